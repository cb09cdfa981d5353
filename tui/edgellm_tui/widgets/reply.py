"""One answer: its Markdown as it grows, its reasoning folded away, and a line of figures below."""

from __future__ import annotations

import time

from textual.app import ComposeResult
from textual.widgets import Collapsible, Static

from edgellm.contracts import Finished, FinishReason
from edgellm_tui.terminal_text import safe_line
from edgellm_tui.widgets.figures import count_text, rate_text, seconds_text
from edgellm_tui.widgets.folding import Fold
from edgellm_tui.widgets.streaming_markdown import StreamingMarkdown


def first_token_s(finished: Finished) -> float | None:
    """Seconds until the first token, as the engine measured them; None without a token."""
    return finished.timings.ttft_s or None if finished.usage.completion_tokens else None


def finished_line(finished: Finished, *, drawn: bool = False) -> str:
    """The figures of a finished answer in one line, with how it ended when that was not by itself.

    ``drawn``: chance had a part in it, so the seed that repeats it is told.
    """
    tokens, timings = finished.usage.completion_tokens, finished.timings
    parts = [f"{count_text(tokens)} token{'' if tokens == 1 else 's'}"]
    if drawn:  # before the figures, which are in the bar too: a narrow window cuts the end
        parts.append(f"seed {finished.seed}")
    if timings.decode_tokens_per_s:
        parts.append(f"{rate_text(timings.decode_tokens_per_s)} tok/s")
    first_token = first_token_s(finished)
    if first_token is not None:
        parts.append(f"first token {seconds_text(first_token)}")
    if finished.usage.cached_tokens:
        parts.append(f"{count_text(finished.usage.cached_tokens)} cached")
    ending = {
        FinishReason.CANCELLED: "■ stopped",
        FinishReason.LENGTH: "▲ cut: token limit",
    }.get(finished.reason)
    return " · ".join([ending, *parts] if ending else parts)


class Reply(Fold):
    """An answer in the transcript. ``text`` is what the model wrote, unchanged."""

    def __init__(self) -> None:
        super().__init__(classes="reply")
        self._parts: list[str] = []
        self._body = StreamingMarkdown()
        self._foot = Static("…", markup=False, classes="foot")
        self._thoughts: StreamingMarkdown | None = None
        self._fold: Collapsible | None = None
        self._thinking_since = 0.0
        self._finished = False

    def compose(self) -> ComposeResult:
        yield self._body
        yield self._foot

    def folds(self) -> list[Fold]:
        """What of it may be folded away: all of it once it is finished, until then its closed segments."""
        segments: list[Fold] = list(self._body.closed)
        if self._thoughts is not None:
            segments += self._thoughts.closed
        return [self, *segments] if self._finished else segments

    @property
    def text(self) -> str:
        return "".join(self._parts)

    async def append(self, text: str, reasoning: str = "") -> None:
        """Shows more of the answer, and of the reasoning before it."""
        if reasoning:
            await self._append_reasoning(reasoning)
        if text:
            if self._fold is not None and not self._parts:
                self._fold.title = f"Thought for {seconds_text(time.monotonic() - self._thinking_since)}"
            self._parts.append(text)
            self._foot.update("")
            await self._body.append(text)

    async def _append_reasoning(self, reasoning: str) -> None:
        if self._thoughts is None:
            self._thinking_since = time.monotonic()
            self._thoughts = StreamingMarkdown()
            self._fold = Collapsible(self._thoughts, title="Thinking", collapsed=True)
            await self.mount(self._fold, before=self._body)
        await self._thoughts.append(reasoning)

    def waiting(self, text: str) -> None:
        """What is being done before the first word."""
        if not self._parts:
            self._foot.update(safe_line(text))

    async def finish(self, line: str, *, style: str = "") -> None:
        """No more text comes; ``line`` says how it went."""
        await self._body.finish()
        if self._thoughts is not None:
            await self._thoughts.finish()
        self._foot.update(safe_line(line))
        self._finished = True
        if style:
            self._foot.add_class(style)
