"""Rings of unquantized KV: who owns which, and what is still there after drafts, gaps and restarts."""

from __future__ import annotations

import random

import pytest

from edgellm.cache.tail_rings import TailRings
from edgellm_models.errors import EngineError

RECENT = 20


def test_a_sequence_keeps_what_it_computed() -> None:
    rings = TailRings(2, RECENT)
    first = rings.step(7, 0, 10)
    assert (first.head_from, first.tail_from) == (0, 0)
    assert rings.step(7, 10, 50) == first
    span = rings.step(7, 60, 1)
    assert (span.ring, span.head_from, span.tail_from) == (first.ring, 0, 40)


def test_a_reused_prefix_was_not_computed() -> None:
    span = TailRings(1, RECENT).step(1, 32, 8)
    assert (span.head_from, span.tail_from) == (32, 32)


def test_a_gap_begins_anew() -> None:
    rings = TailRings(1, RECENT)
    rings.step(1, 0, 10)
    span = rings.step(1, 11, 4)
    assert (span.head_from, span.tail_from) == (11, 11)


def test_a_restart_begins_anew() -> None:
    rings = TailRings(1, RECENT)
    rings.step(1, 0, 100)
    span = rings.step(1, 0, 100)
    assert (span.head_from, span.tail_from) == (0, 0)


def test_what_a_rejected_draft_overwrote_stays_lost() -> None:
    rings = TailRings(1, RECENT)
    rings.step(1, 0, 30)
    rings.step(1, 30, 15)  # positions 30 .. 44 take the slots of 10 .. 24
    span = rings.step(1, 31, 1)
    assert span.tail_from == 25
    assert rings.step(1, 32, 1).tail_from == 25
    assert rings.step(1, 33, 20).tail_from == 25
    assert rings.step(1, 53, 1).tail_from == 33


def test_a_released_ring_goes_to_the_next() -> None:
    rings = TailRings(1, RECENT)
    rings.step(1, 0, 5)
    with pytest.raises(EngineError, match="all 1 tails"):
        rings.step(2, 0, 5)
    rings.release(1)
    rings.release(1)
    assert rings.step(2, 5, 5).head_from == 5
    rings.check_integrity()


def test_a_fork_reads_what_its_parent_would() -> None:
    rings = TailRings(2, RECENT)
    assert rings.fork(1, 2) is None
    parent = rings.step(1, 0, 40)
    assert rings.fork(1, 2) == (parent.ring, 1 - parent.ring)
    child, own = rings.step(2, 40, 1), rings.step(1, 40, 1)
    assert (child.head_from, child.tail_from) == (own.head_from, own.tail_from) == (0, 20)


def test_a_simulated_ring_holds_what_the_span_promises() -> None:
    """Random steps, rollbacks and gaps against a ring of slots that remembers who wrote each last."""
    for seed in range(200):
        rng = random.Random(seed)
        rings, slots, written = TailRings(1, RECENT), {}, {}
        end = rng.choice((0, 5))
        for version in range(30):
            start = max(0, end - rng.choice((0, 0, 0, 1, 3, 15)) + rng.choice((0,) * 9 + (4,)))
            count = rng.choice((1, 1, 2, 6, 19, 20, 45))
            span = rings.step(1, start, count)
            for position in range(span.tail_from, start):
                assert slots[position % RECENT] == (position, written[position]), (seed, position)
            for position in range(start, start + count):
                written[position] = version
                if position >= start + count - RECENT:
                    slots[position % RECENT] = (position, version)
            end = start + count
