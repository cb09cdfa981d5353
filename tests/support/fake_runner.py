"""A runner without a model over a simulated KV memory: it reads back through the block tables what it wrote.

The next token is a pure function of the sequence's tokens (``next_token``), so that any schedule must bring
the answer that ``answer_alone`` computes. The KV of a position is a hash of all tokens up to it and of the
rope's scaling, as real KV depends on all of them: a block that holds anything else is found by the first
read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgellm.contracts import (
    PENDING,
    BlockCopy,
    HostCopy,
    PlannedSequence,
    SequenceResult,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenLogprob,
)

VOCAB = 50
Slot = tuple[int, int, int]


def chain(previous: int, token_id: int) -> int:
    """The KV of a position from that of the one before and its token."""
    data = f"{previous},{token_id}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def chains(token_ids: Sequence[int], is_long: bool = False) -> list[int]:
    """The KV of every position."""
    kv, previous = [], 1 if is_long else 0
    for token_id in token_ids:
        previous = chain(previous, token_id)
        kv.append(previous)
    return kv


def next_token(token_ids: Sequence[int], sample: int = 0) -> int:
    """What comes after these tokens in the given sample."""
    data = f"{sample}:{','.join(map(str, token_ids))}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big") % VOCAB


def answer_alone(prompt: Sequence[int], num_tokens: int, sample: int = 0) -> list[int]:
    """The answer that every schedule must bring."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, sample))
    return token_ids[len(prompt) :]


@dataclass
class _State:
    start: SequenceStart
    token_ids: list[int]
    missing: dict[int, tuple[int, ...]]
    """By position, the evicted blocks when it ran."""
    failed: bool = False
    kv: dict[bool, list[int]] = field(default_factory=dict)

    def expected(self, is_long: bool, end: int) -> list[int]:
        """The KV of the tokens below ``end``, kept between steps as they only grow. It depends on what was
        evicted when they ran."""
        kv = self.kv.setdefault(is_long, [])
        previous = kv[-1] if kv else (1 if is_long else 0)
        for position in range(len(kv), end):
            previous = chain(previous, self.token_ids[position])
            for block in self.missing.get(position, ()):
                previous = chain(previous, -1 - block)
            kv.append(previous)
        return kv

    def see(self, start: int, end: int, missing: tuple[int, ...]) -> None:
        """Positions run without these blocks; again, after a preemption, without the same ones."""
        for position in range(start, end):
            before = self.missing.setdefault(position, missing)
            assert before == missing, f"position {position} saw other blocks when it ran before"


class PagedFakeRunner:
    """Executes plans in order. Asserts that each is complete and that the KV it reads is right."""

    def __init__(
        self,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        *,
        accept: int = 0,
        rope_switch_length: int | None = None,
        error_at: dict[int, int] | None = None,
        check_reads: bool = True,
    ) -> None:
        """``accept``: of a draft so many tokens at most turn out right. ``error_at``: sequence id -> length
        at which its step fails."""
        self.block_size = block_size
        self.windows = windows
        self.accept = accept
        self.rope_switch_length = rope_switch_length
        self.error_at = error_at or {}
        self.check_reads = check_reads
        self.memory: dict[Slot, int] = {}
        self.host: dict[tuple[int, int], dict[int, int]] = {}
        self.states: dict[int, _State] = {}
        self.history: dict[int, dict[int, tuple[int, ...]]] = {}
        """By sequence, also of those that ended, and position the evicted blocks when it ran."""
        self.tails: set[int] = set()
        self.most_tails = 0
        self.plans: list[StepPlan] = []
        self.rows = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == len(self.plans), "plans must come in order"
        self.plans.append(plan)
        self._move_tails(plan)
        for start in plan.started:
            assert start.sequence_id not in self.states, "a sequence was told of twice"
            missing = self.history.setdefault(start.sequence_id, {})
            self.states[start.sequence_id] = _State(start, list(start.prompt_token_ids), missing)
        for parent, child in plan.forked:
            self.history.setdefault(child, {}).update(self.history.get(parent, {}))
        for sequence_id in plan.ended:
            del self.states[sequence_id]
        for copy in sorted([*plan.block_copies, *plan.host_copies], key=lambda copy: copy.order):
            self._copy(copy)
        ids = [planned.sequence_id for planned in plan.sequences]
        assert len(ids) == len(set(ids)), "a sequence is twice in one step"
        self._assert_no_shared_writes(plan)
        return StepResult(plan.step, tuple(self._run(planned) for planned in plan.sequences))

    def _move_tails(self, plan: StepPlan) -> None:
        """Who has KV outside of the blocks: forks and runs bring it, ends and preemptions take it."""
        for parent, child in plan.forked:
            assert child not in self.tails
            if parent in self.tails:  # not where the whole prompt came from the prefix cache
                self.tails.add(child)
        self.tails -= {*plan.ended, *plan.preempted}
        self.tails |= {planned.sequence_id for planned in plan.sequences}
        self.most_tails = max(self.most_tails, len(self.tails))

    def _copy(self, copy: BlockCopy | HostCopy) -> None:
        if isinstance(copy, BlockCopy):
            self._put(copy.group, copy.target, self._block(copy.group, copy.source))
        else:
            assert isinstance(copy, HostCopy)
            if copy.to_host:
                self.host[copy.group, copy.host_block] = self._block(copy.group, copy.block)
            else:
                self._put(copy.group, copy.block, self.host[copy.group, copy.host_block])

    def _block(self, group: int, block: int) -> dict[int, int]:
        slots = ((offset, self.memory.get((group, block, offset))) for offset in range(self.block_size))
        return {offset: value for offset, value in slots if value is not None}

    def _put(self, group: int, block: int, values: dict[int, int]) -> None:
        for offset in range(self.block_size):
            self.memory.pop((group, block, offset), None)
            if offset in values:
                self.memory[group, block, offset] = values[offset]

    def _assert_no_shared_writes(self, plan: StepPlan) -> None:
        """A block that is written in a step is in the table of its writer only."""
        for group in range(len(self.windows)):
            written: set[int] = set()
            read: dict[int, int] = {}
            for planned in plan.sequences:
                table = planned.block_tables[group]
                for block in table:
                    if block >= 0:
                        read[block] = read.get(block, 0) + 1
                last = planned.start_position + len(planned.token_ids) + planned.draft_limit - 1
                first = planned.start_position // self.block_size
                written.update(table[first : last // self.block_size + 1])
            assert all(read[block] == 1 for block in written), "a shared block is written"

    def _slot(self, planned: PlannedSequence, group: int, position: int) -> Slot:
        table = planned.block_tables[group]
        block = table[position // self.block_size]
        assert block >= 0, f"position {position} of sequence {planned.sequence_id} has no block"
        return group, block, position % self.block_size

    def _run(self, planned: PlannedSequence) -> SequenceResult:
        state = self.states[planned.sequence_id]
        if state.failed:  # the slot that was planned ahead of the error
            return SequenceResult(planned.sequence_id, (), error="no token to run")
        start, count = planned.start_position, len(planned.token_ids)
        assert count, "a sequence without a token is in the plan"
        end = start + count
        self.rows += count + planned.draft_limit
        known = state.token_ids[start:end]
        assert len(known) == count, "a token is run that does not exist yet"
        assert all(p in (t, PENDING) for p, t in zip(planned.token_ids, known, strict=True))
        assert PENDING not in planned.token_ids[:-1]
        pools = state.start.pooling
        assert planned.needs_logits == (end == len(state.token_ids) and pools is None)
        all_rows = count if pools == "mean" else int(end == len(state.token_ids))
        assert planned.num_states == (0 if pools is None else all_rows)
        assert planned.total_length == len(state.token_ids)
        is_long = self.rope_switch_length is not None and planned.total_length > self.rope_switch_length
        state.see(start, end, self._missing(planned))
        expected = state.expected(is_long, end)
        for group, window in enumerate(self.windows):
            for position in range(start, end):
                self.memory[self._slot(planned, group, position)] = expected[position]
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end) if self.check_reads else ():
                if window is None and planned.block_tables[group][position // self.block_size] < 0:
                    continue  # evicted, which the values of this step's KV tell
                slot = self._slot(planned, group, position)
                assert self.memory.get(slot) == expected[position], (
                    f"step {len(self.plans) - 1}: group {group} position {position} of sequence "
                    f"{planned.sequence_id} holds another KV"
                )
        if pools is not None:
            done = end == len(state.token_ids)
            assert not planned.draft_limit
            return SequenceResult(planned.sequence_id, (), embedding=(float(end),) if done else None)
        if not planned.needs_logits:
            assert not planned.draft_limit
            return SequenceResult(
                planned.sequence_id,
                (),
                prompt_logprobs=self._scores(planned, state),
                block_scores=self._block_scores(planned),
            )
        if len(state.token_ids) >= self.error_at.get(planned.sequence_id, 1 << 60):
            state.failed = True
            return SequenceResult(planned.sequence_id, (), error="NaN in the logits")
        accepted = min(self.accept, planned.draft_limit)
        scores = self._scores(planned, state)
        new = []
        for _ in range(accepted + 1):
            new.append(next_token(state.token_ids, state.start.sample))
            state.token_ids.append(new[-1])
        state.see(end, end + accepted, self._missing(planned))
        expected = state.expected(is_long, end + accepted)
        for group in range(len(self.windows)):
            for position in range(end, end + planned.draft_limit):
                right = expected[position] if position < end + accepted else -1
                self.memory[self._slot(planned, group, position)] = right
        if self.rope_switch_length is not None and planned.draft_limit and not is_long:
            assert end + planned.draft_limit <= self.rope_switch_length, "a draft outgrows the short scaling"
        return SequenceResult(
            planned.sequence_id,
            tuple(new),
            planned.draft_limit,
            accepted,
            prompt_logprobs=scores,
            block_scores=self._block_scores(planned),
        )

    def _missing(self, planned: PlannedSequence) -> tuple[int, ...]:
        """The evicted blocks: those of groups without a window one after another, a thousand numbers each."""
        return tuple(
            1000 * group + i
            for group, (table, window) in enumerate(zip(planned.block_tables, self.windows, strict=True))
            for i, block in enumerate(table)
            if window is None and block < 0
        )

    def _block_scores(self, planned: PlannedSequence) -> tuple[tuple[float, ...], ...]:
        """A number for each block that depends on everything it holds."""
        scores = []
        for group, blocks in enumerate(planned.score_blocks):
            held = [self._block(group, block) for block in blocks]
            assert all(len(values) == self.block_size for values in held), "a block is scored too early"
            scores.append(tuple(float(hash(tuple(values.values())) % 1000) for values in held))
        return tuple(scores)

    @staticmethod
    def _scores(planned: PlannedSequence, state: _State) -> tuple[TokenLogprob, ...]:
        if not planned.prompt_logits:
            return ()
        prompt = state.start.prompt_token_ids
        first = planned.start_position + 1
        scored = prompt[first : first + len(planned.token_ids)]
        assert scored, "logits of prompt tokens are wanted where there are none"
        return tuple(TokenLogprob(t, 0.0) for t in scored)
