"""Tests of the drawing of KL divergence over bits per weight."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PLOT = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "plot_quality.py"))


def row(model: str, case: str, loss: float, **detail: Any) -> dict[str, Any]:
    return {"name": f"{model}: KL from the twin, {case}", "value": loss, "detail": detail}


def test_newest_full_runs_are_points_and_a_case_without_file_has_the_size_of_its_format() -> None:
    rows = [
        row("a", "gptq 4", 0.9, bpw=4.3),
        row("a", "gptq 4", 0.1, bpw=4.4),
        row("a", "rtn 4", 0.5),
        row("a", "Q4_K_M (8192 calibration tokens, 4096 scored)", 0.3, bpw=4.8),
        row("b", "rtn 4", 0.5),
        {"name": "a: KL of gptq 4 over rtn 4", "value": 0.2, "detail": {}},
    ]
    assert PLOT["points"](rows) == {"a": {"gptq 4": (4.4, 0.1), "rtn 4": (4.4, 0.5)}}


def test_a_reduced_run_is_drawn_where_it_has_more_and_the_full_one_in_a_tie() -> None:
    few = " (8 calibration tokens, 4 scored)"
    rows = [row("a", f"Q4_K_M{few}", 0.3, bpw=4.8), row("a", "Q4_K_M", 0.2, bpw=4.8)]
    assert PLOT["points"](rows) == {"a": {"Q4_K_M": (4.8, 0.2)}}
    rows.append(row("a", f"Q3_K_M{few}", 0.4, bpw=3.9))
    assert PLOT["points"](rows) == {f"a{few}": {"Q4_K_M": (4.8, 0.3), "Q3_K_M": (3.9, 0.4)}}


def test_lower_losses_lie_lower_and_more_bits_further_right() -> None:
    rows = [row("m & n", "Q3_K_M", 0.2, bpw=3.9), row("m & n", "llama Q4_K_M", 0.1, bpw=4.8)]
    root = ElementTree.fromstring(PLOT["plot"](rows))
    space = "{http://www.w3.org/2000/svg}"
    drawn = [circle for circle in root.iter(f"{space}circle") if float(circle.attrib["cy"]) > 30]
    by_colour = {c.attrib["fill"]: (float(c.attrib["cx"]), float(c.attrib["cy"])) for c in drawn}
    ours, theirs = by_colour[PLOT["KINDS"]["edgellm"]], by_colour[PLOT["KINDS"]["llama-quantize"]]
    assert ours[0] < theirs[0] and ours[1] < theirs[1]
    words = [text.text for text in root.iter(f"{space}text")]
    assert "m & n" in words and words.count("Q4_K_M") == 1
