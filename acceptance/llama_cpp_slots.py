"""The process in which llama.cpp answers llama_cpp_server.py. Run as a file, it imports nothing of ours.

A line of JSON is a group of requests, which it answers at once, with the processor time of all.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.request
from typing import Any


def serve(path: str, context: int, threads: int, slots: int, kv_type: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = context * slots
    params.n_parallel = slots
    params.n_gpu_layers = 0
    params.fit_params = False
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kv_type.upper()}")
    server = xllamacpp.Server(params)

    def ask(ids: list[int], new_tokens: int, reuse: bool, into: list[Any]) -> None:
        body = {
            "prompt": ids,
            "n_predict": new_tokens,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": reuse,
        }
        request = urllib.request.Request(
            server.listening_address + "/completion",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            into.append(json.load(response)["timings"])

    def answer(value: Any) -> None:
        print("ANSWER " + json.dumps(value), flush=True)

    answer(
        {
            "system": " ".join(str(xllamacpp.get_system_info()).split()),
            "flash_attention": params.flash_attn_type.name.removeprefix("LLAMA_FLASH_ATTN_TYPE_").lower(),
            "kv_type": kv_type,
            "batch": params.n_batch,
            "ubatch": params.n_ubatch,
        }
    )
    for line in sys.stdin:
        prompts, new_tokens, reuse = json.loads(line)
        timings: list[Any] = []
        wall, processor = time.monotonic(), time.process_time()
        asking = [threading.Thread(target=ask, args=(ids, new_tokens, reuse, timings)) for ids in prompts]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        answer(
            {
                "prefill_s": timings[0]["prompt_ms"] / 1e3,
                "decode_s": timings[0]["predicted_ms"] / 1e3,
                "processor_s": time.process_time() - processor,
                "wall_s": time.monotonic() - wall,
            }
        )
    os._exit(0)  # the server's own shutdown is slow and nothing is left to save


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
