"""The ids that begin, end and pad a text, the sampling a model asks for and its templates, as GGUF keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgellm_models.errors import BadInputError, Notice
from edgellm_quantize.gguf_values import MetadataTable, array, boolean, f32, text, u32
from edgellm_quantize.hf_tokenizer_files import TokenizerFiles, read_bounded_text

_IDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "sep": "seperator_token_id",  # the format's own spelling
    "mask": "mask_token_id",
}
_END_OF_MESSAGE = ("<|eom_id|>",)
"""Ends a message whose turn goes on after a tool's answer."""
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_MAX_TEMPLATE_BYTES = 4 << 20


def special_id_fields(
    files: TokenizerFiles,
    config: Mapping[str, Any],
    ids: Mapping[str, int],
    adds: tuple[bool, bool],
    notices: list[Notice],
) -> MetadataTable:
    """Keys for the special ids. ``ids`` maps spellings, ``adds`` is (BOS, EOS) put around a text."""
    out: MetadataTable = {}
    known = set(ids.values())
    for name, key in _IDS.items():
        token_id = _named_id(files.config.get(f"{name}_token"), ids)
        for holder in (config, files.generation):
            if token_id is None:
                token_id = next((i for i in _id_list(holder.get(f"{name}_token_id")) if i in known), None)
        if token_id is not None:
            out[f"tokenizer.ggml.{key}"] = u32(token_id)
    spellings = {token_id: spelling for spelling, token_id in ids.items()}
    ends = _id_list(files.generation.get("eos_token_id")) or _id_list(config.get("eos_token_id"))
    eos = out["tokenizer.ggml.eos_token_id"].value if "tokenizer.ggml.eos_token_id" in out else None
    dropped = []
    for end in dict.fromkeys(ends):
        if end == eos or end not in known:
            continue
        key = "eom_token_id" if spellings[end] in _END_OF_MESSAGE else "eot_token_id"
        if f"tokenizer.ggml.{key}" in out:
            dropped.append(spellings[end])
        else:
            out[f"tokenizer.ggml.{key}"] = u32(end)
    if dropped:
        notices.append(
            Notice(
                "end_tokens_dropped",
                f"GGUF states one eos, eot and eom id; these end tokens are not in the file: {dropped}",
            )
        )
    out["tokenizer.ggml.add_bos_token"] = boolean(adds[0])
    out["tokenizer.ggml.add_eos_token"] = boolean(adds[1])
    return out


def _named_id(token: Any, ids: Mapping[str, int]) -> int | None:
    """The id of a bos_token entry, which is a string or an object with its content."""
    spelling = token.get("content") if isinstance(token, Mapping) else token
    return ids.get(spelling) if isinstance(spelling, str) else None


def _id_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def sampling_fields(generation: Mapping[str, Any]) -> MetadataTable:
    """general.sampling keys of a generation_config.json; none where it says greedy."""
    if generation.get("do_sample") is False:
        return {}
    out: MetadataTable = {}
    for name, key in _SAMPLING.items():
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            out[key] = f32(value)
    top_k = generation.get("top_k")
    if isinstance(top_k, int) and not isinstance(top_k, bool) and top_k >= 0:
        out["general.sampling.top_k"] = u32(top_k)
    return out


def chat_templates(files: TokenizerFiles) -> dict[str, str]:
    """Every chat template of the folder by name; "default" is the plain one.

    chat_template.jinja wins over chat_template.json, that over tokenizer_config.json, whose list form names
    its templates; additional_chat_templates/NAME.jinja adds more.
    """
    found: dict[str, str] = {}
    stated = files.config.get("chat_template")
    if isinstance(stated, str):
        found["default"] = stated
    elif isinstance(stated, list):
        for entry in stated:
            if not (
                isinstance(entry, Mapping)
                and isinstance(entry.get("name"), str)
                and isinstance(entry.get("template"), str)
            ):
                raise BadInputError(
                    "tokenizer_config.json: chat_template has an entry without name and template"
                )
            found[entry["name"]] = entry["template"]
    elif stated is not None:
        raise BadInputError("tokenizer_config.json: chat_template must be a text or a list")
    if isinstance(files.processor_template, str):
        found["default"] = files.processor_template
    plain = files.folder / "chat_template.jinja"
    if plain.is_file():
        found["default"] = read_bounded_text(plain, _MAX_TEMPLATE_BYTES)
    more = files.folder / "additional_chat_templates"
    if more.is_dir():
        for path in sorted(more.glob("*.jinja")):
            found[path.stem] = read_bounded_text(path, _MAX_TEMPLATE_BYTES)
    return found


def chat_template_fields(files: TokenizerFiles, notices: list[Notice]) -> MetadataTable:
    """tokenizer.chat_template for the default, tokenizer.chat_template.NAME for others, and their list."""
    out: MetadataTable = {}
    named = []
    for name, template in chat_templates(files).items():
        if name == "default":
            out["tokenizer.chat_template"] = text(template)
        elif re.fullmatch(r"[A-Za-z0-9_]{1,40}", name):
            named.append(name)
            out[f"tokenizer.chat_template.{name}"] = text(template)
        else:
            notices.append(
                Notice("chat_template_dropped", f"a chat template with the name {name!r:.60} is no GGUF key")
            )
    if named:
        out["tokenizer.chat_templates"] = array("STRING", named)
    return out
