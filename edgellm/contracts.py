"""Every dataclass, enum and protocol that crosses a border between rooms. Standard library only."""

from __future__ import annotations

import enum
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from edgellm_models.errors import BadInputError
from edgellm_models.errors import Notice as Notice
from edgellm_models.errors import PullProgress as PullProgress

PENDING = -1
"""Stands in ``PlannedSequence.token_ids`` for the id that the step in flight is still sampling."""


# --- what a caller asks for -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen.

    Applied in this order: repetition, presence and frequency penalties, logit bias, the constraint's mask,
    temperature, top-k, typical-p, top-p, min-p. The token that crosses a probability limit stays, at least
    one stays, equal logits rank by id.
    """

    temperature: float = 1.0
    """0 is greedy; the filters after it then have nothing to decide."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """1 is off."""
    min_p: float = 0.0
    """0 is off: keeps tokens of at least this share of the most likely token's probability."""
    typical_p: float = 1.0
    """1 is off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of every id in prompt or answer. 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from ids that are in the answer so far."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the answer so far."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids. As OpenAI clients expect, -100 or less removes a token, and where ids
    have
    100 or more nothing else can be drawn."""
    seed: int | None = None
    """None draws one, which is returned with the answer."""
    max_new_tokens: int | None = None
    """None is whatever the context still holds."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end ids."""
    ignore_eos: bool = False
    """The model's end ids (wherever they are stated) do not stop the answer; ``stop`` still does."""

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, rule: str) -> None:
            if not ok:
                raise BadInputError(f"{name} must be {rule}, not {getattr(self, name)!r}")

        for name in ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty"):
            check(name, _is_number(getattr(self, name)), "a finite number")
        check("frequency_penalty", _is_number(self.frequency_penalty), "a finite number")
        check("temperature", self.temperature >= 0, "0 or more")
        check("top_k", _is_int(self.top_k) and self.top_k >= 0, "an integer of 0 (off) or more")
        check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)")
        check("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1")
        check("typical_p", 0 < self.typical_p <= 1, "above 0 and at most 1 (off)")
        check("repetition_penalty", self.repetition_penalty > 0, "above 0")
        check("seed", self.seed is None or _is_int(self.seed), "an integer")
        check(
            "max_new_tokens",
            self.max_new_tokens is None or (_is_int(self.max_new_tokens) and self.max_new_tokens >= 0),
            "an integer of 0 or more",
        )
        check("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings")
        ids_are_good = all(_is_int(t) and t >= 0 for t in self.stop_token_ids)
        check("stop_token_ids", ids_are_good, "token ids of 0 or more")
        for token_id, bias in self.logit_bias.items():
            if not _is_int(token_id) or token_id < 0 or not _is_number(bias):
                raise BadInputError(
                    f"logit_bias must map token ids to finite numbers, not {token_id!r}: {bias!r}"
                )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class Task(enum.Enum):
    """What a request wants from the model."""

    GENERATE = "generate"
    EMBED = "embed"


class ConstraintKind(enum.Enum):
    """In which language a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """Rust's regex syntax, anchored at both ends."""
    LARK = "lark"
    """llguidance's dialect of Lark; the rule ``start`` is the answer."""
    GBNF = "gbnf"
    """llama.cpp's grammars; the rule ``root`` is the answer."""


@dataclass(frozen=True)
class ConstraintSpec:
    """What an answer's text must be, as its author wrote it; ``constraint/`` compiles it for a vocabulary."""

    kind: ConstraintKind
    text: str


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt as token ids and everything that decides its answer."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_samples: int = 1
    logprobs: int | None = None
    """How many alternatives to report per answer token; None is off, 0 only the chosen one."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, the first excepted: nothing comes before it."""
    score_from: int = 1
    """Position of the first prompt token that ``prompt_logprobs`` is about; what is before it costs less."""
    constraint: ConstraintSpec | None = None
    """The whole answer keeps to it; complete, it ends with STOP. Cut by a limit it may be incomplete."""
    prediction_token_ids: tuple[int, ...] = ()
    speculate: bool = True
    kv_policy: str = "stop"
    """stop, window or budget (cache/eviction.py); trim is done by whoever makes the request."""
    kv_keep: int | None = None
    """Tokens that window or budget keeps; None is the engine's setting."""
    protected_tokens: int = 0
    """Leading tokens (the system prompt) that no eviction may drop."""
    turn_starts: tuple[int, ...] = ()
    """Positions in the prompt at which a chat message begins."""
    conversation_id: str | None = None
    cache_salt: str = ""
    deadline: float | None = None
    """Monotonic seconds after which the request is cancelled."""
    arrival_time: float = 0.0
    """Monotonic seconds."""
    priority: int = 0
    """Smaller is served first: a person's chat before batch work."""
    task: Task = Task.GENERATE
    continues_text: bool = False
    """Raw completion: the answer goes on where the prompt's text ends, so that its first space is a real one.
    """
    shown_token_ids: tuple[int, ...] = ()
    """Control tokens that are text in this answer, such as those that mark tool calls."""


# --- what comes back ---------------------------------------------------------------------------------------


class FinishReason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was reused rather than computed."""
    completion_tokens: int


@dataclass(frozen=True)
class RequestTimings:
    """Seconds spent in each phase. The first answer token belongs to the prefill."""

    queued_s: float
    prefill_s: float
    decode_s: float
    prefill_tokens: int = 0
    """Prompt tokens computed (without cached ones)."""
    completion_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.queued_s + self.prefill_s

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """(n - 1) / decode_s: the first token is the prefill's."""
        if self.decode_s <= 0 or self.completion_tokens < 2:
            return 0.0
        return (self.completion_tokens - 1) / self.decode_s


@dataclass(frozen=True)
class DraftCounts:
    """Speculative decoding of one request or of an engine since its start."""

    proposed: int = 0
    accepted: int = 0
    steps: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability (natural, of the raw softmax) of one token and its best alternatives, sorted."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """What one step brought for one request. The last event of a sample carries its finish_reason."""

    request_id: str
    sample: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Text that became certain in this step; never half a character, never part of a stop string."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Those of the prompt's tokens from the second on, in order, over the events of the prefill."""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: RequestTimings | None = None
    draft: DraftCounts | None = None
    seed: int | None = None
    """The seed that was used, in the last event."""
    queue_position: int | None = None
    """Place in the queue, in events of the waiting phase: 1 is next."""
    prefill_done: int | None = None
    """Prompt tokens whose KV exists by now, in events of the prefill phase."""
    notice: Notice | None = None
    error: str | None = None


@dataclass(frozen=True)
class ContentPart:
    """One part of a message's content as OpenAI clients send it."""

    type: str
    text: str = ""


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str | tuple[ContentPart, ...] | None = None
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Queued:
    position: int


@dataclass(frozen=True)
class Prefill:
    done: int
    total: int
    cached: int


@dataclass(frozen=True)
class Delta:
    text: str = ""
    reasoning: str = ""
    tool_call: Mapping[str, Any] | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class NoticeEvent:
    notice: Notice


@dataclass(frozen=True)
class Finished:
    reason: FinishReason
    usage: Usage
    timings: RequestTimings
    draft: DraftCounts
    seed: int
    error: str | None = None


ChatEvent = Queued | Prefill | Delta | NoticeEvent | Finished


# --- what a model and an engine say of themselves ---------------------------------------------------------


@dataclass(frozen=True)
class EngineStats:
    """Counters that the engine writes once per step and the front ends poll."""

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
    weight_bytes: int = 0
    kv_bytes: int = 0
    achieved_gb_per_s: float = 0.0
    device: str = "cpu"
    kernel_backend: str = "torch"


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
    ) -> AsyncIterator[ChatEvent]:
        """Streams the answer. Closing the iterator early, or ``cancel``, stops generation within a step."""
        ...

    async def count_tokens(self, messages: Sequence[ChatMessage]) -> int: ...

    async def cancel(self, conversation_id: str) -> None: ...

    async def close(self) -> None: ...


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


# --- saved chats --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredChat:
    """A saved chat without its messages."""

    id: str
    """32 hexadecimal digits; also the conversation_id that the engine knows it by."""
    title: str
    """The beginning of the first question until somebody renames it; may be empty."""
    created: float
    """Seconds since 1970, as ``updated`` and ``deleted``."""
    updated: float
    system: str = ""
    model: str = ""
    """The name of the model that answered last."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Settings that belong to this chat, as its owner wrote them."""
    pinned: bool = False
    head_id: str | None = None
    """The message that the shown branch ends with; None in a chat without messages."""
    num_messages: int = 0
    """Of all branches."""
    deleted: float | None = None


@dataclass(frozen=True)
class StoredMessage:
    """One message of a chat's tree, with what is known of how it was made."""

    id: str
    chat_id: str
    parent_id: str | None
    """None at the root."""
    message: ChatMessage
    created: float
    partial: bool = False
    """An answer whose end was never written: still streaming, or its writer was killed."""
    finish_reason: FinishReason | None = None
    """None in questions and partial answers."""
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The fields of SamplingParams that it was asked with, the seed as it was drawn."""
    usage: Usage | None = None
    timings: RequestTimings | None = None
    draft: DraftCounts | None = None
    notices: tuple[Notice, ...] = ()
    error: str | None = None
    sibling: int = 1
    """Its place among the messages with the same parent, in order of creation, from 1."""
    num_siblings: int = 1


@dataclass(frozen=True)
class SearchHit:
    """A place in a saved chat that has what was searched."""

    chat: StoredChat
    message_id: str | None
    """None when it is the title."""
    role: str
    """user, assistant, ... or title."""
    excerpt: str
    """One line around the first find."""
    marks: tuple[tuple[int, int], ...] = ()
    """(start, end) in ``excerpt`` of each find."""


class AnswerWriter(Protocol):
    """Saves one answer while it streams. ``add`` only notes the text down; a thread of the writer's own puts
    it on the disk, at the latest a second after."""

    @property
    def message_id(self) -> str: ...

    def add(self, text: str, reasoning: str = "") -> None: ...

    def add_notice(self, notice: Notice) -> None: ...

    def finish(self, finished: Finished, *, tool_calls: Sequence[Mapping[str, Any]] = ()) -> StoredMessage:
        """Writes the end, whatever its reason. What was never added is not made up."""
        ...

    def fail(self, error: str) -> StoredMessage | None:
        """The backend raised: keeps what has come with reason ERROR. Without any text the answer is removed,
        its question is the head again, and None is returned."""
        ...


class ChatStore(Protocol):
    """Saved chats: each a tree of messages, of which the branch that ends with the head is shown.

    Usable from any thread; several processes may have the same store open. NotFoundError for an id that is
    none, OutputError when the disk refuses, UnavailableError when another process keeps it locked.
    """

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What opening it had to do: a damaged file set aside, search without an index, ..."""
        ...

    def create_chat(
        self, *, title: str = "", system: str = "", model: str = "", params: Mapping[str, Any] | None = None
    ) -> StoredChat: ...

    def get_chat(self, chat_id: str) -> StoredChat: ...

    def find_chat(self, prefix: str, *, deleted: bool = False) -> StoredChat:
        """The chat whose id begins so. NotFoundError when none does, BadInputError when several do."""
        ...

    def list_chats(self, *, limit: int = 100, offset: int = 0, deleted: bool = False) -> Sequence[StoredChat]:
        """Pinned ones first, then by ``updated``, newest first; with ``deleted`` only the deleted ones."""
        ...

    def update_chat(
        self,
        chat_id: str,
        *,
        title: str | None = None,
        system: str | None = None,
        model: str | None = None,
        params: Mapping[str, Any] | None = None,
        pinned: bool | None = None,
    ) -> StoredChat:
        """Changes what is not None. None of these counts as use: ``updated`` stays."""
        ...

    def delete_chat(self, chat_id: str) -> None:
        """Hides it; after 30 days it is removed for good."""
        ...

    def restore_chat(self, chat_id: str) -> None: ...

    def purge_chat(self, chat_id: str) -> None:
        """Removes it for good, its text overwritten."""
        ...

    def branch(self, chat_id: str, message_id: str | None = None) -> Sequence[StoredMessage]:
        """Root to head, or root to this message."""
        ...

    def conversation(self, chat_id: str, message_id: str | None = None) -> list[ChatMessage]:
        """The same as a backend takes it: the system prompt first, answers without a text left out."""
        ...

    def siblings(self, message_id: str) -> Sequence[StoredMessage]:
        """All messages with the same parent, itself included, in order of creation."""
        ...

    def tree(self, chat_id: str) -> Sequence[StoredMessage]:
        """All messages of all branches; every parent comes before its children."""
        ...

    def add_message(self, chat_id: str, message: ChatMessage, *, parent_id: str | None) -> StoredMessage:
        """A new child of ``parent_id`` (None: a new root), which becomes the head. An edit is a new sibling:
        add with the parent of the edited one. The first question gives an untitled chat its title."""
        ...

    def begin_answer(
        self, chat_id: str, *, parent_id: str | None, model: str, sampling: SamplingParams
    ) -> AnswerWriter:
        """An answer to ``parent_id``. It is in the tree, and the head, with its first text. Regenerate: begin
        another answer to the same parent."""
        ...

    def select(self, message_id: str) -> StoredChat:
        """Shows the branch through this message: the head becomes where that branch was last left."""
        ...

    def set_head(self, chat_id: str, message_id: str | None) -> StoredChat:
        """The shown branch ends exactly here (None: before the first message): what is added next goes under
        it. Nothing is removed."""
        ...

    def search(self, text: str, *, limit: int = 50) -> Sequence[SearchHit]:
        """Chats, not deleted, that have all words of ``text`` in a message or the title (a word may be the
        beginning of one; "in quotes" a phrase), best first."""
        ...

    def export(self, chat_id: str, form: str) -> str:
        """The chat as ``markdown`` (the shown branch) or ``json`` (everything)."""
        ...

    def close(self) -> None: ...


# --- scheduler to runner: integers only ---------------------------------------------------------------------


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
    draft_by_layers: bool = False
    """The runner drafts up to ``draft_limit`` tokens itself, with some sub-layers left out."""
    total_length: int = 0
    """Tokens of the sequence by now, those that a later step runs included: length-dependent rope scaling
    goes by it, so that every chunk of a sequence turns alike. 0 is what ends with this step."""
    token_masks: tuple[bytes, ...] = ()
    """Per row that draws a token, in order, which ids may be drawn: bit ``id % 8`` (1, 2, 4, ...) of byte
    ``id // 8``; ids beyond the bytes may not. Empty where nothing is forbidden."""
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
    block_scores: tuple[tuple[float, ...], ...] = ()
    """The scores of ``score_blocks``, in their order: the smaller, the sooner a block is evicted."""
    error: str | None = None


@dataclass(frozen=True)
class StepResult:
    step: int
    results: tuple[SequenceResult, ...]


class Runner(Protocol):
    """Executes plans; ``FakeRunner`` in the tests plays a script."""

    def execute(self, plan: StepPlan) -> StepResult: ...
