"""Small tokenizers in the manner of each family, as the files a Hugging Face folder holds."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.tiny_styles import BPE_STYLES, SPM_STYLES, BPEStyle
from tests.support.tiny_text import TRAINING_TEXT

STYLES: tuple[str, ...] = (*BPE_STYLES, *SPM_STYLES)
TRAINED_VOCAB = 448
"""Entries before added tokens: 256 bytes and fewer than 200 learned pieces keep a TINY head small."""


@dataclass(frozen=True)
class TinyTokenizer:
    """The files of one tokenizer and the ids a config.json repeats."""

    style: str
    files: Mapping[str, bytes]
    """File name to content: tokenizer.json, tokenizer_config.json and, for SentencePiece, tokenizer.model."""
    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int | None
    eos_ids: tuple[int, ...]
    """eos first, then the end-of-turn token: generation_config's list."""
    pieces: tuple[str, ...] = field(repr=False, default=())
    """Vocabulary spelling of every id."""

    def write(self, folder: Path) -> None:
        """Write the files into ``folder``."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode("utf-8")


def added_entry(token_id: int, content: str, special: bool, rstrip: bool = False) -> dict[str, Any]:
    """One entry of tokenizer.json's added_tokens."""
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": rstrip,
        "normalized": False,
        "special": special,
    }


def tokenizer_config(
    entries: Sequence[Mapping[str, Any]],
    *,
    bos: str | None,
    eos: str,
    pad: str | None,
    unk: str | None,
    add_bos: bool,
    tokenizer_class: str,
    chat_template: Any,
    **more: Any,
) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    config: dict[str, Any] = {
        "added_tokens_decoder": {
            str(entry["id"]): {k: v for k, v in entry.items() if k != "id"} for entry in entries
        },
        "add_bos_token": add_bos,
        "add_eos_token": False,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unk,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "tokenizer_class": tokenizer_class,
        **more,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    return config


def bos_post_processor(bos: str, bos_id: int) -> dict[str, Any]:
    """A tokenizer.json post-processor that puts BOS first."""
    special = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def byte_level_pipeline(style: BPEStyle) -> dict[str, Any]:
    """normalizer, pre_tokenizer and decoder of tokenizer.json for a byte-level family."""
    use_regex = style.pattern is None
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }
    steps: list[dict[str, Any]] = []
    if style.pattern is not None:
        steps.append(
            {"type": "Split", "pattern": {"Regex": style.pattern}, "behavior": "Isolated", "invert": False}
        )
    if style.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    steps.append(byte_level)
    return {
        "normalizer": {"type": "NFC"} if style.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else byte_level,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }


def bpe_files(
    style: BPEStyle,
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    entries: Sequence[Mapping[str, Any]],
    chat_template: Any,
) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE vocabulary with its added tokens."""
    ids = {entry["content"]: entry["id"] for entry in entries}
    post = None
    if style.add_bos and style.bos is not None:
        post = bos_post_processor(style.bos, ids[style.bos])
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(entries),
        **byte_level_pipeline(style),
        "post_processor": post,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": style.ignore_merges,
            "vocab": dict(vocab),
            "merges": [list(pair) for pair in merges],
        },
    }
    config = tokenizer_config(
        entries,
        bos=style.bos,
        eos=style.eos,
        pad=style.pad,
        unk="<unk>" if "<unk>" in style.special else None,
        add_bos=style.add_bos,
        tokenizer_class=style.tokenizer_class,
        chat_template=chat_template,
    )
    return {"tokenizer.json": _json_bytes(document), "tokenizer_config.json": _json_bytes(config)}


@functools.cache
def _trained_bpe(name: str) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """(pieces in id order, merges) that ``tokenizers`` learns from the text with the family's splitting."""
    from tokenizers import Tokenizer, models, trainers

    blank = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        **byte_level_pipeline(BPE_STYLES[name]),
        "post_processor": None,
        "model": json.loads(Tokenizer(models.BPE()).to_str())["model"],
    }
    tokenizer = Tokenizer.from_str(json.dumps(blank))
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_VOCAB, show_progress=False, initial_alphabet=sorted(byte_alphabet().values())
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tuple(pieces), tuple((left, right) for left, right in model["merges"])


@functools.cache
def byte_alphabet() -> Mapping[int, str]:
    """Byte to the printable character that stands for it in byte-level BPE (GPT-2's mapping)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _make_bpe(name: str, chat_template: Any, extra: Sequence[tuple[str, bool]]) -> TinyTokenizer:
    style = BPE_STYLES[name]
    pieces, merges = _trained_bpe(name)
    offset = len(style.special) if style.special_first else 0
    vocab = {piece: offset + index for index, piece in enumerate(pieces)}
    entries = []
    specials = [(text, True) for text in style.special]
    if style.special_first:
        entries = [added_entry(i, text, True) for i, (text, _) in enumerate(specials)]
        vocab = {entry["content"]: entry["id"] for entry in entries} | vocab
        specials = []
    for text, special in [*specials, *((text, False) for text in style.added), *extra]:
        taken = {entry["content"] for entry in entries}
        if text not in taken:
            entries.append(added_entry(len(pieces) + len(entries), text, special))
    ids = {entry["content"]: entry["id"] for entry in entries}
    by_id = {token_id: text for text, token_id in {**vocab, **ids}.items()}
    eos_ids = [ids[style.eos]] + ([ids[style.eot]] if style.eot else [])
    return TinyTokenizer(
        style=name,
        files=bpe_files(style, vocab, merges, entries, chat_template),
        vocab_size=len(by_id),
        bos_id=ids[style.bos] if style.bos else None,
        eos_id=ids[style.eos],
        pad_id=ids[style.pad] if style.pad else None,
        eos_ids=tuple(eos_ids),
        pieces=tuple(by_id[i] for i in range(len(by_id))),
    )


@functools.cache
def _trained_spm(name: str) -> bytes:
    """tokenizer.model bytes that ``sentencepiece`` learns from the text."""
    import sentencepiece

    style = SPM_STYLES[name]
    lines = TRAINING_TEXT.splitlines()
    sink = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # Latin lines only: every other script must go through byte fallback.
        sentence_iterator=iter([line for line in lines if line.strip() and max(line) < "\u0250"]),
        model_writer=sink,
        model_type="bpe",
        vocab_size=TRAINED_VOCAB,
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=style.dummy_prefix,
        unk_id=style.ids["unk"],
        bos_id=style.ids["bos"],
        eos_id=style.ids["eos"],
        pad_id=style.ids["pad"],
        bos_piece=style.bos,
        eos_piece=style.eos if style.eos not in style.added_special else "</s>",
        user_defined_symbols=list(style.user_defined),
        control_symbols=list(style.control),
        num_threads=1,
        minloglevel=2,
    )
    return sink.getvalue()


def spm_json(
    pieces: Sequence[tuple[str, float, bool]],
    entries: Sequence[Mapping[str, Any]],
    *,
    dummy_prefix: bool,
    bos: tuple[str, int] | None,
) -> dict[str, Any]:
    """tokenizer.json of a SentencePiece BPE vocabulary.

    ``pieces`` are (text, score, is_normal) in id order. Every split of a piece into two entries becomes a
    merge; merges are ordered by the score of their result, as SentencePiece prefers it.
    """
    vocab = {text: index for index, (text, _, _) in enumerate(pieces)}
    merges: list[tuple[float, int, int, str, str]] = []
    for text, score, normal in pieces:
        if normal:
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in vocab and right in vocab:
                    merges.append((-score, vocab[left], vocab[right], left, right))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(entries),
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if dummy_prefix else replace,
        "pre_tokenizer": None,
        "post_processor": bos_post_processor(*bos) if bos else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [[left, right] for _, _, _, left, right in sorted(merges)],
        },
    }


def _make_spm(name: str, chat_template: Any, extra: Sequence[tuple[str, bool]]) -> TinyTokenizer:
    import sentencepiece

    style = SPM_STYLES[name]
    model = _trained_spm(name)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    special = {style.bos, "</s>", style.eos, "<unk>", "<pad>", *style.user_defined, *style.control}
    pieces: list[tuple[str, float, bool]] = []
    entries: list[dict[str, Any]] = []
    for index in range(processor.get_piece_size()):
        text = processor.id_to_piece(index)
        pieces.append(
            (text, processor.get_score(index), text not in special and not processor.is_byte(index))
        )
        if text in special:
            entries.append(added_entry(index, text, True, text in style.rstrip))
    for text, is_special in [*((text, True) for text in style.added_special), *extra]:
        if text not in {entry["content"] for entry in entries}:
            used = max(len(pieces), max(entry["id"] for entry in entries) + 1)
            entries.append(added_entry(used, text, is_special, text in style.rstrip))
    ids = {entry["content"]: entry["id"] for entry in entries}
    size = max(len(pieces), max(ids.values()) + 1)
    bos = (style.bos, ids[style.bos]) if style.add_bos else None
    document = spm_json(pieces, entries, dummy_prefix=style.dummy_prefix, bos=bos)
    config = tokenizer_config(
        entries,
        bos=style.bos,
        eos=style.eos,
        pad=style.pad,
        unk="<unk>",
        add_bos=style.add_bos,
        tokenizer_class=style.tokenizer_class,
        chat_template=chat_template,
        legacy=True,
    )
    by_id = {index: text for index, (text, _, _) in enumerate(pieces)} | {v: k for k, v in ids.items()}
    return TinyTokenizer(
        style=name,
        files={
            "tokenizer.model": model,
            "tokenizer.json": _json_bytes(document),
            "tokenizer_config.json": _json_bytes(config),
        },
        vocab_size=size,
        bos_id=ids[style.bos],
        eos_id=ids[style.eos],
        pad_id=ids[style.pad] if style.pad else None,
        eos_ids=tuple([ids[style.eos]] + ([ids[style.eot]] if style.eot else [])),
        pieces=tuple(by_id[i] for i in range(size)),
    )


DEFAULT_TEMPLATE = object()
"""Stands for the style's own chat template; None leaves the template out (field report B11)."""


def make_tokenizer(
    style: str, *, chat_template: Any = DEFAULT_TEMPLATE, extra_tokens: Sequence[tuple[str, bool]] = ()
) -> TinyTokenizer:
    """A tokenizer of one of ``STYLES``.

    ``chat_template`` is a string, a list of ``{"name", "template"}`` or None; ``extra_tokens`` are
    (text, special) pairs added last, as a fine-tune adds them.
    """
    if style in BPE_STYLES:
        template = BPE_STYLES[style].chat_template if chat_template is DEFAULT_TEMPLATE else chat_template
        return _make_bpe(style, template, extra_tokens)
    if style in SPM_STYLES:
        template = SPM_STYLES[style].chat_template if chat_template is DEFAULT_TEMPLATE else chat_template
        return _make_spm(style, template, extra_tokens)
    raise ValueError(f"unknown tokenizer style {style!r}; known: {', '.join(STYLES)}")
