"""Block tables of all open sequences: prefix reuse, growth, sharing, windows, eviction. Integers only.

Whatever a call returns or frees takes effect in the order of the calls. The runner keeps to that by doing
the copies of a plan in ascending ``order`` before anything of the plan writes KV. Every copy that was
returned must be done, even when its sequence left the plan again. A sequence whose KV is taken away by
``free``, ``offload`` or ``evict`` has no part in the plan that is being made, or is grown after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from edgellm.cache import host_offload, integrity, saved_blocks
from edgellm.cache.block_pool import BlockPool
from edgellm.cache.conversation import ConversationMemory, Divergence
from edgellm.cache.prefix_index import PrefixIndex, PrefixNode
from edgellm.cache.prefix_match import PromptSearches, longest_hit, window_blocks
from edgellm.cache.sequence_blocks import NULL_BLOCK, GroupLayout, SequenceBlocks
from edgellm.contracts import BlockCopy, HostCopy
from edgellm_models.errors import EngineError


class KVManager:
    """The KV blocks of one engine. One pool per layer group; block ids of different groups are unrelated.

    ``cache_key`` names everything but the tokens that decides what KV holds (prefix_index.cache_key).
    ``lookahead`` is how many positions beyond the committed ones a step may draft or run ahead: windows keep
    as many positions more. ``host_blocks`` gives the size of each group's host pool for offloading.
    """

    def __init__(
        self,
        groups: Sequence[GroupLayout],
        block_size: int,
        *,
        cache_key: str = "",
        lookahead: int = 0,
        host_blocks: Sequence[int] | None = None,
        enable_prefix_cache: bool = True,
        has_tail: bool = False,
    ) -> None:
        """``has_tail``: what a sequence computed last is read unquantized, and quantized once it has been
        preempted (int4)."""
        self.groups = tuple(groups)
        self.block_size = block_size
        self.lookahead = lookahead
        self.enable_prefix_cache = enable_prefix_cache
        self.has_tail = has_tail
        self.index = PrefixIndex(cache_key, block_size)
        self.pools = tuple(
            BlockPool(
                layout.num_blocks, block_size, layout.window, on_evict=partial(self.index.forget, group)
            )
            for group, layout in enumerate(self.groups)
        )
        sizes = tuple(host_blocks) if host_blocks is not None else (0,) * len(self.groups)
        if len(sizes) != len(self.groups):
            raise EngineError(f"{len(sizes)} host pools for {len(self.groups)} layer groups")
        self.host_pools = tuple(BlockPool(size, block_size) for size in sizes)
        self.sequences: dict[int, SequenceBlocks] = {}
        """The open sequences; only this package writes to it."""
        self._searches = PromptSearches(self.index, self.groups)
        self._conversations = ConversationMemory()
        self._divergences: dict[int, Divergence] = {}
        self._num_copies = 0
        self._num_evictions = 0

    # --- opening and closing ---

    def reusable(self, token_ids: Sequence[int], *, salt: str = "") -> int:
        """How many leading tokens ``open`` would reuse now. Changes nothing."""
        if not self.enable_prefix_cache:
            return 0
        limit = self._reuse_limit(token_ids)
        root = self.index.root(salt)
        return len(longest_hit(self.index, self.groups, root, token_ids, limit)) * self.block_size

    def open(
        self,
        sequence_id: int,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        conversation_id: str | None = None,
        most: int | None = None,
        publishes: bool = True,
    ) -> int:
        """Starts a sequence with the cached part of its prompt; how many tokens that is.

        Whole blocks, and at most one token less than the prompt has, as one must run to bring logits, and at
        most ``most`` tokens: what comes behind depends on what the sequence evicts. The blocks are in use
        from now on. Nothing is allocated, so this cannot fail for want of blocks. One that is freed again
        before it grows is opened again at little cost, with the same tokens, until ``forget``. One that
        does not publish reuses nothing, and what it computes is never cached: it displaces nothing that is.
        """
        if sequence_id in self.sequences:
            raise EngineError(f"sequence {sequence_id} is open already")
        root = self.index.root(salt)
        chain = []
        if self.enable_prefix_cache and publishes:
            limit = self._reuse_limit(token_ids)
            if most is not None:
                limit = min(limit, most // self.block_size)
            chain = self._searches.longest_hit(sequence_id, root, token_ids, limit)
        tables, skipped = [], []
        for group, layout in enumerate(self.groups):
            absent = len(chain) - window_blocks(layout, len(chain), self.block_size)
            hits = [self.pick(node, group) for node in chain[absent:]]
            for block in hits:
                self.pools[group].share(block)
            tables.append([NULL_BLOCK] * absent + hits)
            skipped.append(absent)
        reused = len(chain) * self.block_size
        conversation = None if conversation_id is None else (salt, conversation_id)
        self.sequences[sequence_id] = SequenceBlocks(
            root=root,
            tables=tables,
            first_live=list(skipped),
            skipped=skipped,
            evicted=[set() for _ in self.groups],
            chain=chain,
            tokens=list(token_ids[:reused]),
            grown=reused,
            reused=reused,
            conversation=conversation,
            publishes=publishes,
        )
        if conversation is not None:
            found = self._conversations.compare(conversation, token_ids, reused, self.block_size)
            if found is not None:
                self._divergences[sequence_id] = found
        return reused

    def _reuse_limit(self, token_ids: Sequence[int]) -> int:
        return max(0, len(token_ids) - 1) // self.block_size

    def pick(self, node: PrefixNode, group: int) -> int:
        """One of the blocks that hold a node, of which there is at least one: rather one that is in use."""
        pool, blocks = self.pools[group], self.index.blocks(node, group)
        return max(blocks, key=pool.ref_count)

    def free(self, sequence_id: int) -> None:
        """Ends a sequence, wherever it is. Its hashed blocks stay cached, the last to be given away first."""
        sequence = self._get(sequence_id)
        if sequence.conversation is not None and sequence.committed > sequence.reused:
            # Nobody can reuse what was computed after an eviction.
            exact = None if sequence.exact_blocks is None else sequence.exact_blocks * self.block_size
            self._conversations.remember(sequence.conversation, sequence.tokens[:exact])
        if sequence.host is not None:
            host_offload.free_host(self, sequence)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.free(block for block in reversed(table) if block != NULL_BLOCK)
        del self.sequences[sequence_id]
        self._divergences.pop(sequence_id, None)

    def forget(self, sequence_id: int) -> None:
        """A sequence that is not open will not be opened again."""
        self._searches.forget(sequence_id)

    def fork(self, parent: int, child: int) -> None:
        """Opens ``child`` with all committed KV of ``parent``, shared; a partial block is copied on write."""
        source = self._resident(parent)
        if child in self.sequences:
            raise EngineError(f"sequence {child} is open already")
        # Blocks behind the committed length are the parent's own: it may be drafting into them.
        num_blocks = -(-source.committed // self.block_size)
        tables = [table[:num_blocks] for table in source.tables]
        for pool, table in zip(self.pools, tables, strict=True):
            for block in table:
                if block != NULL_BLOCK:
                    pool.share(block)
        self.sequences[child] = SequenceBlocks(
            root=source.root,
            tables=tables,
            first_live=list(source.first_live),
            skipped=list(source.skipped),
            evicted=[set(entries) for entries in source.evicted],
            chain=list(source.chain),
            tokens=list(source.tokens),
            grown=source.committed,
            epoch=source.epoch,
            exact_blocks=source.exact_blocks,
            reused=source.committed,
            conversation=source.conversation,
            publishes=source.publishes,
        )

    # --- one step ---

    def can_grow(self, sequence_id: int, length: int) -> bool:
        """Whether ``grow`` would find its blocks now."""
        sequence = self._resident(sequence_id)
        return all(
            self._shortage(sequence, group, max(length, sequence.committed)) <= 0
            for group in range(len(self.groups))
        )

    def grow(self, sequence_id: int, length: int) -> list[BlockCopy] | None:
        """Makes slots for all positions below ``length`` and takes back those beyond.

        Frees what windows have left behind, counted from the committed length minus the lookahead. A block
        that this sequence is going to write and that others hold, or that holds a known prefix, is replaced
        by a copy: those copies are the result. None when blocks are short; nothing has changed then.
        ``length`` covers every step that is in flight.
        """
        sequence = self._resident(sequence_id)
        length = max(length, sequence.committed)
        if self._has_slots(sequence, length):
            sequence.grown = length
            self._searches.forget(sequence_id)
            return []
        if not self.can_grow(sequence_id, length):
            return None
        sequence.shown = None
        copies = []
        for group, pool in enumerate(self.pools):
            table = sequence.tables[group]
            self._free_behind_window(sequence, group)
            wanted = -(-length // self.block_size)
            pool.free(reversed(table[wanted:]))
            del table[wanted:]
            if self._needs_copy(sequence, group, length):
                index = sequence.committed // self.block_size
                [target] = pool.allocate(1)
                copies.append(BlockCopy(group, table[index], target, self.next_copy()))
                pool.free([table[index]])
                table[index] = target
            table.extend(pool.allocate(wanted - len(table)))
            assert length == sequence.committed or all(
                pool.ref_count(block) == 1 and not pool.is_hashed(block)
                for block in table[sequence.committed // self.block_size :]
            ), "I7: a block that will be written is shared or hashed"
        sequence.grown = length
        self._searches.forget(sequence_id)
        return copies

    def _has_slots(self, sequence: SequenceBlocks, length: int) -> bool:
        """Whether ``grow`` has nothing to take, to give back or to copy, as in most steps of one token."""
        committed, size = sequence.committed, self.block_size
        wanted, (current, offset) = -(-length // size), divmod(committed, size)
        for group, table in enumerate(sequence.tables):
            if len(table) != wanted or self.dead_blocks(group, committed) > sequence.first_live[group]:
                return False
            if offset and length > committed:
                pool, block = self.pools[group], table[current]
                if pool.ref_count(block) > 1 or pool.is_hashed(block):
                    return False
        return True

    def dead_blocks(self, group: int, committed: int) -> int:
        """How many leading blocks no query can see any more, not even after a rollback of the lookahead."""
        return self.groups[group].first_seen(committed, self.lookahead) // self.block_size

    def _dead_range(self, sequence: SequenceBlocks, group: int) -> range:
        dead = min(self.dead_blocks(group, sequence.committed), len(sequence.tables[group]))
        return range(sequence.first_live[group], max(dead, sequence.first_live[group]))

    def _needs_copy(self, sequence: SequenceBlocks, group: int, length: int) -> bool:
        """Whether the partial block may not be written as it is.

        It is hashed when a relative by ``fork`` has filled and published it meanwhile.
        """
        if length == sequence.committed or sequence.committed % self.block_size == 0:
            return False
        pool = self.pools[group]
        block = sequence.tables[group][sequence.committed // self.block_size]
        return pool.ref_count(block) > 1 or pool.is_hashed(block)

    def _shortage(self, sequence: SequenceBlocks, group: int, length: int) -> int:
        """Blocks that a group lacks to grow the sequence to ``length``; 0 or less when it has them."""
        pool, table = self.pools[group], sequence.tables[group]
        wanted = -(-length // self.block_size) - len(table)  # below 0: blocks that come back
        if self._needs_copy(sequence, group, length):
            wanted += 1
        if wanted <= 0:
            return 0
        dead = (table[i] for i in self._dead_range(sequence, group))
        returned = sum(block != NULL_BLOCK and pool.ref_count(block) == 1 for block in dead)
        return wanted - pool.num_free - returned

    def _free_behind_window(self, sequence: SequenceBlocks, group: int) -> None:
        table, dead = sequence.tables[group], self._dead_range(sequence, group)
        self.pools[group].free(table[i] for i in reversed(dead) if table[i] != NULL_BLOCK)
        table[dead.start : dead.stop] = [NULL_BLOCK] * len(dead)
        sequence.evicted[group].difference_update(dead)
        sequence.first_live[group] = dead.stop

    def commit(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Says that these next tokens' KV is final. Blocks that are full by now can be reused by others."""
        sequence = self._resident(sequence_id)
        if sequence.committed + len(token_ids) > sequence.grown:
            raise EngineError(
                f"sequence {sequence_id} has slots for {sequence.grown} tokens, cannot commit "
                f"{sequence.committed} + {len(token_ids)}"
            )
        sequence.tokens.extend(token_ids)
        if not self.enable_prefix_cache or not sequence.publishes:
            return
        size = self.block_size
        for i in range(len(sequence.chain), sequence.committed // size):
            parent = sequence.chain[-1] if sequence.chain else sequence.root
            tokens = tuple(sequence.tokens[i * size : (i + 1) * size])
            sequence.chain.append(self.index.extend(parent, tokens, sequence.epoch))
            self.publish(sequence, i)

    def publish(self, sequence: SequenceBlocks, index: int) -> None:
        """Makes a full, committed block known in every group that has it."""
        for group, pool in enumerate(self.pools):
            block = sequence.tables[group][index]
            if block != NULL_BLOCK:
                sequence.chain[index] = self.index.publish(sequence.chain[index], group, block)
                pool.mark_hashed(block)

    def next_copy(self) -> int:
        """The place of the next copy in the order of all."""
        self._num_copies += 1
        return self._num_copies

    # --- taking KV away ---

    def evict(self, sequence_id: int, group: int, block_indices: Sequence[int]) -> None:
        """Drops full, committed blocks of a running sequence for good: what follows no longer sees them.

        Blocks that fill from now on depend on that, so they are known under a new eviction epoch, which no
        other request asks for. The dropped blocks themselves stay reusable for others.
        """
        sequence = self._resident(sequence_id)
        table, full = sequence.tables[group], sequence.committed // self.block_size
        for i in block_indices:
            if not 0 <= i < full:
                raise EngineError(
                    f"block {i} of sequence {sequence_id} is not among its {full} full, committed blocks"
                )
        dropped = sorted({i for i in block_indices if table[i] != NULL_BLOCK}, reverse=True)
        if not dropped:
            return
        self.pools[group].free(table[i] for i in dropped)
        sequence.shown = None
        for i in dropped:
            table[i] = NULL_BLOCK
        sequence.evicted[group].update(dropped)
        self._num_evictions += 1
        sequence.epoch = self._num_evictions
        if sequence.exact_blocks is None:
            sequence.exact_blocks = full

    def offload(self, sequence_id: int) -> list[HostCopy] | None:
        """Moves committed KV to host blocks; None when those are short (nothing changed then)."""
        return host_offload.offload(self, self._resident(sequence_id))

    def restore(self, sequence_id: int) -> list[HostCopy] | None:
        """Brings an offloaded sequence back; None when blocks are short (nothing changed then)."""
        sequence = self._get(sequence_id)
        if sequence.host is None:
            raise EngineError(f"sequence {sequence_id} is not offloaded")
        return host_offload.restore(self, sequence)

    # --- what others want to know ---

    def _get(self, sequence_id: int) -> SequenceBlocks:
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            raise EngineError(f"sequence {sequence_id} is not open")
        return sequence

    def _resident(self, sequence_id: int) -> SequenceBlocks:
        sequence = self._get(sequence_id)
        if sequence.host is not None:
            raise EngineError(f"sequence {sequence_id} is offloaded")
        return sequence

    def committed(self, sequence_id: int) -> int:
        """Tokens whose KV is final."""
        return self._get(sequence_id).committed

    def is_offloaded(self, sequence_id: int) -> bool:
        return self._get(sequence_id).host is not None

    def tables(self, sequence_id: int) -> tuple[tuple[int, ...], ...]:
        """Per group, block ids by block index; -1 is a block behind the window or an evicted one. The very
        same tuples as before where nothing has changed."""
        sequence = self._resident(sequence_id)
        if sequence.shown is None:
            sequence.shown = tuple(tuple(table) for table in sequence.tables)
        return sequence.shown

    def divergence(self, sequence_id: int) -> Divergence | None:
        """Where the request parts from its conversation's last cached state, when that made it reuse less."""
        self._get(sequence_id)
        return self._divergences.get(sequence_id)

    def counts(self) -> Mapping[str, int]:
        """Blocks over all groups: used + cached + free is all of them, shared is a part of used.

        ``evicted`` are the entries of open sequences that lossy eviction dropped, ``host`` the host blocks in
        use.
        """
        sequences = self.sequences.values()
        return {
            "used": sum(pool.num_used for pool in self.pools),
            "shared": sum(pool.num_shared for pool in self.pools),
            "cached": sum(pool.num_cached for pool in self.pools),
            "free": sum(pool.num_free - pool.num_cached for pool in self.pools),
            "evicted": sum(len(entries) for sequence in sequences for entries in sequence.evicted),
            "host": sum(pool.num_used for pool in self.host_pools),
        }

    def waste(self) -> float:
        """The share of the slots in used blocks that holds no committed token; 0 when nothing is used."""
        unused: dict[tuple[int, int], int] = {}
        for sequence in self.sequences.values():
            first = sequence.committed // self.block_size
            for group, table in enumerate(sequence.tables):
                for i in range(first, len(table)):
                    empty = self.block_size - max(0, sequence.committed - i * self.block_size)
                    if self.pools[group].is_hashed(table[i]):  # a relative by fork has filled it
                        empty = 0
                    key = (group, table[i])
                    unused[key] = min(empty, unused.get(key, empty))
        slots = sum(pool.num_used for pool in self.pools) * self.block_size
        return sum(unused.values()) / slots if slots else 0.0

    # --- what outlives the process ---

    def conversation(self, conversation_id: str, salts: Sequence[str]) -> tuple[str, tuple[int, ...]] | None:
        """Under which of these salts a conversation's last sequence was committed, and its tokens."""
        return self._conversations.latest([(salt, conversation_id) for salt in salts])

    def find_saved(self, token_ids: Sequence[int], salt: str) -> tuple[int, list[list[int]]]:
        """As ``saved_blocks.find``."""
        return saved_blocks.find(self, token_ids, salt)

    def first_saved(self, num_blocks: int) -> tuple[int, ...]:
        """As ``saved_blocks.first_saved``."""
        return saved_blocks.first_saved(self, num_blocks)

    def adopt(self, token_ids: Sequence[int], salt: str, write: saved_blocks.WriteBlocks) -> None:
        """As ``saved_blocks.adopt``. EngineError for tokens that are no whole blocks, or without a prefix
        cache."""
        if len(token_ids) % self.block_size or not self.enable_prefix_cache:
            raise EngineError(f"{len(token_ids)} tokens cannot be kept as cached blocks of {self.block_size}")
        saved_blocks.adopt(self, token_ids, salt, write)

    def check_integrity(self) -> None:
        """Asserts the fifteen invariants of the cache (integrity.py)."""
        integrity.check(self)
