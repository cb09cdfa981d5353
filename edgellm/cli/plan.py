"""``edgellm plan``: what a model needs and how fast it can be, before anything is loaded or even fetched."""

from __future__ import annotations

import dataclasses
import re
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
from edgellm.cli.output import Output, current_output
from edgellm.log import log_notice
from edgellm_models.errors import BadInputError, NotFoundError, UsageError

if TYPE_CHECKING:
    from edgellm.planning.planner import Plan
    from edgellm.planning.shape import ModelShape

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


@click.command(
    cls=EdgeCommand,
    examples=(
        "edgellm plan smollm2-135m",
        "edgellm plan ./config.json --ctx 8192 --batch 4 --memory 24GiB --bandwidth 1008 --flops 165",
        "edgellm plan qwen3-4b --kv-dtype int8 --memory 8GiB --json",
    ),
)
@model_argument()
@setting_options("model", "ctx", "kv_dtype", "kv_policy", "kv_window", "kv_budget", "kernels", "spec")
@option("--batch", type=click.IntRange(1, 65536), default=1, help="Sequences at once.  [default: 1]")
@option("--memory", metavar="SIZE", help="Memory of the machine, such as 24GiB or 16GB.  [default: free now]")
@option(
    "--memory-fraction",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    help="Share of the memory that may be used.  [default: 0.9]",
)
@option(
    "--bandwidth",
    type=click.FloatRange(0, min_open=True),
    metavar="GB/S",
    help="Read bandwidth in 10^9 bytes per second.  [default: measured here]",
)
@option(
    "--flops",
    type=click.FloatRange(0, min_open=True),
    metavar="TFLOPS",
    help="Arithmetic of dense products in 10^12 operations per second.",
)
@option(
    "--acceptance",
    type=click.FloatRange(0, 1),
    metavar="A",
    help="Expected share of drafted tokens that are accepted.",
)
@option(
    "--draft-cost",
    type=click.FloatRange(0),
    metavar="C",
    help="Time of one draft step over that of a plain step; 0 for n-gram lookup.",
)
@option(
    "--draft-tokens", type=click.IntRange(1, 64), default=4, help="Drafted tokens per round.  [default: 4]"
)
@option(
    "--prompt-tokens",
    type=click.IntRange(1),
    default=512,
    help="Prompt for the first token's floor.  [default: 512]",
)
@json_option
def command(
    model_name: str | None,
    batch: int,
    memory: str | None,
    memory_fraction: float,
    bandwidth: float | None,
    flops: float | None,
    acceptance: float | None,
    draft_cost: float | None,
    draft_tokens: int,
    prompt_tokens: int,
    as_json: bool,
    **settings: Any,
) -> None:
    """Say what a model needs and how fast it can be: memory, contexts, batches, ceilings, speculation.

    The weights need not be there: a config.json, a GGUF header or a catalog entry is enough. Where nothing
    is said of the KV type it is the engine's own for this machine, bf16 for one whose memory or bandwidth is
    stated. On this machine the program itself, torch above all, counts too; --kernels torch holds weights as
    f32.
    """
    from edgellm.cache.eviction import longest_step, most_positions
    from edgellm.cache.kv_sizes import auto_kv_types
    from edgellm.cli.model_access import named_by
    from edgellm.planning.machine import free_memory, read_bandwidth
    from edgellm.planning.planner import BLOCK_SIZE, Machine, Wish, make_plan
    from edgellm.planning.workspace import PREFILL_CHUNK
    from edgellm.speculative.drafter import MAX_DRAFT

    output = current_output()
    settled = resolve_settings(settings, model=model_name)
    with named_by(settled):
        name, shape = model_shape(settled.model, output)
    total = parse_size(memory) if memory is not None else free_memory()
    measured = None
    if bandwidth is None:
        measured = bandwidth = read_bandwidth()
    machine = Machine(
        memory_bytes=None if total is None else int(total * memory_fraction),
        bandwidth_gb_s=bandwidth,
        tflops=flops,
        holds_process=memory is None,
    )
    kept_tokens = settled.kv_window if settled.kv_policy == "window" else settled.kv_budget
    kernels = _kernels(settled.kernels, here=memory is None and measured is not None)
    kv_dtype = settled.kv_dtype
    if kv_dtype == "auto":  # as the engine takes it; a stated machine is a card
        here = memory is None and measured is not None
        exact = kernels == "torch" or settled.activations == "exact"
        kv_dtype = auto_kv_types("cpu" if here else "cuda", exact=exact)[0]
    wish = Wish(
        context=settled.ctx or shape.context_length,
        batch=batch,
        kv_dtype=kv_dtype,
        kept=most_positions(settled.kv_policy, kept_tokens, BLOCK_SIZE),
        chunk=longest_step(settled.kv_policy, kept_tokens, BLOCK_SIZE, PREFILL_CHUNK),
        lookahead=0 if settled.spec == "off" else MAX_DRAFT,
        kernels=kernels,
        acceptance=acceptance,
        draft_cost=draft_cost,
        draft_tokens=draft_tokens,
        prompt_tokens=prompt_tokens,
    )
    plan = make_plan(shape, wish, machine, shape.held_bytes(kernels))
    if as_json:
        data = as_data(name, shape, plan, bandwidth, flops, measured is not None)
        output.json(data | {"kernels": kernels, "kv_policy": settled.kv_policy})
    else:
        print_plan(output, name, shape, plan, bandwidth, flops, measured is not None)


def _kernels(asked: str, *, here: bool) -> str:
    """native or torch, as the engine takes them; a stated machine is a card's, which packs weights too."""
    if asked != "auto":
        return "torch" if asked == "torch" else "native"
    from edgellm_kernels.native_library import find_library

    return "torch" if here and find_library() is None else "native"


def model_shape(argument: str, output: Output) -> tuple[str, ModelShape]:
    """Name and shape of a MODEL argument, from headers or, before a pull, from the catalog."""
    from edgellm.planning.shape import catalog_shape, config_bits_per_weight, shape_of
    from edgellm_models.catalog import resolve_model
    from edgellm_models.checkpoint.headers import read_header
    from edgellm_models.network import read_spec

    path: Path | None = Path(argument)
    name = Path(argument).parent.name if Path(argument).name == "config.json" else argument
    if not (Path(argument).name == "config.json" and Path(argument).is_file()):
        resolved = resolve_model(argument, models_folder())
        name, path = resolved.name, resolved.path
        if path is None:
            assert resolved.entry is not None
            guessed = catalog_shape(resolved.entry)
            if guessed is None:
                raise NotFoundError(
                    f"the catalog knows too little of {name} to plan it; fetch it first: edgellm pull {name}"
                )
            output.note(f"{name} is not here yet: planned from the catalog, its layers' widths estimated")
            return name, guessed
    assert path is not None
    header = read_header(path)
    for notice in header.notices:
        log_notice(notice)
        output.notice(notice)
    try:
        spec = read_spec(header.file_format, header.metadata, header.tensors)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None
    bits = config_bits_per_weight(header.metadata)
    has_merges = header.metadata.get("tokenizer.ggml.model") != "llama"
    return name, shape_of(spec, header.tensors, bits_per_weight=bits, has_merges=has_merges)


def parse_size(text: str) -> int:
    """Bytes of a size such as 24GiB, 16GB, 512M or 8589934592. UsageError says what is accepted."""
    match = _SIZE.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--memory must be a size such as 24GiB, 16GB or 8589934592, not {text!r}")
    exponent = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** exponent)


def as_data(
    name: str, shape: ModelShape, plan: Plan, bandwidth: float | None, flops: float | None, measured: bool
) -> dict[str, Any]:
    """The JSON object; integers are bytes, tokens or sequences."""
    data = dataclasses.asdict(plan)
    return {
        "model": name,
        "parameters": shape.parameters,
        "bits_per_weight": round(shape.bits_per_weight, 4),
        "is_estimate": shape.is_estimate,
        "trained_context": shape.context_length,
        "bandwidth_gb_s": bandwidth,
        "bandwidth_measured": measured,
        "tflops": flops,
        "total_bytes": plan.total_bytes,
        "fits": plan.fits,
        **data,
    }


def print_plan(
    output: Output,
    name: str,
    shape: ModelShape,
    plan: Plan,
    bandwidth: float | None,
    flops: float | None,
    measured: bool,
) -> None:
    """The table for a person; every size in 10^9 or 10^6 bytes."""
    from edgellm.cli.plan_table import rows

    about = " (estimated)" if shape.is_estimate else ""
    output.data(
        f"{name}: {shape.parameters / 1e6:,.0f} M weights, {shape.bits_per_weight:.2f} bits each{about}"
    )
    for title, value in rows(shape, plan, bandwidth, flops, measured):
        output.data(f"  {title:<24}{value}")
