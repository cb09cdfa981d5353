"""What models and engines say of themselves and what they can be asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from edgellm.contracts.answers import ChatEvent, DraftCounts, TokenEvent
from edgellm.contracts.requests import ChatMessage, ConstraintSpec, GenerationRequest, SamplingParams
from edgellm_models.errors import Notice, PullProgress


@dataclass(frozen=True)
class DrafterStats:
    """What one drafter did since the start."""

    name: str
    armed: int
    """Open answers that draft with it by now."""
    draft: DraftCounts
    accepted_at: tuple[int, ...] = ()
    """Drafts of which the token at this place was kept, the first place first."""


@dataclass(frozen=True)
class GpuUse:
    """What the driver says of an engine's GPU, whoever uses it. None is what it does not tell."""

    memory_used_bytes: int
    memory_total_bytes: int
    busy: float | None = None
    """Share of the last moment in which something ran on it."""
    watts: float | None = None
    celsius: float | None = None


@dataclass(frozen=True)
class EngineStats:
    """Counters that the engine writes, at most once per step, and the front ends poll."""

    time: float = 0.0
    waiting: int = 0
    running: int = 0
    kv_blocks: Mapping[str, int] = field(default_factory=dict)
    """Number of blocks by state: used, shared, cached, free, evicted."""
    kv_waste: float = 0.0
    """1 - committed tokens / slots of the blocks in use."""
    prefix_hit_rate: float = 0.0
    """Prompt tokens that were reused rather than computed, as a share of all since the start."""
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    """Committed tokens over the last second."""
    draft: DraftCounts = field(default_factory=DraftCounts)
    draft_state: str = "off"
    """What drafts, and whether it does by now or why not, in a few words."""
    drafters: tuple[DrafterStats, ...] = ()
    evicted_tokens: Mapping[str, int] = field(default_factory=dict)
    """By policy, tokens that answers had lost from the model's sight when they ended."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    achieved_gb_per_s: float = 0.0
    device: str = "cpu"
    kernel_backend: str = "torch"
    gpu: GpuUse | None = None
    """Where the engine runs on a GPU whose driver can be asked."""


@dataclass(frozen=True)
class ModelInfo:
    """A loaded or known model, as lists and headers show it."""

    name: str
    path: str
    architecture: str
    file_format: str
    quantization: str
    """True bits and type names, such as ``Q4_1 (5.0 bits)``."""
    parameters: int
    file_bytes: int
    context_length: int
    """The context in force."""
    trained_context: int
    has_chat_template: bool = False
    licence: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a model needs before it is loaded."""

    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    workspace_bytes: int
    available_bytes: int
    context: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes


@runtime_checkable
class ChatBackend(Protocol):
    """A conversation partner: an engine in this process or a server."""

    def info(self) -> ModelInfo: ...

    def stats(self) -> EngineStats: ...

    def stream_chat(
        self,
        conversation_id: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        tools: Sequence[Mapping[str, Any]] = (),
        constraint: ConstraintSpec | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[ChatEvent]:
        """Streams the answer. Closing the iterator early, or ``cancel``, stops generation within a step.

        ``template_variables`` reach the chat template, such as ``enable_thinking``.
        """
        ...

    async def count_tokens(self, messages: Sequence[ChatMessage]) -> int: ...

    async def cancel(self, conversation_id: str) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class KeepsChats(Protocol):
    """A backend that keeps what it computed of a chat over its own end, so that going on starts at once."""

    async def take_up(self, conversation_id: str, tokens: int) -> Sequence[Notice]:
        """Before the first answer of a saved chat of so many tokens; what was not as hoped for."""
        ...

    async def put_by(
        self, conversation_id: str, messages: Sequence[ChatMessage], tokens: int
    ) -> Sequence[Notice]:
        """When a chat is left; what was not as hoped for."""
        ...


class GenerationEngine(Protocol):
    """The synchronous engine: submit requests, step, read events."""

    def submit(self, request: GenerationRequest) -> None: ...

    def step(self) -> list[TokenEvent]: ...

    def cancel(self, request_id: str) -> None: ...

    def has_work(self) -> bool: ...


class ModelLibrary(Protocol):
    """The models that a user has or can fetch."""

    def list(self) -> Sequence[ModelInfo]: ...

    def pull(self, name: str) -> Iterator[PullProgress]: ...

    def remove(self, name: str) -> int: ...

    def plan(self, name: str, context: int | None = None) -> MemoryPlan: ...

    async def open(self, name: str) -> ChatBackend: ...
