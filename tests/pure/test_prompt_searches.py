"""Searches of waiting prompts: hashed once, searched again only when the index has changed, never stale."""

from __future__ import annotations

from collections import Counter

import pytest

from edgellm.cache import prefix_index, prefix_match
from edgellm.cache.conversation import ConversationMemory
from edgellm.cache.kv_manager import KVManager
from edgellm.cache.sequence_blocks import GroupLayout


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many blocks were hashed and how many searches were made."""
    seen: Counter[str] = Counter()

    def counted(module: object, name: str) -> None:
        original = getattr(module, name)

        def wrapper(*arguments: object) -> object:
            seen[name] += 1
            return original(*arguments)

        monkeypatch.setattr(module, name, wrapper)

    counted(prefix_index, "chain_hash")
    counted(prefix_match, "longest_hit")
    return seen


def compute(kv: KVManager, sequence_id: int, tokens: list[int]) -> None:
    kv.open(sequence_id, tokens)
    assert kv.grow(sequence_id, len(tokens)) is not None
    kv.commit(sequence_id, tokens[kv.committed(sequence_id) :])


def attempt(kv: KVManager, sequence_id: int, tokens: list[int], salt: str = "") -> int:
    reused = kv.open(sequence_id, tokens, salt=salt)
    kv.free(sequence_id)
    return reused


@pytest.mark.parametrize("window", [None, 9])
def test_a_waiting_prompt_is_hashed_once_and_searched_when_the_index_changed(
    counts: Counter[str], window: int | None
) -> None:
    kv = KVManager([GroupLayout(None, 60), GroupLayout(window, 60)], 4)
    tokens = list(range(40))
    compute(kv, 1, tokens)
    kv.free(1)
    counts.clear()
    for _ in range(5):
        assert attempt(kv, 2, tokens) == 36
    assert counts == {"chain_hash": 9, "longest_hit": 1}
    compute(kv, 3, list(range(100, 108)))  # another prefix becomes known
    counts.clear()
    for _ in range(5):
        assert attempt(kv, 2, tokens) == 36
    assert counts == {"longest_hit": 1}


def test_what_came_and_what_went_is_seen() -> None:
    kv = KVManager([GroupLayout(None, 12)], 4)
    tokens = list(range(40))
    assert attempt(kv, 1, tokens) == 0
    compute(kv, 2, tokens[:22])
    assert attempt(kv, 1, tokens) == 20
    kv.free(2)
    compute(kv, 3, list(range(100, 132)))  # of the cached blocks the last ones are given away
    assert attempt(kv, 1, tokens) == 16
    assert attempt(kv, 1, tokens, "other") == attempt(kv, 4, list(range(1, 41))) == 0
    assert attempt(kv, 1, tokens) == 16
    assert attempt(kv, 1, tokens[:9]) == 8
    kv.check_integrity()


def test_nothing_is_kept_of_what_runs_or_has_ended() -> None:
    kv = KVManager([GroupLayout(None, 60)], 4)
    for sequence_id in range(3):
        attempt(kv, sequence_id, list(range(20)))
    compute(kv, 0, list(range(20)))
    kv.forget(1)
    assert len(kv._searches) == 1
    for sequence_id in range(10, 300):
        attempt(kv, sequence_id, list(range(8)))
    assert len(kv._searches) == prefix_match.MAX_REMEMBERED


@pytest.mark.parametrize("at", [0, 1, 31, 32, 57, 99, None])
def test_the_first_difference_is_found_wherever_it_is(at: int | None) -> None:
    memory = ConversationMemory()
    before = list(range(100))
    memory.remember(("", "c"), before)
    now = [-1 if i == at else i for i in range(140)]
    found = memory.compare(("", "c"), now, reused=0, block_size=4)
    assert found is not None and found.position == (100 if at is None else at)
