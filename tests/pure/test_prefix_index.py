"""The prefix index: what makes two prefixes one, and that a hash alone never decides."""

from __future__ import annotations

import pytest

from edgellm.cache import prefix_index
from edgellm.cache.prefix_index import PrefixIndex, PrefixNode, cache_key, chain_hash, same_prefix

SIZE = 2


def chain(index: PrefixIndex, tokens: list[int], salt: str = "", epoch: int = 0) -> list[PrefixNode]:
    nodes = [index.root(salt)]
    for i in range(0, len(tokens), SIZE):
        nodes.append(index.extend(nodes[-1], tuple(tokens[i : i + SIZE]), epoch))
    return nodes[1:]


def held(index: PrefixIndex, tokens: list[int], group: int = 0, salt: str = "", epoch: int = 0) -> set[int]:
    return set(index.blocks(chain(index, tokens, salt, epoch)[-1], group))


def publish(
    index: PrefixIndex, tokens: list[int], blocks: list[int], group: int = 0, salt: str = "", epoch: int = 0
) -> None:
    for node, block in zip(chain(index, tokens, salt, epoch), blocks, strict=True):
        index.publish(node, group, block)
    index.check_integrity()


def small_hash(parent: bytes, token_ids: tuple[int, ...], epoch: int) -> bytes:
    """Seven hashes in all."""
    return bytes([chain_hash(parent, token_ids, epoch)[0] % 7])


def test_a_prefix_is_found_by_its_tokens_from_the_start() -> None:
    index = PrefixIndex("m", SIZE)
    publish(index, [1, 2, 3, 4], [10, 11])
    assert held(index, [1, 2]) == {10} and held(index, [1, 2, 3, 4]) == {11}
    assert held(index, [3, 4]) == set() and held(index, [9, 9, 3, 4]) == set()
    assert held(index, [1, 2, 3, 5]) == set()


@pytest.mark.parametrize("patched", [False, True])
def test_salt_group_epoch_and_cache_key_keep_prefixes_apart(
    patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F09: the same text under two models, adapters or salts; with seven hashes in all, too."""
    if patched:
        monkeypatch.setattr(prefix_index, "chain_hash", small_hash)
    index = PrefixIndex("m", SIZE)
    publish(index, [1, 2, 3, 4], [10, 11])
    publish(index, [1, 2, 3, 4], [20, 21], salt="other")
    publish(index, [1, 2, 3, 4], [10, 30], group=1, epoch=5)
    assert held(index, [1, 2, 3, 4]) == {11}
    assert held(index, [1, 2, 3, 4], salt="other") == {21}
    assert held(index, [1, 2, 3, 4], salt="third") == set()
    assert held(index, [1, 2, 3, 4], group=1) == set()
    assert held(index, [1, 2, 3, 4], group=1, epoch=5) == {30}
    assert held(index, [1, 2, 3, 4], epoch=5) == set()
    other = PrefixIndex("n", SIZE)
    assert not same_prefix(chain(index, [1, 2])[0], chain(other, [1, 2])[0])
    assert not same_prefix(chain(index, [1, 2])[0], chain(PrefixIndex("m", 4), [1, 2])[0])


def test_no_collision_gives_another_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """F09: every prefix of three blocks over three letters, seven hashes: equal last blocks, equal parents'
    hashes, other text before them.
    """
    monkeypatch.setattr(prefix_index, "chain_hash", small_hash)
    index = PrefixIndex("m", SIZE)
    pairs = [[a, b] for a in range(3) for b in range(3)]
    texts = [[*x, *y, *z] for x in pairs for y in pairs for z in pairs]
    wanted: dict[tuple[int, ...], set[int]] = {}
    for number, text in enumerate(texts[::2]):
        publish_quietly(index, text, [3 * number, 3 * number + 1, 3 * number + 2])
        for end, block in ((2, 0), (4, 1), (6, 2)):
            wanted.setdefault(tuple(text[:end]), set()).add(3 * number + block)
    index.check_integrity()
    assert len(index._nodes) <= 7
    for text in texts:
        for end in (2, 4, 6):
            assert held(index, text[:end]) == wanted.get(tuple(text[:end]), set())


def publish_quietly(index: PrefixIndex, tokens: list[int], blocks: list[int]) -> None:
    for node, block in zip(chain(index, tokens), blocks, strict=True):
        index.publish(node, 0, block)


def test_several_blocks_may_hold_one_prefix_and_leave_it_one_by_one() -> None:
    index = PrefixIndex("m", SIZE)
    publish(index, [1, 2], [10])
    publish(index, [1, 2], [11])
    assert held(index, [1, 2]) == {10, 11}
    index.forget(0, 10)
    assert held(index, [1, 2]) == {11}
    index.forget(0, 11)
    assert held(index, [1, 2]) == set() and not index._nodes
    index.check_integrity()


def test_a_child_is_found_again_after_its_parent_was_given_away_and_came_back() -> None:
    index = PrefixIndex("m", SIZE)
    publish(index, [1, 2, 3, 4], [10, 11])
    index.forget(0, 10)
    assert held(index, [1, 2]) == set() and held(index, [1, 2, 3, 4]) == {11}
    publish(index, [1, 2], [12])
    assert held(index, [1, 2]) == {12} and held(index, [1, 2, 3, 4]) == {11}


def test_a_node_that_was_forgotten_meanwhile_joins_the_one_that_took_its_place() -> None:
    index = PrefixIndex("m", SIZE)
    old = chain(index, [1, 2])[0]
    index.publish(old, 0, 10)
    index.forget(0, 10)
    publish(index, [1, 2], [11])
    known = index.publish(old, 1, 5)
    assert known is not old and set(index.blocks(known, 0)) == {11} and set(index.blocks(known, 1)) == {5}
    index.check_integrity()


def test_a_block_cannot_hold_two_prefixes() -> None:
    index = PrefixIndex("m", SIZE)
    publish(index, [1, 2], [10])
    publish(index, [1, 2], [10])
    with pytest.raises(AssertionError, match="another prefix"):
        index.publish(chain(index, [3, 4])[0], 0, 10)


def test_the_hash_is_blake2b_of_128_bits_over_parent_epoch_and_ids() -> None:
    import hashlib

    packed = b"".join(n.to_bytes(8, "little") for n in (3, 70_000, 1))
    expected = hashlib.blake2b(b"parent" + packed, digest_size=16).digest()
    assert chain_hash(b"parent", (70_000, 1), 3) == expected


def test_whatever_decides_the_content_of_kv_is_in_the_cache_key() -> None:
    """I15."""
    base = {"model_id": "a", "rope": "r", "kv_dtypes": ["f16"], "adapter": ""}
    changed = [
        base,
        {**base, "model_id": "b"},
        {**base, "rope": "s"},
        {**base, "kv_dtypes": ["int8"]},
        {**base, "kv_dtypes": ["f16", "f16"]},
        {**base, "adapter": "x"},
    ]
    assert len({cache_key(**facts) for facts in changed}) == len(changed)  # type: ignore[arg-type]
