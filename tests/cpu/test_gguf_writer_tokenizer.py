"""What the dense GGUF writer makes of a folder's tokenizer: ids, kinds, special ids and templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer import load_tokenizer
from edgellm_models.tokenizer.base import TokenKind
from edgellm_quantize.gguf_pre_tokenizer import CHECK_TEXT, find_pre_tokenizer
from edgellm_quantize.writers import DenseGGUFReport, write_dense_gguf
from tests.support.llama_cpp import LlamaCpp
from tests.support.oracles import require_oracle
from tests.support.real_models import real_model
from tests.support.tiny_models import make_tiny
from tests.support.tiny_styles import BPE_STYLES, SPM_STYLES
from tests.support.tiny_text import SAMPLE_TEXTS
from tests.support.tiny_tokenizers import STYLES, byte_level_pipeline

PRE_NAMES = {
    "llama3": "llama-bpe",
    "qwen2": "qwen2",
    "nemo": "tekken",
    "phi4": "gpt-4o",
    "smollm": "smollm",
    "gpt2": "gpt-2",
}


def _written(folder: Path) -> tuple[DenseGGUFReport, dict[str, Any]]:
    """Write the folder's GGUF beside it; the report and the metadata that is read back."""
    report = write_dense_gguf(folder, folder.with_suffix(".gguf"), "f32")
    checkpoint = open_checkpoint(report.path)
    try:
        return report, dict(checkpoint.metadata)
    finally:
        checkpoint.close()


def _edit(path: Path, change: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}, ensure_ascii=False))


@pytest.mark.parametrize("style", STYLES)
def test_both_forms_give_the_same_ids(style: str, tmp_path: Path) -> None:
    """A17: byte-level and SentencePiece, with and without normalizer; the tokenizers library judges."""
    from tokenizers import Tokenizer

    folder = make_tiny("llama", tmp_path / style, tokenizer=style)
    _, metadata = _written(folder)
    judge = Tokenizer.from_file(str(folder / "tokenizer.json"))
    from_gguf = load_tokenizer(folder.with_suffix(".gguf"), "gguf", metadata)
    from_folder = load_tokenizer(folder, "safetensors", json.loads((folder / "config.json").read_text()))
    for text in SAMPLE_TEXTS:
        expected = judge.encode(text).ids
        assert from_folder.encode(text) == expected, text
        assert from_gguf.encode(text) == expected, text
    assert metadata["tokenizer.ggml.pre"] == PRE_NAMES.get(style, "default")


def test_the_nfc_texts_are_a_test(tmp_path: Path) -> None:
    """A17 would pass with any normalizer if no sample changed under it."""
    import unicodedata

    assert any(unicodedata.normalize("NFC", text) != text for text in SAMPLE_TEXTS)


@pytest.mark.parametrize("style", ["llama3", "qwen2", "smollm", "spm_llama", "spm_gemma", "spm_phi3"])
def test_tokens_of_a_fine_tune_survive(style: str, tmp_path: Path) -> None:
    """A13: three plain and two special added tokens and a declaration that repeats an existing one."""
    again = SPM_STYLES[style].eos if style in SPM_STYLES else BPE_STYLES[style].eos
    extra = [
        ("<name>", False),
        ("[part two]", False),
        ("Ünïcode", False),
        ("<|call|>", True),
        ("<<end>>", True),
    ]
    folder = make_tiny("llama", tmp_path / style, tokenizer=style, extra_tokens=[*extra, (again, True)])
    report, metadata = _written(folder)
    assert not [notice for notice in report.notices if notice.kind == "added_token_repeated"]
    before = load_tokenizer(folder, "safetensors", json.loads((folder / "config.json").read_text()))
    after = load_tokenizer(report.path, "gguf", metadata)
    text = f"a<name> b[part two]Ünïcode<|call|>c <<end>> {again}d"
    assert after.encode(text) == before.encode(text)
    for spelling, special in extra:
        token_id = after.token_id(spelling)
        assert token_id is not None and token_id == before.token_id(spelling)
        assert token_id in after.encode(text)
        expected = TokenKind.CONTROL if special else TokenKind.USER_DEFINED
        assert after.token_kind(token_id) is expected, spelling
    require_oracle("xllamacpp")
    with LlamaCpp(report.path) as judge:
        assert judge.tokenize(text) == before.encode(text)


@pytest.mark.parametrize("style", list(SPM_STYLES))
def test_scores_are_rebuilt_from_merges(style: str, tmp_path: Path) -> None:
    """A SentencePiece vocabulary that came without tokenizer.model splits as its own model does."""
    import sentencepiece

    folder = make_tiny("llama", tmp_path / style, tokenizer=style)
    model = (folder / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model").unlink()
    report, metadata = _written(folder)
    judge = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = load_tokenizer(report.path, "gguf", metadata)
    for text in SAMPLE_TEXTS:
        assert tokenizer.encode(text, add_special=False) == judge.encode(text), text
    require_oracle("xllamacpp")
    with LlamaCpp(report.path) as llama:
        for text in SAMPLE_TEXTS:
            assert llama.tokenize(text, add_special=False) == judge.encode(text), text


def test_a_tiktoken_table_named_tokenizer_model_is_not_taken_for_sentencepiece(tmp_path: Path) -> None:
    """Llama 3 repositories put one there: the byte-level tokenizer.json counts."""
    folder = make_tiny("llama", tmp_path / "m")
    (folder / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    _, metadata = _written(folder)
    assert metadata["tokenizer.ggml.model"] == "gpt2"


def test_rows_without_token_are_padding(tmp_path: Path) -> None:
    folder = make_tiny("qwen2", tmp_path / "m", vocab_size=512)
    _, metadata = _written(folder)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == 512 == len(set(tokens))
    assert tokens[511] == "[PAD511]" and kinds[511] == 5


def test_added_tokens_beyond_the_embedding_are_told(tmp_path: Path) -> None:
    folder = make_tiny("qwen2", tmp_path / "m", vocab_size=450)
    report, metadata = _written(folder)
    assert len(metadata["tokenizer.ggml.tokens"]) == 450
    assert "tokens_beyond_embedding" in [notice.kind for notice in report.notices]


def test_special_ids(tmp_path: Path) -> None:
    """Two end tokens become eos and eot, a third eom where it is one, and more are told."""
    folder = make_tiny("llama", tmp_path / "m")
    ids = {
        entry["content"]: entry["id"]
        for entry in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }
    ends = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    _edit(folder / "generation_config.json", {"eos_token_id": [ids[text] for text in ends]})
    report, metadata = _written(folder)
    assert metadata["tokenizer.ggml.bos_token_id"] == ids["<|begin_of_text|>"]
    assert metadata["tokenizer.ggml.eos_token_id"] == ids["<|end_of_text|>"]
    assert metadata["tokenizer.ggml.eot_token_id"] == ids["<|eot_id|>"]
    assert metadata["tokenizer.ggml.eom_token_id"] == ids["<|eom_id|>"]
    assert metadata["tokenizer.ggml.padding_token_id"] == ids["<|finetune_right_pad_id|>"]
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert not report.notices
    _edit(folder / "generation_config.json", {"eos_token_id": [*ids.values()]})
    report, _ = _written(folder)
    assert [notice.kind for notice in report.notices] == ["end_tokens_dropped"]


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("style", ["qwen2", "llama3", "spm_llama", "spm_gemma", "spm_phi3"])
def test_bos_is_added_as_the_folder_adds_it(style: str, flag: bool | None, tmp_path: Path) -> None:
    """A09's source: transformers 5 goes by the post-processor, whatever the flags say."""
    transformers = require_oracle("transformers")
    folder = make_tiny("qwen2" if style == "qwen2" else "llama", tmp_path / style, tokenizer=style)
    _edit(folder / "tokenizer_config.json", {"add_bos_token": flag})
    _, metadata = _written(folder)
    judge = transformers.AutoTokenizer.from_pretrained(folder)
    adds = judge("a")["input_ids"] != judge("a", add_special_tokens=False)["input_ids"]
    assert metadata["tokenizer.ggml.add_bos_token"] is adds


@pytest.mark.parametrize("flag", [True, False])
def test_without_tokenizer_json_the_flag_counts(flag: bool, tmp_path: Path) -> None:
    folder = make_tiny("mistral", tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    _edit(folder / "tokenizer_config.json", {"add_bos_token": flag})
    _, metadata = _written(folder)
    assert metadata["tokenizer.ggml.add_bos_token"] is flag


def test_every_template_is_copied(tmp_path: Path) -> None:
    """B08: chat_template.jinja wins, named templates keep their names."""
    named = [{"name": "tool_use", "template": "TOOLS"}, {"name": "default", "template": "LIST"}]
    folder = make_tiny("llama", tmp_path / "m", chat_template=named)
    _, metadata = _written(folder)
    assert metadata["tokenizer.chat_template"] == "LIST"
    assert metadata["tokenizer.chat_template.tool_use"] == "TOOLS"
    assert list(metadata["tokenizer.chat_templates"]) == ["tool_use"]
    (folder / "chat_template.jinja").write_text("FILE é")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("RAG")
    _, metadata = _written(folder)
    assert metadata["tokenizer.chat_template"] == "FILE é"
    assert metadata["tokenizer.chat_template.tool_use"] == "TOOLS"
    assert metadata["tokenizer.chat_template.rag"] == "RAG"


def test_a_base_model_gets_no_template(tmp_path: Path) -> None:
    """B11's source: nothing is made up."""
    _, metadata = _written(make_tiny("llama", tmp_path / "m", chat_template=None))
    assert not [key for key in metadata if key.startswith("tokenizer.chat_template")]


def test_sampling_values_are_kept(tmp_path: Path) -> None:
    wanted = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    folder = make_tiny("llama", tmp_path / "m", generation_config={"do_sample": True, **wanted})
    _, metadata = _written(folder)
    found = {
        key: metadata[f"general.sampling.{key}"]
        for key in ("temp", "top_p", "top_k", "min_p", "penalty_repeat")
    }
    assert found == pytest.approx(dict(zip(found, [0.6, 0.9, 20, 0.05, 1.1], strict=True)))
    _edit(folder / "generation_config.json", {"do_sample": False})
    _, metadata = _written(folder)
    assert not [key for key in metadata if key.startswith("general.sampling")]


def test_white_space_after_tokens_is_kept_out_or_told(tmp_path: Path) -> None:
    """llama.cpp goes by the name phi-3: it is there when the tokens swallow white space as it assumes."""
    phi3 = make_tiny("phi3", tmp_path / "mine")
    report, metadata = _written(phi3)
    assert metadata["general.name"] == "phi-3 mine" and not report.notices
    report, metadata = _written(make_tiny("phi3", tmp_path / "Phi-3-tuned", tokenizer="phi4"))
    assert metadata["general.name"] == "phi 3-tuned" and not report.notices
    document = json.loads((phi3 / "tokenizer.json").read_text())
    document["added_tokens"][-1]["lstrip"] = True
    (phi3 / "tokenizer.json").write_text(json.dumps(document))
    report, _ = _written(phi3)
    assert [notice.kind for notice in report.notices] == ["added_token_stripping_dropped"]


def _pipeline(**changes: Any) -> dict[str, Any]:
    return {**byte_level_pipeline(BPE_STYLES["llama3"]), "model": {"ignore_merges": True}, **changes}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (_pipeline(normalizer={"type": "Lowercase"}), "Lowercase"),
        (_pipeline(pre_tokenizer={"type": "Whitespace"}), "Whitespace"),
        (
            _pipeline(
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"Regex": r"\w+|\W"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            ),
            r"\\w\+",
        ),
        (
            _pipeline(pre_tokenizer={"type": "Split", "pattern": {"String": "x"}, "behavior": "Isolated"}),
            "Regex",
        ),
        (_pipeline(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True}), "add_prefix_space"),
    ],
)
def test_a_splitting_that_gguf_cannot_name_is_refused(document: dict[str, Any], words: str) -> None:
    """A11: never GPT-2's splitting by default."""
    with pytest.raises(BadInputError, match=words):
        find_pre_tokenizer(document, None)


def test_a_name_that_nearly_fits_is_told() -> None:
    name, notices = find_pre_tokenizer(_pipeline(normalizer={"type": "NFC"}), None)
    assert name in ("llama-bpe", "dbrx")
    assert [notice.kind for notice in notices] == ["pre_tokenizer_differs"]
    assert find_pre_tokenizer(_pipeline(model={"ignore_merges": False}), None) == ("dbrx", [])


@pytest.mark.real_model
def test_a_published_tokenizer_is_known_by_its_hash() -> None:
    """SmolLM's vocabulary gives the hash that llama.cpp's converter has for it; its splitting agrees."""
    from tokenizers import Tokenizer

    checkpoint = open_checkpoint(real_model("smollm2-135m"))
    tokens = checkpoint.metadata["tokenizer.ggml.tokens"]
    merges = checkpoint.metadata["tokenizer.ggml.merges"]
    document = {
        "version": "1.0",
        "added_tokens": [],
        "post_processor": None,
        **byte_level_pipeline(BPE_STYLES["smollm"]),
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [list(merge.split(" ")) for merge in merges],
        },
    }
    ids = Tokenizer.from_str(json.dumps(document)).encode(CHECK_TEXT).ids
    assert find_pre_tokenizer({}, ids) == ("smollm", [])
    assert find_pre_tokenizer(document, None) == ("smollm", [])


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": {"type": "Unigram", "vocab": [["a", 0]]}}']
)
def test_a_damaged_or_foreign_tokenizer_is_one_clear_error(content: bytes, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadInputError, match=r"tokenizer\.json"):
        write_dense_gguf(folder, tmp_path / "m.gguf", "f32")
    assert not (tmp_path / "m.gguf").exists()


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadInputError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        write_dense_gguf(folder, tmp_path / "m.gguf", "f32")


def test_a_malformed_byte_token_is_refused(tmp_path: Path) -> None:
    """C07 at the source: <0x1> typed BYTE in a tokenizer.model."""
    from tests.support.bigram import sentencepiece_model

    folder = make_tiny("mistral", tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<0x1>", 0.0, 6), ("a", -1.0, 1)]
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(pieces))
    with pytest.raises(BadInputError, match="<0x1>"):
        write_dense_gguf(folder, tmp_path / "m.gguf", "f32")
