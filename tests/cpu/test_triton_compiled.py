"""The Triton kernels compile for GPUs that are not here, and their machine code is what was meant."""

# ruff: noqa: E402 (what is imported below needs the oracle)
from __future__ import annotations

import os

import pytest

from tests.support.oracles import require_oracle

require_oracle("triton")

from tests.support.cubins import ARCHITECTURES, Compiled
from tests.support.gpu_cases import Case, cases, faults

assert os.environ.get("TRITON_INTERPRET") != "1", "kernels that are interpreted cannot be compiled"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_for(architecture: int) -> None:
    """No spills, shared memory within the card's, wide loads, tensor cores where meant, few instructions."""
    for case in cases(simple=architecture == 86):
        assert faults(case, case.compile(architecture), architecture) == [], case.name


def test_faults_are_seen() -> None:
    """The checks fail for code that spills, waits in its loop, or has too many instructions."""
    loop = (".L_x_1:", "LDG.E R0, [R2]", "BAR.SYNC 0x0", "STL [R1], R0", "@P0 BRA `(.L_x_1)")
    sass = (*loop[:-1], "BRA `(.L_x_1)", "EXIT")
    code = Compiled(sass, {"REG": 40, "STACK": 8, "LOCAL": 0, "SHARED": 0}, 200_000, 4)
    case = Case("bad", None, {}, weights_per_thread=0.5, ceiling=5.0, is_gemv=True, has_dot=True)
    assert len(faults(case, code, 86)) == 6
