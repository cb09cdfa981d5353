"""``edgellm bench model``: speed, latency, bandwidth and memory of a model on natural text."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.options import engine_options, json_option, model_argument, option, resolve_settings
from edgellm.cli.output import Output, current_output, megabytes

if TYPE_CHECKING:
    from edgellm.bench.profile_ranges import Range
    from edgellm.cli.runtime import Runtime
    from edgellm_models.errors import Notice

LARGEST_PROMPT = 1 << 20
LARGEST_BATCH = 1024
"""Requests at once; the cache is made for as many."""
READ_BYTES = 1 << 30
"""Buffer of the bandwidth measurement, far over the caches of desktops and servers."""


@click.command(
    "model",
    cls=EdgeCommand,
    examples=(
        "edgellm bench",
        "edgellm bench smollm2-135m --batch 1,2,4,8,16 --slo ttft=1,tps=20",
        "edgellm bench model.gguf --prompt-tokens 128,512,2048 --against llama.cpp --json",
    ),
)
@model_argument()
@option("--prompt-tokens", metavar="N,...", default="512", show_default=True, help="Lengths of the prompts.")
@option(
    "--new-tokens", metavar="N", type=click.IntRange(2, 1 << 20), default=128, show_default=True,
    help="Tokens of each answer.",
)  # fmt: skip
@option(
    "--repeat", metavar="N", type=click.IntRange(1, 1000), default=3, show_default=True,
    help="Runs of each kind, besides the warm-up.",
)  # fmt: skip
@option("--batch", metavar="N,...", default="1", show_default=True, help="Requests at once, one row each.")
@option("--slo", metavar="ttft=S,tps=T", default=None, help="Name the batch up to which this is kept.")
@option(
    "--price-per-hour",
    metavar="X",
    type=click.FloatRange(0, min_open=True),
    default=None,
    help="What the machine costs, for the cost per million tokens.",
)
@option(
    "--profile", "profile_path", metavar="FILE", default=None,
    help="Also write a torch profiler trace (Chrome format) of one more run.",
)  # fmt: skip
@option(
    "--against", type=click.Choice(["llama.cpp"]), default=None, help="Run the same file there too, in turn."
)
@engine_options
@json_option
def command(
    model_name: str | None,
    prompt_tokens: str,
    new_tokens: int,
    repeat: int,
    batch: str,
    slo: str | None,
    price_per_hour: float | None,
    profile_path: str | None,
    against: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure a model on natural text: first token, tokens per second, bandwidth, memory.

    Greedy answers of a fixed length; medians of the runs, percentiles over all tokens, warm-up excluded.
    In a batch the rates are those of the time in which all answers go on.
    """
    from dataclasses import replace

    from edgellm.bench.latency import parse_counts, parse_target
    from edgellm.bench.model_bench import Bandwidth, BenchPlan, run_bench
    from edgellm.bench.peak_memory import peak_bytes, reset_peak
    from edgellm.cli.model_access import local_model, named_by
    from edgellm_models.errors import UsageError

    output = current_output()
    plan = BenchPlan(
        parse_counts(prompt_tokens, "--prompt-tokens", LARGEST_PROMPT),
        new_tokens,
        repeat,
        parse_counts(batch, "--batch", LARGEST_BATCH),
        None if slo is None else parse_target(slo),
        price_per_hour,
    )
    resolved = resolve_settings(settings, model=model_name)
    if resolved.kv_policy == "trim":
        raise UsageError("--kv-policy trim leaves out turns of a chat; a benchmark has none: use stop")
    plan = replace(plan, kv_policy=resolved.kv_policy)
    with named_by(resolved):
        model, path = local_model(resolved.model, output)
    from edgellm.cli.runtime import load_runtime
    from edgellm.planning.machine import free_memory, read_bandwidth

    told: list[Notice] = []

    def tell(notice: Notice) -> None:
        told.append(notice)
        if not as_json:
            output.notice(notice)

    if resolved.ctx is None:
        resolved = replace(resolved, ctx=plan.context)
    free = free_memory()
    largest = max(plan.batches)
    # Before the model takes memory: the buffer is large.
    read_gb_per_s = read_bandwidth(READ_BYTES if free is None or free > 4 * READ_BYTES else READ_BYTES // 4)
    runtime = load_runtime(resolved, path, model.name, tell, full_contexts=largest, max_running=largest)
    with contextlib.ExitStack() as stack:
        stack.callback(runtime.close)
        if plan.context > runtime.info.context_length:
            raise UsageError(
                f"a request comes to {plan.context} tokens here and the context holds "
                f"{runtime.info.context_length}; lower --prompt-tokens, --new-tokens or --batch"
            )
        threads = runtime.num_threads
        peer = None
        if against is not None:
            from edgellm.bench.llama_cpp_peer import LlamaCppPeer

            peer = LlamaCppPeer(path, context=plan.context + 8, threads=threads)
            stack.enter_context(peer)
        was_reset = reset_peak()
        stats = runtime.core.stats
        bandwidth = Bandwidth(stats.weight_bytes, runtime.kv_read_bytes, read_gb_per_s)
        report = run_bench(
            runtime.core, runtime.tokenizer.encode, plan, bandwidth, peer, on_progress=output.status
        )
        peak, source = peak_bytes(was_reset)
        if profile_path is not None:
            _profile(runtime, plan, Path(profile_path))
    output.end_progress()
    report |= {
        "peak_bytes": peak,
        "peak_source": source,
        "model": runtime.info.name,
        "quantization": runtime.info.quantization,
        "device": stats.device,
        "kernel_backend": stats.kernel_backend,
        "kv_dtype": resolved.kv_dtype,
        "threads": threads,
        "profile": profile_path,
    }
    if as_json:
        output.json(report | {"notices": told})
    else:
        print_report(output, report)


def _profile(runtime: Runtime, plan: Any, path: Path) -> None:
    """One more run under the profiler: it slows what it watches, and runs op by op, so its times are for
    shares only.
    """
    from edgellm.bench.natural_text import natural_ids
    from edgellm.bench.profile_ranges import profiled
    from edgellm.bench.workload import run_together

    prompt = natural_ids(runtime.tokenizer.encode, "prose", plan.prompt_tokens[0], 999_983)
    runner: Any = runtime.runner
    program = runner._decoder
    # Of a step program the single ops, its twin: inside of one foreign call there is nothing to see.
    runner._decoder = getattr(program, "decoder", program)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, runner, "_decoder", program)
        stack.enter_context(profiled(path, ranges(runtime)))
        run_together(runtime.core, [prompt], min(plan.new_tokens, 32), kv_policy=plan.kv_policy, name="p")


def ranges(runtime: Runtime) -> list[Range]:
    """Where the trace's ranges begin and end: queue, prefill, decode or verify, draft, and inside of them
    attention, linears and sampling."""
    from edgellm.bench.profile_ranges import Range

    runner: Any = runtime.runner
    kernels = runner._decoder.kernels

    def step(plan: Any) -> str:
        if any(s.is_prefill for s in plan.sequences):
            return "prefill"
        drafted = any(s.draft_token_ids or s.draft_by_runner for s in plan.sequences)
        return "verify" if drafted else "decode"

    found = [
        Range(runtime.core._scheduler, "next_step", "queue"),
        Range(runner, "execute", step),
        Range(runner._sampler, "verify", "sampling"),
        Range(kernels, "paged_attention", "attention"),
        *(Range(kernels, op, "linears") for op in ("linear", "gate_up", "lm_head")),
    ]
    # Looked up between the steps, or by layers or a smaller model inside of one.
    for drafter, attribute in ((runtime.core._drafting.speculator, "propose"), (runner.drafter, "add")):
        if drafter is not None:
            found.append(Range(drafter, attribute, "draft"))
    return found


def print_report(output: Output, report: dict[str, Any]) -> None:
    """The figures for people: one table of prompts, one of batches, then lines."""
    output.data(
        f"{report['model']}, {report['quantization']}, {report['kernel_backend']} kernels on "
        f"{report['device']}, {report['threads']} threads, {report['kv_dtype']} KV"
    )
    output.data("")
    output.data("  prompt   prefill     first token s        decode    between tokens ms      read")
    output.data("  tokens     tok/s     p50    p95    p99     tok/s     p50    p95    p99     GB/s")
    for row in report["prompts"]:
        first, gap = row["ttft_s"], row["inter_token_s"]
        output.data(
            f"{row['prompt_tokens']:8} {row['prefill_tokens_per_s']:9.1f} "
            f"{first['p50']:7.3f}{first['p95']:7.3f}{first['p99']:7.3f} {row['decode_tokens_per_s']:9.2f} "
            f"{_ms(gap['p50'])}{_ms(gap['p95'])}{_ms(gap['p99'])} {row['achieved_gb_per_s']:8.2f}"
        )
    output.data("")
    output.data(
        "   batch     total      each   between tokens ms        first token s    longest    cost per"
    )
    output.data(
        "             tok/s     tok/s     p50    p95    p99     p50    p95    p99   gap ms    1M tokens"
    )
    for row in report["batches"]:
        first, gap = row["ttft_s"], row["inter_token_s"]
        cost = row["cost_per_million_tokens"]
        output.data(
            f"{row['batch']:8} {row['total_tokens_per_s']:9.2f} {row['tokens_per_s_each']:9.2f} "
            f"{_ms(gap['p50'])}{_ms(gap['p95'])}{_ms(gap['p99'])} "
            f"{first['p50']:7.3f}{first['p95']:7.3f}{first['p99']:7.3f} {_ms(row['longest_gap_s'])}  "
            f"{'-' if cost is None else f'{cost:.2f}':>9}"
            f"{'  <- knee' if row['batch'] == report['knee_batch'] and len(report['batches']) > 1 else ''}"
        )
    output.data("")
    output.data(
        f"a decode step reads {megabytes(report['step_bytes'])} of weights and KV: "
        f"{report['achieved_gb_per_s']:.2f} GB/s, {report['read_share']:.0%} of the "
        f"{report['read_gb_per_s']:.1f} GB/s that all cores read here"
    )
    output.data(f"peak memory {megabytes(report['peak_bytes'])} ({report['peak_source']})")
    slo = report.get("slo")
    if slo is not None:
        parts = [
            f"first token within {slo['ttft_s']:g} s" if slo["ttft_s"] is not None else "",
            f"{slo['tokens_per_s']:g} tokens per second" if slo["tokens_per_s"] is not None else "",
        ]
        wish = " and ".join(part for part in parts if part)
        smooth = slo["smooth_up_to"]
        output.data(
            f"a chat stays smooth ({wish}, at p95) up to a batch of {smooth}"
            if smooth
            else f"a chat is not smooth ({wish}, at p95) at any batch measured"
        )
    peer = report.get("against")
    if peer is not None:
        output.data(
            f"{peer['name']} ({peer['version']}, {peer['threads']} threads, {peer['kv_type']} KV, "
            f"flash attention {peer['flash_attention']}, batch {peer['batch']}/{peer['ubatch']}): prefill "
            f"{peer['prefill_tokens_per_s']:.1f}, decode {peer['decode_tokens_per_s']:.2f} tok/s; edgellm is "
            f"{peer['prefill_ratio']:.2f}x and {peer['decode_ratio']:.2f}x of that"
        )
        output.data(f"{peer['name']} system: {peer['system']}")
    if report.get("profile"):
        output.data(f"profile written to {report['profile']}")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:7.1f}"
