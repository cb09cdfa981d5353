"""What a caller asks for: messages, sampling settings, constraints, the request itself."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgellm_models.errors import BadInputError


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


MAX_PENALTY = 1000


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
        most = MAX_PENALTY  # far beyond any use; without a bound a logit may become infinite
        check(
            "repetition_penalty", 1 / most <= self.repetition_penalty <= most, f"from {1 / most:g} to {most}"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            check(name, abs(getattr(self, name)) <= most, f"from -{most} to {most}")
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
    """The prompt's hidden states behind the output norm, pooled; nothing is drawn."""


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
    max_draft: int | None = None
    """Tokens drafted per step at most; None is the engine's limit."""
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
    pooling: str = "mean"
    """With EMBED: the ``mean`` of the states of all tokens, or the ``last`` one."""
    continues_text: bool = False
    """Raw completion: the answer goes on where the prompt's text ends, so that its first space is a real one.
    """
    shown_token_ids: tuple[int, ...] = ()
    """Control tokens that are text in this answer, such as those that mark tool calls."""
