"""What programs written for OpenAI's API do, by its own client of any major version, against a server.

``python -m tests.support.openai_cases ADDRESS MODEL`` runs the list and prints one JSON object per case; the
interpreter decides which version of the client that is.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.support.schemas import is_valid

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Ulm", "Bonn"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
HELLO: Any = [{"role": "user", "content": "hello there"}]
NO_KEY = "none"
CONSTRAINED_TOKENS = 200
"""More than a call or an object of ``CITY`` takes, whatever the weights."""


@dataclass(frozen=True)
class Target:
    """A server: ``http://...`` or ``unix:PATH``, the one model that it has, and how long answers may be."""

    address: str
    model: str
    tokens: int = 12
    context: int = 1024
    """At most that of the server: a text of twice as many words does not fit."""
    api_key: str = NO_KEY

    def client(self, **fields: Any) -> Any:
        import openai

        return openai.OpenAI(**self._fields(openai.DefaultHttpxClient, "HTTPTransport"), **fields)

    def async_client(self, **fields: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(
            **self._fields(openai.DefaultAsyncHttpxClient, "AsyncHTTPTransport"), **fields
        )

    def _fields(self, http_client: Any, transport: str) -> dict[str, Any]:
        found: dict[str, Any] = {"api_key": self.api_key, "max_retries": 0}
        if not self.address.startswith("unix:"):
            return found | {"base_url": f"{self.address}/v1"}
        # The HTTP library that this version of the client is built on.
        library = sys.modules[http_client.__base__.__module__.partition(".")[0]]
        over = getattr(library, transport)(uds=self.address.removeprefix("unix:"))
        return found | {"base_url": "http://localhost/v1", "http_client": http_client(transport=over)}

    @property
    def asked(self) -> dict[str, Any]:
        return {"model": self.model, "messages": HELLO, "seed": 7, "max_tokens": self.tokens}


def models(target: Target) -> None:
    import openai

    client = target.client()
    assert [model.id for model in client.models.list()] == [target.model]
    assert client.models.retrieve(target.model).object == "model"
    try:
        client.models.retrieve("other")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("a model that is not there was found")


def chat_and_stream(target: Target) -> None:
    """Two answers whole and as streams: the same texts, reasons and counts."""
    client = target.client()
    asked = {**target.asked, "n": 2, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(**asked)
    assert answer.object == "chat.completion" and answer.model == target.model
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    usage = answer.usage
    assert usage.completion_tokens == 2 * target.tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"
    for index in range(2):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in own) == answer.choices[index].message.content
        assert own[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["length"]
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 2 * target.tokens
    assert chunks[-1].usage.prompt_tokens == usage.prompt_tokens


def seeds(target: Target) -> None:
    """The same seed gives the same text, and the text of answer 1 differs from that of answer 0."""
    client = target.client()
    asked = {**target.asked, "temperature": 1.5}
    first, second = (client.chat.completions.create(**asked, n=2) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices] and texts[0] != texts[1]


def stop(target: Target) -> None:
    client = target.client()
    text = client.chat.completions.create(**target.asked).choices[0].message.content
    for stops in (text[3:6], [text[3:6], "never said"]):
        stopped = client.chat.completions.create(**target.asked, stop=stops).choices[0]
        assert stopped.message.content == text[: text.index(text[3:6])]
        assert stopped.finish_reason == "stop"
    streamed = list(client.chat.completions.create(**target.asked, stop=text[3:6], stream=True))
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert joined == text[: text.index(text[3:6])] and streamed[-1].choices[0].finish_reason == "stop"


def tools(target: Target) -> None:
    """A named call, a call that is streamed, and the turn that brings its result back."""
    client = target.client()
    asked = {**target.asked, "max_tokens": CONSTRAINED_TOKENS, "tools": [TOOL]}
    named = client.chat.completions.create(
        **asked, tool_choice={"type": "function", "function": {"name": "weather"}}
    ).choices[0]
    [call] = named.message.tool_calls
    assert named.finish_reason == "tool_calls" and call.type == "function" and call.id
    assert call.function.name == "weather" and is_valid(CITY, call.function.arguments)
    assert not named.message.content
    chunks = list(client.chat.completions.create(**asked, tool_choice="required", stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [c for delta in deltas for c in delta.tool_calls or ()]
    assert {c.index for c in calls} == {0} and [c.function.name for c in calls if c.function.name]
    assert is_valid(CITY, "".join(c.function.arguments or "" for c in calls))
    assert not any(delta.content for delta in deltas)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    turns = [
        *HELLO,
        named.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    after = client.chat.completions.create(**{**target.asked, "messages": turns}, tools=[TOOL])
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert after.usage.prompt_tokens > 0


def json_schema(target: Target) -> None:
    """Plain, streamed, and by the client's own helper, which makes the schema of a class."""
    from typing import Literal

    import pydantic

    client = target.client()
    asked = {**target.asked, "max_tokens": CONSTRAINED_TOKENS}
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": CITY, "strict": True},
    }
    whole = client.chat.completions.create(**asked, response_format=wanted).choices[0]
    assert whole.finish_reason == "stop" and is_valid(CITY, whole.message.content)
    chunks = client.chat.completions.create(**asked, response_format=wanted, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content

    class City(pydantic.BaseModel):
        city: Literal["Ulm", "Bonn"]
        days: Literal[1, 2, 3]

    parsed = client.chat.completions.parse(**asked, response_format=City).choices[0].message.parsed
    assert isinstance(parsed, City)


def json_object(target: Target) -> None:
    """An object, or one that was cut and says so."""
    client = target.client()
    asked = {**target.asked, "max_tokens": 3 * target.tokens, "response_format": {"type": "json_object"}}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:
        assert choice.finish_reason == "length"


def logprobs(target: Target) -> None:
    """One entry a token, whose bytes spell the text; sorted alternatives; the same streamed."""
    client = target.client()
    asked = {**target.asked, "logprobs": True, "top_logprobs": 3, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(**asked)
    choice = answer.choices[0]
    entries = choice.logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    spelled = b"".join(bytes(entry.bytes or b"") for entry in entries)
    assert spelled.decode("utf-8", "replace") == choice.message.content
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert all(math.isfinite(value) and value <= 0 for value in (entry.logprob, *values))
    chunks = client.chat.completions.create(**asked, stream=True)
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert all(
        math.isclose(a.logprob, b.logprob, abs_tol=1e-4) for a, b in zip(streamed, entries, strict=True)
    )


def completions(target: Target) -> None:
    """Several prompts, logprobs in the old shape, echo, and a stream."""
    client = target.client()
    asked = {"model": target.model, "max_tokens": 3, "seed": 1, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(**asked, prompt=["one", "two"], logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert len(choice.logprobs.token_logprobs) == 3 == len(choice.logprobs.top_logprobs)
        assert all(len(top) >= 2 for top in choice.logprobs.top_logprobs)
    echoed = client.completions.create(**asked, prompt="one", echo=True, logprobs=0).choices[0]
    assert echoed.text.startswith("one") and echoed.text[3:] == answer.choices[0].text
    assert echoed.logprobs.token_logprobs[0] is None or len(echoed.logprobs.token_logprobs) > 3
    chunks = client.completions.create(**asked, prompt="one", stream=True)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == answer.choices[0].text


def responses(target: Target) -> None:
    client = target.client()
    limit = {"model": target.model, "max_output_tokens": target.tokens}
    whole = client.responses.create(**limit, input="hello there", instructions="Be brief.", temperature=0)
    assert whole.status in ("completed", "incomplete") and whole.usage.output_tokens > 0
    events = list(
        client.responses.create(**limit, input=HELLO, instructions="Be brief.", temperature=0, stream=True)
    )
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == f"response.{whole.status}"
    joined = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert joined == whole.output_text == events[-1].response.output_text
    city = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    limit["max_output_tokens"] = CONSTRAINED_TOKENS
    assert is_valid(CITY, client.responses.create(**limit, input="hello", text=city).output_text)


def embeddings(target: Target) -> None:
    """Floats, and what the client asks for by itself, base64."""
    client = target.client()
    texts = ["hello there", "good morning", "hello there"]
    by_default = client.embeddings.create(model=target.model, input=texts)
    floats = client.embeddings.create(model=target.model, input=texts, encoding_format="float")
    assert [row.index for row in by_default.data] == [0, 1, 2]
    for a, b in zip(by_default.data, floats.data, strict=True):
        assert len(a.embedding) == len(b.embedding) > 1
        assert all(
            math.isclose(x, y, rel_tol=1e-3, abs_tol=1e-3)
            for x, y in zip(a.embedding, b.embedding, strict=True)
        )
    assert by_default.data[0].embedding == by_default.data[2].embedding != by_default.data[1].embedding
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens > 0


def errors(target: Target) -> None:
    """Each is the client's own class, with the code, the field and a message."""
    import openai

    client = target.client()
    long_text = "x " * (2 * target.context)
    wrong: list[tuple[type[Any], dict[str, Any], str | None, str | None]] = [
        (openai.NotFoundError, {"model": "other"}, "model_not_found", "model"),
        (openai.BadRequestError, {"temperature": -1}, None, "temperature"),
        (openai.BadRequestError, {"n": 99}, None, "n"),
        (
            openai.BadRequestError,
            {"messages": [{"role": "user", "content": long_text}]},
            "context_length_exceeded",
            "messages",
        ),
        (openai.BadRequestError, {"tool_choice": "required"}, None, "tool_choice"),
    ]
    for kind, fields, code, param in wrong:
        for stream in (False, True):
            try:
                client.chat.completions.create(**{**target.asked, **fields}, stream=stream)
            except kind as error:
                assert error.code == code and error.param == param and error.body["message"], fields
            else:
                raise AssertionError(f"{fields} was accepted")
    if target.api_key != NO_KEY:
        try:
            replace(target, api_key=target.api_key[:-1]).client().models.list()
        except openai.AuthenticationError as error:
            assert error.status_code == 401 and target.api_key[:-1] not in str(error)
        else:
            raise AssertionError("a wrong key was taken")
    try:
        client.embeddings.create(model=target.model, input=long_text)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
    else:
        raise AssertionError("a text that does not fit was embedded")


def timeouts(target: Target) -> None:
    """A client that gives up: its request ends, and the next one is answered."""
    import openai

    asked = {**target.asked, "max_tokens": target.context // 2, "extra_body": {"ignore_eos": True}}
    try:
        target.client(timeout=0.001).chat.completions.create(**asked)
    except openai.APITimeoutError:
        assert target.client().chat.completions.create(**target.asked).choices
    else:
        raise AssertionError("a long answer came in a millisecond")


def many_at_once(target: Target) -> None:
    """The asynchronous client: answers side by side, and a stream that is left in its middle."""

    async def ask() -> None:
        async with target.async_client() as client:
            asked = {**target.asked, "temperature": 0}
            alone = await client.chat.completions.create(**asked)
            answers = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(4)))
            assert {a.choices[0].message.content for a in answers} == {alone.choices[0].message.content}
            stream = await client.chat.completions.create(
                **{**asked, "max_tokens": target.context // 2}, extra_body={"ignore_eos": True}, stream=True
            )
            async for _ in stream:
                break
            await stream.close()
            again = await client.chat.completions.create(**asked)
            assert again.choices[0].message.content == alone.choices[0].message.content

    asyncio.run(ask())


CASES: tuple[Callable[[Target], None], ...] = (
    models,
    chat_and_stream,
    seeds,
    stop,
    tools,
    json_schema,
    json_object,
    logprobs,
    completions,
    responses,
    embeddings,
    errors,
    timeouts,
    many_at_once,
)


def main() -> int:
    """Runs the list against the server of the command line; 1 when a case failed."""
    import openai

    address, model, *key = sys.argv[1:]
    target = Target(address, model, api_key=key[0] if key else NO_KEY)
    failed = False
    for case in CASES:
        begin, problem = time.monotonic(), ""
        try:
            case(target)
        except Exception as error:
            problem, failed = f"{type(error).__name__}: {error}"[:400], True
        row = {"case": case.__name__, "seconds": round(time.monotonic() - begin, 3), "problem": problem}
        print(json.dumps({**row, "openai": openai.__version__}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
