"""One answer: its Markdown as it grows, its reasoning folded away, and a line of figures below."""

from __future__ import annotations

import time

from textual.app import ComposeResult
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Collapsible

from edgellm.contracts import DraftCounts, Finished, FinishReason, StoredMessage
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


def stored_line(message: StoredMessage) -> tuple[str, bool]:
    """The last line of a saved answer, and whether the answer was cut."""
    if message.usage is not None and message.timings is not None and message.finish_reason is not None:
        seed = message.sampling.get("seed")
        drawn = bool(message.sampling.get("temperature")) and seed is not None
        finished = Finished(
            message.finish_reason, message.usage, message.timings, message.draft or DraftCounts(), seed or 0
        )
        line = finished_line(finished, drawn=drawn)
        if message.finish_reason is FinishReason.ERROR:
            line = "■ broken off · " + line
        return line, message.finish_reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS)
    if message.partial:
        return "■ not finished: edgellm ended while it was written · Ctrl+R answers again", True
    return "■ broken off", True


def place_text(place: int, count: int, chosen: bool) -> str:
    """Which of several versions is shown, with the keys where they would act."""
    if count < 2:
        return ""
    return f"‹ {place}/{count} ›" + (" Alt+←/→" if chosen else "")


class Foot(Widget):
    """One line of facts; where there is no room the last of them are left out."""

    text: reactive[str] = reactive("")

    def __init__(self, text: str) -> None:
        super().__init__(classes="foot")
        self.set_reactive(Foot.text, text)

    def update(self, text: str) -> None:
        self.text = text

    def render(self) -> Content:
        width = max(1, self.content_size.width)
        facts = self.text.split(" · ")
        while len(facts) > 1 and Content(" · ".join(facts)).cell_length > width:
            facts.pop()
        return Content(" · ".join(facts)).truncate(width, ellipsis=True)


class Reply(Fold):
    """An answer in the transcript. ``text`` is what the model wrote, unchanged."""

    def __init__(self) -> None:
        super().__init__(classes="reply")
        self._parts: list[str] = []
        self._body = StreamingMarkdown()
        self._foot = Foot("…")
        self._thoughts: StreamingMarkdown | None = None
        self._fold: Collapsible | None = None
        self._thinking_since = 0.0
        self._finished = False
        self._line = ""
        self._place = ""
        self.message_id = ""
        """Of the answer in the store."""

    def compose(self) -> ComposeResult:
        yield self._body
        yield self._foot

    def folds(self) -> list[Fold]:
        """What of it may be folded away: all of it once it is finished."""
        return [self] if self._finished else []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def has_text(self) -> bool:
        """The model wrote something, if only thoughts."""
        return bool(self._parts) or self._thoughts is not None

    async def append(self, text: str, reasoning: str = "") -> None:
        """Shows more of the answer, and of the reasoning before it."""
        if reasoning:
            await self._append_reasoning(reasoning)
        if text:
            if self._fold is not None and not self._parts:
                self._fold.title = f"Thought for {seconds_text(time.monotonic() - self._thinking_since)}"
            if not self._parts:
                self._foot.update("")
            self._parts.append(text)
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
        self._line = safe_line(line)
        self._show_foot()
        self._finished = True
        if style:
            self._foot.add_class(style)

    def set_place(self, place: int, count: int, chosen: bool) -> None:
        """Says which of its versions this is."""
        self._place = place_text(place, count, chosen)
        if self._finished or not self._parts:
            self._show_foot()

    def _show_foot(self) -> None:
        self._foot.update(" · ".join(part for part in (self._place, self._line) if part))

    async def show_thinking(self, shown: bool) -> bool:
        """Unfolds or folds away the reasoning; False where there is none."""
        if self._fold is not None:
            self._fold.collapsed = not shown
        return self._fold is not None

    @property
    def thinking_shown(self) -> bool | None:
        return None if self._fold is None else not self._fold.collapsed

    async def restore(self, message: StoredMessage) -> None:
        """Shows a saved answer."""
        text = message.message.content
        whole = text if isinstance(text, str) else "".join(part.text for part in text or ())
        if message.message.reasoning:
            await self._append_reasoning(message.message.reasoning)
            if self._fold is not None:
                self._fold.title = "Thought"
        if whole:
            self._parts.append(whole)
            await self._body.append(whole)
        line, cut = stored_line(message)
        await self.finish(line, style="-cut" if cut else "")
        self.message_id = message.id
        self.set_place(message.sibling, message.num_siblings, False)
