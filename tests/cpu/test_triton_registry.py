"""Which ops the Triton kernels serve, without importing Triton, and what is said where they cannot run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from edgellm_kernels import registry
from edgellm_kernels.ops import load_kernels
from edgellm_kernels.registry import OPS, KernelUnavailableError, available, choose, explain, keep_fused
from tests.support.oracles import require_oracle


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "triton_missing", lambda: "")


@pytest.mark.usefixtures("with_triton")
def test_triton_serves_the_gpu() -> None:
    """It is preferred there; torch stays the reference on request; the CPU has none of it."""
    for dtype in (torch.float32, torch.bfloat16):
        for preferred in ("auto", "triton"):
            chosen = {op: choose(op, "cuda", dtype, preferred).backend for op in OPS}
            assert chosen.pop("rope_angles") == "torch" and set(chosen.values()) == {"triton"}
        assert {choose(op, "cuda", dtype, "torch").backend for op in OPS} == {"torch"}
    assert explain("cuda")["linear"] == "triton (also: torch)"
    with pytest.raises(KernelUnavailableError, match="no triton kernels for rope_angles on cpu"):
        choose("rope_angles", "cpu", preferred="triton")
    assert all(i.backend != "triton" for op in OPS for i in available(op, "cpu"))


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, or on too old a GPU, auto is torch, and a wish is refused with the reason."""
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    assert choose("linear", "cuda").backend == "torch"
    with pytest.raises(
        KernelUnavailableError, match="triton kernels here: the package triton is not installed"
    ):
        choose("linear", "cuda", preferred="triton")
    monkeypatch.undo()
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(KernelUnavailableError, match=r"compute capability 8\.0"):
        choose("linear", "cuda", preferred="triton")


def test_triton_is_not_imported_before_it_is_chosen() -> None:
    code = (
        "import sys\n"
        "from edgellm_kernels.registry import explain\n"
        "explain('cuda'); explain('cpu')\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_products_stay_fused_unless_the_user_says_otherwise() -> None:
    for given, kept in (({}, "1"), ({"TRITON_DEFAULT_FP_FUSION": "0"}, "0")):
        environ = dict(given)
        keep_fused(environ)
        assert environ == {"TRITON_DEFAULT_FP_FUSION": kept}


@pytest.mark.parametrize("preferred", ["torch", "triton"])
@pytest.mark.usefixtures("with_triton")
def test_kernels_of_a_gpu_keep_products_fused(monkeypatch: pytest.MonkeyPatch, preferred: str) -> None:
    """Whatever computes the rest: draws are Triton's there."""
    require_oracle("triton")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # so that what is set here goes with the test
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION")
    load_kernels("cpu")
    assert "TRITON_DEFAULT_FP_FUSION" not in os.environ
    load_kernels("cuda", preferred=preferred)
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "1"
