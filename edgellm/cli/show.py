"""``edgellm show``: describes a model, pulled or not, without loading weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.options import (
    json_option,
    model_argument,
    models_folder,
    option,
    resolve_settings,
    setting_options,
)
from edgellm.cli.output import Output, current_output, megabytes

if TYPE_CHECKING:
    from edgellm_models.catalog import Entry, ResolvedModel

MAX_VALUE_CHARS = 120


@click.command(
    cls=EdgeCommand,
    examples=(
        "edgellm show smollm2-135m",
        "edgellm show ./model.gguf --metadata",
        "edgellm show qwen3-4b --json",
    ),
)
@model_argument()
@setting_options("model")
@option("--metadata", is_flag=True, help="All metadata of the file.")
@json_option
def command(model_name: str | None, metadata: bool, as_json: bool, **settings: Any) -> None:
    """Describe a model: true bits per weight, sampling defaults, licence and the memory that it needs.

    A catalog name works before its model was pulled; nothing is fetched.
    """
    from edgellm.cli.model_access import named_by
    from edgellm_models.catalog import resolve_model

    output = current_output()
    settled = resolve_settings(settings, model=model_name)
    argument = settled.model
    with named_by(settled):
        resolved = resolve_model(argument, models_folder())
    described = describe(resolved, with_metadata=metadata or as_json)
    if as_json:
        output.json(described)
    else:
        _print(output, described)


def describe(resolved: ResolvedModel, *, with_metadata: bool) -> dict[str, Any]:
    """Everything that is known: of the catalog's entry, and of the file when there is one."""
    described: dict[str, Any] = {"name": resolved.name, "pulled": resolved.path is not None}
    if resolved.entry is not None:
        described |= describe_entry(resolved.entry)
    if resolved.path is not None:
        described |= describe_file(resolved.path, with_metadata=with_metadata)
    if resolved.entry is not None and resolved.entry.sampling:
        # The catalog's defaults win over the model's own.
        described["sampling"] = dict(resolved.entry.sampling)
        described["sampling_origin"] = "catalog"
    return described


def describe_entry(entry: Entry) -> dict[str, Any]:
    """What the catalog says. Memory is an estimate until the file is here."""
    kv = entry.kv_bytes_per_token(4)
    dense = entry.parameters * 4 if entry.parameters else None
    return {
        "title": entry.title,
        "architecture": entry.family,
        "parameters": entry.parameters,
        "context_length": entry.context,
        "quantization": entry.quantization,
        "has_chat_template": entry.chat,
        "licence": entry.licence,
        "licence_url": entry.licence_url,
        "tried": entry.tried,
        "sources": [source.label for source in entry.sources],
        "sampling": dict(entry.sampling),
        "sampling_origin": "catalog" if entry.sampling else None,
        "memory": {
            "file_bytes": entry.weight_bytes,
            "file_bytes_exact": entry.bytes is not None,
            "weights_f32_bytes": dense,
            "kv_bytes_per_token_f32": kv,
            "kv_bytes_f32": kv * entry.context if kv and entry.context else None,
        },
    }


def describe_file(path: Path, *, with_metadata: bool) -> dict[str, Any]:
    """What the file says, read from its headers."""
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.network import read_spec
    from edgellm_models.tokenizer import load_chat_templates, load_sampling_defaults

    checkpoint = open_checkpoint(path)
    try:
        tensors = checkpoint.tensors()
        spec = read_spec(checkpoint.file_format, checkpoint.metadata, tensors)
        types: dict[str, dict[str, float]] = {}
        for info in tensors.values():
            count = 1
            for size in info.shape:
                count *= size
            row = types.setdefault(info.type_name, {"tensors": 0, "weights": 0, "bytes": 0})
            row["tensors"] += 1
            row["weights"] += count
            row["bytes"] += info.nbytes
        for row in types.values():
            row["bits_per_weight"] = round(row["bytes"] * 8 / row["weights"], 4) if row["weights"] else 0.0
        weights = sum(int(row["weights"]) for row in types.values())
        weight_bytes = sum(int(row["bytes"]) for row in types.values())
        per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
        kv = sum(
            2
            * len(group.layers)
            * spec.num_kv_heads
            * spec.head_dim
            * 4
            * min(spec.context_length, group.window or spec.context_length)
            for group in spec.kv_groups
        )
        sampling = load_sampling_defaults(checkpoint.path, checkpoint.file_format, checkpoint.metadata)
        templates = load_chat_templates(checkpoint.path, checkpoint.file_format, checkpoint.metadata)
        described: dict[str, Any] = {
            "path": path,
            "file_format": checkpoint.file_format,
            "architecture": checkpoint.architecture,
            "parameters": weights,
            "bits_per_weight": round(weight_bytes * 8 / weights, 4) if weights else 0.0,
            "types": dict(sorted(types.items(), key=lambda item: -item[1]["bytes"])),
            "context_length": spec.context_length,
            "layers": spec.num_layers,
            "hidden_size": spec.hidden_size,
            "heads": spec.num_heads,
            "kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "vocab_size": spec.vocab_size,
            "windows": sorted({group.window for group in spec.kv_groups if group.window}),
            "has_chat_template": templates is not None,
            "sampling": sampling,
            "sampling_origin": "model" if sampling else None,
            "memory": {
                "file_bytes": checkpoint.file_bytes,
                "file_bytes_exact": True,
                "weights_f32_bytes": weights * 4,
                "kv_bytes_per_token_f32": per_token,
                "kv_bytes_f32": kv,
            },
            "notices": list(checkpoint.notices),
        }
        licence = checkpoint.metadata.get("general.license")
        if isinstance(licence, str) and licence:
            described["file_licence"] = licence
        if with_metadata:
            described["metadata"] = {key: _short(value) for key, value in checkpoint.metadata.items()}
        return described
    finally:
        checkpoint.close()


def _short(value: Any) -> Any:
    """A metadata value without its bulk: long lists by their length, long texts by their begin."""
    if isinstance(value, str):
        return (
            value
            if len(value) <= MAX_VALUE_CHARS
            else f"{value[:MAX_VALUE_CHARS]}... ({len(value)} characters)"
        )
    if isinstance(value, bool | int | float) or value is None:
        return value
    if isinstance(value, dict):
        return {str(key): _short(item) for key, item in list(value.items())[:100]}
    try:
        count = len(value)
    except TypeError:
        return str(value)[:MAX_VALUE_CHARS]
    return [_short(item) for item in value] if count <= 8 else f"({count:,} values)"


def _print(output: Output, described: dict[str, Any]) -> None:
    from edgellm.cli.errors import one_line

    def line(label: str, value: Any) -> None:
        if value not in (None, "", [], {}):
            output.data(f"{label:<14} {one_line(str(value))}")

    line("name", described["name"])
    line("title", described.get("title"))
    line(
        "file",
        described.get("path") if described["pulled"] else f"not pulled (edgellm pull {described['name']})",
    )
    line("sources", None if described["pulled"] else ", ".join(described.get("sources", [])))
    line("architecture", described.get("architecture"))
    parameters = described.get("parameters")
    line("parameters", f"{parameters:,}" if parameters else None)
    line("quantization", _quantization(described))
    context = described.get("context_length")
    line("context", f"{context:,} tokens" if context else None)
    line("windows", ", ".join(f"{window:,} tokens" for window in described.get("windows", [])))
    has_template = described.get("has_chat_template")
    line("chat template", None if has_template is None else "yes" if has_template else "none (a base model)")
    sampling = described.get("sampling") or {}
    origin = f" ({described['sampling_origin']})" if described.get("sampling_origin") else ""
    line("sampling", ", ".join(f"{k} {v}" for k, v in sampling.items()) + origin if sampling else None)
    licence = described.get("licence") or described.get("file_licence")
    line("licence", " ".join(part for part in (licence, described.get("licence_url")) if part))
    _print_memory(output, described.get("memory") or {}, context)
    if described.get("tried") is False and not described["pulled"]:
        output.data(
            "tried          not by this project; it is read by the same code as the others of its family"
        )
    for notice in described.get("notices", []):
        output.notice(notice)
    for key, value in (described.get("metadata") or {}).items():
        output.data(one_line(f"  {key} = {value}"))


def _quantization(described: dict[str, Any]) -> str:
    types = described.get("types")
    if not types:
        return str(described.get("quantization") or "")
    parts = [
        f"{name} {row['bits_per_weight']:.4g} bits x {int(row['tensors'])}" for name, row in types.items()
    ]
    return f"{described['bits_per_weight']:.2f} bits per weight: " + ", ".join(parts)


def _print_memory(output: Output, memory: dict[str, Any], context: int | None) -> None:
    size = memory.get("file_bytes")
    if not size:
        return
    about = "" if memory.get("file_bytes_exact") else "about "
    output.data(f"{'weights':<14} {about}{megabytes(size)} in the file")
    if memory.get("weights_f32_bytes"):
        output.data(f"{'memory':<14} {megabytes(memory['weights_f32_bytes'])} for weights decoded to f32")
    if memory.get("kv_bytes_per_token_f32"):
        per_token, whole = memory["kv_bytes_per_token_f32"], memory.get("kv_bytes_f32")
        text = f"{megabytes(per_token)} of KV cache per token in f32"
        if whole and context:
            text += f", {megabytes(whole)} at {context:,} tokens"
        output.data(f"{'':<14} {text}")
