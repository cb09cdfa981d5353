"""``edgellm bench ops``: a table of kernels on this CPU, refusals, and how launch sizes are chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from edgellm.cli.main import run
from edgellm_kernels.gpu_configs import configurations, file_name
from edgellm_kernels.measure import FORMS, random_weight
from edgellm_kernels.tuning import candidates, tune, tuned_file, write_tuned
from edgellm_kernels.weights import prepare


def test_the_table_and_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Every type, shape and number of rows once, then the norms; the sizes are what was asked for."""
    arguments = ["--types", "q4_0,Q6_K", "--shapes", "64x256,32x512", "--rows", "1,3", "--repeat", "1"]
    assert run(["bench", "ops", "--kernels", "torch", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kernels"]["linear"] == "torch" and found["copy_gb_per_s"] > 0
    linears = [(o["form"], o["n"], o["k"], o["rows"]) for o in found["ops"] if o["op"] == "linear"]
    assert linears == [
        (form, n, k, rows) for form in ("Q4_0", "Q6_K") for n, k in ((64, 256), (32, 512)) for rows in (1, 3)
    ]
    assert all(o["ms"] > 0 and o["gb_per_s"] > 0 for o in found["ops"])
    assert [o["rows"] for o in found["ops"] if o["op"] == "add_rms_norm"] == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tune"], "no usable GPU"),
        (["--types", "Q9"], "--types has no 'Q9'"),
        (["--shapes", "64"], "--shapes takes NxK"),
        (["--shapes", "64x100"], "multiple of 256"),
        (["--rows", "0"], "--rows takes numbers"),
        (["--device", "tpu"], "--device tpu"),
    ],
)
def test_refusals(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["bench", "ops", *arguments]) != 0
    shown = capsys.readouterr()
    assert words in shown.err and not shown.out


@pytest.mark.parametrize("form", FORMS)
def test_random_weights_are_finite(form: str) -> None:
    dense = prepare(random_weight(form, 8, 512), hold="dense")
    values = dense.data.float()  # type: ignore[union-attr]
    assert values.shape == (8, 512) and bool(values.isfinite().all()) and float(values.std()) > 0


def test_sizes_replace_the_default_only_where_they_are_clearly_faster(tmp_path: Path) -> None:
    default = dict(configurations()["gemv"])
    assert next(candidates("gemv")) == default and len(list(candidates("gemv"))) == 27

    def measure(kernel: str, sizes: Mapping[str, int]) -> float | None:
        if kernel == "gemv":  # two warps are best, and large tiles do not fit
            return None if sizes["blocks"] == 64 else 1.0 * sizes["warps"] + 0.1 * sizes["rows"]
        return 1.0 if sizes == dict(configurations()[kernel]) else 0.98  # within the noise

    found = tune(measure)
    assert list(found) == ["gemv"]
    assert (found["gemv"]["warps"], found["gemv"]["rows"]) == (2, 4) and found["gemv"]["blocks"] != 64
    write_tuned(found, tmp_path / "card.json")
    assert json.loads((tmp_path / "card.json").read_text()) == found
    assert [path.name for path in tmp_path.iterdir()] == ["card.json"]
    assert tuned_file("NVIDIA RTX").name == file_name("NVIDIA RTX") and tuned_file("x").parent.is_dir()
