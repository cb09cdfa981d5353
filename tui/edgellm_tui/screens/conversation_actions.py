"""Actions of the chat on its conversation: stopping, asking again, versions, other chats."""

from __future__ import annotations

import time

from edgellm.contracts import ChatMessage
from edgellm_models.errors import BadInputError, Notice
from edgellm_tui.screens.chat_parts import ChatParts
from edgellm_tui.screens.history import HistoryScreen, Picked
from edgellm_tui.unsaved import text_of

QUIT_WINDOW_S = 2.0
"""A second Ctrl+C within this time quits."""


class ConversationActions(ChatParts):
    """What the table of commands names under these keys."""

    def __init__(self) -> None:
        super().__init__()
        self._interrupted_at = float("-inf")

    # --- stopping and leaving ---

    async def action_stop_reply(self) -> None:
        """Esc: ends the answer, keeps what has come, leaves the draft alone."""
        if self._stream is None:
            if self._editing is not None:
                self._editing = None
                self._prompt.replace_text("")
                self._describe_prompt()
            elif self._attached:
                self._attached.clear()
                self._describe_prompt()
                self.show_hint("The attached files were taken away")
            self.clear_selection()
            return
        self._status.phase = "stopping"
        # In a task of its own: while the backend takes its time, keys still work.
        self.run_worker(self._stream.stop(), group="stop", exit_on_error=False)

    async def interrupt(self) -> None:
        """Ctrl+C: copies a selection, else stops, else (the second time within two seconds) quits."""
        selected = self._prompt.selected_text or self.get_selected_text()
        if selected:
            await self.copy(selected)
            self.clear_selection()
            self._prompt.move_cursor(self._prompt.cursor_location)
            return
        now = time.monotonic()
        if now - self._interrupted_at <= QUIT_WINDOW_S:
            self.app.exit(return_code=0)
            return
        self._interrupted_at = now
        if self.generating:
            await self.action_stop_reply()
            self.show_hint("Stopped. Ctrl+C again quits", seconds=QUIT_WINDOW_S)
        else:
            self.show_hint("Ctrl+C again quits, Ctrl+Q quits at once", seconds=QUIT_WINDOW_S)

    async def action_quit_chat(self) -> None:
        await self.app.action_quit()

    # --- asking again ---

    async def action_regenerate(self) -> None:
        """Answers the last question again; the answer that is there becomes its sibling."""
        if self._busy():
            return
        question = self._conversation.last_question
        if question is None:
            self.show_hint("There is no question to answer again")
            return
        last = self._conversation.branch[-1]
        sampling = self._conversation.effective_sampling
        if last.id != question.id and (sampling.temperature == 0 or sampling.seed is not None):
            why = "temperature 0" if sampling.temperature == 0 else f"seed {sampling.seed}"
            self.show_hint(
                f"With {why} the answer is the same again: F3 or /set temperature 0.8", seconds=8.0
            )
        ids = [message.id for message in self._conversation.branch]
        after = ids[ids.index(question.id) + 1 :]
        if not after:
            # Not answered: what stands below the question (an error, "stopped") goes with it.
            await self._ask(question, shown_from=question.id)
        else:
            await self._ask(question, shown_from=after[0], again=True)

    async def action_edit_question(self, argument: str = "") -> None:
        """Puts a question into the prompt; sent, it is asked as another version of itself."""
        if self._busy():
            return
        question = self._conversation.question_back(self._number(argument, "/edit"))
        if question is None:
            self.show_hint("There is no such question to edit")
            return
        draft = self._prompt.draft
        if draft and self._editing is None:
            self._prompt.remember(draft)
        self._editing = question
        self._prompt.replace_text(text_of(question.message))
        self._describe_prompt()
        self._prompt.focus()

    async def action_branch(self, argument: str = "") -> None:
        """Goes back to an earlier answer; what is asked next is a branch from there."""
        if self._busy():
            return
        number = self._number(argument, "/branch", 2)
        answer = self._conversation.answer_back(number)
        if answer is None:
            self.show_hint("There is no such answer to go on from")
            return
        self._conversation.go_back_to(answer)
        await self._view.update(self._conversation)
        self._show_chat()
        self.show_hint("What you ask now goes on from here; the rest is kept beside it")

    async def _other_version(self, by: int) -> None:
        if self._busy():
            return
        fork = self._view.fork(self._conversation)
        if fork is None:
            self.show_hint("There are no other versions here: Ctrl+R answers again, Ctrl+E edits")
            return
        place = [message.id for message in self._conversation.branch].index(fork.id)
        if not self._conversation.step(fork, by):
            self.show_hint("This is the last version" if by > 0 else "This is the first version")
            return
        self._editing = None
        self._view.keep_place(self._conversation.branch[place])
        await self._view.update(self._conversation)
        self._show_chat()

    async def action_previous_sibling(self) -> None:
        await self._other_version(-1)

    async def action_next_sibling(self) -> None:
        await self._other_version(1)

    def action_previous_fork(self) -> None:
        if not self._view.choose(self._conversation, -1):
            self.show_hint("There is no fork above")

    def action_next_fork(self) -> None:
        if not self._view.choose(self._conversation, 1):
            self.show_hint("There is no fork below")

    # --- chats ---

    async def action_new_chat(self) -> None:
        if self._busy():
            return
        await self._leave_chat()
        self._conversation = self._new_conversation()
        self._editing = None
        self._attached.clear()
        self._last_finished = None
        await self._view.show(self._conversation, self._model)
        self._show_chat()

    def action_history(self) -> None:
        self._pick_chat("")

    def action_search_history(self, argument: str = "") -> None:
        self._pick_chat(argument, searching=True)

    def _pick_chat(self, words: str, *, searching: bool = False) -> None:
        if self._busy():
            return
        current = self._conversation.chat_id

        async def picked(choice: Picked | None) -> None:
            if choice is not None:
                await self._open_chat(choice.chat_id, choice.message_id)
            elif current is not None:
                self._top.title = self._conversation.title  # it may have been renamed there
                if self._store.get_chat(current).deleted is not None:
                    await self.action_new_chat()

        self.app.push_screen(HistoryScreen(self._store, current, words, searching), picked)

    def action_rename(self, argument: str = "") -> None:
        title = " ".join(argument.split())
        if not title:
            raise BadInputError("/rename needs a title: /rename Paris, plans for May")
        self._conversation.rename(title)
        self._top.title = self._conversation.title

    async def action_compact(self, argument: str = "") -> None:
        """A new chat that begins with the end of this one, which stays as it is."""
        if self._busy():
            return
        number = self._number(argument, "/compact", 2)
        kept = self._conversation.last_turns(number)
        if not kept:
            self.show_hint("There is nothing to go on with yet")
            return
        old = self._conversation
        new = self._new_conversation()
        new.system, new.params, new.extra = old.system, dict(old.params), dict(old.extra)
        new.rename(f"{old.title} (continued)"[:80])
        parent: str | None = None
        assert new.chat_id is not None
        for message in kept:
            copied = ChatMessage(message.role, message.content, message.reasoning)
            parent = self._store.add_message(new.chat_id, copied, parent_id=parent).id
        await self._open_chat(new.chat_id)
        dropped = sum(m.message.role == "user" for m in old.branch) - number
        if dropped > 0:
            which = f"the {dropped} oldest question{'s' * (dropped > 1)}"
            text = f"goes on without {which}; the whole chat is in Ctrl+S"
            await self._show_notice(Notice("compacted", text))
