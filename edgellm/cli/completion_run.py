"""One completion: its request, the run with Ctrl-C, what came of it, and the JSON that reports it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from edgellm.cli.piped_text import write_text

if TYPE_CHECKING:
    from edgellm.cli.runtime import Runtime
    from edgellm.contracts import (
        ConstraintSpec,
        GenerationRequest,
        SamplingParams,
        TokenEvent,
        TokenLogprob,
    )
    from edgellm_models.errors import Notice


def make_request(
    runtime: Runtime,
    prompt: str,
    sampling: SamplingParams,
    logprobs: int | None,
    no_special: bool,
    constraint: ConstraintSpec | None = None,
) -> GenerationRequest:
    """The prompt as ids. An empty one is a lone BOS where the model has one; otherwise the engine refuses
    it.
    """
    from edgellm.contracts import GenerationRequest

    tokenizer = runtime.tokenizer
    ids = tokenizer.encode(prompt, add_special=not no_special, parse_special=not no_special)
    if not ids and tokenizer.bos_id is not None and not no_special:
        ids = [tokenizer.bos_id]
    return GenerationRequest(
        "complete",
        tuple(ids),
        sampling,
        logprobs=logprobs,
        constraint=constraint,
        kv_policy=runtime.kv_policy,
        continues_text=True,
    )


class Completion:
    """Collects the events of the one request, and streams its text unless the result is JSON."""

    def __init__(self, as_json: bool) -> None:
        from edgellm.cli.terminal_text import TerminalText

        self._streams = not as_json
        self._on_terminal = self._streams and sys.stdout.isatty()
        self._cleaner = TerminalText()
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.notices: list[Notice] = []
        self.first_notices: list[Notice] = []
        self.last: TokenEvent | None = None
        self.score: float | None = None
        """Mean log-probability of the tokens, of a beam search."""
        self.interrupted = False

    def add(self, event: TokenEvent) -> None:
        self.text.append(event.text)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        if event.notice is not None:
            self.notices.append(event.notice)
        if event.finish_reason is not None:
            self.last = event
        if self._streams and event.text:
            write_text(sys.stdout, self._cleaner.push(event.text) if self._on_terminal else event.text)

    def end(self) -> None:
        """Ends the streamed text; on a terminal with the line."""
        if self._on_terminal:
            write_text(sys.stdout, self._cleaner.finish())
            if self.text and not "".join(self.text).endswith("\n"):
                write_text(sys.stdout, "\n")

    @property
    def reached_limit(self) -> bool:
        """The token limit cut the answer, and not the context, which has a notice of its own."""
        from edgellm.contracts import FinishReason

        return (
            self.last is not None
            and self.last.finish_reason is FinishReason.LENGTH
            and all(notice.kind != "context_full" for notice in self.notices)
        )

    def exit_code(self) -> int:
        from edgellm.cli.errors import INTERRUPTED

        return INTERRUPTED if self.interrupted else 0


def run(runtime: Runtime, request: GenerationRequest, result: Completion) -> None:
    """Runs the request to its end. Ctrl-C cancels it, which keeps the text so far; a second one ends at once.

    EngineError when the engine could not go on.
    """
    import asyncio
    import contextlib
    import signal

    from edgellm_models.errors import EngineError

    async def main() -> None:
        engine = runtime.engine
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            if result.interrupted:
                raise KeyboardInterrupt
            result.interrupted = True
            engine.cancel(request.request_id)

        # Not on Windows or outside of the main thread: there KeyboardInterrupt ends the run, the text so far
        # is out.
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGINT, interrupt)
        stream = engine.submit(request)
        try:
            async for event in stream:
                result.add(event)
        finally:
            await stream.aclose()
            result.end()

    asyncio.run(main())
    assert result.last is not None
    if result.last.error is not None:
        raise EngineError(f"the answer broke off: {result.last.error}")


def json_result(runtime: Runtime, request: GenerationRequest, result: Completion) -> dict[str, Any]:
    """The one object of ``--json``."""
    from edgellm.cli.output import timings_report

    last = result.last
    assert last is not None and last.timings is not None and last.finish_reason is not None
    load = {"import_s": runtime.times.import_s, "load_s": runtime.times.load_s}
    found = {
        "text": "".join(result.text),
        "token_ids": result.token_ids,
        "prompt_token_ids": request.prompt_token_ids,
        "finish_reason": last.finish_reason,
        "usage": last.usage,
        "timings": timings_report(last.timings, load),
        "draft": last.draft,
        "seed": last.seed,
        "notices": [*result.first_notices, *runtime.notices, *result.notices],
    }
    if request.logprobs is not None:
        found["logprobs"] = result.logprobs
    if result.score is not None:
        found["score"] = result.score
    return found
