"""Who goes first and who gives way: pure functions of priorities, times and lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgellm.scheduler.sequence import Sequence

AGE_BOUND_S = 20.0
"""A prefill that has waited this long is no longer overtaken by shorter ones."""


def rank(sequence: Sequence) -> tuple[int, float, int]:
    """Smallest is served first; the largest is the victim of a preemption: lowest priority, newest first.

    By arrival, not by the last start: a sequence that was preempted does not become the newest by resuming,
    so the oldest always gets on and two sequences never take each other's blocks in turn.
    """
    return sequence.priority, sequence.arrival, sequence.sequence_id


def prefill_order(
    candidates: Iterable[Sequence], now: float, age_bound_s: float, last_served: Mapping[int, float]
) -> list[Sequence]:
    """The order in which prefills, running and waiting, share what a step has left.

    By priority. Of one priority: first those older than ``age_bound_s`` by arrival, then those that were
    preempted, then the shortest remaining. So that no priority starves either, the first of one of which
    nothing ran for ``age_bound_s`` (``last_served``: priority -> monotonic seconds) goes ahead of all, one
    per bound: a backlog of batch work that has grown old delays a chat by one sequence, not by the backlog.
    """

    def key(sequence: Sequence) -> tuple[int, bool, float, bool, int, float, int]:
        aged = now - sequence.arrival >= age_bound_s
        return (
            sequence.priority,
            not aged,
            sequence.arrival if aged else 0.0,
            sequence.preempted_at is None,
            sequence.remaining,
            sequence.arrival,
            sequence.sequence_id,
        )

    ordered = sorted(candidates, key=key)
    starved: list[Sequence] = []
    seen: set[int] = set()
    for sequence in ordered:
        if sequence.priority in seen:
            continue
        seen.add(sequence.priority)
        oldest = min(s.arrival for s in ordered if s.priority == sequence.priority)
        if now - max(oldest, last_served.get(sequence.priority, oldest)) >= age_bound_s:
            starved.append(sequence)
    first = sorted(starved, key=lambda s: (s.arrival, s.sequence_id))
    return first + [s for s in ordered if s not in first]


def kv_salt(sequence: Sequence) -> str:
    """The salt under which a sequence's blocks are shared; the word before the colon keeps kinds apart.

    K of the rope's two scalings are of no use to each other, and a prompt whose tokens are scored or pooled
    must run.
    """
    must_run = sequence.start.prompt_logprobs is not None or sequence.start.pooling is not None
    own = f"own-{sequence.sequence_id}-" if must_run else ""
    return own + shared_salt(sequence.salt, is_short=sequence.rope_is_short)


def shared_salt(salt: str, *, is_short: bool) -> str:
    """``kv_salt`` of sequences whose blocks others may use, for a request's own salt."""
    return f"{'short' if is_short else 'long'}:{salt}"
