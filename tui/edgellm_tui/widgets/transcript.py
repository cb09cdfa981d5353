"""The conversation: messages from the top down, following the end only while the reader is there."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import Container, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from edgellm.contracts import ModelInfo
from edgellm_tui.terminal_text import safe_line, safe_text
from edgellm_tui.widgets.figures import count_text, parameters_text
from edgellm_tui.widgets.folding import Fold, fold_distant
from edgellm_tui.widgets.reply import Reply, place_text

SHOWN_LINES = 16
SHOWN_CHARACTERS = 4000
"""A question with more (a file that goes along, a long paste) is shown by its ends, until it is clicked."""
END_LINES = 5
END_CHARACTERS = 600


def shortened(text: str) -> tuple[str, str, str] | None:
    """Beginning, what is left out between, and end of a long text; None for one that is shown whole."""
    lines = text.split("\n")
    many = len(lines) > SHOWN_LINES
    if not many and len(text) <= SHOWN_CHARACTERS:
        return None
    head = ("\n".join(lines[:END_LINES]) if many else text)[:END_CHARACTERS]
    tail = ("\n".join(lines[-END_LINES:]) if many else text)[-END_CHARACTERS:]
    left = len(lines) - 2 * END_LINES if many else len(text) - len(head) - len(tail)
    return head, f"… {count_text(left)} more {'lines' if many else 'characters'} · a click shows them", tail


class UserMessage(Static):
    """What the person wrote, as written; where there are several versions, which one this is."""

    def __init__(self, text: str, message_id: str = "") -> None:
        self.text = text
        self.message_id = message_id
        self._place = ""
        self._ends = shortened(text)
        self._whole = self._ends is None
        super().__init__(self._content(), markup=False, classes="user")

    def _content(self) -> Content:
        if self._whole or self._ends is None:
            parts = [Content(safe_text(self.text))]
        else:
            head, left_out, tail = self._ends
            parts = [
                Content(safe_text(head)),
                Content.styled(left_out, "dim italic"),
                Content(safe_text(tail)),
            ]
        if self._place:
            parts.append(Content.styled(self._place, "dim"))
        return Content("\n").join(parts)

    def set_place(self, place: int, count: int, chosen: bool) -> None:
        """Says which of its versions this is."""
        shown = place_text(place, count, chosen)
        if shown != self._place:
            self._place = shown
            self.update(self._content())

    def on_click(self) -> None:
        # The end of a selection is a click too.
        if self._ends is not None and not self.screen.get_selected_text():
            self._whole = not self._whole
            self.update(self._content())


class Earlier(Static):
    """Stands for messages that are not mounted yet; asked for by a click or by scrolling to the top."""

    class Wanted(Message):
        """Show more of them."""

    def __init__(self, count: int) -> None:
        super().__init__(f"↑ {count:,} earlier messages · Ctrl+Home", markup=False, classes="earlier")

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.post_message(self.Wanted())


class QuietLine(Static):
    """A notice, in one dim line."""

    def __init__(self, text: str, *, mark: str = "·") -> None:
        super().__init__(f"{mark} {safe_line(text)}", markup=False, classes="quiet")


class ErrorLine(Static):
    """Something failed: what, and the way out if there is one."""

    def __init__(self, text: str) -> None:
        super().__init__(f"✗ {safe_text(text)}", markup=False, classes="error")


class Welcome(Static):
    """What an empty conversation shows: who answers, and the keys that matter."""

    def __init__(self, model: ModelInfo) -> None:
        name = safe_line(model.name)
        facts = [
            safe_line(model.architecture),
            parameters_text(model.parameters),
            safe_line(model.quantization),
            f"{count_text(model.context_length)} tokens of context",
        ]
        keys = [
            ("Enter", "send"),
            ("Ctrl+J", "new line"),
            ("Esc", "stop the answer"),
            ("Ctrl+E", "edit the question"),
            ("Ctrl+O", "another model"),
            ("Ctrl+S", "earlier chats"),
            ("F1", "all keys"),
        ]
        lines = [
            Content.styled(name, "bold $primary"),
            Content.styled(" · ".join(fact for fact in facts if fact), "dim"),
            Content(""),
            *(Content.assemble((f"{key:>7}", "bold"), "  ", (does, "dim")) for key, does in keys),
        ]
        super().__init__(Content("\n").join(lines), classes="welcome")


class NewTextHint(Static):
    """Says that text arrived below what is on the screen."""

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.post_message(Transcript.EndRequested())


MARGIN_WRITING = 3
"""Lines beyond the view that stay ready while it follows an answer."""


class Scroller(VerticalScroll, can_focus=False):
    """The scrolled column of messages."""

    class Moved(Message):
        """The visible part changed."""

    @property
    def at_end(self) -> bool:
        """The newest text is in view, or will be with the next layout, which an anchored column follows.

        The position says it late, without telling a watcher; in a column shorter than the view it is below 0.
        """
        follows = self._anchored and not self._anchor_released
        return follows or self.max_scroll_y <= 0 or self.is_vertical_scroll_end

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self.post_message(self.Moved())

    def on_resize(self) -> None:
        self.post_message(self.Moved())


class Transcript(Container):
    """Messages, and the hint when there is more below."""

    class EndRequested(Message):
        """The reader wants to see the newest text."""

    def compose(self) -> ComposeResult:
        yield Scroller()
        yield NewTextHint("↓ new text below · Ctrl+End", markup=False)

    def __init__(self) -> None:
        super().__init__()
        self._replies: list[Reply] = []
        self._width = 0
        self.writing = False
        """An answer is being written."""

    def on_mount(self) -> None:
        self.scroller.anchor()

    @property
    def scroller(self) -> Scroller:
        return self.query_one(Scroller)

    async def add(self, widget: Widget, *, follow: bool = False) -> None:
        """Appends a message; ``follow`` moves to the end even if the reader had scrolled away."""
        for welcome in self.query(Welcome):
            await welcome.remove()
        await self.scroller.mount(widget)
        if isinstance(widget, Reply):
            self._replies.append(widget)
        if follow:
            self.to_end()
        else:
            self.text_arrived()

    def messages(self) -> list[UserMessage | Reply]:
        """The questions and answers that are mounted, in order."""
        return [child for child in self.scroller.children if isinstance(child, UserMessage | Reply)]

    async def cut_from(self, message_id: str) -> None:
        """Takes away the message with this id and all that follows, notices and errors too."""
        children = list(self.scroller.children)
        for place, child in enumerate(children):
            if isinstance(child, UserMessage | Reply) and child.message_id == message_id:
                # Notices that belong to an answer stand before it.
                while place > 0 and isinstance(children[place - 1], QuietLine | ErrorLine):
                    place -= 1
                await self.scroller.remove_children(children[place:])
                break
        self._replies = [reply for reply in self._replies if reply.is_mounted and reply.parent is not None]

    async def insert(self, widgets: Sequence[Widget], *, before: Widget | None = None) -> None:
        """Mounts saved messages, at the end or before another."""
        await self.scroller.mount_all(widgets, before=before)
        self._replies += [widget for widget in widgets if isinstance(widget, Reply)]

    def settled(self) -> None:
        """To be called when inserted messages have their text."""
        self.call_after_refresh(self._fold_distant)

    async def clear(self, model: ModelInfo | None) -> None:
        """Empties the conversation."""
        self._replies.clear()
        await self.scroller.remove_children()
        if model is not None:
            await self.scroller.mount(Welcome(model))
        self.to_end()

    def to_end(self) -> None:
        """Shows the newest text and follows it from here on."""
        self.scroller.anchor()
        self._hint(False)

    def scroll(self, where: str) -> None:
        """Moves by page_up, page_down, home or end."""
        if where == "end":
            self.to_end()
        elif self.scroller.max_scroll_y > 0:
            getattr(self.scroller, f"scroll_{where}")(animate=False)
            if where == "home":
                for line in self.scroller.query(Earlier):
                    line.post_message(Earlier.Wanted())

    def text_arrived(self) -> None:
        """Called after text was added: the view stays where it is, with a hint if that is not the end."""
        # The end moves with the layout, so an anchored view is at it only after the next refresh.
        self.call_after_refresh(self._after_layout)

    def _after_layout(self) -> None:
        self._hint(not self.scroller.at_end)
        self._fold_distant()

    def _fold_distant(self) -> None:
        view = self.scroller.region
        # While the view follows an answer that is written, every line kept ready above is laid out for every
        # piece of text; a reader who moves gets a whole view's worth in both directions.
        follows = self.writing and self.scroller.at_end
        margin = MARGIN_WRITING if follows else view.height
        if fold_distant((fold for reply in self._replies for fold in reply.folds()), view, margin):
            self.call_after_refresh(self._fold_distant)

    def _hint(self, visible: bool) -> None:
        # On the hint itself: a class on this container would restyle every block of every message.
        self.query_one(NewTextHint).display = visible

    def on_resize(self, event: events.Resize) -> None:
        if event.size.width != self._width:
            self._width = event.size.width
            # Heights were measured for another width.
            for reply in self._replies:
                for fold in reply.folds():
                    fold.unfold()
            self.call_after_refresh(self._fold_distant)

    def on_scroller_moved(self, event: Scroller.Moved) -> None:
        event.stop()
        if self.scroller.at_end:
            self._hint(False)
        # Where things are is known when the moved view has been drawn.
        self.call_after_refresh(self._fold_distant)

    def on_fold_measured(self, event: Fold.Measured) -> None:
        event.stop()
        self._fold_distant()

    def on_transcript_end_requested(self, event: EndRequested) -> None:
        event.stop()
        self.to_end()
