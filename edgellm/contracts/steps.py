"""What the scheduler tells the runner of a step and what comes back: integers only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from edgellm.contracts.answers import TokenLogprob
from edgellm.contracts.requests import SamplingParams

PENDING = -1
"""Stands in ``PlannedSequence.token_ids`` for the id that the step in flight is still sampling."""


class LayerKind(enum.Enum):
    """How a group of layers attends."""

    FULL = "full"
    WINDOW = "window"


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose KV has the same shape and lifetime, so that they share block tables."""

    kind: LayerKind
    layers: tuple[int, ...]
    window: int | None
    """Positions a query sees, itself included; None is all."""
    num_kv_heads: int
    k_dim: int
    v_dim: int
    kv_dtype: str
    softmax_sinks: bool = False


@dataclass(frozen=True)
class PlannedSequence:
    """One sequence's share of a step."""

    sequence_id: int
    token_ids: tuple[int, ...]
    """New tokens to run; may end in PENDING."""
    start_position: int
    block_tables: tuple[tuple[int, ...], ...]
    """Per LayerGroup, the block ids by block index; a null block is -1."""
    is_prefill: bool
    needs_logits: bool
    draft_limit: int = 0
    """Positions behind ``token_ids`` that have slots for drafted tokens."""
    draft_token_ids: tuple[int, ...] = ()
    """At most ``draft_limit`` drafted tokens, which run behind ``token_ids`` and are kept as far as they are
    what is drawn before them."""
    draft_by_runner: bool = False
    """The runner drafts up to ``draft_limit`` tokens itself: without some sub-layers, or by a draft model."""
    total_length: int = 0
    """Tokens of the sequence by now, those that a later step runs included: length-dependent rope scaling
    goes by it, so that every chunk of a sequence turns alike. 0 is what ends with this step."""
    token_masks: tuple[bytes, ...] = ()
    """Per row that draws a token, in order, which ids may be drawn: bit ``id % 8`` (1, 2, 4, ...) of byte
    ``id // 8``; ids beyond the bytes may not. Empty where nothing is forbidden."""
    num_states: int = 0
    """Of so many of its last new tokens the hidden states are pooled, as ``SequenceStart.pooling`` says; then
    nothing is drawn and nothing scored."""
    prompt_logits: bool = False
    """The prompt's tokens behind these tokens are scored too, as ``SequenceStart.prompt_logprobs`` asks."""
    score_blocks: tuple[tuple[int, ...], ...] = ()
    """Per LayerGroup, ids of blocks that are full after this step and by whose scores others are evicted."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Everything that runs, from ``start_position`` on: the new tokens, then the drafted ones."""
        return self.token_ids + self.draft_token_ids


@dataclass(frozen=True)
class SequenceStart:
    """What the sampler must know of a sequence, told once, in the first plan that names it."""

    sequence_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """The request's seed, or the one that was drawn for it."""
    sample: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    score_from: int = 1
    pooling: str | None = None
    """``mean`` or ``last`` where the prompt is embedded rather than answered."""


@dataclass(frozen=True)
class BlockCopy:
    """One block's KV copied to another block of the same layer group, all layers of it."""

    group: int
    source: int
    target: int
    order: int = field(default=0, compare=False)
    """The copies of one step, of blocks and of the host alike, are done in ascending order: what a copy reads
    may be overwritten by a later one."""


@dataclass(frozen=True)
class HostCopy:
    """One block's KV copied between the device and a host block of the same layer group."""

    group: int
    block: int
    host_block: int
    to_host: bool
    order: int = field(default=0, compare=False)
    """As in BlockCopy; both kinds count together."""


@dataclass(frozen=True)
class StepPlan:
    """What the runner does next. A plan without sequences may still start and end some."""

    step: int
    sequences: tuple[PlannedSequence, ...]
    started: tuple[SequenceStart, ...] = ()
    """Sequences that the runner has not seen before."""
    ended: tuple[int, ...] = ()
    """Ids whose state the runner forgets before it runs this plan."""
    block_copies: tuple[BlockCopy, ...] = ()
    """Done before anything of this plan writes KV, together with ``host_copies``, in ascending order."""
    host_copies: tuple[HostCopy, ...] = ()
    forked: tuple[tuple[int, int], ...] = ()
    """(parent, child): before this plan runs, the child takes over what the runner keeps of its parent's
    recent KV outside of the blocks (int4 only)."""
    preempted: tuple[int, ...] = ()
    """Ids whose recent KV outside of the blocks is dropped before this plan runs; sampling goes on later."""


@dataclass(frozen=True)
class SequenceResult:
    """What a step brought for one sequence."""

    sequence_id: int
    token_ids: tuple[int, ...]
    """1..k+1 accepted ids; none after a prefill chunk that is not the last."""
    draft_proposed: int = 0
    draft_accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Where ``prompt_logits`` was set: of the prompt's tokens at the positions ``start_position + 1`` and on.
    """
    embedding: tuple[float, ...] | None = None
    """Of a prompt that is embedded, once its last token has run."""
    block_scores: tuple[tuple[float, ...], ...] = ()
    """The scores of ``score_blocks``, in their order: the smaller, the sooner a block is evicted."""
    error: str | None = None


@dataclass(frozen=True)
class StepResult:
    step: int
    results: tuple[SequenceResult, ...]
    draft_seconds: float = 0.0
    """Of the step, what the runner's own drafting took."""
    draft_passes: int = 0
    """Drafting passes in which these seconds went."""


class StepInFlight(Protocol):
    """A step that the runner has begun."""

    def result(self) -> StepResult:
        """Waits for the step."""
        ...


class Runner(Protocol):
    """Executes plans; ``FakeRunner`` in the tests plays a script."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class LaunchingRunner(Runner, Protocol):
    """Can begin a step while the one before is in flight."""

    def launch(self, plan: StepPlan) -> StepInFlight:
        """Begins a plan, of which ids may be PENDING where the step launched before draws them. Results are
        taken in the order of the launches."""
        ...
