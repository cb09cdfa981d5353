"""What travels from the stream worker to the screen: at most ten texts a second, never one per token."""

from __future__ import annotations

from textual.message import Message

from edgellm.contracts import EngineStats, Finished
from edgellm_models.errors import Notice


class ReplyStarted(Message):
    """The backend took the request."""


class ReplyDelta(Message):
    """Text of the answer since the last such message."""

    def __init__(self, text: str, reasoning: str = "") -> None:
        super().__init__()
        self.text = text
        self.reasoning = reasoning


class ReplyNotice(Message):
    """Something was done differently from what was asked."""

    def __init__(self, notice: Notice) -> None:
        super().__init__()
        self.notice = notice


class ReplyFinished(Message):
    """The answer is complete, or was stopped."""

    def __init__(self, finished: Finished) -> None:
        super().__init__()
        self.finished = finished


class ReplyFailed(Message):
    """The answer broke off."""

    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error


class StatsUpdated(Message):
    """Counters of the engine, polled."""

    def __init__(self, stats: EngineStats) -> None:
        super().__init__()
        self.stats = stats
