"""Tokenizers from Hugging Face folders: tokenizer.json as it is, tokenizer.model, added tokens, end ids."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer import load_sampling_defaults, load_tokenizer
from edgellm_models.tokenizer.base import LiteralText, Tokenizer, TokenKind
from tests.support.corpus import corpus_blocks, corpus_lines
from tests.support.tiny_tokenizers import STYLES, make_tokenizer
from tests.support.vocabularies import trained_bpe


def load(folder: Path, config: dict[str, Any] | None = None) -> Tokenizer:
    return load_tokenizer(folder, "safetensors", config or {})


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def bpe_json(pre_tokenizer: Any, normalizer: Any = None, **more: Any) -> dict[str, Any]:
    pieces, merges = trained_bpe()
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": len(pieces) + n, "content": content, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": special,
            }
            for n, (content, special) in enumerate([("<s>", True), ("</s>", True), ("<think>", False)])
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": [list(pair) for pair in merges],
        },
        **more,
    }  # fmt: skip


RAW = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = {**RAW, "use_regex": True}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def split(kind: str, pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        GPT2,
        sequence(split("Regex", r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+"), RAW),
        sequence({"type": "Digits", "individual_digits": True}, GPT2),
        sequence(
            {"type": "Punctuation", "behavior": "Contiguous"},
            GPT2,
            {"type": "Digits", "individual_digits": False},
        ),
        sequence(
            split("Regex", r"[\r\n]"),
            split("Regex", r"\s?\p{L}+"),
            {"type": "Digits", "individual_digits": True},
            RAW,
        ),
        sequence(split("String", r"(?i:'s|'t)|\p{N}+"), RAW),
    ],
    ids=["gpt2", "llama3-like", "smollm", "falcon", "deepseek", "literal-string"],
)
def test_ids_equal_the_tokenizers_library(tmp_path: Path, pre_tokenizer: Any) -> None:
    """A11: what tokenizer.json says is done, a Split pattern that is a literal string and never matches
    included."""
    from tokenizers import Tokenizer as Library

    write(tmp_path, "tokenizer.json", bpe_json(pre_tokenizer, {"type": "NFC"}))
    ours, theirs = load(tmp_path), Library.from_file(str(tmp_path / "tokenizer.json"))
    texts = ["12345 I'LL\r\n\r\n  x\té中文 🫠", *corpus_lines(), *corpus_blocks(), "<s>a</s><think>"]
    assert len(texts) > 500
    for text in texts:
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False).ids


def test_saved_truncation_and_padding_do_not_cut_prompts(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "a",
    }  # fmt: skip
    write(tmp_path, "tokenizer.json", bpe_json(GPT2, truncation=truncation, padding=padding))
    tokenizer = load(tmp_path)
    text = "one two three four five six seven eight nine ten"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("short")) == "short"


@pytest.mark.parametrize("style", STYLES)
def test_parse_special_off(tmp_path: Path, style: str) -> None:
    """A08: for every family's own tokens, special and added."""
    make_tokenizer(style, extra_tokens=[("<note>", False), ("<|mark|>", True)]).write(tmp_path)
    tokenizer = load(tmp_path)
    hidden = {TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN}
    specials = [i for i in range(tokenizer.vocab_size) if tokenizer.token_kind(i) in hidden]
    assert {"<note>", "<|mark|>"} <= {tokenizer.token_text(i) for i in specials}
    for token_id in specials:
        text = f"a {tokenizer.token_text(token_id)} b"
        assert token_id in tokenizer.encode(text, add_special=False)
        off = tokenizer.encode(text, add_special=False, parse_special=False)
        assert not any(tokenizer.token_kind(i) in hidden for i in off)
        assert tokenizer.decode(off) == text


@pytest.mark.parametrize("style", STYLES)
def test_added_tokens_of_a_fine_tune(tmp_path: Path, style: str) -> None:
    """A13: three normal, two special and one that repeats a token of the base; kinds are kept."""
    extra = [
        ("<a1>", False),
        ("<a2>", False),
        ("<a3>", False),
        ("<s1>", True),
        ("<s2>", True),
        ("</s>", True),
    ]
    tiny = make_tokenizer(style, extra_tokens=extra)
    tiny.write(tmp_path)
    tokenizer = load(tmp_path)
    assert tokenizer.vocab_size == tiny.vocab_size
    for text, special in extra:
        token_id = tokenizer.token_id(text)
        assert token_id is not None
        kind = TokenKind.CONTROL if special else TokenKind.USER_DEFINED
        assert tokenizer.token_kind(token_id) is kind
        assert tokenizer.encode(f"x{text}y", add_special=False).count(token_id) == 1


def test_tokens_that_only_the_config_knows(tmp_path: Path) -> None:
    """A13: tokenizer_config.json may declare tokens that tokenizer.json lacks; another id for one is an
    error."""
    write(tmp_path, "tokenizer.json", bpe_json(GPT2))
    size = load(tmp_path).vocab_size
    added = {str(size): {"content": "<late>", "special": True}}
    write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": added})
    tokenizer = load(tmp_path)
    assert tokenizer.encode("<late>", add_special=False) == [size]
    assert tokenizer.token_kind(size) is TokenKind.CONTROL
    write(
        tmp_path,
        "tokenizer_config.json",
        {"added_tokens_decoder": {"7": {"content": "<late>", "special": True}}},
    )
    with pytest.raises(BadInputError, match=r"'<late>' should have the id 7"):
        load(tmp_path)


def post_processor(folder: Path, bos: str) -> None:
    document = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    token_id = next(t["id"] for t in document["added_tokens"] if t["content"] == bos)
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [token_id], "tokens": [bos]}},
    }
    write(folder, "tokenizer.json", document)


def test_exactly_one_bos(tmp_path: Path) -> None:
    """A09: BOS is wanted by the file's post-processor or by the config, which wins; never twice."""
    write(tmp_path, "tokenizer.json", bpe_json(GPT2))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    assert not load(tmp_path).add_bos
    post_processor(tmp_path, "<s>")
    tokenizer = load(tmp_path)
    assert tokenizer.add_bos and not tokenizer.add_eos
    bos = tokenizer.bos_id
    assert tokenizer.encode("hi").count(bos) == tokenizer.encode("<s>hi").count(bos) == 1
    write(
        tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    )
    assert load(tmp_path).encode("hi").count(bos) == 0
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True})
    assert load(tmp_path).encode("hi")[-1] == load(tmp_path).token_id("</s>")


def test_end_ids_from_everywhere(tmp_path: Path) -> None:
    """eos_token, config.json (also inside text_config), generation_config.json, and control tokens by
    text."""
    write(tmp_path, "tokenizer.json", bpe_json(GPT2))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "<think>"})
    write(tmp_path, "generation_config.json", {"eos_token_id": [5, 6]})
    config = {"eos_token_id": 9, "text_config": {"eos_token_id": [11]}}
    tokenizer = load(tmp_path, config)
    named = {tokenizer.token_id("<think>"), tokenizer.token_id("</s>")}
    assert tokenizer.eos_ids == {5, 6, 9, 11} | named


@pytest.mark.parametrize("style", ["spm_llama", "spm_mistral", "spm_gemma", "spm_phi3"])
def test_tokenizer_model_alone_equals_tokenizer_json(tmp_path: Path, style: str) -> None:
    """Both files of a SentencePiece family describe one tokenizer; the libraries behind them differ."""
    both, alone = tmp_path / "both", tmp_path / "alone"
    for folder in (both, alone):
        folder.mkdir()
        make_tokenizer(style).write(folder)
    (alone / "tokenizer.json").unlink()
    one, other = load(both), load(alone)
    assert (one.bos_id, one.eos_ids, one.pad_id, one.add_bos, one.vocab_size) == (
        other.bos_id, other.eos_ids, other.pad_id, other.add_bos, other.vocab_size,
    )  # fmt: skip
    assert [one.token_kind(i) for i in range(one.vocab_size)] == [
        other.token_kind(i) for i in range(one.vocab_size)
    ]
    assert [one.token_bytes(i) for i in range(one.vocab_size)] == [
        other.token_bytes(i) for i in range(one.vocab_size)
    ]
    for text in (*corpus_lines(), *corpus_blocks()):
        assert one.encode(text) == other.encode(text), text
        assert one.decode(one.encode(text)) == other.decode(other.encode(text))


# --- what can be wrong
# --------------------------------------------------------------------------------------------


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        document = bpe_json(GPT2)
        change(document)
        write(folder, "tokenizer.json", document)

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "tokenizer.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "tokenizer.json").write_text("[1]"), "no tokenizer model"),
        (lambda f: (f / "tokenizer.json").write_bytes(b"\xff\xfe\x00"), "is not JSON"),
        (lambda f: (f / "tokenizer.json").write_text("[" * 100_000), "is not JSON"),
        (edit(lambda d: d["model"].update(type="WordPiece")), "'WordPiece' is not supported"),
        (edit(lambda d: d["model"].update(merges=[])), "without merges"),
        (edit(lambda d: d["model"]["merges"].append(["qqq", "zzz"])), "cannot be used"),
        (edit(lambda d: d["model"]["vocab"].update(zzzz=3)), "both have the id 3"),
        (edit(lambda d: d["model"]["vocab"].update(zzzz=4_000_000_000)), "has the id 4000000000"),
        (edit(lambda d: d["model"]["vocab"].update(zzzz=-1)), "has the id -1"),
        (edit(lambda d: d["model"]["vocab"].update(zzzz=True)), "must be a number, not True"),
        (edit(lambda d: d["model"].update(vocab=5)), "model.vocab must be an object, not int"),
        (edit(lambda d: d["model"].update(vocab=["a"] * 300)), "model.vocab must be an object, not list"),
        (edit(lambda d: d["model"].update(merges={"a": 1})), "model.merges must be a list, not dict"),
        (edit(lambda d: d["model"]["merges"].append(["a"])), r"merges\[\d+\] must be two texts"),
        (edit(lambda d: d["model"]["merges"].append([])), r"merges\[\d+\] must be two texts"),
        (edit(lambda d: d.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})), "decoder"),
        (edit(lambda d: d.update(pre_tokenizer={"type": "Nonsense"})), "cannot be used"),
        (edit(lambda d: d.update(pre_tokenizer=split("Regex", "("))), "cannot be used"),
    ],
)  # fmt: skip
def test_damaged_tokenizer_json(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(tmp_path)
    with pytest.raises(BadInputError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no tokenizer that is read"):
        load(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(BadInputError, match=r"it has vocab\.json"):
        load(tmp_path)


def test_special_token_outside_the_vocabulary(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer.json", bpe_json(GPT2))
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<nowhere>"})
    with pytest.raises(BadInputError, match="eos_token is '<nowhere>'"):
        load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"<html>not a model</html>", b"\x0a\xff\xff\xff\xff\x7f", b"\x0a\x03\x0a\x05x"]
)
def test_damaged_tokenizer_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(BadInputError, match=r"tokenizer\.model"):
        load(tmp_path)


def test_truncated_tokenizer_model(tmp_path: Path) -> None:
    whole = make_tokenizer("spm_llama").files["tokenizer.model"]
    for size in range(1, len(whole), 397):
        (tmp_path / "tokenizer.model").write_bytes(whole[:size])
        with pytest.raises(BadInputError):
            load(tmp_path)


# --- sampling defaults
# ----------------------------------------------------------------------------------------------


def test_sampling_defaults_of_a_folder(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path, "safetensors", {}) == {}
    write(
        tmp_path,
        "generation_config.json",
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "bos_token_id": 1},
    )
    assert load_sampling_defaults(tmp_path, "safetensors", {}) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    write(
        tmp_path,
        "generation_config.json",
        {"temperature": 0.6, "do_sample": False, "repetition_penalty": 1.1, "top_k": -1},
    )
    assert load_sampling_defaults(tmp_path, "safetensors", {}) == {
        "temperature": 0.0, "repetition_penalty": 1.1, "top_k": 0,
    }  # fmt: skip


def test_sampling_defaults_of_a_gguf() -> None:
    fields = {
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 40,
        "general.sampling.penalty_repeat": 1.05,
    }
    assert load_sampling_defaults(Path("x"), "gguf", fields) == {
        "temperature": 0.7, "top_k": 40, "repetition_penalty": 1.05,
    }  # fmt: skip
    assert load_sampling_defaults(Path("x"), "gguf", {}) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 2),
        ("top_k", 1.5),
        ("temperature", float("inf")),
    ],
)
def test_impossible_sampling_defaults_are_named(tmp_path: Path, key: str, value: object) -> None:
    write(tmp_path, "generation_config.json", {key: value})
    with pytest.raises(BadInputError, match=rf"generation_config\.json: {key} must be"):
        load_sampling_defaults(tmp_path, "safetensors", {})


# --- files and texts that ask for too much
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("many", ["[],", "{},", "0,", '"ab",'])
def test_many_small_values_are_refused_before_they_are_objects(tmp_path: Path, name: str, many: str) -> None:
    """A list of empty lists takes 60 times the memory of its text."""
    make_tokenizer("gpt2").write(tmp_path)
    text = '{"model": {"type": "BPE", "vocab": {}, "merges": [' + many * 6_100_000 + "1]}}"
    (tmp_path / name).write_text(text, encoding="utf-8")
    tracemalloc.start()
    try:
        with pytest.raises(
            BadInputError, match=r"holds \d+ (arrays and objects|values); at most \d+ are read"
        ):
            load(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(text) + 10_000_000


def test_a_tokenizer_file_has_a_largest_size(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(BadInputError, match=r"has 67108865 bytes; at most 67108864 are read"):
        load(tmp_path)


def test_ids_far_above_the_number_of_tokens_are_refused(tmp_path: Path) -> None:
    """Holes up to as many as there are tokens are kept; more would be memory for nothing."""
    described = bpe_json(RAW)
    count = len(described["model"]["vocab"])
    described["model"]["vocab"]["zzzz"] = 2 * count
    write(tmp_path, "tokenizer.json", described)
    tokenizer = load(tmp_path)
    assert tokenizer.vocab_size == 2 * count + 1 and tokenizer.token_id("zzzz") == 2 * count
    assert tokenizer.decode(tokenizer.encode_parts([LiteralText("</s>x")])) == "</s>x"
    described["model"]["vocab"]["zzzz"] = 2 * count + 2000
    write(tmp_path, "tokenizer.json", described)
    with pytest.raises(BadInputError, match=rf"'zzzz' has the id {2 * count + 2000} in a vocabulary of"):
        load(tmp_path)


def test_added_ids_far_above_a_sentencepiece_model_are_refused(tmp_path: Path) -> None:
    make_tokenizer("spm_llama").write(tmp_path)
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    write(tmp_path, "added_tokens.json", {"<far>": 3_999_999})
    with pytest.raises(BadInputError, match="has the id 3999999 beside a vocabulary of"):
        load(tmp_path)


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    ("normalizer", "message"),
    [
        (replace({"String": "a"}, "b" * 1025), r"normalizer.content has 1025 characters; at most 1024"),
        ({"type": "Prepend", "prepend": "b" * 1025}, "normalizer.prepend has 1025 characters"),
        (
            {"type": "Sequence", "normalizers": [replace({"String": "a"}, "a" * 40)] * 2},
            "more than 1024 times longer",
        ),
        (
            {"type": "Sequence", "normalizers": [replace({"Regex": ""}, "a")] * 11},
            "more than 1024 times longer",
        ),
    ],
)
def test_normalizers_that_blow_up_a_text_are_refused(
    tmp_path: Path, normalizer: dict[str, Any], message: str
) -> None:
    write(tmp_path, "tokenizer.json", bpe_json(RAW, normalizer))
    with pytest.raises(BadInputError, match=message):
        load(tmp_path)


def test_normalizers_that_lengthen_a_text_leave_less_room_for_it(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer.json", bpe_json(RAW, replace({"String": "a"}, "b" * 1000)))
    tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a")) == "b" * 1000
    for text in ("a" * 8001, "x" * 8001):
        with pytest.raises(BadInputError, match=r"8001 characters, of which .* 1000 times as many"):
            tokenizer.encode(text)
        with pytest.raises(BadInputError, match=r"8001 characters, of which .* 1000 times as many"):
            tokenizer.encode_parts([LiteralText(text)])


@pytest.mark.parametrize("style", ["gpt2", "qwen2", "spm_llama"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" " * 10_500_000 + "x", "10500001 characters; at most 8000000"),
        (" " * 4_000_001 + "x", "4000001 characters of white space in a row; at most 4000000"),
        ("x" * 4_000_001 + "\n", "4000001 characters of text without white space in a row"),
    ],
    ids=["whole", "spaces", "letters"],
)
def test_texts_that_are_too_long_are_one_clear_line(
    tmp_path: Path, style: str, text: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before a library gives up on them with a traceback of its own."""
    make_tokenizer(style).write(tmp_path)
    tokenizer = load(tmp_path)
    for encode in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode(text, parse_special=False),
        lambda: tokenizer.encode_parts([text[:100], LiteralText(text[100:])]),
    ):
        with pytest.raises(BadInputError, match=message) as caught:
            encode()
        assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_pattern_at_which_the_library_gives_up_is_a_clear_line(tmp_path: Path) -> None:
    """Its panic is no Exception."""
    write(tmp_path, "tokenizer.json", bpe_json(sequence(split("Regex", r"(a|a)*(a|aa)+$b"), RAW)))
    tokenizer = load(tmp_path)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_parts([LiteralText(text)])):
        with pytest.raises(BadInputError, match="a text of 41 characters cannot be tokenized") as caught:
            encode("a" * 40 + "!")
        assert "\n" not in str(caught.value)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
