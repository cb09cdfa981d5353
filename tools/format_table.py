"""The table of docs/formats.md: what every output takes, costs and is for, from measured rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"
MODELS = {"smollm2-135m": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
WEIGHTS = {"smollm2-135m": 134_515_008, "gemma3-270m": 268_098_176}
"""Of each model, as reports of quantizing count them."""
_GGUF = "llama.cpp and all that is built on it, edgellm"
_SAME = "the same"
_GPTQ = "transformers with GPTQModel, vLLM, edgellm"
ROWS: tuple[tuple[str, str, str, str, str, str], ...] = (
    ("GGUF Q2_K_S", "", "`--type Q2_K_S`", "2.6", _GGUF, "as Q2_K, smaller still"),
    ("GGUF Q2_K", "", "`--type Q2_K`", "2.6", _SAME, "only when nothing else fits; with `--calibration`"),
    ("GGUF Q3_K_S", "", "`--type Q3_K_S`", "3.4", _SAME, "tight memory"),
    ("GGUF Q3_K_M", "Q3_K_M", "`--type Q3_K_M`", "3.9", _SAME, "tight memory, the better choice at 3 bits"),
    ("GGUF Q3_K_L", "", "`--type Q3_K_L`", "4.2", _SAME, "between Q3_K_M and Q4_K_S"),
    ("GGUF Q4_K_S", "", "`--type Q4_K_S`", "4.6", _SAME, "a little smaller than Q4_K_M"),
    ("GGUF Q4_K_M", "Q4_K_M", "(nothing: the default)", "4.8", _SAME, "the first choice on a desktop"),
    ("", "target-bpw", "`--target-bpw 6.17`", "any", _SAME, "what must fit; types by sensitivity"),
    ("GGUF Q5_K_S", "", "`--type Q5_K_S`", "5.5", _SAME, "room to spare"),
    ("GGUF Q5_K_M", "", "`--type Q5_K_M`", "5.7", _SAME, "room to spare"),
    ("GGUF Q6_K", "", "`--type Q6_K`", "6.6", _SAME, "nearly lossless"),
    ("GGUF Q8_0", "", "`--type Q8_0`", "8.5", _SAME, "lossless for practice; a source for further work"),
    ("GGUF Q4_0", "", "`--type Q4_0`", "4.5", _SAME, "rows no multiple of 256; old programs"),
    ("GGUF Q4_1", "", "`--type Q4_1`", "5.0", _SAME, "the same, with a least value per block"),
    ("GGUF Q5_0", "", "`--type Q5_0`", "5.5", _SAME, "the same, at 5 bits"),
    ("GGUF Q5_1", "", "`--type Q5_1`", "6.0", _SAME, "the same, with a least value per block"),
    ("GGUF F16", "", "`--type F16`", "16", _SAME, "a source to quantize from"),
    ("GGUF BF16", "", "`--type BF16`", "16", _SAME, "the same, with the range of the model's own numbers"),
    ("GGUF F32", "", "`--type F32`", "32", _SAME, "exact work"),
    ("GPTQ 4 bits", "gptq 4", "`--bits 4 --calibration FILE`", "4.16 (g128), 4.31 (g64)",
     "transformers with GPTQModel, vLLM, exllamav2, edgellm", "GPU servers"),
    ("GPTQ 4 bits with zero points", "", "`--bits 4 --asym`", "4.2 (g128)",
     "transformers with GPTQModel, edgellm; vLLM refuses", "better take AWQ"),
    ("GPTQ 8 bits", "", "`--bits 8`", "8.2", _GPTQ, "GPU servers, nearly lossless"),
    ("GPTQ 3 bits", "gptq 3", "`--bits 3`", "3.1 to 3.3",
     "transformers with GPTQModel, edgellm; vLLM refuses (a notice says so)", "large models on small GPUs"),
    ("GPTQ 2 bits", "", "`--bits 2`", "2.1 to 2.3", _SAME, "only when nothing else fits"),
    ("AWQ 4 bits", "awq", "`--format awq --calibration FILE`", "4.16 (g128)",
     "transformers with GPTQModel, vLLM, AutoAWQ, edgellm", "GPU servers; the best 4 bits there"),
    ("compressed-tensors 4 bits", "", "`--format compressed-tensors`", "4.13 (g128)",
     "vLLM, transformers with compressed-tensors, edgellm", "vLLM without GPTQ kernels"),
    ("Hugging Face bf16", "", "`--format hf --dtype bf16`", "16",
     "everything that reads safetensors", "a GGUF back into what training tools read"),
)  # fmt: skip
"""Output as acceptance/output_formats names it, case of quantize_quality, command, nominal bits, who loads
it, when to take it."""


def table() -> str:
    """Markdown; a cell without a measured row is ``-``."""
    measured = {**_rows("output_formats"), **_rows("quantize_quality")}
    names = " | ".join(f"{name}: bits, MB a token | tok/s | loss | calibrated" for name in MODELS.values())
    lines = [f"| output | command | nominal bits | {names} | loads in | take it |"]
    lines.append("|" + "---|" * lines[0].count(" | ") + "---|")
    for output, case, command, nominal, loads, take in ROWS:
        label = output or "GGUF of a size"
        cells = [label, command, nominal]
        for model in MODELS:
            cells += _cells(measured, model, output, case)
        lines.append("| " + " | ".join([*cells, loads, take]) + " |")
    return "\n".join(lines)


def _rows(name: str) -> dict[str, dict[str, Any]]:
    path = RESULTS / f"{name}.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {row["name"]: row for row in rows}


def _cells(measured: dict[str, dict[str, Any]], model: str, output: str, case: str) -> list[str]:
    plain = measured.get(f"{model}: {output}, loss without calibration")
    speed = measured.get(f"{model}: {output}, decoding")
    best = measured.get(f"{model}: KL from the twin, {case}")
    planned = measured.get(f"{model}: {output}, size")
    size = next((row["detail"] for row in (plain, planned, best) if row and "bpw" in row["detail"]), None)
    return [
        f"{size['bpw']:.2f}, {_megabytes(model, size['bpw']):.0f}" if size else "-",
        f"{speed['value']:.0f}" if speed else "-",
        _loss(plain),
        _loss(best),
    ]


def _megabytes(model: str, bits_per_weight: float) -> float:
    """Of the tensors. A token does not read the header and the vocabulary that a file has besides."""
    return bits_per_weight * WEIGHTS[model] / 8e6


def _loss(row: dict[str, Any] | None) -> str:
    return f"{row['value']:.2g}" if row else "-"
