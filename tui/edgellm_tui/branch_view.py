"""Shows the branch of a conversation in the transcript, and at which fork the keys for versions act."""

from __future__ import annotations

from collections.abc import Sequence

from textual.widget import Widget

from edgellm.contracts import ModelInfo, StoredMessage
from edgellm_tui.conversation import Conversation
from edgellm_tui.unsaved import text_of
from edgellm_tui.widgets.reply import Reply
from edgellm_tui.widgets.transcript import Earlier, ErrorLine, QuietLine, Transcript, UserMessage

MOUNTED_AT_ONCE = 24
"""Saved messages that are made into widgets together; those before wait until somebody scrolls up."""


class BranchView:
    """Keeps the transcript in step with ``Conversation.branch``."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._chosen: str | None = None

    async def show(self, conversation: Conversation, model: ModelInfo | None) -> None:
        """The whole conversation anew, from its end."""
        empty = not conversation.branch
        await self._transcript.clear(model if empty else None)
        self._chosen = None
        if not empty:
            await self._mount(conversation.branch)
        self.mark(conversation)
        self._transcript.to_end()

    async def update(self, conversation: Conversation) -> None:
        """Changes what differs from the branch: everything from the first other message on."""
        shown = [widget.message_id for widget in self._transcript.messages()]
        wanted = [message.id for message in conversation.branch]
        if shown and shown[0] in wanted:
            wanted = wanted[wanted.index(shown[0]) :]  # what comes before waits in Earlier
        same = 0
        while same < min(len(shown), len(wanted)) and shown[same] == wanted[same]:
            same += 1
        if same < len(shown):
            await self._transcript.cut_from(shown[same])
        rest = conversation.branch[len(conversation.branch) - len(wanted) + same :]
        await self._mount(rest)
        self.mark(conversation)

    async def show_earlier(self, conversation: Conversation) -> None:
        """Mounts some of the messages before those that are shown."""
        line = next(iter(self._transcript.scroller.query(Earlier)), None)
        shown = self._transcript.messages()
        if line is None or not shown:
            return
        ids = [message.id for message in conversation.branch]
        first = ids.index(shown[0].message_id) if shown[0].message_id in ids else 0
        await line.remove()
        await self._mount(conversation.branch[:first], before=self._transcript.scroller.children[0])
        self.mark(conversation)

    async def reveal(self, conversation: Conversation, message_id: str) -> None:
        """Brings a message of the branch into view, at the top."""
        while all(widget.message_id != message_id for widget in self._transcript.messages()):
            before = len(self._transcript.messages())
            await self.show_earlier(conversation)
            if len(self._transcript.messages()) == before:
                return
        widget = next(w for w in self._transcript.messages() if w.message_id == message_id)
        scroller = self._transcript.scroller

        def look() -> None:
            scroller.scroll_to_widget(widget, animate=False, top=True)

        # Where it stands is known after the next layout.
        scroller.release_anchor()
        scroller.call_after_refresh(look)

    async def _mount(self, messages: Sequence[StoredMessage], before: Widget | None = None) -> None:
        kept = messages[-MOUNTED_AT_ONCE:]
        widgets: list[Widget] = []
        if len(kept) < len(messages):
            widgets.append(Earlier(len(messages) - len(kept)))
        replies: list[tuple[Reply, StoredMessage]] = []
        for message in kept:
            widgets += [QuietLine(notice.detail) for notice in message.notices]
            if message.message.role == "assistant":
                reply = Reply()
                replies.append((reply, message))
                widgets.append(reply)
                if message.error:
                    widgets.append(ErrorLine(message.error))
            else:
                widgets.append(UserMessage(text_of(message.message), message.id))
        if not widgets:
            return
        await self._transcript.insert(widgets, before=before)
        with self._transcript.app.batch_update():
            for reply, message in replies:
                await reply.restore(message)
        self._transcript.settled()

    # --- versions ---

    def fork(self, conversation: Conversation) -> StoredMessage | None:
        """The message whose versions the keys go through: the chosen one, else the last."""
        forks = conversation.forks
        chosen = next((message for message in forks if message.id == self._chosen), None)
        return chosen or (forks[-1] if forks else None)

    def choose(self, conversation: Conversation, by: int) -> bool:
        """Moves to the fork ``by`` places below; False where there is none."""
        forks, at = conversation.forks, self.fork(conversation)
        if at is None:
            return False
        place = forks.index(at) + by
        if not 0 <= place < len(forks):
            return False
        self._chosen = forks[place].id
        self.mark(conversation)
        for widget in self._transcript.messages():
            if widget.message_id == self._chosen:
                self._transcript.scroller.scroll_to_widget(widget, animate=False)
        return True

    def keep_place(self, message: StoredMessage | None) -> None:
        """The keys stay at this message."""
        self._chosen = message.id if message else None

    def mark(self, conversation: Conversation) -> None:
        """Writes on every message which of its versions it is."""
        at = self.fork(conversation)
        by_id = {message.id: message for message in conversation.branch}
        for widget in self._transcript.messages():
            message = by_id.get(widget.message_id)
            if message is not None:
                widget.set_place(
                    message.sibling, message.num_siblings, at is not None and at.id == message.id
                )
