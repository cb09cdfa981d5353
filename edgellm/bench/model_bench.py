"""One benchmark of a loaded model: prompts of several lengths, batches, bytes per step, a peer in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgellm.bench.latency import (
    BatchRow,
    Percentiles,
    Target,
    Timeline,
    batch_row,
    knee,
    percentile,
    percentiles,
    smooth_up_to,
)
from edgellm.bench.llama_cpp_peer import LlamaCppPeer, PeerRun
from edgellm.bench.natural_text import Kind, natural_ids
from edgellm.bench.workload import BenchEngine, run_together
from edgellm.planning.roofline import cost_per_million

KINDS: tuple[Kind, ...] = ("prose", "code", "chat")
WARM_UP_TOKENS = (64, 4)
"""Prompt and new tokens of the run that is not counted."""


@dataclass(frozen=True)
class BenchPlan:
    """What is to be run."""

    prompt_tokens: tuple[int, ...]
    new_tokens: int
    repeat: int
    batches: tuple[int, ...]
    target: Target | None = None
    price_per_hour: float | None = None
    kv_policy: str = "stop"

    @property
    def extra_tokens(self) -> int:
        """How long those that begin first may go on for the others' prompts to be read: a step reads at least
        some tens of prompt tokens beside answers.
        """
        largest = max(self.batches)
        return 0 if largest == 1 else largest * (2 + max(self.prompt_tokens) // 32)

    @property
    def context(self) -> int:
        """Tokens that a request may come to."""
        return max(self.prompt_tokens) + self.new_tokens + self.extra_tokens


@dataclass(frozen=True)
class PromptRow:
    """One request alone, by length of its prompt: medians of the repeated runs, percentiles over all."""

    prompt_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_s: Percentiles
    inter_token_s: Percentiles
    step_bytes: int
    """Weights and KV that a decode step reads, in the middle of the answer."""
    achieved_gb_per_s: float


@dataclass(frozen=True)
class Bandwidth:
    """What the bytes of a step are compared with."""

    weight_bytes: int
    kv_read_bytes: Callable[[int], int]
    """Of a sequence of so many tokens."""
    read_gb_per_s: float


def run_bench(
    engine: BenchEngine,
    encode: Callable[[str], Sequence[int]],
    plan: BenchPlan,
    bandwidth: Bandwidth,
    peer: LlamaCppPeer | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """All measurements as a JSON object (docs/bench.schema.json without what only the command knows)."""
    numbers = iter(range(1, 1_000_000))

    def prompts(lengths: Sequence[int]) -> list[tuple[int, ...]]:
        # Never the same text twice: the prefix cache would answer.
        return [
            natural_ids(encode, KINDS[i % len(KINDS)], length, next(numbers))
            for i, length in enumerate(lengths)
        ]

    def run(chosen: Sequence[Sequence[int]], new_tokens: int, extra: int = 0) -> list[Timeline]:
        name = f"bench{next(numbers)}"
        return run_together(
            engine, chosen, new_tokens, extra_tokens=extra, kv_policy=plan.kv_policy, name=name
        )

    on_progress("warm-up")
    warm = [min(WARM_UP_TOKENS[0], min(plan.prompt_tokens))]
    run(prompts(warm), min(WARM_UP_TOKENS[1], plan.new_tokens))
    alone: dict[int, list[list[Timeline]]] = {length: [] for length in plan.prompt_tokens}
    peer_runs: list[PeerRun] = []
    for turn in range(plan.repeat):
        for length in plan.prompt_tokens:
            on_progress(f"prompt of {length} tokens, run {turn + 1} of {plan.repeat}")
            [prompt] = prompts([length])
            measure_peer = peer is not None and length == plan.prompt_tokens[0]
            if measure_peer and turn % 2:  # in turn, so that noise of the machine meets both
                assert peer is not None
                peer_runs.append(peer.run(prompt, plan.new_tokens))
            alone[length].append(run([prompt], plan.new_tokens))
            if measure_peer and not turn % 2:
                assert peer is not None
                peer_runs.append(peer.run(prompt, plan.new_tokens))
    rows = [_prompt_row(length, runs, plan, bandwidth) for length, runs in alone.items()]
    batches: list[BatchRow] = []
    for batch in plan.batches:
        runs = alone[plan.prompt_tokens[0]] if batch == 1 else []
        for turn in range(plan.repeat if batch > 1 else 0):
            on_progress(f"batch of {batch}, run {turn + 1} of {plan.repeat}")
            lengths = [plan.prompt_tokens[i % len(plan.prompt_tokens)] for i in range(batch)]
            runs.append(run(prompts(lengths), plan.new_tokens, plan.extra_tokens))
        row = batch_row(batch, runs)
        if plan.price_per_hour is not None and row.total_tokens_per_s > 0:
            cost = cost_per_million(plan.price_per_hour, row.total_tokens_per_s)
            row = replace(row, cost_per_million_tokens=cost)
        batches.append(row)
    return _report(plan, rows, batches, bandwidth, peer, peer_runs)


def _prompt_row(
    length: int, runs: Sequence[Sequence[Timeline]], plan: BenchPlan, bandwidth: Bandwidth
) -> PromptRow:
    lines = [line for run in runs for line in run]
    decode = percentile([line.decode_tokens_per_s for line in lines], 0.5)
    step_bytes = bandwidth.weight_bytes + bandwidth.kv_read_bytes(length + plan.new_tokens // 2)
    return PromptRow(
        length,
        percentile([line.prompt_tokens / line.prefill_s for line in lines if line.prefill_s > 0], 0.5),
        decode,
        percentiles([line.ttft_s for line in lines]),
        percentiles([gap for line in lines for gap in line.gaps]),
        step_bytes,
        step_bytes * decode / 1e9,
    )


def _report(
    plan: BenchPlan,
    rows: Sequence[PromptRow],
    batches: Sequence[BatchRow],
    bandwidth: Bandwidth,
    peer: LlamaCppPeer | None,
    peer_runs: Sequence[PeerRun],
) -> dict[str, Any]:
    first = rows[0]
    report: dict[str, Any] = {
        "prefill_tokens_per_s": first.prefill_tokens_per_s,
        "decode_tokens_per_s": first.decode_tokens_per_s,
        "ttft_s": first.ttft_s.p50,
        "achieved_gb_per_s": first.achieved_gb_per_s,
        "read_gb_per_s": bandwidth.read_gb_per_s,
        "read_share": first.achieved_gb_per_s / bandwidth.read_gb_per_s,
        "weight_bytes": bandwidth.weight_bytes,
        "step_bytes": first.step_bytes,
        "prompt_tokens": list(plan.prompt_tokens),
        "new_tokens": plan.new_tokens,
        "repeat": plan.repeat,
        "prompts": [asdict(row) for row in rows],
        "batches": [asdict(row) for row in batches],
        "knee_batch": knee(batches),
    }
    if plan.target is not None:
        report["slo"] = asdict(plan.target) | {"smooth_up_to": smooth_up_to(batches, plan.target)}
    if plan.price_per_hour is not None:
        report["price_per_hour"] = plan.price_per_hour
        report["cost_per_million_tokens"] = batches[0].cost_per_million_tokens
    if peer is not None:
        prefill = percentile([run.prefill_tokens_per_s for run in peer_runs], 0.5)
        decode = percentile([run.decode_tokens_per_s for run in peer_runs], 0.5)
        report["against"] = peer.description | {
            "prefill_tokens_per_s": prefill,
            "decode_tokens_per_s": decode,
            "prefill_ratio": first.prefill_tokens_per_s / prefill,
            "decode_ratio": first.decode_tokens_per_s / decode,
            "runs": [asdict(run) for run in peer_runs],
        }
    return report
