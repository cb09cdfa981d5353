"""The bar above (who answers, how full the context is) and the bar below (what happens, how fast)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from edgellm.contracts import ModelInfo
from edgellm_tui.live import context_level
from edgellm_tui.terminal_text import safe_line
from edgellm_tui.widgets.figures import count_text, meter, rate_text, seconds_text

CONTEXT_STYLES = {"ok": "dim", "warning": "bold $text-warning", "alarm": "bold $text-error"}


@dataclass(frozen=True)
class Part:
    """A piece of a bar. Where there is no room the parts of the highest rank go first."""

    content: Content
    rank: int = 0


def fit(left: Sequence[Part], right: Sequence[Part], width: int, gap: str = "   ") -> Content:
    """One line of ``width`` cells with ``left`` and ``right`` parts; leaves out what has no room."""
    kept_left, kept_right = list(left), list(right)
    while True:
        start = Content(gap).join(part.content for part in kept_left)
        end = Content(gap).join(part.content for part in kept_right)
        space = width - start.cell_length - end.cell_length
        if space >= (2 if kept_left and kept_right else 0) or len(kept_left) + len(kept_right) <= 1:
            break
        worst = max([*kept_left, *kept_right], key=lambda part: part.rank)
        (kept_left if worst in kept_left else kept_right).remove(worst)
    return Content.assemble(start, " " * max(0, space), end)


class TopBar(Widget):
    """Model and context."""

    model: reactive[ModelInfo | None] = reactive(None)
    context_used: reactive[int] = reactive(0)
    """Tokens of the conversation that the model has seen or written."""
    title: reactive[str] = reactive("")
    """Of the chat."""

    def render(self) -> Content:
        left = [Part(Content.styled("edgellm", "bold $primary"), rank=5)]
        right: list[Part] = []
        if self.model is not None:
            left.append(Part(Content.styled(safe_line(self.model.name), "bold"), rank=1))
            left.append(Part(Content.styled(safe_line(self.model.quantization), "dim"), rank=4))
            if self.title:
                title = Content.styled(safe_line(self.title), "italic dim")
                left.append(
                    Part(title.truncate(max(12, self.content_size.width // 3), ellipsis=True), rank=6)
                )
            right = self._context_parts(self.model.context_length)
        return fit(left, right, self.content_size.width)

    def _context_parts(self, length: int) -> list[Part]:
        if length <= 0:
            return []
        share = self.context_used / length
        style = CONTEXT_STYLES[context_level(self.context_used, length)]
        figures = f"{count_text(self.context_used)} / {count_text(length)}"
        return [
            Part(Content.styled(meter(share, 10), style), rank=3),
            Part(Content.styled(figures, style), rank=0),
            Part(Content.styled(f"{share:.0%}", style), rank=2),
        ]


class StatusLine(Widget):
    """Phase and speed."""

    phase: reactive[str] = reactive("ready")
    busy: reactive[bool] = reactive(False)
    hint: reactive[str] = reactive("")
    """A sentence that for a moment takes the place of the phase."""
    ttft_s: reactive[float | None] = reactive(None)
    now_tokens_per_s: reactive[float | None] = reactive(None)
    answer_tokens_per_s: reactive[float | None] = reactive(None)

    def render(self) -> Content:
        if self.hint:
            hint = Content.styled(safe_line(self.hint), "bold $text-warning")
            left = [Part(hint.truncate(max(1, self.content_size.width), ellipsis=True))]
        else:
            mark = Content.styled("●", "$success" if self.busy else "dim")
            left = [Part(Content.assemble(mark, " ", safe_line(self.phase)))]
        right: list[Part] = []
        if self.ttft_s is not None:
            right.append(self._figure("first token", seconds_text(self.ttft_s), 3))
        if self.now_tokens_per_s is not None:
            right.append(self._figure("now", f"{rate_text(self.now_tokens_per_s)} tok/s", 2))
        if self.answer_tokens_per_s is not None:
            right.append(self._figure("answer", f"{rate_text(self.answer_tokens_per_s)} tok/s", 1))
        if not right:
            right.append(Part(Content.styled("F1 help", "dim"), rank=4))
        return fit(left, right, self.content_size.width)

    @staticmethod
    def _figure(name: str, value: str, rank: int) -> Part:
        return Part(Content.assemble((f"{name} ", "dim"), value), rank)
