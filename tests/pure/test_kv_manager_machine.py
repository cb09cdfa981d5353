"""A Hypothesis state machine over the KV manager: tables and invariants hold in any order of operations."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.kv_world import SHAPES, KVWorld, WorldShape, run_random

numbers = st.integers(0, 63)
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=15)
"""Two ids only, so that prompts share prefixes."""


class KVManagerMachine(RuleBasedStateMachine):
    @initialize(shape=st.sampled_from(SHAPES))
    def make(self, shape: WorldShape) -> None:
        self.world = KVWorld(shape)

    @rule(prompt=tokens, salt=st.sampled_from([0, 0, 0, 1]))
    def add(self, prompt: list[int], salt: int) -> None:
        self.world.add(prompt, salt)

    @rule(pick=numbers, size=numbers)
    def chunk_or_decode(self, pick: int, size: int) -> None:
        self.world.step(pick, size)

    @rule(pick=numbers, size=numbers)
    def chunk_or_decode_and_commit(self, pick: int, size: int) -> None:
        self.world.step(pick, size)
        self.world.commit(pick, size)

    @rule(pick=numbers, drafted=tokens)
    def draft(self, pick: int, drafted: list[int]) -> None:
        self.world.draft(pick, drafted)

    @rule(pick=numbers, accepted=numbers)
    def commit_or_accept(self, pick: int, accepted: int) -> None:
        self.world.commit(pick, accepted)

    @rule(pick=numbers)
    def fork(self, pick: int) -> None:
        self.world.fork(pick)

    @rule(pick=numbers, at=numbers, new=tokens)
    def edit(self, pick: int, at: int, new: list[int]) -> None:
        self.world.edit(pick, at, new)

    @rule(pick=numbers)
    def abort(self, pick: int) -> None:
        self.world.free(pick)

    @rule(pick=numbers)
    def finish(self, pick: int) -> None:
        self.world.run()
        self.world.free(pick)

    @rule(pick=numbers, group=numbers, index=numbers)
    def evict(self, pick: int, group: int, index: int) -> None:
        self.world.evict(pick, group, index)

    @rule(pick=numbers, policy=numbers, blocks=numbers)
    def evict_by_policy(self, pick: int, policy: int, blocks: int) -> None:
        self.world.evict_by_policy(pick, policy, blocks)

    @rule(pick=numbers)
    def offload(self, pick: int) -> None:
        self.world.offload(pick)

    @rule(pick=numbers)
    def restore(self, pick: int) -> None:
        self.world.restore(pick)

    @rule()
    def run_plan(self) -> None:
        self.world.run()

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestKVManagerMachine = KVManagerMachine.TestCase
TestKVManagerMachine.settings = settings(
    max_examples=340,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_long_random_runs_meet_every_event() -> None:
    """Worlds that live for 400 operations; ``python -m tests.support.kv_world`` runs a million of them."""
    seen = run_random(6_000, seed=1)
    events = ("hit", "cold", "step", "ahead", "short", "commit", "rejected", "fork", "block copy", "evict")
    events = (*events, "evict by policy")
    for event in (*events, "offload", "host short", "restore", "restore short"):
        assert seen[event] >= 5, f"{event!r} hardly ever happened: {seen}"
