"""The routes of the server as one ASGI application, and the errors of those that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgellm.server.api_errors import ApiError, api_error, to_json
from edgellm.server.embedding_routes import EmbeddingRoutes
from edgellm.server.gate import Application
from edgellm.server.generation_routes import GenerationRoutes
from edgellm.server.kept_chats import KeptChats
from edgellm.server.metrics import ServerMetrics
from edgellm.server.model_host import ModelHost
from edgellm.server.model_routes import ModelRoutes
from edgellm.server.settings import ServerSettings
from edgellm.server.sse import ClientGoneError
from edgellm_models.errors import EdgeLLMError, EngineError

Endpoint = Callable[[Request], Awaitable[Response]]


def make_application(host: ModelHost, settings: ServerSettings, metrics: ServerMetrics) -> Application:
    """Everything behind the gate (gate.py)."""
    generation = GenerationRoutes(host, settings, metrics)
    models = ModelRoutes(host, settings, metrics, generation)
    table: dict[str, dict[str, Endpoint]] = {
        "/health": {"GET": models.health},
        "/metrics": {"GET": models.metrics_text},
        "/openapi.json": {"GET": models.openapi},
        "/v1/models": {"GET": models.list_models},
        "/v1/models/{model:path}": {"GET": models.one_model},
        "/v1/chat/completions": {"POST": generation.chat},
        "/v1/completions": {"POST": generation.completion},
        "/v1/responses": {"POST": generation.responses},
        "/v1/embeddings": {"POST": EmbeddingRoutes(host, settings, metrics).embeddings},
        "/tokenize": {"POST": models.tokenize},
        "/detokenize": {"POST": models.detokenize},
        "/apply-template": {"POST": models.apply_template},
        "/v1/edge/status": {"GET": models.status},
        "/v1/edge/cancel/{answer_id}": {"POST": generation.cancel},
    }
    if settings.chat_file is not None:
        kept = KeptChats(host, generation.memory, settings.chat_file)
        table["/v1/edge/chats/save"] = {"POST": kept.save}
        table["/v1/edge/chats/load"] = {"POST": kept.load}
    routes = [
        Route(path, _answered(endpoint, metrics), methods=[method])
        for path, methods in table.items()
        for method, endpoint in methods.items()
    ]

    async def not_found(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        known = {name: sorted(methods) for name, methods in table.items()}
        if error.status_code == 405:
            allowed = next((known[p] for p in known if _fits(p, path)), [])
            problem = ApiError(
                405,
                f"{path} takes {', '.join(allowed) or 'another method'}, not {request.method}",
                code="method_not_allowed",
            )
            headers = {"allow": ", ".join(allowed)}
        elif error.status_code == 404:
            near = difflib.get_close_matches(path, list(known), n=1, cutoff=0.0)
            problem = ApiError(
                404, f"there is nothing at {path[:200]}; the nearest is {near[0]}", code="unknown_url"
            )
            headers = {}
        else:
            problem = ApiError(error.status_code, str(error.detail))
            headers = {}
        return json_response(problem.body(), problem.status, headers)

    application = Starlette(routes=routes, exception_handlers={HTTPException: not_found})
    application.router.redirect_slashes = False
    return application


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(body), status, headers, media_type="application/json")


def _fits(pattern: str, path: str) -> bool:
    return path == pattern or (path.startswith(pattern.partition("{")[0]) and "{" in pattern)


def _answered(endpoint: Endpoint, metrics: ServerMetrics) -> Endpoint:
    """The endpoint, with refusals as answers and counted."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ApiError as error:
            problem = error
        except ClientGoneError:
            return Response(status_code=499)  # nobody reads it
        except EdgeLLMError as error:
            problem = api_error(error)
            problem.counted = isinstance(error, EngineError)  # where it was to be answered
        if request.method == "POST" and not problem.counted:
            metrics.refused(problem.status, problem.code)
        return json_response(problem.body(), problem.status, problem.headers())

    return answer
