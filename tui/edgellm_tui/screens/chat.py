"""The chat screen: one conversation with one backend, from the question to the end of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message

from edgellm.contracts import (
    ChatBackend,
    ChatStore,
    EngineStats,
    Finished,
    FinishReason,
    ModelInfo,
    StoredMessage,
)
from edgellm_models.errors import EdgeLLMError, Notice
from edgellm_tui.branch_view import BranchView
from edgellm_tui.commands import bindings, completions
from edgellm_tui.conversation import THINKS, Conversation, Question
from edgellm_tui.files import load_prompts, save_prompts, with_attachments
from edgellm_tui.live_figures import gather, now_rate
from edgellm_tui.messages import (
    ReplyDelta,
    ReplyFailed,
    ReplyFinished,
    ReplyNotice,
    ReplyStarted,
    StatsUpdated,
)
from edgellm_tui.screens.conversation_actions import ConversationActions
from edgellm_tui.screens.model_actions import ModelActions
from edgellm_tui.screens.text_actions import TextActions
from edgellm_tui.settings import ChatSettings
from edgellm_tui.slash import SlashCommand, UnknownCommand, parse_slash
from edgellm_tui.stream_worker import ReplyStream
from edgellm_tui.unsaved import MemoryStore, text_of
from edgellm_tui.widgets.figures import count_text
from edgellm_tui.widgets.prompt import ChatPrompt, Verdict
from edgellm_tui.widgets.reply import Reply, finished_line, first_token_s
from edgellm_tui.widgets.stats_panel import StatsPanel
from edgellm_tui.widgets.status_line import StatusLine, TopBar
from edgellm_tui.widgets.streaming_markdown import StreamingMarkdown
from edgellm_tui.widgets.transcript import Earlier, ErrorLine, QuietLine, Transcript, UserMessage

PANEL_WIDTH = 110
"""From so many columns on the live panel has room beside the conversation."""

IDLE_POLLS = 16
"""While nothing is written, one of so many polls is made."""
SETTLING_POLLS = 4
"""After an answer, and in the beginning, so many are made at once: a server is asked in the background, and
what is known by now may be from before."""


class ChatScreen(ConversationActions, TextActions, ModelActions):
    """Transcript, prompt, two bars and the live panel."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings()]

    class Ready(Message):
        """The prompt is there."""

        def __init__(self, screen: ChatScreen) -> None:
            super().__init__()
            self.screen = screen

    def __init__(
        self,
        backend: ChatBackend,
        settings: ChatSettings,
        notices: tuple[Notice, ...] = (),
        store: ChatStore | None = None,
        chat_id: str | None = None,
    ) -> None:
        super().__init__()
        self._backend = backend
        self._settings = settings
        self._opening_notices = notices
        self._store: ChatStore = store if store is not None else MemoryStore()
        self._first_chat = chat_id
        self._model: ModelInfo = backend.info()
        self._conversation = self._new_conversation()
        self._notices: list[Notice] = list(notices)
        self._stream: ReplyStream | None = None
        self._question: Question | None = None
        self._asked: StoredMessage | None = None
        self._reply: Reply | None = None
        self._last_finished: Finished | None = None
        self._message_taken = False
        """A message has left the prompt and its answer has not begun."""
        self._context_before = 0
        self._polls = 0
        self._settling = SETTLING_POLLS

    def _new_conversation(self) -> Conversation:
        settings = self._settings
        return Conversation(
            self._store,
            self._model.name,
            settings.sampling,
            settings.system_prompt,
            extra=dict(settings.chat_extra),
        )

    def compose(self) -> ComposeResult:
        yield TopBar()
        with Horizontal(id="main"):
            with Vertical(id="talk"):
                yield Transcript()
                yield ChatPrompt(judge=self._judge, placeholder="Ask anything")
            yield StatsPanel()
        yield StatusLine()

    async def on_mount(self) -> None:
        self._view = BranchView(self._transcript)
        self._top.model = self._model
        self._prompt.load_history(load_prompts(self._settings.prompts_file))
        await self._transcript.clear(self._model)
        if self._first_chat is not None:
            await self._open_chat(self._first_chat)
        for notice in self._opening_notices:
            await self._show_notice(notice)
        self._place_panel()
        self._describe_prompt()
        self.post_message(self.Ready(self))
        self.set_interval(self._settings.stats_interval_s, self._poll)

    @property
    def _top(self) -> TopBar:
        return self.query_one(TopBar)

    @property
    def _transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def _prompt(self) -> ChatPrompt:
        return self.query_one(ChatPrompt)

    @property
    def _status(self) -> StatusLine:
        return self.query_one(StatusLine)

    @property
    def _panel(self) -> StatsPanel:
        return self.query_one(StatsPanel)

    @property
    def generating(self) -> bool:
        return self._stream is not None

    async def show_error(self, text: str) -> None:
        """A failure that is not an answer's."""
        await self._transcript.add(ErrorLine(text))

    async def use_backend(
        self, backend: ChatBackend, settings: ChatSettings, notices: Sequence[Notice] = ()
    ) -> None:
        """Goes on with another model, or with the same one in a new engine."""
        self._backend, self._settings, self._model = backend, settings, backend.info()
        self._conversation.model, self._conversation.sampling = self._model.name, settings.sampling
        self._top.model = self._model
        self._last_finished = None
        self._settling = SETTLING_POLLS
        if not self._conversation.branch:
            await self._transcript.clear(self._model)
        else:
            await self._show_notice(Notice("model_opened", f"{self._model.name} answers from here on"))
        for notice in notices:
            if notice not in self._notices:  # the same engine anew says what it said before
                await self._show_notice(notice)
        self._status.phase = "ready"

    # --- sending ---

    def _judge(self, text: str) -> Verdict:
        if not text.strip():
            return Verdict.WRONG
        parsed = parse_slash(text)
        at_once = isinstance(parsed, SlashCommand) and not parsed.command.waits
        if (self.generating or self._message_taken) and not at_once:
            self.show_hint("Still answering: Esc stops it, your draft is kept", while_answering=True)
            return Verdict.LATER
        if isinstance(parsed, UnknownCommand):
            typed = parsed.typed if len(parsed.typed) <= 14 else f"{parsed.typed[:13]}…"
            near = f"did you mean /{parsed.nearest}?" if parsed.nearest else "F1 lists the commands"
            self.show_hint(f"/{typed} is no command, {near} (// sends it as text)")
            return Verdict.WRONG
        self._message_taken = isinstance(parsed, str)
        self._prompt.remember(text)
        save_prompts(self._settings.prompts_file, self._prompt.sent)
        self._clear_hint()
        return Verdict.TAKEN

    @on(ChatPrompt.Submitted)
    async def _submit(self, event: ChatPrompt.Submitted) -> None:
        parsed = parse_slash(event.text)
        if isinstance(parsed, SlashCommand):
            await self.run_command(parsed.command, parsed.argument)
        elif self.generating or isinstance(parsed, UnknownCommand):
            self._prompt.give_back(event.text)
        else:
            await self._send(parsed)

    @on(ChatPrompt.Edited)
    def _edited(self, event: ChatPrompt.Edited) -> None:
        found = completions(event.text)
        if found and event.text != f"/{found[0]}":
            names = "  ".join(f"/{name}" for name in found[:8]) + (" …" if len(found) > 8 else "")
            self._prompt.border_title = f"Tab: {names}"
        else:
            self._describe_prompt()

    async def _send(self, text: str) -> None:
        """Asks ``text``: as another version of the question that is edited or was not answered, else at the
        end."""
        try:
            whole = with_attachments(text, [(a.name, a.text) for a in self._attached])
            last = self._conversation.branch[-1] if self._conversation.branch else None
            unanswered = last if last is not None and last.message.role == "user" else None
            replaced = self._editing or unanswered
            if unanswered is not None and self._editing is None and text_of(unanswered.message) == whole:
                question = unanswered
            else:
                question = self._conversation.ask(whole, instead_of=replaced)
            await self._ask(question, shown_from=replaced.id if replaced else None)
        except EdgeLLMError as error:
            self._message_taken = False
            self._prompt.give_back(text)
            await self._transcript.add(ErrorLine(str(error)))
            return
        self._attached.clear()
        self._editing = None
        self._describe_prompt()

    async def _ask(self, message: StoredMessage, *, shown_from: str | None, again: bool = False) -> None:
        """Streams an answer to ``message``; the transcript is taken away from ``shown_from`` on."""
        self._context_before = self._top.context_used
        question = self._conversation.begin(message)
        self._asked, self._question = message, question
        self._reply = Reply()
        # Set before the first await, so that a second Enter finds the screen busy.
        settings = self._settings.told(THINKS, self._conversation.thinks)
        self._stream = ReplyStream(self._backend, self, settings, question)
        self._message_taken = False
        self._transcript.writing = True
        self._last_finished = None
        self._view.keep_place(None)
        if shown_from is not None:
            await self._transcript.cut_from(shown_from)
        if not again:
            await self._transcript.add(UserMessage(text_of(message.message), message.id), follow=True)
        await self._transcript.add(self._reply, follow=True)
        self._view.mark(self._conversation)
        self._top.title = self._conversation.title
        self._status.ttft_s = self._status.now_tokens_per_s = self._status.answer_tokens_per_s = None
        self._describe_prompt()
        self._refresh_progress()
        self.run_worker(self._stream.run(), group="reply", exit_on_error=False)

    # --- the answer ---

    @on(ReplyStarted)
    def _reply_started(self) -> None:
        self._refresh_progress()

    @on(ReplyDelta)
    async def _reply_delta(self, event: ReplyDelta) -> None:
        try:
            if self._reply is not None:
                await self._reply.append(event.text, event.reasoning)
                self._transcript.text_arrived()
        finally:
            if self._stream is not None:
                self._stream.painted()

    @on(ReplyNotice)
    async def _reply_notice(self, event: ReplyNotice) -> None:
        await self._show_notice(event.notice)

    @on(ReplyFinished)
    async def _reply_finished(self, event: ReplyFinished) -> None:
        finished, reply, question = event.finished, self._reply, self._question
        if question is not None:
            self._answered_chats.add(question.chat_id)
        self._end_reply()
        self._last_finished = finished
        self._top.context_used = finished.usage.prompt_tokens + finished.usage.completion_tokens
        # The engine's figures, as in the answer's last line; until here they were this screen's own.
        self._status.ttft_s = first_token_s(finished)
        self._status.answer_tokens_per_s = finished.timings.decode_tokens_per_s or None
        self._status.phase = "stopped" if finished.reason is FinishReason.CANCELLED else "ready"
        if reply is None or question is None:
            return
        stopped = finished.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        if reply.has_text:
            await self._save(lambda: question.writer.finish(finished))
            reply.message_id = question.writer.message_id
            line = finished_line(finished, drawn=question.sampling.temperature > 0)
        elif finished.reason is FinishReason.CANCELLED:
            await self._save(lambda: question.writer.fail("stopped before the first word"))
            self._top.context_used = self._context_before
            line = "■ stopped before the first word · Ctrl+R asks again"
        else:
            await self._save(lambda: question.writer.finish(finished))
            reply.message_id = question.writer.message_id
            line = finished_line(finished, drawn=question.sampling.temperature > 0) + " · an empty answer"
        await reply.finish(line, style="-cut" if stopped else "")
        self._after_answer()

    @on(ReplyFailed)
    async def _reply_failed(self, event: ReplyFailed) -> None:
        reply, question = self._reply, self._question
        self._refresh_progress()
        self._end_reply()
        self._status.phase = "failed"
        if reply is not None and question is not None:
            await self._save(lambda: question.writer.fail(event.error))
            if reply.has_text:
                reply.message_id = question.writer.message_id
            await reply.finish("■ broken off" if reply.has_text else "no answer", style="-cut")
            if not reply.has_text:
                # The question was not answered: give it back. Sent again, it is not asked twice.
                self._top.context_used = self._context_before
                if not self._prompt.draft and self._asked is not None:
                    self._prompt.replace_text(text_of(self._asked.message))
            self._after_answer()
        restart = " · /restart starts the engine again" if self.can_restart else ""
        await self._transcript.add(ErrorLine(event.error + restart))

    def _after_answer(self) -> None:
        self._conversation.refresh()
        self._view.mark(self._conversation)
        self._transcript.text_arrived()
        self._poll_now()

    def _end_reply(self) -> None:
        self._stream = None
        self._settling = SETTLING_POLLS
        self._reply = None
        self._question = None
        self._transcript.writing = False
        self._status.busy = False
        self._status.now_tokens_per_s = None
        if self._hint_ends_with_answer:
            self._clear_hint()
        self._describe_prompt()

    async def _show_notice(self, notice: Notice) -> None:
        self._notices.append(notice)
        line = QuietLine(notice.detail)
        if self._reply is not None and self._reply.is_mounted:
            await self._transcript.scroller.mount(line, before=self._reply)
        else:
            await self._transcript.scroller.mount(line)
        self._transcript.text_arrived()

    @on(Earlier.Wanted)
    async def _earlier(self) -> None:
        await self._view.show_earlier(self._conversation)

    # --- figures ---

    def _poll(self) -> None:
        self._polls += 1
        settling = self._settling > 0
        if self._stream is not None or (self._panel.display and (settling or self._polls % IDLE_POLLS == 0)):
            self._poll_now()
        if settling and self._stream is None:
            self._settling -= 1

    def _poll_now(self) -> None:
        self.post_message(StatsUpdated(self._backend.stats()))

    @on(StatsUpdated)
    def _stats_updated(self, event: StatsUpdated) -> None:
        self._refresh_progress(event.stats)
        progress = self._stream.progress if self._stream is not None else None
        snapshot = gather(
            progress, event.stats, self._last_finished, self._model, self._top.context_used, self._notices
        )
        self._panel.show(snapshot, sample=progress is not None and progress.phase == "writing")

    def _refresh_progress(self, stats: EngineStats | None = None) -> None:
        if self._stream is None:
            return
        progress, status = self._stream.progress, self._status
        status.busy = True
        if progress.phase == "queued":
            status.phase = f"queued, position {progress.queue_position}"
        elif progress.phase == "reading":
            read = f"{count_text(progress.prefill_done)} / {count_text(progress.prefill_total)}"
            cached = f", {count_text(progress.prefill_cached)} cached" if progress.prefill_cached else ""
            status.phase = f"reading {read} tokens{cached}"
        elif progress.phase == "writing":
            status.phase = f"writing, {count_text(progress.tokens)} tokens"
        else:
            status.phase = progress.phase
        if self._reply is not None and progress.first_token_at is None:
            self._reply.waiting(f"{status.phase} …")
        status.ttft_s = progress.ttft_s
        status.answer_tokens_per_s = progress.tokens_per_s
        if stats is not None and progress.phase == "writing":
            status.now_tokens_per_s = now_rate(progress, stats)
        if progress.prefill_total:
            self._top.context_used = progress.prefill_total + progress.tokens

    # --- layout ---

    def on_resize(self, event: events.Resize) -> None:
        self._place_panel()

    def _place_panel(self) -> None:
        wide = self.app.size.width >= PANEL_WIDTH
        chosen = self._panel_chosen if self._panel_chosen is not None else self._settings.panel
        panel = self._panel
        panel.display = wide and self.app.size.height >= 20 if chosen is None else chosen
        panel.set_class(not wide, "-strip")
        main = self.query_one("#main")
        main.styles.layout = "horizontal" if wide else "vertical"

    # --- small things ---

    @on(ChatPrompt.LeaveRequested)
    async def _leave(self) -> None:
        await self.app.action_quit()

    @on(ChatPrompt.ScrollRequested)
    def _scroll(self, event: ChatPrompt.ScrollRequested) -> None:
        self._transcript.scroll(event.where)

    @on(ChatPrompt.StopRequested)
    async def _stop(self) -> None:
        await self.action_stop_reply()

    @on(StreamingMarkdown.LinkClicked)
    async def _link_clicked(self, event: StreamingMarkdown.LinkClicked) -> None:
        # A model's link is not opened: over SSH that could start a browser in this very terminal.
        event.stop()
        await self.copy(event.address)

    def _describe_prompt(self) -> None:
        prompt = self._prompt
        if self.generating:
            prompt.border_subtitle = "Esc stop"
        elif self._editing is not None:
            prompt.border_subtitle = "Enter asks anew · Esc cancels"
        else:
            prompt.border_subtitle = "Enter send · Ctrl+J new line"
        titles = ["editing a question"] if self._editing is not None else []
        titles += [f"+ {a.name} ({a.size})" for a in self._attached]
        prompt.border_title = "  ".join(titles)
        prompt.set_class(self.generating, "-generating")

    async def _open_chat(self, chat_id: str, message_id: str | None = None) -> None:
        """A saved chat, at its end or at one of its messages, which may be of another branch."""
        await self._leave_chat()
        chat = self._store.get_chat(chat_id)
        self._conversation = Conversation.of(self._store, chat, self._model.name, self._settings.sampling)
        self._editing = None
        self._attached.clear()
        self._last_finished = None
        if message_id is not None:
            self._conversation.go_to(message_id)
        await self._view.show(self._conversation, self._model)
        self._show_chat()
        if message_id is not None:
            await self._view.reveal(self._conversation, message_id)
        # Beside the screen: a question that is asked meanwhile is just computed.
        self.run_worker(self._take_up(), group="keep", exit_on_error=False)

    async def _leave_chat(self) -> None:
        for notice in await self.put_by():
            await self._show_notice(notice)

    def _show_chat(self) -> None:
        """The bars say what the shown chat is."""
        self._top.title = self._conversation.title
        self._top.context_used = self._conversation.tokens
        self._status.ttft_s = self._status.answer_tokens_per_s = None
        self._status.phase = "ready"
        self._describe_prompt()
        self._poll_now()
        self._prompt.focus()
