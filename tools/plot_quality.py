"""Draws KL divergence over bits per weight from docs/benchmarks/quantize_quality.json as docs/quality.svg."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "docs" / "benchmarks" / "quantize_quality.json"
TARGET = ROOT / "docs" / "quality.svg"

WIDTH, HEIGHT = 520, 450
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 76, 52
KINDS = {"edgellm": "#1f6feb", "llama-quantize": "#d9730d", "GPTQModel": "#8250df", "recipe": "#6e7781"}
LABELS = {
    "edgellm": "edgellm",
    "llama-quantize": "llama-quantize with imatrix",
    "GPTQModel": "GPTQModel",
    "recipe": "published recipe, computed here",
}
SAME_SIZE = {
    "rtn 4": "gptq 4",
    "plain gptq 4": "gptq 4",
    "gptqmodel 4": "gptq 4",
    "plain gptq 3": "gptq 3",
    "gptqmodel 3": "gptq 3",
    "rtn 4 asymmetric": "awq",
    "awq identity": "awq",
}
"""Cases that are measured without being written, and the file of the same format, bits and groups."""
_NAME = re.compile(r"^([^:]+): KL from the twin, ([^()]+?)( \([^()]*\))?$")


def points(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, tuple[float, float]]]:
    """title -> case -> (bits per weight, KL), each model's newest rows of the size of run that has the most.

    Reduced runs say their size in brackets, which the title repeats; the full run wins a tie.
    """
    newest = {}
    for row in rows:
        if match := _NAME.match(str(row["name"])):
            newest[match.group(1), match.group(3) or "", match.group(2)] = row
    sizes = {key: row["detail"]["bpw"] for key, row in newest.items() if "bpw" in row["detail"]}
    runs: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    for (model, run, case), row in newest.items():
        size = sizes.get((model, run, case), sizes.get((model, run, SAME_SIZE.get(case, case))))
        if size is not None:
            runs.setdefault(model, {}).setdefault(run, {})[case] = (float(size), float(row["value"]))
    fullest = {
        model: max(found, key=lambda run: (len(found[run]), run == "")) for model, found in runs.items()
    }
    return {model + run: runs[model][run] for model, run in fullest.items()}


def kind_of(case: str) -> str:
    if case.startswith("llama "):
        return "llama-quantize"
    if case.startswith("gptqmodel "):
        return "GPTQModel"
    return "recipe" if case in SAME_SIZE else "edgellm"


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten in a range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [t for p in powers for m in (1, 2, 5) if low <= (t := m * 10.0**p) <= high]


def _panel(model: str, cases: Mapping[str, tuple[float, float]], at: int) -> list[str]:
    sizes, losses = zip(*cases.values(), strict=True)
    first, last = math.floor(min(sizes) * 2) / 2, math.ceil(max(sizes) * 2 + 0.2) / 2
    low, high = min(losses) / 1.4, max(losses) * 1.4
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def x(size: float) -> float:
        return at + LEFT + (size - first) / (last - first) * (right - LEFT)

    def y(loss: float) -> float:
        return bottom - math.log(loss / low) / math.log(high / low) * (bottom - TOP)

    out = [f'<text x="{at + LEFT}" y="{TOP - 12}" class="head">{escape(model)}</text>']
    for loss in _ticks(low, high):
        out.append(f'<path d="M{at + LEFT} {y(loss):.1f}H{at + right}" class="grid"/>')
        out.append(f'<text x="{at + LEFT - 6}" y="{y(loss) + 4:.1f}" class="end">{loss:g}</text>')
    for half in range(round(first * 2), round(last * 2) + 1):
        out.append(f'<path d="M{x(half / 2):.1f} {TOP}V{bottom}" class="grid"/>')
        out.append(f'<text x="{x(half / 2):.1f}" y="{bottom + 16}" class="mid">{half / 2:g}</text>')
    out.append(
        f'<text x="{at + (LEFT + right) / 2:.0f}" y="{bottom + 36}" class="mid">bits per weight</text>'
    )
    taken: list[tuple[float, float]] = []
    for case, (size, loss) in sorted(cases.items(), key=lambda item: item[1][1]):
        colour = KINDS[kind_of(case)]
        centre, middle = x(size), y(loss)
        out.append(f'<circle cx="{centre:.1f}" cy="{middle:.1f}" r="4.5" fill="{colour}"/>')
        label = middle + 4
        while any(abs(label - other) < 12 and abs(centre - place) < 95 for place, other in taken):
            label -= 1.0  # points come from below, so a label that does not fit goes up
        taken.append((centre, label))
        side, shift = ("end", -8) if centre > at + right - 90 else ("start", 8)
        out.append(
            f'<text x="{centre + shift:.1f}" y="{label:.1f}" class="{side}" fill="{colour}">'
            f"{escape(case.removeprefix('llama '))}</text>"
        )
    return out


def plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """The drawing: a panel for each model. Text alone, so that a change of a figure shows in a diff."""
    models = points(rows)
    width = max(1, len(models)) * WIDTH
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        "<title>KL divergence from the dense twin over bits per weight</title>",
        "<style>.grid{stroke:#d0d7de;stroke-width:.6}.mid{text-anchor:middle}.end{text-anchor:end}"
        ".head{font-size:14px;font-weight:bold}</style>",
        f'<rect width="{width}" height="{HEIGHT}" fill="#fff"/>',
    ]
    used = {kind_of(case) for cases in models.values() for case in cases}
    place = LEFT
    for kind in (kind for kind in KINDS if kind in used):
        out.append(f'<circle cx="{place}" cy="14" r="4.5" fill="{KINDS[kind]}"/>')
        out.append(f'<text x="{place + 8}" y="18">{LABELS[kind]}</text>')
        place += 30 + 6 * len(LABELS[kind])
    out.append(f'<text x="{LEFT}" y="34">mean KL divergence in nats (logarithmic): lower is better</text>')
    for number, (model, cases) in enumerate(models.items()):
        out += _panel(model, cases, number * WIDTH)
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    TARGET.write_text(plot(json.loads(SOURCE.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
