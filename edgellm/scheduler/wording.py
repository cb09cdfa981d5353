"""The notices and errors of the scheduler as sentences, with the numbers in them."""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.cache.eviction import RANDOM, WINDOW, Dropped, EvictionPlan
from edgellm.contracts import Notice


def queued_for_blocks(length: int, counts: Mapping[str, int]) -> Notice:
    return Notice(
        "queued_for_blocks",
        f"waits for KV memory: {length} tokens need blocks and {_free(counts)}; it goes on as soon as others "
        "end, fewer requests at once or a larger KV cache avoid it",
    )


def preempted(num_tokens: int, *, to_host: bool, for_urgent: bool = False) -> Notice:
    fate = "was moved to host memory" if to_host else "was dropped and will be computed again"
    why = "for a request of a better priority" if for_urgent else "as KV memory is short"
    return Notice("preempted", f"paused, {why}: the KV of its {num_tokens} tokens {fate}")


def resumed(waited_s: float, kept: int, again: int, *, lost_tail: bool = False) -> Notice:
    tail = "; what it read unquantized of an int4 cache it now reads quantized" if lost_tail else ""
    return Notice(
        "resumed",
        f"goes on after {waited_s:.1f} s: the KV of {kept} tokens is there, {again} are computed again{tail}",
    )


def rope_switched(limit: int, length: int) -> Notice:
    return Notice(
        "rope_scaling_switched",
        f"the sequence has outgrown {limit} tokens, where the model's rope scaling changes; its {length} "
        "tokens are computed again",
    )


def evicted(plan: EvictionPlan, dropped: Dropped, length: int) -> Notice:
    """The KV that a sequence of ``length`` tokens has lost by now. Counts as told."""
    dropped.told = dropped.tokens
    if plan.policy == WINDOW:
        kept = f"--kv-window {plan.keep} keeps the beginning and the last ones"
    else:
        lots = "drawn by lot" if plan.policy == RANDOM else "with the lowest scores, which is experimental"
        kept = f"--kv-budget {plan.keep} drops those {lots}"
    return Notice(
        "kv_evicted",
        f"{dropped.tokens} of {length} tokens, between positions {dropped.first} and {dropped.end - 1}, are "
        f"out of the model's sight by now, and what they say may be missed: {kept}; --kv-policy stop keeps "
        "all",
    )


def no_room(length: int, counts: Mapping[str, int]) -> str:
    return (
        f"the KV cache is too small: {length} tokens need more blocks than it has, although nothing else "
        f"runs ({_free(counts)}); use a larger one or a shorter request"
    )


def _free(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[name]} are {name}" for name in ("free", "cached", "used") if name in counts)
