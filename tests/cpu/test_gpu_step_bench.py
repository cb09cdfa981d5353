"""The script that times decode steps on a GPU runs on the CPU too, with a tiny shape and eager replay."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from edgellm.runner.decode_graphs import EagerReplay
from edgellm_kernels.ops import load_kernels
from tests.support.command_line import ROOT


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_step_bench", ROOT / "tools" / "gpu_step_bench.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_step_bench", module)  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_a_row_for_every_shape_batch_and_way(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = load_kernels("cpu", preferred="torch")
    shapes = [bench.Shape(name, 2, 256, 4, 2, 64, 256, 300) for name in ("small", "large")]

    def make(shape, form):  # type: ignore[no-untyped-def]
        return bench.random_decoder(shape, kernels, form, "Q8_0" if form != "F16" else "F16", "dense")

    found = bench.rows(shapes, (1, 20), make, EagerReplay, copy=10.0, repeat=1)
    met = [(row["shape"], row["weights"], row["batch"], row["way"]) for row in found]
    per_model = [(1, "single launches"), (1, "graph"), (20, "single launches")]
    models = (("small", "Q4_0"), ("small", "F16"), ("large", "Q4_0"))
    assert met == [(*model, *way) for model in models for way in per_model]
    assert all(row["ms"] > 0 and row["tokens_per_s"] > 0 and row["of_copy"] > 0 for row in found)
    assert len(capsys.readouterr().out.splitlines()) == len(found)
