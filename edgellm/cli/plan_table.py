"""The lines of ``edgellm plan`` for a person: titles and values in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm.planning.planner import Plan
    from edgellm.planning.shape import ModelShape


def size(num_bytes: float) -> str:
    """Bytes in a unit that leaves three or four digits."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def rows(
    shape: ModelShape, plan: Plan, bandwidth: float | None, flops: float | None, measured: bool
) -> Iterator[tuple[str, str]]:
    """(title, value) in reading order."""
    sequences = "one sequence" if plan.batch == 1 else f"{plan.batch} sequences"
    yield "weights", size(plan.weight_bytes)
    yield (
        "KV cache",
        f"{size(plan.kv_bytes)} for {sequences} of {plan.context:,} tokens in {plan.kv_dtype} "
        f"({plan.kv_bytes_per_token:,} bytes per token)",
    )
    yield "workspace", size(plan.workspace_bytes)
    where = "in the same memory" if plan.holds_process else "in the host's memory"
    yield "the program itself", f"{size(plan.process_bytes)} {where}: torch, imports, tokenizer"
    total = size(plan.needed_bytes)
    if plan.memory_bytes is not None:
        verdict = "fits in" if plan.fits else "does not fit in"
        total += f", {verdict} the {size(plan.memory_bytes)} that may be used"
    yield "total", total
    if plan.largest_context is not None:
        yield "largest context", f"{plan.largest_context:,} tokens for {sequences}"
    if plan.largest_batch is not None:
        yield "largest batch", f"{plan.largest_batch:,} of {plan.context:,} tokens"
    yield (
        "a decode step reads",
        f"{size(plan.step_weight_bytes)} of weights and {size(plan.step_kv_bytes)} of KV",
    )
    yield from _speed(plan, bandwidth, flops, measured)
    yield from _crossings(shape, plan)
    yield from _speculation(plan)
    yield "what pays", plan.lever


def _speed(
    plan: Plan, bandwidth: float | None, flops: float | None, measured: bool
) -> Iterator[tuple[str, str]]:
    if plan.decode_ceiling is not None and plan.usual_decode is not None:
        origin = "measured" if measured else "stated"
        yield (
            "decode",
            f"at most {plan.decode_ceiling:,.1f} tokens/s at {bandwidth:,.1f} GB/s ({origin}), usual "
            f"{plan.usual_decode[0]:,.1f} to {plan.usual_decode[1]:,.1f}; at most "
            f"{plan.decode_ceiling_empty:,.1f} while the context is empty",
        )
    if plan.first_token_floor_s is not None:
        basis = f"{flops:,.1f} TFLOPS" if flops is not None else "one reading of the weights; see --flops"
        yield (
            "first token",
            f"not before {plan.first_token_floor_s * 1000:,.1f} ms for {plan.prompt_tokens:,} prompt tokens "
            f"({basis})",
        )


def _crossings(shape: ModelShape, plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.kv_passes_weights_context is None:
        at = f"never at batch {plan.batch} within the trained {shape.context_length:,} tokens"
    else:
        at = f"from {plan.kv_passes_weights_context:,} tokens at batch {plan.batch}"
    if plan.kv_passes_weights_batch is not None:
        at += f"; from batch {plan.kv_passes_weights_batch:,} at {plan.context:,} tokens"
    yield "KV passes the weights", at
    if plan.compute_bound_batch is not None:
        yield "compute takes over", f"from batch {plan.compute_bound_batch:,.1f}"


def _speculation(plan: Plan) -> Iterator[tuple[str, str]]:
    draft = plan.speculation
    if draft is None:
        yield "speculation", "say --draft-cost, and --acceptance where it is known, to see what it brings"
        return
    needed = (
        "pays at no acceptance"
        if draft.break_even_acceptance is None
        else f"pays from an acceptance of {draft.break_even_acceptance:.3f}"
    )
    line = f"{draft.draft_tokens} tokens at {draft.draft_cost:g} of a step {needed}"
    if draft.tokens_per_round is not None and draft.speed_up is not None:
        line += (
            f"; at {draft.acceptance:g}: {draft.tokens_per_round:.3f} tokens per round, {draft.speed_up:.3f}x"
        )
    if draft.best_draft_tokens is not None and draft.best_speed_up is not None:
        best = f"{draft.best_draft_tokens} tokens, {draft.best_speed_up:.3f}x"
        line += f"; best: {best if draft.best_draft_tokens else 'not drafting'}"
    yield "speculation", line
