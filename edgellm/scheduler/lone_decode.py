"""Sees at a glance whether one sequence decodes and nobody waits, as in most steps of a personal machine."""

from __future__ import annotations

from edgellm.scheduler.roster import Roster
from edgellm.scheduler.sequence import Sequence


def lone_decode(roster: Roster) -> Sequence | None:
    """The sequence whose next token is all that a step can be about, where that is plain; else None.

    Then a plan without looking further is the plan that ``Scheduler`` comes to: nobody to admit, to push out,
    to fork or to draft for. A step of a small model takes milliseconds, and the Python around it comes from
    caches that the weights have emptied.
    """
    if len(roster.running) != 1 or roster.waiting or roster.rope_switch_length is not None:
        return None
    [sequence] = roster.running.values()
    length = len(sequence.token_ids)
    if sequence.in_flight or sequence.computed != length - 1 or sequence.draft_limit > 0:
        return None
    if sequence.eviction is not None or length - sequence.prompt_length >= sequence.max_new_tokens:
        return None
    return sequence
