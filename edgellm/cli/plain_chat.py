"""Chat without a screen: one answer as text or JSON lines, and a conversation in lines."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgellm.cli.chat_kv import ChatKV
from edgellm.cli.chat_partner import Partner, partner_of
from edgellm.cli.errors import INTERRUPTED, tell
from edgellm.cli.output import Output, counted, timings_report
from edgellm.cli.piped_text import write_text
from edgellm.cli.saved_chats import kv_files
from edgellm.cli.terminal_text import TerminalText
from edgellm.contracts import (
    ChatBackend,
    ChatEvent,
    ChatMessage,
    ConstraintSpec,
    Delta,
    Finished,
    FinishReason,
    NoticeEvent,
    Prefill,
    Queued,
    SamplingParams,
)
from edgellm_models.errors import EdgeLLMError, EngineError, Notice

if TYPE_CHECKING:
    from edgellm.cli.chat_record import ChatRecord
    from edgellm.cli.chat_session import ChatSession
    from edgellm.cli.opening import Opening

LINE_PROMPT = "> "


class AnswerText:
    """The answer on standard output: as it is into a pipe, made safe on a terminal."""

    def __init__(self) -> None:
        self._on_terminal = sys.stdout.isatty()
        self._cleaner = TerminalText()
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, text: str) -> None:
        self._parts.append(text)
        write_text(sys.stdout, self._cleaner.push(text) if self._on_terminal else text)

    def end(self) -> None:
        """Ends the line, so that a prompt or the next program starts on its own."""
        if self._on_terminal:
            write_text(sys.stdout, self._cleaner.finish())
        if not self.text.endswith("\n"):
            write_text(sys.stdout, "\n")


class Answer:
    """One exchange with a backend. Ctrl-C ends it and keeps what has come; a second Ctrl-C does not wait."""

    def __init__(self, on_event: Callable[[ChatEvent], None]) -> None:
        self._on_event = on_event
        self.finished: Finished | None = None
        self.interrupted = False

    async def run(
        self,
        backend: ChatBackend,
        conversation_id: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        constraint: ConstraintSpec | None = None,
    ) -> None:
        """Streams the answer into ``on_event``. Raises what the backend raises."""
        loop = asyncio.get_running_loop()
        cancels: set[asyncio.Task[None]] = set()

        def interrupt() -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            cancels.add(asyncio.ensure_future(backend.cancel(conversation_id)))

        # Not on Windows or outside of the main thread: there KeyboardInterrupt ends the run.
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            stream = backend.stream_chat(conversation_id, messages, sampling, constraint=constraint)
            async for event in stream:
                if isinstance(event, Finished):
                    self.finished = event
                self._on_event(event)
        finally:
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                loop.remove_signal_handler(signal.SIGINT)


# --- one answer ---


def answer_once(opening: Opening, session: ChatSession, system: str, prompt: str) -> int:
    """Prints the answer to ``prompt`` and returns the exit code; both are saved as they come."""
    record = session.record(system, opening.model_argument)  # first: what was asked for may not be there
    partner = partner_of(opening, session.on_notice)
    try:
        return asyncio.run(_answer_once(opening, session, record, partner, prompt))
    finally:
        partner.close()


async def _answer_once(
    opening: Opening, session: ChatSession, record: ChatRecord, partner: Partner, prompt: str
) -> int:
    backend, sampling = await partner.connect()
    try:
        kv = ChatKV(kv_files(), session.on_notice) if session.continued is not None else None
        if kv is not None:
            await kv.load(backend, record.conversation_id, record.tokens)
        code = await print_answer(backend, record, prompt, sampling, session, opening, partner.load_times)
        if kv is not None and record.is_saved:
            await kv.save(backend, record.conversation_id, record.tokens)
        return code
    finally:
        await partner.disconnect(backend)


async def print_answer(
    backend: ChatBackend,
    record: ChatRecord,
    prompt: str,
    sampling: SamplingParams,
    session: ChatSession,
    opening: Opening,
    load_times: Mapping[str, float],
) -> int:
    """One answer from an open backend.

    EngineError when the answer broke off; what has come by then is printed and saved.
    """
    output, as_json = session.output, session.as_json
    shown = AnswerText()

    def on_event(event: ChatEvent) -> None:
        record.on_event(event)
        if isinstance(event, NoticeEvent):
            session.on_notice(event.notice)
        if as_json:
            if not isinstance(event, Finished):
                output.json(event_object(event))
        elif isinstance(event, Delta):
            shown.add(event.text)

    answer = Answer(on_event)
    with record.exchange(prompt, backend.info().name, sampling):
        try:
            await answer.run(backend, record.conversation_id, record.messages, sampling, opening.constraint)
        finally:
            if not as_json and record.reply:
                shown.end()
        finished = answer.finished
        if finished is None:
            raise EngineError("the answer ended without an end event")
    if as_json:
        chat_id = record.conversation_id if record.is_saved else None
        output.json(final_object(record.reply, finished, session.notices, load_times, chat_id))
    else:
        _note_end(finished, sampling, session.notices, output)
    if finished.reason is FinishReason.ERROR:
        raise EngineError(f"the answer broke off: {finished.error}")
    return INTERRUPTED if answer.interrupted else 0


def event_object(event: ChatEvent) -> dict[str, Any]:
    """One line of ``--json`` while the answer streams."""
    match event:
        case Delta():
            line: dict[str, Any] = {"type": "delta", "text": event.text, "token_ids": event.token_ids}
            if event.reasoning:
                line["reasoning"] = event.reasoning
            if event.tool_call is not None:
                line["tool_call"] = event.tool_call
            return line
        case Prefill():
            return {"type": "prefill", "done": event.done, "total": event.total, "cached": event.cached}
        case Queued():
            return {"type": "queued", "position": event.position}
        case NoticeEvent():
            return {"type": "notice", "kind": event.notice.kind, "detail": event.notice.detail}
        case Finished():
            return {"type": "finished", "finish_reason": event.reason}


def final_object(
    text: str,
    finished: Finished,
    notices: Sequence[Notice],
    load: Mapping[str, float],
    chat_id: str | None,
) -> dict[str, Any]:
    """The last line of ``--json``."""
    found = {
        "type": "finished",
        "text": text,
        "finish_reason": finished.reason,
        "usage": finished.usage,
        "timings": timings_report(finished.timings, load),
        "draft": finished.draft,
        "seed": finished.seed,
        "notices": list(notices),
        "chat_id": chat_id,
    }
    if finished.error is not None:
        found["error"] = finished.error
    return found


# --- a conversation in lines ---


def converse(opening: Opening, session: ChatSession, system: str) -> int:
    """Talks in lines until Ctrl-D (0) or Ctrl-C at the prompt (130); every line is saved as it comes."""
    record = session.record(system, opening.model_argument)
    partner = partner_of(opening, session.on_notice)
    try:
        with asyncio.Runner() as runner:
            backend, sampling = runner.run(partner.connect())
            try:
                kv = ChatKV(kv_files(), session.on_notice)
                runner.run(kv.load(backend, record.conversation_id, record.tokens))
                code = line_mode(runner, backend, record, sampling, session.output, opening.constraint)
                if record.is_saved:
                    runner.run(kv.save(backend, record.conversation_id, record.tokens))
                return code
            finally:
                runner.run(partner.disconnect(backend))
    finally:
        partner.close()


def line_mode(
    runner: asyncio.Runner,
    backend: ChatBackend,
    record: ChatRecord,
    sampling: SamplingParams,
    output: Output,
    constraint: ConstraintSpec | None = None,
    read: Callable[[], str] | None = None,
) -> int:
    """The conversation itself. ``read`` returns the next line, raises EOFError at the end."""
    read_line = read or _reader()
    info = backend.info()
    facts = " · ".join(part for part in (info.name, info.quantization) if part)
    output.note(f"{facts} · /quit or Ctrl-D leaves, Ctrl-C stops an answer, /new starts over")
    while True:
        try:
            text = read_line()
        except EOFError:
            _end_line()
            return 0
        except KeyboardInterrupt:
            _end_line()
            return INTERRUPTED
        command = text.strip()
        if not command:
            continue
        if command == "/quit":
            return 0
        if command == "/new":
            record.start_over()
            output.note("a new conversation")
            continue
        if command.startswith("/") and not command.startswith("//"):
            output.note(f"{command.split()[0]} is no command here: /new, /quit; // sends a slash")
            continue
        text = text.replace("//", "/", 1) if command.startswith("//") else text
        runner.run(_exchange(backend, record, text, sampling, output, constraint))


async def _exchange(
    backend: ChatBackend,
    record: ChatRecord,
    text: str,
    sampling: SamplingParams,
    output: Output,
    constraint: ConstraintSpec | None,
) -> None:
    """Prints one answer; a failure is a line, not the end of the conversation."""
    shown = AnswerText()
    notices: list[Notice] = []

    def on_event(event: ChatEvent) -> None:
        record.on_event(event)
        if isinstance(event, Delta):
            shown.add(event.text)
        elif isinstance(event, NoticeEvent):
            notices.append(event.notice)
            output.notice(event.notice)

    answer = Answer(on_event)
    error: str | None = None
    try:
        with record.exchange(text, backend.info().name, sampling):
            await answer.run(backend, record.conversation_id, record.messages, sampling, constraint)
    except EdgeLLMError as failure:
        error = str(failure)
    finally:
        shown.end()
    if answer.finished is not None and answer.finished.reason is FinishReason.ERROR:
        error = answer.finished.error or "the engine failed"
    if error is not None:
        output.note(f"edgellm: {error}")
    elif answer.interrupted:
        output.note("stopped")
    if answer.finished is not None:
        _note_end(answer.finished, sampling, notices, output)


def _note_end(
    finished: Finished, sampling: SamplingParams, notices: Sequence[Notice], output: Output
) -> None:
    """What cut the answer, unless a notice said it already, and the seed that was drawn for it."""
    limit = sampling.max_new_tokens
    if finished.reason is FinishReason.LENGTH and all(notice.kind != "context_full" for notice in notices):
        if limit is not None and finished.usage.completion_tokens >= limit:
            output.note(f"note: the answer was cut at {counted(limit, 'token')}; --max-tokens N allows more")
        else:
            output.note("note: the answer was cut: the context is full; --ctx N allows more")
    if sampling.seed is None and sampling.temperature > 0 and finished.usage.completion_tokens:
        output.note(f"note: seed {finished.seed}")


def _reader() -> Callable[[], str]:
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (editing and history for input())
        return lambda: input(LINE_PROMPT)

    def read() -> str:
        # The answers go to a file or program, the prompt to the person.
        tell(LINE_PROMPT)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read


def _end_line() -> None:
    tell("\n")
