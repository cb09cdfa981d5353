"""POST /v1/embeddings: hidden states of texts, pooled, in OpenAI's form."""

from __future__ import annotations

import asyncio
import base64
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edgellm.server.api_errors import ApiError, bad_field, to_json
from edgellm.server.completion_answers import encode_prompt
from edgellm.server.completion_schema import EmbeddingRequest, read_embedding
from edgellm.server.fields import read_object
from edgellm.server.generation_routes import check_model
from edgellm.server.metrics import ServerMetrics
from edgellm.server.model_host import ModelHost, ServedModel
from edgellm.server.settings import ServerSettings
from edgellm.server.sse import until_client_leaves

Embed = Callable[[Sequence[int], str, Callable[[], bool]], list[float]]


class EmbeddingRoutes:
    """The endpoint over one model host. Texts are embedded one by one, between the engine's steps: each has
    KV of its own while it runs, so however many ask, the memory is that of one.
    """

    def __init__(self, host: ModelHost, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._host = host
        self._settings = settings
        self._metrics = metrics
        self._turn = asyncio.Lock()

    async def embeddings(self, request: Request) -> Response:
        """The vectors as the model has them: not normalized, so that they equal the pooled states."""
        wanted = read_embedding(read_object(await request.body()), strict=self._settings.strict)
        return await until_client_leaves(request.receive, self._embed(wanted))

    async def _embed(self, wanted: EmbeddingRequest) -> Response:
        async with self._host.lend(1) as model:
            check_model(wanted.model, model)
            if model.embed is None:
                raise ApiError(501, "this model has no hidden states to embed with", code="not_supported")
            prompts = [
                self._ids(model, prompt, f"input.{index}" if len(wanted.inputs) > 1 else "input")
                for index, prompt in enumerate(wanted.inputs)
            ]
            data = []
            for index, ids in enumerate(prompts):
                values = await self._in_turn(model.embed, ids, wanted.pooling)
                if wanted.dimensions not in (None, len(values)):
                    raise bad_field(
                        "dimensions",
                        f"dimensions must be {len(values)} or absent: the vectors cannot be shortened",
                    )
                data.append(
                    {"object": "embedding", "index": index, "embedding": _written(values, wanted.base64)}
                )
        tokens = sum(map(len, prompts))
        self._metrics.prompt_tokens += tokens
        body: dict[str, Any] = {
            "object": "list",
            "data": data,
            "model": model.info.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "edgellm": {"pooling": wanted.pooling, "normalized": False},
        }
        if wanted.warnings:
            body["edgellm"]["warnings"] = list(wanted.warnings)
        return Response(to_json(body), media_type="application/json")

    async def _in_turn(self, embed: Embed, ids: tuple[int, ...], pooling: str) -> list[float]:
        """One text, once nothing else is embedded. A client that leaves ends it within a chunk."""
        await self._turn.acquire()
        wanted = threading.Event()
        wanted.set()
        work = asyncio.ensure_future(asyncio.to_thread(embed, ids, pooling, wanted.is_set))
        # Its memory is free when the thread has ended, not when its client has left.
        work.add_done_callback(lambda _: self._turn.release())
        try:
            return await asyncio.shield(work)
        finally:
            wanted.clear()

    def _ids(self, model: ServedModel, prompt: Any, name: str) -> tuple[int, ...]:
        ids = encode_prompt(model, prompt, name)
        if len(ids) > model.info.context_length:
            raise ApiError(
                400,
                f"{name} has {len(ids)} tokens but the context holds {model.info.context_length}; "
                "shorten it, or raise --ctx",
                param=name,
                code="context_length_exceeded",
            )
        return ids


def _written(values: list[float], as_base64: bool) -> list[float] | str:
    if not as_base64:
        return values
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode("ascii")
