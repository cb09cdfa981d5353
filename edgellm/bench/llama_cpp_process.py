"""The process in which llama.cpp answers llama_cpp_peer.py. Run as a file, it imports nothing of ours."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from importlib.metadata import version
from typing import Any


def serve(path: str, context: int, threads: int) -> None:
    """Answers [token ids, number of new tokens] lines."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = context
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.fit_params = False
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    described = {
        "name": "llama.cpp",
        "version": f"xllamacpp {version('xllamacpp')}",
        "system": " ".join(str(xllamacpp.get_system_info()).split()),
        "threads": threads,
        "flash_attention": params.flash_attn_type.name.removeprefix("LLAMA_FLASH_ATTN_TYPE_").lower(),
        "kv_type": params.cache_type_k.name.removeprefix("GGML_TYPE_").lower(),
        "batch": params.n_batch,
        "ubatch": params.n_ubatch,
    }
    server = xllamacpp.Server(params)

    def answer(value: Any) -> None:
        print("ANSWER " + json.dumps(value), flush=True)

    answer(described)
    for line in sys.stdin:
        ids, count = json.loads(line)
        body = {
            "prompt": ids,
            "n_predict": count,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            server.listening_address + "/completion",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            timings = json.load(response)["timings"]
        answer(
            {
                "prefill_tokens_per_s": timings["prompt_per_second"],
                "decode_tokens_per_s": timings["predicted_per_second"],
                "prompt_tokens": timings["prompt_n"],
                "new_tokens": timings["predicted_n"],
            }
        )
    os._exit(0)  # the server's own shutdown is slow and nothing is left to save


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
