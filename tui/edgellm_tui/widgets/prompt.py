"""The multi-line prompt: Enter sends, the cursor moves by what a person sees as one character."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

from edgellm_tui.commands import SLASH, completions
from edgellm_tui.terminal_text import grapheme_starts, safe_text

MAX_REMEMBERED_PROMPTS = 200

MAX_BLINKS = 20
"""So often the cursor changes after the last key; then it stays."""

PASTE_GAP_S = 0.1
"""Text that follows an Enter sooner than this was pasted, not typed."""


def _common_beginning(words: Sequence[str]) -> str:
    first, last = min(words), max(words)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]


class Verdict(enum.Enum):
    """What becomes of a text when Enter is pressed."""

    TAKEN = "taken"
    LATER = "later"
    """Not now: the text stays, and so does the line end if more text follows."""
    WRONG = "wrong"
    """Not as it is: the text stays to be mended."""


class ChatPrompt(TextArea):
    """Where a person writes. Keeps the prompts that were sent; Up and Down bring them back.

    ``judge`` says at the moment of an Enter what becomes of the text, so that keys on their way behind it
    already find the prompt as it will be.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+j,shift+enter,alt+enter", "newline", "New line", show=False),
        Binding("ctrl+d", "leave_or_delete", "Leave", show=False),
        Binding("pageup", "scroll_transcript('page_up')", "Scroll up", show=False),
        Binding("pagedown", "scroll_transcript('page_down')", "Scroll down", show=False),
        Binding("ctrl+home", "scroll_transcript('home')", "First message", show=False),
        Binding("ctrl+end", "scroll_transcript('end')", "Last message", show=False),
    ]

    class Submitted(Message):
        """Enter was pressed and the text, which is no longer in the prompt, taken."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class StopRequested(Message):
        """Esc was pressed: in its order behind an Enter of the same burst."""

    class Edited(Message):
        """The text is another than before."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class LeaveRequested(Message):
        """Ctrl+D on an empty prompt."""

    class ScrollRequested(Message):
        """A key that means the transcript: page_up, page_down, home or end."""

        def __init__(self, where: str) -> None:
            super().__init__()
            self.where = where

    _blinks = 0
    """Changes of the cursor since the last key."""

    def __init__(self, *, judge: Callable[[str], Verdict], placeholder: str = "") -> None:
        super().__init__(
            soft_wrap=True,
            show_line_numbers=False,
            tab_behavior="focus",
            highlight_cursor_line=False,
            placeholder=placeholder,
        )
        self._judge = judge
        self._typed: list[str] = []
        """Characters that came in one breath and are inserted together: an unbracketed paste may be long."""
        self._owed_newlines = 0
        """Refused Enters, which become line ends if more text follows, as in an unbracketed paste."""
        self._owed_until: float | None = None
        self._owed_at = (0, 0)
        self._sent: list[str] = []
        self._recalled: int | None = None
        self._draft = ""

    def remember(self, text: str) -> None:
        """Adds a prompt that was sent to those that Up brings back."""
        if not self._sent or self._sent[-1] != text:
            self._sent.append(text)
            del self._sent[:-MAX_REMEMBERED_PROMPTS]
        self._recalled = None

    @property
    def sent(self) -> list[str]:
        """The prompts that Up brings back, oldest first."""
        return list(self._sent)

    @property
    def draft(self) -> str:
        """The text with every character that has come so far."""
        self._insert_typed()
        return self.text

    def replace_text(self, text: str) -> None:
        """Puts ``text`` into the prompt with the cursor at its end."""
        self._owed_newlines = 0
        self.text = text
        self.move_cursor(self.document.end)

    def paste_text(self, text: str) -> None:
        """Puts a text from outside into the prompt, made harmless as a pasted one is."""
        self.replace_text(safe_text(text))

    def give_back(self, text: str) -> None:
        """Puts a text that was taken but cannot be sent before what has been written since."""
        draft = self.draft
        self.replace_text(f"{text}\n{draft}" if draft else text)

    def _restart_blink(self) -> None:
        self._blinks = 0
        super()._restart_blink()

    def _toggle_cursor_blink_visible(self) -> None:
        # Each change is drawn: a chat that nobody touches must cost next to nothing.
        self._blinks += 1
        if self._blinks > MAX_BLINKS:
            self._pause_blink(visible=True)
        else:
            super()._toggle_cursor_blink_visible()

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self._enter(event.time)
            return
        if event.is_printable and event.character is not None:
            event.stop()
            event.prevent_default()
            self._restart_blink()
            if not self._typed:
                self.call_later(self._insert_typed)
            self._typed.append(self._line_ends(event.time) + event.character)
            return
        self._insert_typed()
        if event.key == "escape":
            event.stop()
            event.prevent_default()
            self.post_message(self.StopRequested())
            return
        if event.key == "tab":
            event.stop()
            event.prevent_default()
            self._complete()
            return
        if event.key in ("home", "end") and not self.text:
            event.stop()
            event.prevent_default()
            self.post_message(self.ScrollRequested(event.key))
            return
        line_ends = self._line_ends(event.time)
        if event.key == "ctrl+j" and line_ends:
            self._replace_via_keyboard(line_ends, *self.selection)
        # Bindings would run when the key has travelled up to the application: behind keys that came later.
        for binding in self._bindings.key_to_bindings.get(event.key, ()):
            if not binding.priority and await self.app.run_action(binding.action, self):
                event.stop()
                event.prevent_default()
                return
        await super()._on_key(event)

    def _complete(self) -> None:
        """Tab: the longest common beginning of the commands that may be meant."""
        found = completions(self.text)
        if not found:
            return
        common = _common_beginning(found)
        if len(found) == 1 or self.text == f"/{found[0]}":
            self.replace_text(f"/{found[0]}" + (" " if SLASH[found[0]].argument else ""))
        elif len(common) > len(self.text) - 1:
            self.replace_text(f"/{common}")

    def _on_text_area_changed(self) -> None:
        self.post_message(self.Edited(self.text))

    def load_history(self, sent: Sequence[str]) -> None:
        """Prompts of earlier sessions, oldest first."""
        self._sent = [*sent, *self._sent][-MAX_REMEMBERED_PROMPTS:]

    def _insert_typed(self) -> None:
        text = "".join(self._typed)
        self._typed.clear()
        if text:
            self._replace_via_keyboard(text, *self.selection)

    def _enter(self, time: float) -> None:
        text = self.draft
        verdict = self._judge(text)
        if verdict is Verdict.TAKEN:
            self._owed_newlines = 0
            self.clear()
            self.post_message(self.Submitted(text))
        elif text:
            self._owed_newlines += 1
            self._owed_until = time + PASTE_GAP_S if verdict is Verdict.WRONG else None
            self._owed_at = self.cursor_location

    def _line_ends(self, time: float) -> str:
        """The owed line ends, for text that came at ``time``; they are owed no more."""
        owed, self._owed_newlines = self._owed_newlines, 0
        in_time = self._owed_until is None or time <= self._owed_until
        return "\n" * owed if in_time and self.cursor_location == self._owed_at else ""

    async def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        # Pasted text is shown in the prompt, so it has to be as harmless as any other text on the screen.
        self._typed.append(self._line_ends(event.time) + safe_text(event.text))
        self._insert_typed()

    async def _on_mouse_down(self, event: events.MouseDown) -> None:
        self._insert_typed()
        await super()._on_mouse_down(event)

    def action_newline(self) -> None:
        start, end = self.selection
        self._replace_via_keyboard("\n", start, end)

    # As in a shell: of the whole line, however it is wrapped.

    def action_delete_to_start_of_line(self) -> None:
        row, column = self.selection.end
        if column == 0:
            super().action_delete_to_start_of_line()  # joins it with the line above
        else:
            self._delete_via_keyboard((row, 0), (row, column))

    def action_delete_to_end_of_line(self) -> None:
        row, column = self.selection.end
        self._delete_via_keyboard((row, column), (row, len(self.document.get_line(row))))

    def action_leave_or_delete(self) -> None:
        if self.text:
            self.action_delete_right()
        else:
            self.post_message(self.LeaveRequested())

    def action_scroll_transcript(self, where: str) -> None:
        self.post_message(self.ScrollRequested(where))

    # Up and Down leave the text only where there is no line to move to.

    def action_cursor_up(self, select: bool = False) -> None:
        if select or self.get_cursor_up_location()[0] != self.cursor_location[0] or not self._at_first_line():
            super().action_cursor_up(select)
        else:
            self._recall(-1)

    def action_cursor_down(self, select: bool = False) -> None:
        if select or not self._at_last_line():
            super().action_cursor_down(select)
        else:
            self._recall(1)

    def _at_first_line(self) -> bool:
        return self.wrapped_document.location_to_offset(self.cursor_location).y == 0

    def _at_last_line(self) -> bool:
        offset = self.wrapped_document.location_to_offset(self.cursor_location)
        return offset.y >= self.wrapped_document.height - 1

    def _recall(self, step: int) -> None:
        if not self._sent:
            return
        if self._recalled is None:
            if step > 0:
                return
            self._draft = self.text
            position = len(self._sent) - 1
        else:
            position = self._recalled + step
        if position < 0:
            return
        if position >= len(self._sent):
            self._recalled = None
            self.replace_text(self._draft)
        else:
            self._recalled = position
            self.replace_text(self._sent[position])

    # A cursor between the parts of one emoji or letter would show a broken half and delete a part of it.

    def get_cursor_left_location(self) -> tuple[int, int]:
        row, column = self.cursor_location
        before = [start for start in grapheme_starts(self.document[row]) if start < column]
        return (row, before[-1]) if before else super().get_cursor_left_location()

    def get_cursor_right_location(self) -> tuple[int, int]:
        row, column = self.cursor_location
        after = [start for start in grapheme_starts(self.document[row]) if start > column]
        return (row, after[0]) if after else super().get_cursor_right_location()
