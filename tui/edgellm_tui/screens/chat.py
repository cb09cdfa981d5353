"""The chat screen: one conversation with one backend."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Markdown

from edgellm.contracts import ChatBackend, ChatMessage, EngineStats, FinishReason, ModelInfo
from edgellm_models.errors import Notice
from edgellm_tui.clipboard import copy_text
from edgellm_tui.messages import (
    ReplyDelta,
    ReplyFailed,
    ReplyFinished,
    ReplyNotice,
    ReplyStarted,
    StatsUpdated,
)
from edgellm_tui.screens.help import HelpScreen
from edgellm_tui.settings import ChatSettings
from edgellm_tui.slash import SlashCommand, UnknownCommand, parse_slash
from edgellm_tui.stream_worker import ReplyStream
from edgellm_tui.widgets.figures import count_text, path_text
from edgellm_tui.widgets.prompt import ChatPrompt, Verdict
from edgellm_tui.widgets.reply import Reply, finished_line, first_token_s
from edgellm_tui.widgets.status_line import StatusLine, TopBar
from edgellm_tui.widgets.transcript import ErrorLine, QuietLine, Transcript, UserMessage

QUIT_WINDOW_S = 2.0
"""A second Ctrl+C within this time quits."""

HINT_S = 4.0


class ChatScreen(Screen[None]):
    """Transcript, prompt and two bars."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop_reply", "Stop", show=False, priority=True),
        Binding("ctrl+n", "new_chat", "New chat", show=False, priority=True),
        Binding("ctrl+y", "copy_answer", "Copy answer", show=False, priority=True),
        Binding("f1", "help", "Help", show=False, priority=True),
    ]

    class Ready(Message):
        """The prompt is there."""

        def __init__(self, screen: ChatScreen) -> None:
            super().__init__()
            self.screen = screen

    def __init__(
        self, backend: ChatBackend, settings: ChatSettings, notices: tuple[Notice, ...] = ()
    ) -> None:
        super().__init__()
        self._backend = backend
        self._settings = settings
        self._opening_notices = notices
        self._model: ModelInfo | None = None
        self._turns: list[ChatMessage] = []
        self._conversation_id = uuid.uuid4().hex
        self._stream: ReplyStream | None = None
        self._reply: Reply | None = None
        self._message_taken = False
        """A message has left the prompt and its answer has not begun."""
        self._pending_prompt = ""
        self._context_before = 0
        self._last_answer = ""
        self._interrupted_at = float("-inf")
        self._hint_timer: Timer | None = None
        self._hint_ends_with_answer = False

    def compose(self) -> ComposeResult:
        yield TopBar()
        yield Transcript()
        yield ChatPrompt(judge=self._judge, placeholder="Ask anything")
        yield StatusLine()

    async def on_mount(self) -> None:
        self._model = self._backend.info()
        self._top.model = self._model
        await self._transcript.clear(self._model)
        for notice in self._opening_notices:
            await self._show_notice(notice)
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
    def generating(self) -> bool:
        return self._stream is not None

    # --- sending ---

    def _judge(self, text: str) -> Verdict:
        if not text.strip():
            return Verdict.WRONG
        if self.generating or self._message_taken:
            self.show_hint("Still answering: Esc stops it, your draft is kept", while_answering=True)
            return Verdict.LATER
        parsed = parse_slash(text)
        if isinstance(parsed, UnknownCommand):
            typed = parsed.typed if len(parsed.typed) <= 14 else f"{parsed.typed[:13]}…"
            near = f"did you mean /{parsed.nearest}?" if parsed.nearest else "F1 lists the commands"
            self.show_hint(f"/{typed} is no command, {near} (// sends it as text)")
            return Verdict.WRONG
        self._message_taken = isinstance(parsed, str)
        self._prompt.remember(text)
        self._clear_hint()
        return Verdict.TAKEN

    @on(ChatPrompt.Submitted)
    async def _submit(self, event: ChatPrompt.Submitted) -> None:
        parsed = parse_slash(event.text)
        if isinstance(parsed, SlashCommand):
            await self._run_command(parsed)
        elif self.generating or isinstance(parsed, UnknownCommand):
            self._prompt.give_back(event.text)
        else:
            await self._send(parsed)

    async def _send(self, text: str) -> None:
        self._pending_prompt = text
        self._context_before = self._top.context_used
        self._turns.append(ChatMessage("user", text))
        self._reply = Reply()
        # Set before the first await, so that a second Enter finds the screen busy.
        self._stream = ReplyStream(self._backend, self, self._settings)
        self._message_taken = False
        await self._transcript.add(UserMessage(text), follow=True)
        await self._transcript.add(self._reply, follow=True)
        self._status.ttft_s = self._status.now_tokens_per_s = self._status.answer_tokens_per_s = None
        self._describe_prompt()
        self._refresh_progress()
        system = self._settings.system_prompt
        messages = [ChatMessage("system", system), *self._turns] if system else list(self._turns)
        run = self._stream.run(self._conversation_id, messages, self._settings.sampling)
        self.run_worker(run, group="reply", exit_on_error=False)

    async def _run_command(self, command: SlashCommand) -> None:
        if command.name == "help":
            self.action_help()
        elif command.name == "new":
            await self.action_new_chat()
        elif command.name == "copy":
            await self.action_copy_answer()
        elif command.name == "save":
            self._save_answer(command.argument)
        elif command.name == "quit":
            await self.app.action_quit()

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
        finished, reply = event.finished, self._reply
        self._end_reply()
        self._top.context_used = finished.usage.prompt_tokens + finished.usage.completion_tokens
        # The engine's figures, as in the answer's last line; until here they were this screen's own.
        self._status.ttft_s = first_token_s(finished)
        self._status.answer_tokens_per_s = finished.timings.decode_tokens_per_s or None
        self._status.phase = "stopped" if finished.reason is FinishReason.CANCELLED else "ready"
        if reply is not None:
            self._keep_answer(reply)
            stopped = finished.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
            drawn = self._settings.sampling.temperature > 0
            await reply.finish(finished_line(finished, drawn=drawn), style="-cut" if stopped else "")
            self._transcript.text_arrived()

    @on(ReplyFailed)
    async def _reply_failed(self, event: ReplyFailed) -> None:
        reply = self._reply
        self._refresh_progress()
        self._end_reply()
        self._status.phase = "failed"
        if reply is not None:
            kept = self._keep_answer(reply)
            await reply.finish("■ broken off" if kept else "no answer", style="-cut")
            if not kept:
                # The question was not answered, so it is no part of the conversation: give it back.
                self._turns.pop()
                self._top.context_used = self._context_before
                if not self._prompt.draft:
                    self._prompt.replace_text(self._pending_prompt)
        await self._transcript.add(ErrorLine(event.error))

    def _keep_answer(self, reply: Reply) -> bool:
        if not reply.text:
            return False
        self._last_answer = reply.text
        self._turns.append(ChatMessage("assistant", reply.text))
        return True

    def _end_reply(self) -> None:
        self._stream = None
        self._reply = None
        self._status.busy = False
        self._status.now_tokens_per_s = None
        if self._hint_ends_with_answer:
            self._clear_hint()
        self._describe_prompt()

    async def _show_notice(self, notice: Notice) -> None:
        line = QuietLine(notice.detail)
        if self._reply is not None and self._reply.is_mounted:
            await self._transcript.scroller.mount(line, before=self._reply)
            self._transcript.text_arrived()
        else:
            await self._transcript.scroller.mount(line)

    # --- figures ---

    def _poll(self) -> None:
        if self._stream is None:
            return
        self.post_message(StatsUpdated(self._backend.stats()))

    @on(StatsUpdated)
    def _stats_updated(self, event: StatsUpdated) -> None:
        self._refresh_progress(event.stats)

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
            status.now_tokens_per_s = stats.decode_tokens_per_s
        if progress.prefill_total:
            self._top.context_used = progress.prefill_total + progress.tokens

    # --- keys ---

    async def action_stop_reply(self) -> None:
        """Esc: ends the answer, keeps what has come, leaves the draft alone."""
        if self._stream is None:
            self.clear_selection()
            return
        self._status.phase = "stopping"
        # In a task of its own: while the backend takes its time, keys still work.
        self.run_worker(self._stream.stop(), group="stop", exit_on_error=False)

    async def interrupt(self) -> None:
        """Ctrl+C: copies a selection, else stops, else (the second time within two seconds) quits."""
        selected = self._prompt.selected_text or self.get_selected_text()
        if selected:
            self.show_hint(await copy_text(self.app, selected, os.environ))
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

    async def action_new_chat(self) -> None:
        if self.generating:
            self.show_hint("Still answering: stop it with Esc first", while_answering=True)
            return
        self._turns.clear()
        self._conversation_id = uuid.uuid4().hex
        self._last_answer = ""
        self._top.context_used = 0
        self._status.ttft_s = self._status.answer_tokens_per_s = None
        self._status.phase = "ready"
        await self._transcript.clear(self._model)
        self._prompt.focus()

    async def action_copy_answer(self) -> None:
        text = self._reply.text if self._reply is not None and self._reply.text else self._last_answer
        if text:
            self.show_hint(await copy_text(self.app, text, os.environ))
        else:
            self.show_hint("There is no answer to copy yet")

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())

    @on(ChatPrompt.LeaveRequested)
    async def _leave(self) -> None:
        await self.app.action_quit()

    @on(ChatPrompt.ScrollRequested)
    def _scroll(self, event: ChatPrompt.ScrollRequested) -> None:
        self._transcript.scroll(event.where)

    @on(Markdown.LinkClicked)
    async def _link_clicked(self, event: Markdown.LinkClicked) -> None:
        # A model's link is not opened: over SSH that could start a browser in this very terminal.
        event.stop()
        self.show_hint(await copy_text(self.app, event.href, os.environ))

    # --- small things ---

    def show_hint(self, text: str, *, seconds: float = HINT_S, while_answering: bool = False) -> None:
        """A sentence in the status line: for a while, and with ``while_answering`` not beyond the answer."""
        self._hint_ends_with_answer = while_answering
        if self._hint_timer is not None:
            if text and text == self._status.hint:
                self._hint_timer.reset()
                return
            self._hint_timer.stop()
        self._status.hint = text
        self._hint_timer = self.set_timer(seconds, self._clear_hint)

    def _clear_hint(self) -> None:
        if self._hint_timer is not None:
            self._hint_timer.stop()
            self._hint_timer = None
        self._hint_ends_with_answer = False
        self._status.hint = ""

    def _describe_prompt(self) -> None:
        self._prompt.border_subtitle = "Esc stop" if self.generating else "Enter send · Ctrl+J new line"
        self._prompt.set_class(self.generating, "-generating")

    def _save_answer(self, argument: str) -> None:
        if not self._last_answer:
            self.show_hint("There is no answer to save yet")
            return
        name = argument or f"answer-{time.strftime('%Y%m%d-%H%M%S')}.md"
        path = Path(name)
        try:
            path = (self._settings.save_folder or Path.cwd()) / path.expanduser()
            text = self._last_answer.encode()
            # "x": a file that is there is somebody's work.
            with path.open("xb") as file:
                file.write(text)
        except FileExistsError:
            self.show_hint(f"{path_text(path)} exists already and was left alone")
        except OSError as error:
            why = error.strerror or type(error).__name__
            self.show_hint(f"Not saved, {why.lower()}: {path_text(path, 30)}")
        except UnicodeEncodeError:
            self.show_hint("Not saved: a part of the answer is no text that a file can hold")
        except (RuntimeError, ValueError):  # a home folder that is not known, a NUL
            self.show_hint(f"Not saved, no such path: {path_text(path, 30)}")
        else:
            self.show_hint(f"Saved to {path_text(path, 60)}")
