"""``edgellm complete --input``: many prompts from a file, a line of JSON for each, in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from edgellm.cli.output import Output
    from edgellm.cli.runtime import Runtime
    from edgellm.contracts import ConstraintSpec, GenerationRequest, SamplingParams, TokenEvent
    from edgellm_models.errors import Notice

MAX_LINE_BYTES = 64 << 20
OPEN_AT_ONCE = 64
"""Lines that are read ahead of the first one without a result."""
SAMPLING_KEYS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "typical_p": "typical_p", "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty", "seed": "seed",
    "max_tokens": "max_new_tokens", "stop": "stop", "ignore_eos": "ignore_eos",
}  # fmt: skip
"""Key of a line -> field of SamplingParams."""
KEYS = {"id", "prompt", "prompt_token_ids", *SAMPLING_KEYS}


@dataclass(frozen=True)
class BatchSettings:
    """What holds for every line that does not say otherwise."""

    sampling: SamplingParams
    logprobs: int | None
    no_special: bool
    constraint: ConstraintSpec | None


@dataclass
class _Line:
    """One line of the input on its way to its result."""

    number: int
    """Counted from 1."""
    id: Any = None
    request: GenerationRequest | None = None
    error: str | None = None
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.error is not None or (bool(self.events) and self.events[-1].finish_reason is not None)


@dataclass(frozen=True)
class BatchCounts:
    """How a batch went."""

    done: int
    failed: int
    kept: int
    """Results that were there already."""


def batch_files(
    source: str | None,
    target: str | None,
    words: tuple[str, ...],
    settings: Mapping[str, Any],
    *,
    beams: int | None,
    as_json: bool,
) -> tuple[Path, Path] | None:
    """The two files of a batch, checked; None when none was asked for. UsageError for what does not go with
    it."""
    from edgellm_models.errors import UsageError

    if source is None and target is None:
        return None
    if source is None or target is None:
        raise UsageError("--input and --output go together: the prompts and where their answers go")
    if beams is not None or as_json:
        raise UsageError(f"--input cannot be combined with {'--json' if beams is None else '--beams'}")
    if len(words) + (settings.get("model") is not None) > 1:
        raise UsageError("with --input the prompts are in the file; give at most a MODEL beside it")
    files = Path(source).expanduser(), Path(target).expanduser()
    check_files(*files)
    return files


def report_batch(counts: BatchCounts, output: Output) -> int:
    """Says how it went; the exit code is that of bad input when a line failed."""
    from edgellm_models.errors import BadInputError

    failed = f", {counts.failed} of them without an answer (see their error)" if counts.failed else ""
    output.note(f"{counts.done} lines done{failed}")
    return BadInputError.exit_code if counts.failed else 0


def run_batch(
    runtime: Runtime, source: Path, target: Path, settings: BatchSettings, output: Output
) -> BatchCounts:
    """Answers every line of ``source`` that has no result in ``target`` yet, and appends the results.

    A line is ``{"prompt": TEXT}`` or ``{"prompt_token_ids": [..]}``, with an ``id`` of any kind and sampling
    settings of its own if it likes; empty lines are passed over. A line that cannot be served has
    ``{"line", "error"}`` as its result.
    """
    kept, after = keep_whole_results(target)
    if kept:
        output.note(f"{target} has {kept} results already; going on behind line {after}")
    done = failed = 0
    with (
        open_input(source) as lines,
        # A lone surrogate of an id becomes the escape that JSON has for it.
        target.open("a", encoding="utf-8", errors="backslashreplace", newline="\n") as results,
    ):
        for line in answered(runtime, read_lines(lines, after), settings):
            result = result_of(line, settings)
            results.write(json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n")
            results.flush()
            done += 1
            failed += "error" in result
    return BatchCounts(done, failed, kept)


def open_input(source: Path) -> BinaryIO:
    """The lines. NotFoundError or BadInputError when there are none to read."""
    from edgellm_models.errors import BadInputError, NotFoundError

    try:
        return source.open("rb")
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {source}") from None
    except OSError as error:
        raise BadInputError(f"cannot read {source}: {error.strerror}") from None


def check_files(source: Path, target: Path) -> None:
    """Says what is wrong with the files before a model is loaded for them."""
    from edgellm_models.errors import OutputError, UsageError

    open_input(source).close()
    if target.exists() and target.samefile(source):
        raise UsageError(f"--input and --output are the same file, {source}")
    keep_whole_results(target)
    try:
        target.open("ab").close()
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}") from None


def keep_whole_results(target: Path) -> tuple[int, int]:
    """Number of results in a file, and the input line of the last one. What a kill left of a line is cut off.

    BadInputError, and the file is left alone, when it holds anything else.
    """
    from edgellm_models.errors import BadInputError, OutputError

    kept = after = end = 0
    try:
        with target.open("r+b") as file:
            while data := file.readline(MAX_LINE_BYTES + 1):
                if not data.endswith(b"\n"):
                    break
                try:
                    number = json.loads(data)["line"]
                except (ValueError, TypeError, KeyError, RecursionError):
                    number = None
                if not isinstance(number, int) or number <= after:
                    raise BadInputError(
                        f"line {kept + 1} of {target} is no result of a batch; give --output another name"
                    )
                kept, after, end = kept + 1, number, end + len(data)
            file.truncate(end)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise OutputError(f"cannot go on with {target}: {error.strerror}") from None
    return kept, after


def read_lines(file: BinaryIO, after: int) -> Iterator[tuple[int, bytes]]:
    """(number, line) of those behind line ``after`` that are not empty; one that is too long is cut."""
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
            while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
        if number > after and data.strip():
            yield number, data


def answered(
    runtime: Runtime, lines: Iterator[tuple[int, bytes]], settings: BatchSettings
) -> Iterator[_Line]:
    """The lines in order, each as soon as it and all before it are done; many run at once."""
    engine = runtime.core
    waiting: dict[str, _Line] = {}
    more = True
    while more or waiting:
        while more and len(waiting) < OPEN_AT_ONCE:
            following = next(lines, None)
            if following is None:
                more = False
                break
            line = _prepare(runtime, *following, settings)
            waiting[str(line.number)] = line
            if line.request is not None:
                engine.submit(line.request)
        if engine.has_work():
            for event in engine.step():
                waiting[event.request_id].events.append(event)
        while waiting and (first := next(iter(waiting.values()))).is_done:
            del waiting[str(first.number)]
            yield first


def _prepare(runtime: Runtime, number: int, data: bytes, settings: BatchSettings) -> _Line:
    """A line as a request, or with the reason why it is none."""
    from edgellm_models.errors import BadInputError, EngineError

    line = _Line(number)
    try:
        values = parse_line(data)
        line.id = values.get("id")
        request = make_request(runtime, number, values, settings)
        runtime.core.validate(request)
        line.request = request
    except (BadInputError, EngineError) as error:
        line.error = str(error)
    return line


def parse_line(data: bytes) -> Mapping[str, Any]:
    """One line as an object with known keys. BadInputError says what is wrong."""
    from edgellm_models.errors import BadInputError

    if len(data) > MAX_LINE_BYTES:
        raise BadInputError(f"the line is over {MAX_LINE_BYTES:,} bytes")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"the line is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadInputError('the line must be an object such as {"prompt": "..."}')
    unknown = sorted(set(values) - KEYS)
    if unknown:
        raise BadInputError(f"unknown key {unknown[0]!r}; a line has {', '.join(sorted(KEYS))}")
    if ("prompt" in values) == ("prompt_token_ids" in values):
        raise BadInputError("the line needs either prompt or prompt_token_ids")
    prompt = values.get("prompt", "")
    if not isinstance(prompt, str) or any("\ud800" <= c <= "\udfff" for c in prompt):
        raise BadInputError("prompt must be text, without lone surrogates")
    ids = values.get("prompt_token_ids", [])
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        raise BadInputError("prompt_token_ids must be a list of integers")
    return values


def make_request(
    runtime: Runtime, number: int, values: Mapping[str, Any], settings: BatchSettings
) -> GenerationRequest:
    """The request of one line. BadInputError when a setting of its own is wrong."""
    from edgellm.cli.completion_run import make_request as request_for
    from edgellm_models.errors import BadInputError

    own = {SAMPLING_KEYS[key]: value for key, value in values.items() if key in SAMPLING_KEYS}
    if "stop" in own:
        own["stop"] = (own["stop"],) if isinstance(own["stop"], str) else tuple(own["stop"] or ())
    try:
        sampling = replace(settings.sampling, **own)
    except TypeError as error:
        raise BadInputError(f"a setting of the line has the wrong type: {error}") from None
    request = request_for(
        runtime,
        values.get("prompt", ""),
        sampling,
        settings.logprobs,
        settings.no_special,
        settings.constraint,
    )
    if "prompt_token_ids" in values:
        request = replace(request, prompt_token_ids=tuple(values["prompt_token_ids"]))
    return replace(request, request_id=str(number), priority=1)


def result_of(line: _Line, settings: BatchSettings) -> dict[str, Any]:
    """The line of the output."""
    from edgellm.cli.output import plain

    found: dict[str, Any] = {"line": line.number}
    if line.id is not None:
        found["id"] = line.id
    if line.error is not None:
        return dict(plain(found | {"error": line.error}))
    last = line.events[-1]
    notices: list[Notice] = [event.notice for event in line.events if event.notice is not None]
    found |= {
        "text": "".join(event.text for event in line.events),
        "token_ids": [token for event in line.events for token in event.token_ids],
        "finish_reason": last.finish_reason,
        "usage": last.usage,
        "seed": last.seed,
        "notices": notices,
    }
    if settings.logprobs is not None:
        found["logprobs"] = [logprob for event in line.events for logprob in event.logprobs]
    if last.error is not None:
        found["error"] = last.error
    return dict(plain(found))
