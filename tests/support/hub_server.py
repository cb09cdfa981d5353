"""A local server that speaks the hub's protocol as far as a download needs it, and can misbehave on order."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
PIECE = 4096


@dataclass(frozen=True)
class Fault:
    """What one answer does wrong."""

    kind: str
    """cut or stall after ``after`` bytes, status (answers ``status``), garble (other bytes, same length)."""
    after: int = 0
    status: int = 500
    retry_after: int | None = None


@dataclass(frozen=True)
class Request:
    """One request that arrived."""

    method: str
    host: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class HubState:
    """The repositories and what shall go wrong."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    large: int = 1000
    """Files of at least this size lie in large file storage: a SHA-256, and a redirect to another host."""
    licence: str = "apache-2.0"
    api_faults: deque[Fault] = field(default_factory=deque)
    faults: deque[Fault] = field(default_factory=deque)
    """For GETs of large files, one per request."""
    requests: list[Request] = field(default_factory=list)
    sent_bytes: int = 0
    """Of large files."""
    release: threading.Event = field(default_factory=threading.Event)
    """Ends every stall."""
    gated: bool = False
    false_small: bytes | None = None
    """Sent in place of every small file, under the right file's id."""
    pace_s: float = 0.0
    """Pause after each piece of a large file."""

    def ranges(self) -> list[str | None]:
        """The Range headers of the GETs of large files, in order."""
        return [r.range for r in self.requests if r.method == "GET" and r.path.startswith("/content/")]

    def started(self) -> int:
        return len(self.ranges())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: HubState

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        return

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = self.headers
        self.state.requests.append(
            Request(
                self.command,
                headers.get("Host", ""),
                path,
                headers.get("Range"),
                headers.get("Authorization"),
            )
        )
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]))
        elif parts[0] == "content":
            self._content(parts[1])
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self._status(404)

    def _api(self, repo: str) -> None:
        if self.state.api_faults:
            self._fault_status(self.state.api_faults.popleft())
            return
        if repo not in self.state.repos:
            self._status(401, {"X-Error-Code": "RepoNotFound"})
            return
        siblings = []
        for name, content in self.state.repos[repo].items():
            sibling: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob_id(content)}
            if len(content) >= self.state.large:
                sha256 = hashlib.sha256(content).hexdigest()
                sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            siblings.append(sibling)
        info = {"id": repo, "sha": COMMIT, "siblings": siblings, "cardData": {"license": self.state.licence}}
        self._body(json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _resolve(self, repo: str, name: str) -> None:
        if self.state.gated:
            self._status(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to it is restricted."})
            return
        content = self.state.repos.get(repo, {}).get(name)
        if content is None:
            self._status(404, {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": COMMIT}
        if len(content) >= self.state.large:
            sha256 = hashlib.sha256(content).hexdigest()
            port = self.server.server_address[1]
            headers |= {
                "X-Linked-Etag": f'"{sha256}"',
                "X-Linked-Size": str(len(content)),
                "Location": f"http://localhost:{port}/content/{sha256}",
            }
            self._status(302, headers)
        else:
            sent = content if self.state.false_small is None else self.state.false_small
            self._body(sent, {**headers, "ETag": f'"{blob_id(content)}"'})

    def _content(self, sha256: str) -> None:
        content = next(
            (
                data
                for files in self.state.repos.values()
                for data in files.values()
                if hashlib.sha256(data).hexdigest() == sha256
            ),
            None,
        )
        if content is None:
            self._status(404)
            return
        fault = self.state.faults.popleft() if self.state.faults and self.command == "GET" else Fault("none")
        if fault.kind == "status":
            self._fault_status(fault)
            return
        if fault.kind == "garble":
            content = bytes(byte ^ 255 for byte in content)
        start = 0
        requested = self.headers.get("Range")
        if requested:
            start = int(requested.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if requested else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", f'"{sha256}"')
        if requested:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self._send(content[start:], fault)

    def _send(self, content: bytes, fault: Fault) -> None:
        limit = fault.after if fault.kind in ("cut", "stall") else len(content)
        for offset in range(0, min(limit, len(content)), PIECE):
            piece = content[offset : min(offset + PIECE, limit)]
            try:
                self.wfile.write(piece)
                self.wfile.flush()
            except OSError:
                return
            self.state.sent_bytes += len(piece)
            if self.state.pace_s:
                self.state.release.wait(self.state.pace_s)
        if fault.kind == "stall":
            self.state.release.wait(30)
        if fault.kind in ("cut", "stall"):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _fault_status(self, fault: Fault) -> None:
        headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
        self._status(fault.status, headers)

    def _status(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _body(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def blob_id(content: bytes) -> str:
    """The git id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextmanager
def serve_hub(state: HubState) -> Iterator[str]:
    """Runs the server on a free port; yields the address for HF_ENDPOINT."""
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        state.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
