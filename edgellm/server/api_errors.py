"""Errors in OpenAI's form: status, message, type, param and code of every refusal."""

from __future__ import annotations

import json
from typing import Any

from edgellm.chat.request import ContextExceededError
from edgellm_models.errors import (
    BadInputError,
    EdgeLLMError,
    EngineError,
    NotFoundError,
    PermissionDeniedError,
    ResourceError,
    UnavailableError,
)

RETRY_LOADING_S = 2
RETRY_FULL_S = 1
RETRY_ENDING_S = 10
MAX_MESSAGE_CHARS = 2000


class ApiError(Exception):
    """An answer that is a refusal."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + " ..."
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.counted = False
        """Its request was counted where it ended (metrics.py)."""

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def bad_field(name: str, message: str, code: str | None = None) -> ApiError:
    """400: the named field of a request cannot be honoured."""
    return ApiError(400, message, param=name, code=code)


def loading(detail: str = "the model is still loading") -> ApiError:
    return ApiError(
        503,
        f"{detail}; try again in some seconds",
        kind="service_unavailable",
        code="loading",
        retry_after_s=RETRY_LOADING_S,
    )


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "the server is ending; try again when it is back",
        kind="service_unavailable",
        code="shutting_down",
        retry_after_s=RETRY_ENDING_S,
    )


def queue_full(limit: int) -> ApiError:
    return ApiError(
        429,
        f"{limit} answers wait already, which is the limit of this server (--queue); try again in a moment",
        kind="rate_limit_error",
        code="queue_full",
        retry_after_s=RETRY_FULL_S,
    )


def api_error(error: EdgeLLMError, param: str | None = None) -> ApiError:
    """What an error of ours is to a client."""
    if isinstance(error, ContextExceededError):
        return ApiError(400, str(error), param=param or "messages", code="context_length_exceeded")
    if isinstance(error, BadInputError):
        return ApiError(400, str(error), param=param)
    if isinstance(error, NotFoundError):
        return ApiError(404, str(error), param=param)
    if isinstance(error, PermissionDeniedError):
        return ApiError(403, str(error), kind="permission_error")
    if isinstance(error, ResourceError | UnavailableError):
        return ApiError(
            503,
            str(error),
            kind="service_unavailable",
            code="out_of_memory" if isinstance(error, ResourceError) else "unavailable",
            retry_after_s=RETRY_LOADING_S,
        )
    code = "engine_error" if isinstance(error, EngineError) else "internal_error"
    return ApiError(500, str(error), kind="server_error", code=code)


def to_json(value: Any) -> bytes:
    """UTF-8 JSON. Half a surrogate pair, which UTF-8 has no form for, stays the escape that it came as."""
    return _JSON.encode(value).encode("utf-8", "backslashreplace")


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
