"""A KV manager beside a plain model of it: token lists, and a memory that executes every write and copy.

``python -m tests.support.kv_world --steps 1000000`` runs random operations by hand.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from edgellm.cache.eviction import NUM_SINKS, POLICIES, WINDOW, make_plan
from edgellm.cache.kv_manager import KVManager
from edgellm.cache.sequence_blocks import GroupLayout
from edgellm.contracts import BlockCopy, HostCopy

MAX_SEQUENCES = 6
SALTS = ("", "other")


@dataclass(frozen=True)
class WorldShape:
    """Sizes of a small cache: small enough that blocks run short."""

    groups: tuple[GroupLayout, ...]
    block_size: int
    lookahead: int
    host_blocks: tuple[int, ...]
    depth: int
    """Steps that may be in flight while the next one is planned."""
    enable_prefix_cache: bool = True


SHAPES = (
    WorldShape((GroupLayout(None, 14), GroupLayout(5, 12)), 2, 2, (8, 8), 1),
    WorldShape((GroupLayout(None, 9), GroupLayout(6, 7), GroupLayout(None, 10)), 3, 3, (6, 4, 6), 0),
    WorldShape((GroupLayout(None, 10),), 4, 0, (5,), 1),
    WorldShape((GroupLayout(4, 9), GroupLayout(7, 12)), 2, 1, (6, 6), 0),
    WorldShape((GroupLayout(None, 24), GroupLayout(1, 24)), 1, 4, (9, 3), 1),
    WorldShape((GroupLayout(None, 12), GroupLayout(6, 8)), 2, 2, (6, 6), 1, enable_prefix_cache=False),
)


@dataclass
class Step:
    """Tokens that were planned and whose results are not committed yet."""

    tokens: list[int]
    values: list[int]
    is_draft: bool = False


@dataclass
class ModelSequence:
    """What the model knows of a sequence. A value stands for the KV of a position: it depends on all tokens
    up to there, on the salt, and on what had been evicted by then.
    """

    salt: int
    tokens: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    """Prompt tokens that have not been committed yet."""
    pending: list[Step] = field(default_factory=list)
    history: int = 0
    evicted: set[tuple[int, int]] = field(default_factory=set)
    is_offloaded: bool = False

    def next_values(self, tokens: list[int]) -> list[int]:
        values = [*self.values, *(v for step in self.pending for v in step.values)]
        last = values[-1] if values else 7 + self.salt
        new = []
        for token in tokens:
            last = hash((last, token, self.history))
            new.append(last)
        return new


class KVWorld:
    """Every method is one operation; too large integers wrap around, an impossible one does nothing."""

    def __init__(self, shape: WorldShape) -> None:
        self.shape = shape
        self.kv = KVManager(
            shape.groups,
            shape.block_size,
            cache_key="model",
            lookahead=shape.lookahead,
            host_blocks=shape.host_blocks,
            enable_prefix_cache=shape.enable_prefix_cache,
        )
        size = shape.block_size
        self.device = [[[0] * size for _ in range(layout.num_blocks)] for layout in shape.groups]
        self.host = [[[0] * size for _ in range(count)] for count in shape.host_blocks]
        self.sequences: dict[int, ModelSequence] = {}
        self.copies: list[BlockCopy | HostCopy] = []
        self.writes: list[tuple[int, int, int, int, int]] = []
        """(sequence id, group, block, slot, value) of the plan that is being made."""
        self.next_id = 0
        self.seen: Counter[str] = Counter()
        """What happened, so that a run that never met something shows."""

    # --- operations ---

    def add(self, prompt: list[int], salt: int) -> None:
        if len(self.sequences) >= MAX_SEQUENCES or not prompt:
            return
        sequence = ModelSequence(salt % len(SALTS))
        values = sequence.next_values(prompt)
        expected = None if self.copies or self.writes else self._longest_hit(values)
        sequence_id = self._new_id()
        foreseen = self.kv.reusable(prompt, salt=SALTS[sequence.salt])
        reused = self.kv.open(sequence_id, prompt, salt=SALTS[sequence.salt])
        assert reused == foreseen
        assert reused % self.shape.block_size == 0 and reused < len(prompt)
        if expected is not None:
            assert reused == expected, "not the longest usable prefix"
        sequence.tokens, sequence.values = prompt[:reused], values[:reused]
        sequence.prompt = prompt[reused:]
        self.sequences[sequence_id] = sequence
        self.seen["hit" if reused else "cold"] += 1

    def step(self, pick: int, size: int) -> None:
        """A chunk of the prompt, or one token."""
        found = self._pick(pick)
        if found is None:
            return
        sequence_id, sequence = found
        if len(sequence.pending) > self.shape.depth or any(step.is_draft for step in sequence.pending):
            return
        ahead = sum(len(step.tokens) for step in sequence.pending)
        rest = sequence.prompt[ahead:]
        self._plan(sequence_id, sequence, rest[: 1 + size % 6] if rest else [size % 2])

    def draft(self, pick: int, tokens: list[int]) -> None:
        found = self._pick(pick)
        if found is None or found[1].pending or found[1].prompt:
            return
        self._plan(*found, tokens[: 1 + self.shape.lookahead], is_draft=True)

    def commit(self, pick: int, accepted: int) -> None:
        """The result of the oldest step in flight: all of it, or a part of a draft."""
        waiting = [i for i, s in self.sequences.items() if s.pending and not s.is_offloaded]
        if not waiting:
            return
        self.run()
        sequence_id = waiting[pick % len(waiting)]
        sequence = self.sequences[sequence_id]
        step = sequence.pending.pop(0)
        count = 1 + accepted % len(step.tokens) if step.is_draft else len(step.tokens)
        sequence.tokens += step.tokens[:count]
        sequence.values += step.values[:count]
        del sequence.prompt[:count]
        self.kv.commit(sequence_id, step.tokens[:count])
        self.seen["commit"] += 1
        if count < len(step.tokens):
            self.seen["rejected"] += 1

    def fork(self, pick: int) -> None:
        found = self._pick(pick)
        if found is None or len(self.sequences) >= MAX_SEQUENCES:
            return
        parent_id, parent = found
        child_id = self._new_id()
        self.kv.fork(parent_id, child_id)
        self.sequences[child_id] = ModelSequence(
            parent.salt,
            list(parent.tokens),
            list(parent.values),
            history=parent.history,
            evicted=set(parent.evicted),
        )
        self.seen["fork"] += 1

    def edit(self, pick: int, at: int, tokens: list[int]) -> None:
        """Ends a sequence and asks again with other tokens from a position on."""
        found = self._pick(pick)
        if found is None:
            return
        sequence_id, sequence = found
        kept = sequence.tokens[: at % (len(sequence.tokens) + 1)]
        self._free(sequence_id)
        self.add([*kept, *tokens], sequence.salt)

    def free(self, pick: int) -> None:
        """Ends a sequence wherever it is: waiting, in flight, drafting or on the host."""
        if self.sequences:
            ids = list(self.sequences)
            self._free(ids[pick % len(ids)])

    def evict(self, pick: int, group: int, index: int) -> None:
        found = self._pick(pick)
        if found is None or found[1].pending:
            return
        self.run()
        sequence_id, sequence = found
        group %= len(self.shape.groups)
        full = len(sequence.tokens) // self.shape.block_size
        if full == 0:
            return
        index %= full
        held = self.kv.tables(sequence_id)[group][index] != -1
        self.kv.evict(sequence_id, group, [index])
        if held:
            sequence.evicted.add((group, index))
            sequence.history = hash((sequence.history, group, index, len(sequence.tokens)))
            self.seen["evict"] += 1

    def evict_by_policy(self, pick: int, policy: int, blocks: int) -> None:
        """What a real plan drops at the last border that the sequence has passed, if it has."""
        found = self._pick(pick)
        if found is None or found[1].pending:
            return
        self.run()
        sequence_id, sequence = found
        size, committed = self.shape.block_size, len(sequence.tokens)
        name, least = POLICIES[policy % len(POLICIES)], -(-NUM_SINKS // size) + 3
        keep = (blocks % 4 + (1 if name == WINDOW else least)) * size
        plan, border = make_plan(name, keep, size, 0), committed // size * size
        if not plan.is_border(border):
            return
        for group, layout in enumerate(self.shape.groups):
            if layout.window is not None:
                continue
            table = self.kv.tables(sequence_id)[group]
            live = [i for i in range(border // size) if table[i] >= 0]
            scores = [
                float(hash((group, i, sequence.values[i * size])) % 7) for i in range(committed // size)
            ]
            lost = plan.victims(border, live, scores)
            before = self.kv.pools[group].num_used
            self.kv.evict(sequence_id, group, lost)
            assert self.kv.pools[group].num_used <= before
            for index in lost:
                sequence.evicted.add((group, index))
                sequence.history = hash((sequence.history, group, index, committed))
            self.seen["evict by policy"] += bool(lost)

    def offload(self, pick: int) -> None:
        found = self._pick(pick)
        if found is None:
            return
        sequence_id, sequence = found
        before = self._state()
        copies = self.kv.offload(sequence_id)
        if copies is None:
            assert self._state() == before
            self.seen["host short"] += 1
            return
        self._drop_writes(sequence_id)
        sequence.pending.clear()
        sequence.is_offloaded = True
        self.copies += copies
        self.seen["offload"] += 1

    def restore(self, pick: int) -> None:
        offloaded = [i for i, s in self.sequences.items() if s.is_offloaded]
        if not offloaded:
            return
        sequence_id = offloaded[pick % len(offloaded)]
        before = self._state()
        copies = self.kv.restore(sequence_id)
        if copies is None:
            assert self._state() == before
            self.seen["restore short"] += 1
            return
        self.sequences[sequence_id].is_offloaded = False
        self.copies += copies
        self.seen["restore"] += 1

    def run(self) -> None:
        """The runner does the plan: copies in their order, then all writes."""
        size = self.shape.block_size
        for copy in sorted(self.copies, key=lambda c: c.order):
            blocks = self.device[copy.group]
            if isinstance(copy, BlockCopy):
                assert copy.source != copy.target
                blocks[copy.target] = list(blocks[copy.source])
                self.seen["block copy"] += 1
            elif copy.to_host:
                self.host[copy.group][copy.host_block] = list(blocks[copy.block])
            else:
                blocks[copy.block] = list(self.host[copy.group][copy.host_block])
        for _, group, block, slot, value in self.writes:
            assert slot < size
            self.device[group][block][slot] = value
        self.copies.clear()
        self.writes.clear()

    # --- checks ---

    def check(self) -> None:
        """All invariants; and that each table gathers the right values, when no plan is being made."""
        self.kv.check_integrity()
        if self.copies or self.writes:
            return
        size, slack = self.shape.block_size, self.shape.lookahead
        for sequence_id, sequence in self.sequences.items():
            committed = len(sequence.tokens)
            assert self.kv.committed(sequence_id) == committed
            assert self.kv.is_offloaded(sequence_id) == sequence.is_offloaded
            if sequence.is_offloaded:
                continue
            in_flight = sum(len(step.tokens) for step in sequence.pending)
            for group, table in enumerate(self.kv.tables(sequence_id)):
                window = self.shape.groups[group].window
                first = 0 if window is None else max(0, committed - window + 1)
                for position in range(first, committed):
                    if (group, position // size) in sequence.evicted:
                        assert table[position // size] == -1
                        continue
                    block = table[position // size]
                    assert block >= 0, f"position {position} of sequence {sequence_id} has no block"
                    assert self.device[group][block][position % size] == sequence.values[position]
                assert len(table) * size - committed - in_flight <= size - 1 + slack, "unused slots"
        assert 0 <= self.kv.waste() <= 1

    def end(self) -> None:
        """Frees everything: no block may be lost."""
        for sequence_id in list(self.sequences):
            self._free(sequence_id)
        counts = self.kv.counts()
        total = sum(layout.num_blocks for layout in self.shape.groups)
        assert counts["used"] == counts["host"] == counts["shared"] == counts["evicted"] == 0
        assert counts["cached"] + counts["free"] == total
        self.kv.check_integrity()

    # --- parts ---

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def _pick(self, pick: int) -> tuple[int, ModelSequence] | None:
        resident = [(i, s) for i, s in self.sequences.items() if not s.is_offloaded]
        return resident[pick % len(resident)] if resident else None

    def _plan(
        self, sequence_id: int, sequence: ModelSequence, tokens: list[int], is_draft: bool = False
    ) -> None:
        if any(write[0] == sequence_id for write in self.writes):
            self.run()  # once per plan
        start = len(sequence.tokens) + sum(len(step.tokens) for step in sequence.pending)
        length = start + len(tokens)
        before, can_grow = self._state(), self.kv.can_grow(sequence_id, length)
        copies = self.kv.grow(sequence_id, length)
        assert (copies is not None) == can_grow
        if copies is None:
            assert self._state() == before
            assert any(self._is_short(group, sequence_id, length) for group in range(len(self.shape.groups)))
            self.seen["short"] += 1
            return
        self.copies += copies
        values = sequence.next_values(tokens)
        for group, table in enumerate(self.kv.tables(sequence_id)):
            for position, value in enumerate(values, start):
                block, slot = table[position // self.shape.block_size], position % self.shape.block_size
                assert self.kv.pools[group].ref_count(block) == 1 and not self.kv.pools[group].is_hashed(
                    block
                )
                self.writes.append((sequence_id, group, block, slot, value))
        sequence.pending.append(Step(tokens, values, is_draft))
        self.seen["ahead" if len(sequence.pending) > 1 else "step"] += 1

    def _is_short(self, group: int, sequence_id: int, length: int) -> bool:
        """Whether a group lacks blocks, when it may give away what the window has left behind."""
        size, pool, window = self.shape.block_size, self.kv.pools[group], self.shape.groups[group].window
        table, committed = self.kv.tables(sequence_id)[group], len(self.sequences[sequence_id].tokens)
        wanted = -(-length // size) - len(table)
        if committed % size:
            partial = table[committed // size]
            wanted += pool.ref_count(partial) > 1 or pool.is_hashed(partial)
        behind = 0 if window is None else max(0, committed - window + 1 - self.shape.lookahead) // size
        returned = sum(block >= 0 and pool.ref_count(block) == 1 for block in table[:behind])
        return wanted > pool.num_free + returned

    def _free(self, sequence_id: int) -> None:
        self._drop_writes(sequence_id)
        self.kv.free(sequence_id)
        del self.sequences[sequence_id]
        self.seen["free"] += 1

    def _drop_writes(self, sequence_id: int) -> None:
        """It leaves the plan that is being made; its copies are done all the same."""
        self.writes = [write for write in self.writes if write[0] != sequence_id]

    def _state(self) -> object:
        resident = [i for i, s in self.sequences.items() if not s.is_offloaded]
        pools = [(p.num_free, p.cached_blocks()) for p in (*self.kv.pools, *self.kv.host_pools)]
        return pools, [self.kv.tables(i) for i in resident]

    def _longest_hit(self, values: list[int]) -> int:
        """What a prompt of these values could reuse, found in the memory itself, without hashes or chains."""
        if not self.shape.enable_prefix_cache:
            return 0
        size = self.shape.block_size
        known = [
            {tuple(blocks[b]) for b in range(len(blocks)) if pool.is_hashed(b)}
            for blocks, pool in zip(self.device, self.kv.pools, strict=True)
        ]
        for count in range((len(values) - 1) // size, 0, -1):
            length = count * size
            if all(
                tuple(values[i * size : (i + 1) * size]) in known[group]
                for group, layout in enumerate(self.shape.groups)
                for i in range(count)
                if layout.window is None or (i + 1) * size > length - layout.window + 1
            ):
                return length
        return 0


def random_operation(world: KVWorld, rng: random.Random) -> None:
    """One operation, those that make progress more often."""
    number = rng.randrange
    tokens = [number(2) for _ in range(number(1, 16))]
    rng.choices(
        (
            lambda: world.add(tokens, int(number(6) == 0)),
            lambda: world.step(number(64), number(64)),
            lambda: world.commit(number(64), number(64)),
            lambda: world.draft(number(64), tokens),
            lambda: world.fork(number(64)),
            lambda: world.edit(number(64), number(64), tokens[:4]),
            lambda: world.free(number(64)),
            lambda: world.evict(number(64), number(8), number(64)),
            lambda: world.evict_by_policy(number(64), number(3), number(4)),
            lambda: world.offload(number(64)),
            lambda: world.restore(number(64)),
            world.run,
        ),
        (6, 14, 14, 6, 3, 2, 5, 1, 4, 3, 5, 4),
    )[0]()


def run_random(num_steps: int, seed: int = 0, steps_per_world: int = 400) -> Counter[str]:
    """Random operations with all checks after each; what happened in them."""
    rng, seen = random.Random(seed), Counter[str]()
    while num_steps > 0:
        world = KVWorld(rng.choice(SHAPES))
        for _ in range(min(num_steps, steps_per_world)):
            random_operation(world, rng)
            world.check()
        world.end()
        seen += world.seen
        num_steps -= steps_per_world
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.monotonic()
    seen = run_random(arguments.steps, arguments.seed)
    print(f"{arguments.steps} steps in {time.monotonic() - start:.0f} s")
    for name, count in sorted(seen.items()):
        print(f"  {name:14} {count}")


if __name__ == "__main__":
    main()
