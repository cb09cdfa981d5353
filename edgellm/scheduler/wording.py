"""The notices and errors of the scheduler as sentences, with the numbers in them."""

from __future__ import annotations

from collections.abc import Mapping

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


def resumed(waited_s: float, kept: int, again: int) -> Notice:
    return Notice(
        "resumed",
        f"goes on after {waited_s:.1f} s: the KV of {kept} tokens is there, {again} are computed again",
    )


def rope_switched(limit: int, length: int) -> Notice:
    return Notice(
        "rope_scaling_switched",
        f"the sequence has outgrown {limit} tokens, where the model's rope scaling changes; its {length} "
        "tokens are computed again",
    )


def no_room(length: int, counts: Mapping[str, int]) -> str:
    return (
        f"the KV cache is too small: {length} tokens need more blocks than it has, although nothing else "
        f"runs ({_free(counts)}); use a larger one or a shorter request"
    )


def _free(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[name]} are {name}" for name in ("free", "cached", "used") if name in counts)
