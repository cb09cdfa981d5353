"""POST /v1/embeddings: hidden states of texts, pooled by the engine, in OpenAI's form."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import struct
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edgellm.contracts import FinishReason, GenerationRequest, Notice, Task, TokenEvent
from edgellm.log import log_notice
from edgellm.server.answering import is_out_of_memory
from edgellm.server.api_errors import ApiError, bad_field, shutting_down, to_json
from edgellm.server.chat_answers import engine_failure, notice_json, out_of_time
from edgellm.server.completion_answers import encode_prompt
from edgellm.server.completion_schema import EmbeddingRequest, read_embedding
from edgellm.server.fields import read_object
from edgellm.server.generation_routes import check_model
from edgellm.server.metrics import ServerMetrics
from edgellm.server.model_host import ModelHost, ServedModel
from edgellm.server.settings import ServerSettings
from edgellm.server.sse import until_client_leaves
from edgellm_models.errors import EngineError

PRIORITY = 1
"""Batch work: an answer that somebody waits for goes first."""

Vector = tuple[float, ...]


class EmbeddingRoutes:
    """The endpoint over one model host. Every text is a request of the engine: its KV comes from the same
    blocks, its rows from the same steps as those of answers.
    """

    def __init__(self, host: ModelHost, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._host = host
        self._settings = settings
        self._metrics = metrics

    async def embeddings(self, request: Request) -> Response:
        """The vectors as the model has them: not normalized, so that they equal the pooled states."""
        wanted = read_embedding(read_object(await request.body()), strict=self._settings.strict)
        return await until_client_leaves(request.receive, self._embed(wanted))

    async def _embed(self, wanted: EmbeddingRequest) -> Response:
        # However many texts, they are one client's work, which waits here and not in the queue of others.
        async with self._host.lend(1) as model:
            check_model(wanted.model, model)
            prompts = await asyncio.to_thread(_encode, model, wanted)
            begin = time.monotonic()
            reason, notices = "cancelled", []  # type: tuple[str, list[Notice]]
            try:
                vectors = await self._all(model, wanted, prompts, notices)
                reason = "stop"
            except ApiError as error:
                reason, error.counted = _reason(error), True
                raise
            except EngineError:
                reason = "engine"
                raise
            finally:
                self._metrics.ended(reason, time.monotonic() - begin)
        tokens = sum(map(len, prompts))
        body: dict[str, Any] = {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _written(vector, wanted.base64)}
                for index, vector in enumerate(vectors)
            ],
            "model": model.info.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "edgellm": {"pooling": wanted.pooling, "normalized": False},
        }
        if wanted.warnings:
            body["edgellm"]["warnings"] = list(wanted.warnings)
        if notices:
            body["edgellm"]["notices"] = [notice_json(notice) for notice in notices]
        return Response(to_json(body), media_type="application/json")

    async def _all(
        self,
        model: ServedModel,
        wanted: EmbeddingRequest,
        prompts: Sequence[tuple[int, ...]],
        notices: list[Notice],
    ) -> list[Vector]:
        """The vectors of all texts, as many at once as the engine runs; one that fails ends the others."""
        found: dict[int, Vector] = {}
        numbered = iter(enumerate(prompts))
        timeout_s = self._settings.request_timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        async def work(left: Iterator[tuple[int, tuple[int, ...]]]) -> None:
            for index, ids in left:
                vector = found[index] = await self._one(model, wanted.pooling, ids, deadline, notices)
                if wanted.dimensions not in (None, len(vector)):
                    raise bad_field(
                        "dimensions",
                        f"dimensions must be {len(vector)} or absent: the vectors cannot be shortened",
                    )

        workers = [asyncio.create_task(work(numbered)) for _ in range(min(model.max_running, len(prompts)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [found[index] for index in range(len(prompts))]

    async def _one(
        self,
        model: ServedModel,
        pooling: str,
        ids: tuple[int, ...],
        deadline: float | None,
        notices: list[Notice],
    ) -> Vector:
        request = GenerationRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=ids,
            deadline=deadline,
            arrival_time=time.monotonic(),
            priority=PRIORITY,
            task=Task.EMBED,
            pooling=pooling,
        )
        last: TokenEvent | None = None
        # Leaving it early, as a client does that leaves, cancels the request.
        async with contextlib.aclosing(model.engine.submit(request)) as events:
            async for event in events:
                last = event
                if event.notice is not None:
                    log_notice(event.notice)
                    self._metrics.notices[event.notice.kind] += 1
                    notices.append(event.notice)
        assert last is not None
        if last.finish_reason is FinishReason.CANCELLED:
            # Nobody else cancels it while it is read: its time is over, or the engine's.
            timed_out = last.notice is not None and last.notice.kind == "deadline"
            raise out_of_time() if timed_out else shutting_down()
        if last.embedding is None:
            raise engine_failure(last.error)
        if last.usage is not None:
            self._metrics.used(last.usage)
        return last.embedding


def _encode(model: ServedModel, wanted: EmbeddingRequest) -> list[tuple[int, ...]]:
    """The ids of all texts. Work for a thread. ApiError 400 names the text that is wrong."""
    found = []
    for index, prompt in enumerate(wanted.inputs):
        name = f"input.{index}" if len(wanted.inputs) > 1 else "input"
        ids = encode_prompt(model, prompt, name)
        if len(ids) > model.info.context_length:
            raise ApiError(
                400,
                f"{name} has {len(ids)} tokens but the context holds {model.info.context_length}; "
                "shorten it, or raise --ctx",
                param=name,
                code="context_length_exceeded",
            )
        found.append(ids)
    return found


def _reason(error: ApiError) -> str:
    """By the words of ServerMetrics."""
    if error.code == "request_timeout":
        return "timeout"
    if error.status < 500:
        return "bad_request"
    if error.code == "shutting_down":
        return "cancelled"
    return "no_memory" if is_out_of_memory(error.message) else "engine"


def _written(values: Vector, as_base64: bool) -> list[float] | str:
    if not as_base64:
        return list(values)
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode("ascii")
