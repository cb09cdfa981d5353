"""Who may come in: Host and Origin, keys, CORS, content type and body size, before any route is asked."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from edgellm.server.api_errors import ApiError, to_json
from edgellm.server.settings import ServerSettings, is_ip_literal, is_loopback
from edgellm_models.errors import EdgeLLMError, UsageError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health"})
"""Answered without a key: whoever starts a server must be able to ask whether it is ready."""
BODY_TIMEOUT_S = 60.0
"""A body that takes longer holds nothing up but is refused."""

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]{1,64}(\s*,\s*[A-Za-z0-9-]{1,64}){0,31}")
_ACCESS = logging.getLogger("edgellm.access")
_FAULT = logging.getLogger("edgellm.error")


class Gate:
    """An ASGI application around another one, which is asked only for what may come in.

    The body is read here, whole and bounded; what the inner application then receives is one message and the
    client's parting. Nothing that a header holds is logged.
    """

    def __init__(
        self,
        inner: Application,
        settings: ServerSettings,
        bound_host: str,
        on_access: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._inner = inner
        self._settings = settings
        self._keys = tuple(key.encode() for key in settings.api_keys)
        self._unix = settings.uds is not None
        self._on_access = on_access
        self._hosts = _LOCAL_NAMES | {name.lower() for name in settings.allowed_hosts}
        if bound_host:
            self._hosts |= {bound_host.lower(), f"[{bound_host.lower()}]"}
        # Rebinding needs a name: where others may come in at all, a plain address is none.
        self._any_address = False
        if bound_host:
            try:
                self._any_address = not is_loopback(bound_host)
            except UsageError:
                self._any_address = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = uuid.uuid4().hex
        scope["edgellm.request_id"] = request_id
        start, started, status = time.monotonic(), False, 0
        headers = _headers(scope)
        origin = headers.get("origin")
        extra = [(b"x-request-id", request_id.encode())]

        async def send_on(message: Message) -> None:
            nonlocal started, status
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            if origin is not None:
                self._check_origin(scope, headers, origin)
                extra += self._cors_headers(origin)
            self._check_host(scope, headers)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await self._preflight(headers, origin, send_on)
            else:
                self._check_key(scope, headers)
                body = await self._body(scope, headers, receive)
                await self._inner(scope, _replay(body, receive), send_on)
        except ApiError as error:
            if started:
                raise
            await _answer(send_on, error.status, to_json(error.body()), error.headers())
        except (asyncio.CancelledError, _GoneError):
            status = status or 499
        except Exception as error:  # never a bare 500
            kind = str(error) if isinstance(error, EdgeLLMError) else type(error).__name__
            _FAULT.error("request %s failed: %s", request_id, kind, exc_info=error)
            if started:
                return
            fault = ApiError(
                500,
                f"the server failed in request {request_id}: {kind}",
                kind="server_error",
                code="internal_error",
            )
            await _answer(send_on, 500, to_json(fault.body()), {})
        finally:
            if self._on_access is not None:
                self._on_access(
                    {
                        "time": round(time.time(), 3),
                        "request_id": request_id,
                        "method": scope["method"],
                        "path": scope["path"][:200],
                        "status": status,
                        "duration_ms": round((time.monotonic() - start) * 1000, 1),
                        "client": (scope.get("client") or ("unix",))[0] if not self._unix else "unix",
                    }
                )

    # --- the checks, each an ApiError where it fails ---

    def _check_host(self, scope: Scope, headers: Mapping[str, str]) -> None:
        if self._unix:  # no browser reaches a unix socket
            return
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1:
            raise ApiError(400, "the request has several Host headers")
        if not self._is_own_host(headers.get("host", "")):
            raise ApiError(
                403,
                f"the Host {headers.get('host', '')[:100]!r} is not this server; it is reached as localhost "
                "or by its address, and --allowed-host adds a name",
                kind="permission_error",
                code="host_not_allowed",
            )

    def _is_own_host(self, host: str) -> bool:
        name = _without_port(host.strip().lower()).removesuffix(".")
        return name in self._hosts or (self._any_address and bool(name) and is_ip_literal(name))

    def _check_origin(self, scope: Scope, headers: Mapping[str, str], origin: str) -> None:
        if self._allows(origin):
            return
        parts = urlsplit(origin)
        same = parts.netloc.lower() == headers.get("host", "").strip().lower() and parts.scheme == scope.get(
            "scheme", "http"
        )
        if same and parts.netloc and self._is_own_host(parts.netloc):
            return
        raise ApiError(
            403,
            f"pages of {origin[:100]!r} may not use this server; --cors-origin lets them",
            kind="permission_error",
            code="origin_not_allowed",
        )

    def _allows(self, origin: str) -> bool:
        return origin in self._settings.cors_origins or "*" in self._settings.cors_origins

    def _cors_headers(self, origin: str) -> list[tuple[bytes, bytes]]:
        if not self._allows(origin):
            return []
        allowed = "*" if "*" in self._settings.cors_origins else origin
        return [
            (b"access-control-allow-origin", allowed.encode("latin-1", "replace")),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"Origin"),
        ]

    async def _preflight(self, headers: Mapping[str, str], origin: str | None, send: Send) -> None:
        """A browser asks whether a page may ask; it cannot send the key with it."""
        if origin is None or not self._allows(origin):
            raise ApiError(403, "this server answers no pages of other origins", kind="permission_error")
        if "access-control-request-private-network" in headers:
            raise ApiError(
                403, "pages of a public network may not reach this private one", kind="permission_error"
            )
        asked = headers.get("access-control-request-headers", "")
        names = f", {asked}" if _HEADER_NAMES.fullmatch(asked.strip()) else ""
        await _answer(
            send,
            204,
            b"",
            {
                "access-control-allow-methods": "GET, POST, OPTIONS",
                "access-control-allow-headers": "authorization, content-type" + names,
                "access-control-max-age": "600",
            },
        )

    def _check_key(self, scope: Scope, headers: Mapping[str, str]) -> None:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""
        matches = [hmac.compare_digest(key, known) for known in self._keys]  # all, so that time tells nothing
        if not any(matches):
            what = "the API key is not one of this server's" if key else "this server wants an API key"
            raise ApiError(
                401,
                f"{what}; send it as 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
            )

    async def _body(self, scope: Scope, headers: Mapping[str, str], receive: Receive) -> bytes:
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return b""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        # A page may send other types to any server without being asked for; JSON it may not.
        if kind != "application/json":
            raise ApiError(415, f"the Content-Type must be application/json, not {kind[:100] or 'absent'!r}")
        limit = self._settings.max_body_bytes
        too_long = ApiError(
            413, f"the body is over {limit:,} bytes, which is the limit", code="request_too_large"
        )
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise too_long
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise too_long
                    parts.append(part)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="request_timeout"
            ) from None


class _GoneError(Exception):
    """The client left before its request was whole."""


def _headers(scope: Scope) -> dict[str, str]:
    """Names in lower case; of repeated ones the first."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return found


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _answer(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    if status != 204:
        pairs += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        pairs.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
