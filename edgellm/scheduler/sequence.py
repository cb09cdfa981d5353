"""What the scheduler knows of one sequence, and what a committed step brought for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgellm.cache.eviction import Dropped, EvictionPlan
from edgellm.contracts import PlannedSequence, SequenceResult, SequenceStart


@dataclass(eq=False)
class Sequence:
    """One answer in the making, as tokens, positions and limits. The fields behind the blank line are the
    scheduler's own.

        token_ids   p p p p p p p p a a a      prompt, then answer
                    [ computed  )[ fly  )      KV committed; KV that the steps in flight write
                                        +pending   the id that the last step in flight draws
    """

    start: SequenceStart
    """What the runner is told once; its id names the sequence and is never used again."""
    arrival: float
    """Monotonic seconds."""
    max_new_tokens: int
    """No step runs beyond this many answer tokens; ending the answer is the caller's doing."""
    priority: int = 0
    """Smaller is served first: a person's chat before batch work."""
    salt: str = ""
    """Blocks are shared only between sequences of one salt."""
    conversation_id: str | None = None
    """Passed to the KV manager, which tells where a turn parts from the one before."""
    eviction: EvictionPlan | None = None
    """Which of its blocks go at which positions; None keeps all."""
    draft_limit: int = 0
    """Tokens that may be drafted per step; the caller may change it between steps."""
    needs_host: bool = False
    """What the next step runs depends on the ids of the last one in ways that only the host knows (a grammar,
    a draft from the text): never planned ahead of them."""
    fork_parent: int | None = None
    """Sequence with the same prompt whose prompt KV is shared as soon as it is there."""

    token_ids: list[int] = field(init=False)
    computed: int = 0
    """Leading tokens whose KV is committed."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was found when the sequence first ran."""
    in_flight: list[PlannedSequence] = field(default_factory=list)
    has_kv: bool = False
    """The KV manager knows it."""
    on_host: bool = False
    """Its blocks lie in host memory."""
    preempted_at: float | None = None
    """Monotonic seconds since which it waits for its blocks to come back."""
    announced: bool = False
    """The runner has been told of it."""
    told_blocked: bool = False
    drafting: bool = False
    """It may hold blocks that only drafted tokens need."""
    rope_is_short: bool = True
    """Its KV is that of the rope's short scaling."""
    block_scores: list[tuple[float, ...]] = field(default_factory=list)
    """By block index, a score for each layer group, of any sense where there is no window; only where
    ``eviction`` chooses by scores."""
    dropped: Dropped = field(default_factory=Dropped)
    scored: int = field(init=False)
    """Leading prompt tokens whose logprobs were delivered or are not wanted; the first has none."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.start.prompt_token_ids)
        self.scored = max(1, self.start.score_from)

    @property
    def sequence_id(self) -> int:
        return self.start.sequence_id

    @property
    def prompt_length(self) -> int:
        return len(self.start.prompt_token_ids)

    @property
    def pending(self) -> int:
        """Tokens that the steps in flight draw, as far as their number is known: one each."""
        return sum(planned.needs_logits for planned in self.in_flight) if self.in_flight else 0

    @property
    def total(self) -> int:
        """Tokens, pending ones included."""
        return len(self.token_ids) + self.pending

    @property
    def next_position(self) -> int:
        """Where the next step goes on."""
        if not self.in_flight:
            return self.computed
        last = self.in_flight[-1]
        return last.start_position + len(last.token_ids)

    @property
    def remaining(self) -> int:
        """Tokens without KV, written or on its way: 1 is a decode."""
        return self.total - self.next_position

    @property
    def num_answered(self) -> int:
        """Answer tokens, pending ones included."""
        return self.total - self.prompt_length

    @property
    def is_at_border(self) -> bool:
        """Whether blocks go before the next step."""
        return self.eviction is not None and self.eviction.is_border(self.next_position)

    def blocks_to_score(self, end: int) -> range:
        """The blocks that are full once positions below ``end`` have run and that no step scores yet."""
        if self.eviction is None or not self.eviction.needs_scores:
            return range(0)
        coming = sum(max(map(len, planned.score_blocks), default=0) for planned in self.in_flight)
        return range(len(self.block_scores) + coming, end // self.eviction.block_size)

    def num_states(self, start: int, end: int) -> int:
        """Of how many of the last positions from ``start`` to ``end`` the hidden states are pooled."""
        if self.start.pooling is None:
            return 0
        return end - start if self.start.pooling == "mean" else int(end == self.prompt_length)

    def needs_scores(self, start: int, end: int) -> bool:
        """Whether running positions ``start`` to ``end`` scores prompt tokens that were not scored yet."""
        if self.start.prompt_logprobs is None:
            return False
        return max(start + 1, self.scored) < min(end + 1, self.prompt_length)


@dataclass(frozen=True)
class Outcome:
    """What one step brought for one sequence, already part of its tokens."""

    sequence_id: int
    planned: PlannedSequence
    result: SequenceResult
    computed: int
    """Leading tokens of the sequence whose KV is committed by now."""
    is_prompt: bool
    """The step ran prompt tokens for the first answer token: its progress is worth telling."""


@dataclass(frozen=True)
class Failure:
    """A sequence that was given up because no room can be made for it."""

    sequence_id: int
    error: str
