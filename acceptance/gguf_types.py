"""Both real models in every GGUF type: size, bits per weight, seconds, and whether llama.cpp runs it."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from acceptance.harness import Figure, record, version


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default=None, help="comma-separated; all without it")
    parser.add_argument("--effort", default="fast")
    options = parser.parse_args()

    from edgellm_quantize.recipe import GGUF_TYPES
    from edgellm_quantize.writers import write_quantized_gguf
    from tests.support.llama_cpp import LlamaCpp, LlamaCppError
    from tests.support.real_models import REAL_MODELS, real_model

    types = options.types.split(",") if options.types else GGUF_TYPES
    met = True
    for model in REAL_MODELS:
        for type_name in types:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "m.gguf"
                start = time.perf_counter()
                report = write_quantized_gguf(real_model(model), out, type_name, effort=options.effort)
                seconds = time.perf_counter() - start
                try:
                    with LlamaCpp(out, context=128) as judge:
                        ids = judge.tokenize("The capital of France is")
                        runs = len(judge.greedy(ids, 8)) == 8
                except LlamaCppError as error:
                    print(error)
                    runs = False
            figure = Figure(
                name=f"{model} {type_name}",
                value=round(report.bits_per_weight, 3),
                unit="bits per weight",
                promise="llama.cpp loads it and generates",
                met=runs,
                peer=f"xllamacpp {version('xllamacpp')}",
                detail={"bytes": report.nbytes, "seconds": round(seconds, 2), "effort": options.effort},
            )
            met &= record("gguf_types", [figure])  # one by one: a long run may be cut short
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
