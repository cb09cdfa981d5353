"""The endpoints that do not generate: health, models, metrics, status, tokenizer and template."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from edgellm.chat.messages import message_object
from edgellm.contracts import EngineStats
from edgellm.server.api_errors import ApiError, api_error, bad_field, loading, to_json
from edgellm.server.completion_answers import encode_prompt
from edgellm.server.completion_schema import read_ids, read_template
from edgellm.server.fields import Fields, read_object
from edgellm.server.gpu_meter import GpuMeter
from edgellm.server.metrics import ServerMetrics
from edgellm.server.model_host import ModelHost, ServedModel, State
from edgellm.server.settings import ServerSettings
from edgellm_models.errors import BadInputError

if TYPE_CHECKING:
    from edgellm.server.generation_routes import GenerationRoutes


class ModelRoutes:
    """Endpoints over one model host."""

    def __init__(
        self, host: ModelHost, settings: ServerSettings, metrics: ServerMetrics, generation: GenerationRoutes
    ) -> None:
        self._host = host
        self._settings = settings
        self._metrics = metrics
        self._generation = generation
        self._gpu = GpuMeter()
        self._gpu_turn = asyncio.Lock()

    async def health(self, request: Request) -> Response:
        """GET /health: 200 once the model answers, 503 with the reason before."""
        state = self._host.state
        body: dict[str, Any] = {"status": state.value, "model": self._host.name}
        if state is State.FAILED:
            body["error"] = str(self._host.error)
        ready = state in (State.READY, State.ASLEEP)
        headers = {} if ready else {"retry-after": "2"}
        return Response(to_json(body), 200 if ready else 503, headers, media_type="application/json")

    async def metrics_text(self, request: Request) -> Response:
        """GET /metrics."""
        text = self._metrics.render(
            self._stats(), self._host.last_info, ready=self._host.state is State.READY
        )
        return Response(text, media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        from edgellm.server.openapi import document

        return _json(document(self._host.name))

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models: the one model."""
        return _json({"object": "list", "data": [self._model_json()]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        name = request.path_params["model"]
        if name != self._host.name:
            raise ApiError(
                404,
                f"the model {name[:200]!r} is not here; this server has {self._host.name!r}",
                param="model",
                code="model_not_found",
            )
        return _json(self._model_json())

    def _model_json(self) -> dict[str, Any]:
        info = self._host.last_info
        if info is None:
            raise loading()
        extras = {key: value for key, value in asdict(info).items() if key not in ("name", "path")}
        extras |= {"path": Path(info.path).name, "state": self._host.state.value}
        return {
            "id": self._host.name,
            "object": "model",
            "created": 0,
            "owned_by": "edgellm",
            "max_model_len": info.context_length,
            "edgellm": extras,
        }

    async def status(self, request: Request) -> Response:
        """GET /v1/edge/status: EngineStats, for screens."""
        stats = self._stats()
        if stats.device.startswith("cuda"):
            async with self._gpu_turn:
                stats = replace(stats, gpu=await asyncio.to_thread(self._gpu.read))
        return _json(
            {
                "state": self._host.state.value,
                "model": self._host.name,
                "open_requests": self._generation.open_answers,
                "stats": asdict(stats),
            }
        )

    def _stats(self) -> EngineStats:
        return self._host.model.engine.stats() if self._host.model is not None else EngineStats()

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: ids of a ``content`` (or ``prompt``), or of ``messages``."""
        fields = Fields(read_object(await request.body()))
        async with self._host.lend(0) as model:
            return _json(await asyncio.to_thread(_tokenize, model, fields))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of ``tokens``."""
        fields = Fields(read_object(await request.body()))
        value = fields.raw("tokens")
        if not isinstance(value, list):
            raise fields.refuse("tokens", "a list of token ids")
        ids = read_ids(value, "tokens")
        special = fields.boolean("show_special")
        async with self._host.lend(0) as model:
            if ids:
                encode_prompt(model, ids, "tokens")  # checks them
            known = [t for t in ids if t < model.tokenizer.vocab_size]
            text = await asyncio.to_thread(model.tokenizer.decode, known, show_special=special)
        return _json({"content": text, "prompt": text})

    async def apply_template(self, request: Request) -> Response:
        """POST /apply-template: the prompt that messages make, and its length."""
        fields = Fields(read_object(await request.body()))
        wanted = read_template(fields)
        async with self._host.lend(0) as model:
            prompt, ids = await asyncio.to_thread(_render, model, wanted)
        return _json({"prompt": prompt, "tokens": len(ids)})


def _tokenize(model: ServedModel, fields: Fields) -> Mapping[str, Any]:
    tokenizer = model.tokenizer
    if fields.has("messages"):
        ids = list(_render(model, read_template(fields))[1])
    else:
        key = "content" if fields.has("content") else "prompt"
        if not isinstance(fields.raw(key), str):
            raise bad_field(
                key, f"{key} must be a text" if fields.has(key) else "content is missing: the text"
            )
        special = fields.boolean("add_special", fields.boolean("add_special_tokens", False))
        parse = fields.boolean("parse_special", True)
        ids = tokenizer.encode(fields.text(key), add_special=special, parse_special=parse)
    if not fields.boolean("with_pieces"):
        return {"tokens": ids, "count": len(ids), "max_model_len": model.info.context_length}
    pieces = []
    for token_id in ids:
        data = tokenizer.token_bytes(token_id)
        try:
            pieces.append({"id": token_id, "piece": data.decode("utf-8")})
        except UnicodeDecodeError:
            pieces.append({"id": token_id, "piece": list(data)})
    return {"tokens": pieces, "count": len(ids), "max_model_len": model.info.context_length}


def _render(model: ServedModel, wanted: Any) -> tuple[str, tuple[int, ...]]:
    try:
        chat = model.encoder().encode(
            [message_object(message) for message in wanted.messages],
            list(wanted.tools) or None,
            add_generation_prompt=wanted.add_generation_prompt,
        )
    except BadInputError as error:
        raise api_error(error, "messages") from None
    return chat.text, chat.token_ids


def _json(body: object) -> Response:
    return Response(to_json(body), media_type="application/json")
