"""The process in which llama.cpp answers llama_cpp.py. Run as a file, it imports nothing of ours."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

import xllamacpp

_START_S = 60.0


def serve(path: str, context: int) -> None:
    """Answers [path, body] lines from standard input."""
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = context
    params.n_batch = params.n_ubatch = context
    params.n_parallel = 1
    params.warmup = False
    params.n_gpu_layers = 0
    params.fit_params = False
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.swa_full = True
    params.verbosity = 1
    server = xllamacpp.Server(params)

    def post(route: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            server.listening_address + route,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_START_S) as response:
            return json.load(response)

    def answer(value: dict[str, Any]) -> None:
        print("ANSWER " + json.dumps(value), flush=True)

    answer({"value": None})
    for line in sys.stdin:
        route, body = json.loads(line)
        try:
            answer({"value": post(route, body)})
        except urllib.error.HTTPError as error:
            answer({"error": error.read().decode(errors="replace")})
    # The server's own shutdown is slow and nothing is left to save.
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
