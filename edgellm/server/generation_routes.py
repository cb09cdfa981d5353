"""The endpoints that generate: chat completions and completions, as streams or whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from edgellm.chat.reply import Reply
from edgellm.contracts import GenerationRequest
from edgellm.server.answer_memory import AnswerMemory
from edgellm.server.answering import Answering, Choice
from edgellm.server.api_errors import ApiError, to_json
from edgellm.server.chat_answers import ChatAnswers
from edgellm.server.chat_requests import PreparedChat, prepare_chat
from edgellm.server.chat_schema import ChatRequest, read_chat
from edgellm.server.completion_answers import CompletionAnswers, prepare_completion
from edgellm.server.completion_schema import read_completion
from edgellm.server.fields import read_object
from edgellm.server.metrics import ServerMetrics
from edgellm.server.model_host import ModelHost, ServedModel
from edgellm.server.responses_answers import ResponsesAnswers
from edgellm.server.responses_schema import read_responses
from edgellm.server.settings import ServerSettings
from edgellm.server.sse import DONE, EventStream, event, until_client_leaves


class Answers(Protocol):
    """What writes the answers of one request (chat_answers.py, completion_answers.py)."""

    id: str

    async def whole(self) -> dict[str, Any]: ...

    def chunks(self) -> AsyncIterator[dict[str, Any]]: ...


class GenerationRoutes:
    """Endpoints over one model host. They share what answers were given, and which are open."""

    def __init__(self, host: ModelHost, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._host = host
        self._settings = settings
        self._metrics = metrics
        self._memory = AnswerMemory()
        self._open: dict[str, Answering] = {}

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = read_object(await request.body())
        return await until_client_leaves(request.receive, self._chat(request, body))

    async def _chat(self, request: Request, body: dict[str, Any]) -> Response:
        async with contextlib.AsyncExitStack() as stack:
            model = await stack.enter_async_context(self._host.lend(0))
            chat = read_chat(body, model.sampling, strict=self._settings.strict)
            check_model(chat.options.model, model)
            await stack.enter_async_context(self._host.lend(chat.options.n))
            prepared = await self.prepare(model, chat)
            answers, answering = self.chat_answers(model, chat, prepared)
            return await self.respond(answers, answering, chat.options.stream, stack)

    async def prepare(self, model: ServedModel, chat: ChatRequest) -> PreparedChat:
        """The engine's request, made in a thread."""
        return await asyncio.to_thread(
            prepare_chat, model, chat, self._memory, self._settings.request_timeout_s
        )

    def chat_answers(
        self, model: ServedModel, chat: ChatRequest, prepared: PreparedChat
    ) -> tuple[ChatAnswers, Answering]:
        """What answers a prepared request; nothing runs before its events are read."""
        salt = chat.options.cache_salt

        def remember(choice: Choice) -> None:
            reply = choice.reply
            if not reply.num_calls and reply.content:
                self._memory.add(salt, reply.content, choice.maker.token_ids, model.tokenizer)

        answering = Answering(
            model.engine, model.info.name, [prepared.request], prepared.make_reply, self._metrics, remember
        )
        answers = ChatAnswers(
            answering, chat.options, model.tokenizer, model.info.name, prepared.kv_policy, prepared.notices
        )
        return answers, answering

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses: a chat completion in another form. Nothing is stored."""
        body = read_object(await request.body())
        return await until_client_leaves(request.receive, self._responses(body))

    async def _responses(self, body: dict[str, Any]) -> Response:
        async with contextlib.AsyncExitStack() as stack:
            model = await stack.enter_async_context(self._host.lend(0))
            chat = read_responses(body, model.sampling, strict=self._settings.strict)
            check_model(chat.options.model, model)
            await stack.enter_async_context(self._host.lend(1))
            prepared = await self.prepare(model, chat)
            _, answering = self.chat_answers(model, chat, prepared)
            answers = ResponsesAnswers(
                answering,
                chat.options,
                model.info.name,
                prepared.kv_policy,
                model.tokenizer,
                prepared.notices,
                body,
            )
            return await self.respond(answers, answering, chat.options.stream, stack)

    async def completion(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = read_object(await request.body())
        return await until_client_leaves(request.receive, self._completion(request, body))

    async def _completion(self, request: Request, body: dict[str, Any]) -> Response:
        async with contextlib.AsyncExitStack() as stack:
            model = await stack.enter_async_context(self._host.lend(0))
            completion = read_completion(body, model.sampling, strict=self._settings.strict)
            options = completion.options
            check_model(options.model, model)
            # A batch from one client is one client's work: it waits in the engine, prompt by prompt.
            await stack.enter_async_context(self._host.lend(options.n))
            requests: Sequence[GenerationRequest] = await asyncio.to_thread(
                prepare_completion, model, completion, self._settings.request_timeout_s
            )
            answering = Answering(model.engine, model.info.name, requests, Reply, self._metrics)
            policy = requests[0].kv_policy
            answers = CompletionAnswers(answering, completion, model.tokenizer, model.info.name, policy)
            return await self.respond(answers, answering, options.stream, stack)

    async def respond(
        self, answers: Answers, answering: Answering, stream: bool, stack: contextlib.AsyncExitStack
    ) -> Response:
        """The answers whole, or as a stream that owns what ``stack`` holds until it ends."""
        self._open[answers.id] = answering
        stack.callback(self._open.pop, answers.id, None)
        if not stream:
            return Response(to_json(await answers.whole()), media_type="application/json")
        kept = stack.pop_all()
        return EventStream(chunk_events(answers), kept.aclose)  # type: ignore[return-value]

    async def cancel(self, request: Request) -> Response:
        """POST /v1/edge/cancel/{id}: ends an answer within a step; its stream then ends."""
        answer_id = request.path_params["answer_id"]
        answering = self._open.get(answer_id)
        if answering is None:
            raise ApiError(404, f"no answer with the id {answer_id[:80]!r} is open", code="unknown_answer")
        answering.cancel()
        return Response(to_json({"id": answer_id, "cancelled": True}), media_type="application/json")

    @property
    def memory(self) -> AnswerMemory:
        """The answers that were given lately."""
        return self._memory

    @property
    def open_answers(self) -> int:
        return len(self._open)


def check_model(name: str, model: ServedModel) -> None:
    """ApiError 404 unless this is the model that is here; an empty name or * is any."""
    if name not in ("", "*", model.info.name):
        raise ApiError(
            404,
            f"the model {name[:200]!r} is not here; this server has {model.info.name!r}",
            param="model",
            code="model_not_found",
        )


async def chunk_events(answers: Answers) -> AsyncIterator[bytes]:
    """Server-sent events of a stream. After an error comes nothing, so that clients notice."""
    chunks = answers.chunks()
    failed = False
    try:
        async for chunk in chunks:
            failed = "error" in chunk
            yield event(chunk, chunk.get("type"))
    except ApiError as error:
        failed = True
        yield event(error.body())
    except Exception as error:
        failed = True
        from edgellm_models.errors import EdgeLLMError

        if not isinstance(error, EdgeLLMError):
            import logging

            logging.getLogger("edgellm.error").error(
                "a stream failed: %s", type(error).__name__, exc_info=error
            )
        text = str(error) if isinstance(error, EdgeLLMError) else f"the server failed: {type(error).__name__}"
        yield event(ApiError(500, text, kind="server_error", code="internal_error").body())
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]
    if not failed and not answers.id.startswith("resp_"):  # that API ends with a typed event instead
        yield DONE
