"""A small OpenAI-compatible server for tests: one model, streamed answers, recorded requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Stub:
    """Knows only what OpenAI's own interface has, unless ``owner`` is edgellm."""

    def __init__(self, pieces: Sequence[str], model: str, owner: str, key: str | None) -> None:
        self.pieces, self.model, self.owner, self.key = pieces, model, owner, key
        self.asked: list[dict[str, Any]] = []
        self.address = ""


@contextmanager
def openai_stub(
    *pieces: str, model: str = "their-model", owner: str = "somebody", key: str | None = None
) -> Iterator[Stub]:
    stub = Stub(pieces or ("Hel", "lo."), model, owner, key)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def reply(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def refused(self) -> bool:
            if stub.key is None or self.headers.get("Authorization") == f"Bearer {stub.key}":
                return False
            self.reply(401, {"error": {"message": "no such key", "type": "authentication_error"}})
            return True

        def do_GET(self) -> None:
            if self.path == "/health":
                self.reply(404, {"error": {"message": "no such path"}})
            elif not self.refused():
                self.reply(200, {"data": [{"id": stub.model, "object": "model", "owned_by": stub.owner}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.refused():
                return
            stub.asked.append(body)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for piece in stub.pieces:
                self.event({"choices": [{"index": 0, "delta": {"content": piece}}]})
            self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            usage = {"prompt_tokens": 9, "completion_tokens": len(stub.pieces), "total_tokens": 9}
            self.event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, chunk: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps({"id": "c1", **chunk}).encode() + b"\n\n")
            self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
