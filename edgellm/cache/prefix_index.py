"""Which blocks hold which prefix: chained hashes of full blocks, checked token by token. Integers only."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Collection, Iterator, Sequence

HASH_BYTES = 16


def cache_key(*, model_id: str, rope: str, kv_dtypes: Sequence[str], adapter: str = "") -> str:
    """One text for everything but the tokens that decides what KV holds.

    ``model_id`` names the weights by content, ``rope`` the frequencies and the scaling in force,
    ``kv_dtypes`` the type of each layer group. Block size, salt, group and eviction epoch are the index's.
    """
    return json.dumps([model_id, rope, list(kv_dtypes), adapter])


def chain_hash(parent: bytes, token_ids: Sequence[int], epoch: int) -> bytes:
    """The 128-bit hash of one block: blake2b over its parent's hash, the epoch and the ids, little-endian."""
    packed = struct.pack(f"<q{len(token_ids)}q", epoch, *token_ids)
    return hashlib.blake2b(parent + packed, digest_size=HASH_BYTES).digest()


class PrefixNode:
    """A whole prefix that ends with one full block: its tokens, and through ``parent`` all before them.

    A root has no parent and no tokens but a ``scope``: cache key, block size and salt.
    """

    __slots__ = ("blocks", "digest", "epoch", "parent", "scope", "tokens")

    def __init__(
        self,
        digest: bytes,
        parent: PrefixNode | None,
        tokens: tuple[int, ...],
        epoch: int = 0,
        scope: tuple[str, int, str] | None = None,
    ) -> None:
        self.digest = digest
        self.parent = parent
        self.tokens = tokens
        self.epoch = epoch
        """0, or the number of the lossy eviction that this block's values depend on."""
        self.scope = scope
        self.blocks: dict[int, dict[int, None]] = {}
        """Layer group -> the blocks that hold it, first published first; several may hold the same."""


class PrefixIndex:
    """From a prefix to the blocks of each layer group that hold its last block.

    A hash only finds candidates. A hit needs equal tokens and an equal parent all the way to the root, so a
    collision can cost a comparison but never gives another prefix's KV.
    """

    def __init__(self, cache_key: str, block_size: int) -> None:
        self.cache_key = cache_key
        self.block_size = block_size
        self._nodes: dict[bytes, list[PrefixNode]] = {}
        """Digest -> the nodes that blocks hold; more than one only where hashes collide."""
        self._held: dict[tuple[int, int], PrefixNode] = {}
        """(group, block) -> the node that it holds."""
        self.version = 0
        """Changes whenever the answer to a search may change."""

    def root(self, salt: str) -> PrefixNode:
        """Where the prefixes of one salt begin."""
        scope = (self.cache_key, self.block_size, salt)
        digest = hashlib.blake2b(json.dumps(scope).encode(), digest_size=HASH_BYTES).digest()
        return PrefixNode(digest, None, (), scope=scope)

    def extend(self, parent: PrefixNode, tokens: tuple[int, ...], epoch: int = 0) -> PrefixNode:
        """The node of one more full block behind ``parent``: the known one, or a new one without a block."""
        digest = chain_hash(parent.digest, tokens, epoch)
        known = self._find(digest, parent, tokens, epoch)
        return known if known is not None else PrefixNode(digest, parent, tokens, epoch)

    def renew(self, node: PrefixNode, parent: PrefixNode) -> PrefixNode:
        """As ``extend`` with the tokens of a node that it returned earlier, without hashing them again."""
        known = self._find(node.digest, parent, node.tokens, node.epoch)
        return known if known is not None else node

    def _find(
        self, digest: bytes, parent: PrefixNode, tokens: tuple[int, ...], epoch: int
    ) -> PrefixNode | None:
        for node in self._nodes.get(digest, ()):
            if node.tokens == tokens and node.epoch == epoch and same_prefix(node.parent, parent):
                # The parent may be known again under a new node after all its blocks were given away: taking
                # it over makes the next comparison one of identity.
                node.parent = parent
                return node
        return None

    def blocks(self, node: PrefixNode, group: int) -> Collection[int]:
        """The blocks of a group that hold the node's block; none when there are none."""
        return node.blocks.get(group, {}).keys()

    def publish(self, node: PrefixNode, group: int, block: int) -> PrefixNode:
        """Says that a full, committed block holds the node's KV; returns the node that is known for it."""
        held = self._held.get((group, block))
        if held is not None:
            assert same_prefix(held, node), f"block {block} of group {group} already holds another prefix"
            return held
        if not node.blocks:
            assert node.parent is not None, "a root has no block"
            known = self._find(node.digest, node.parent, node.tokens, node.epoch)
            if known is not None:
                node = known
            else:
                self._nodes.setdefault(node.digest, []).append(node)
        node.blocks.setdefault(group, {})[block] = None
        self._held[group, block] = node
        self.version += 1
        return node

    def forget(self, group: int, block: int) -> None:
        """The block is about to hold something else."""
        node = self._held.pop((group, block))
        self.version += 1
        del node.blocks[group][block]
        if not node.blocks[group]:
            del node.blocks[group]
        if not node.blocks:
            nodes = self._nodes[node.digest]
            nodes.remove(node)
            if not nodes:
                del self._nodes[node.digest]

    def held(self) -> Iterator[tuple[int, int, PrefixNode]]:
        """Every (group, block, node) that is known."""
        for (group, block), node in self._held.items():
            yield group, block, node

    def node_of(self, group: int, block: int) -> PrefixNode | None:
        """What a block is known to hold."""
        return self._held.get((group, block))

    def check_integrity(self) -> None:
        """Asserts that hashes, nodes and blocks agree in both directions."""
        entries = 0
        for digest, nodes in self._nodes.items():
            assert nodes, "I4: a hash without a node"
            for node in nodes:
                assert node.digest == digest, "I4: a node is filed under another hash"
                assert node.parent is not None, "I4: a root is filed"
                assert digest == chain_hash(node.parent.digest, node.tokens, node.epoch), "I4: a wrong hash"
                assert len(node.tokens) == self.block_size, "I6: a hashed block is not full"
                assert node.blocks and all(node.blocks.values()), "I4: a hash that no block has"
                for group, blocks in node.blocks.items():
                    for block in blocks:
                        assert self._held.get((group, block)) is node, "I4: a block holds another node"
                        entries += 1
        assert entries == len(self._held), "I4: a block's node is not filed"


def same_prefix(a: PrefixNode | None, b: PrefixNode | None) -> bool:
    """Equal tokens, epochs and scope from here to the root."""
    while a is not b:
        if a is None or b is None or a.digest != b.digest:
            return False
        if a.tokens != b.tokens or a.epoch != b.epoch or a.scope != b.scope:
            return False
        a, b = a.parent, b.parent
    return True
