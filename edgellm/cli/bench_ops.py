"""``edgellm bench ops``: kernels one by one beside the device's copy speed; ``--tune`` finds launch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.options import json_option, option
from edgellm.cli.output import current_output
from edgellm_models.errors import OutputError, ResourceError, UsageError

if TYPE_CHECKING:
    from edgellm_kernels.tuning import Measure

DEFAULT_SHAPES = "4096x4096,14336x4096"


@click.command(
    "ops",
    cls=EdgeCommand,
    examples=("edgellm bench ops", "edgellm bench ops --types Q4_K,Q6_K --rows 1,8 --json"),
)
@option("--device", metavar="DEVICE", default="cpu", show_default=True, help="cpu or cuda.")
@option("--kernels", metavar="NAME", default="auto", show_default=True, help="auto, torch, native or triton.")
@option("--types", metavar="TYPE,...", default="Q4_0,Q4_K,Q6_K,Q8_0", show_default=True, help="Weight types.")
@option(
    "--shapes", metavar="NxK,...", default=DEFAULT_SHAPES, show_default=True, help="Sizes of the weights."
)
@option("--rows", metavar="N,...", default="1,4,16", show_default=True, help="Rows of activations.")
@option(
    "--repeat", metavar="N", type=click.IntRange(1, 1000), default=10, show_default=True, help="Timed calls."
)
@option("--tune", is_flag=True, help="Find the fastest launch sizes of the GPU kernels and write them.")
@option("--output", metavar="FILE", default=None, help="Where --tune writes; unset is where they are read.")
@json_option
def command(
    device: str,
    kernels: str,
    types: str,
    shapes: str,
    rows: str,
    repeat: int,
    tune: bool,
    output: str | None,
    as_json: bool,
) -> None:
    """Measure kernels one by one: medians after a warm-up, weights that no cache still holds."""
    import torch

    if tune:
        if not torch.cuda.is_available():
            raise ResourceError(
                "--tune times the GPU kernels on the card itself: torch finds no usable GPU here"
            )
        _tune(repeat, output)
        return
    from edgellm_kernels.measure import FORMS, copy_gb_per_s, measure_linears, measure_norm
    from edgellm_kernels.ops import KernelUnavailableError, load_kernels

    names = [name.strip().upper() for name in types.split(",")]
    unknown = [name for name in names if name not in FORMS]
    if unknown:
        raise UsageError(f"--types has no {unknown[0]!r}: choose from {', '.join(FORMS)}")
    sizes = [_shape(text) for text in shapes.split(",")]
    counts = [_count(text) for text in rows.split(",")]
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ResourceError(f"--device {device}: torch finds no such device here; use --device cpu")
    try:
        chosen = load_kernels(device, preferred=kernels)
    except KernelUnavailableError as error:
        raise ResourceError(str(error)) from None
    out = current_output()
    copy = copy_gb_per_s(chosen.device, repeat)
    found = []
    if not as_json:
        out.data(f"copy {copy:.1f} GB/s; kernels: {chosen.chosen['linear']}")
        out.data(f"{'op':<14}{'type':<6}{'N x K':>14}{'rows':>6}{'ms':>10}{'GB/s':>8}{'of copy':>9}")
    timed = measure_linears(chosen, names, sizes, counts, repeat=repeat, copy=copy)
    norms = measure_norm(chosen, sizes[0][1], counts, repeat=repeat, copy=copy)
    for stream in (timed, norms):
        for one in stream:
            found.append(one)
            if not as_json:
                size = f"{one.n} x {one.k}"
                out.data(
                    f"{one.op:<14}{one.form:<6}{size:>14}{one.rows:>6}{one.ms:>10.3f}{one.gb_per_s:>8.1f}"
                    f"{one.of_copy:>9.2f}"
                )
    if as_json:
        out.json(
            {
                "device": str(chosen.device),
                "kernels": dict(chosen.chosen),
                "copy_gb_per_s": copy,
                "ops": [asdict(one) for one in found],
            }
        )


def _shape(text: str) -> tuple[int, int]:
    parts = text.strip().lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and 0 < int(part) <= 1 << 18 for part in parts):
        raise UsageError(f"--shapes takes NxK, such as 4096x4096, not {text!r}")
    n, k = int(parts[0]), int(parts[1])
    if k % 256:
        raise UsageError(f"--shapes {text}: K must be a multiple of 256, whole blocks of every type")
    return n, k


def _count(text: str) -> int:
    if not (text.strip().isdecimal() and 0 < int(text) <= 4096):
        raise UsageError(f"--rows takes numbers from 1 to 4096, not {text!r}")
    return int(text)


def _tune(repeat: int, output: str | None) -> None:
    """Times every candidate on the card. OutputError where the result cannot be written."""
    import torch

    from edgellm_kernels.tuning import tune, tuned_file, write_tuned

    gpu = torch.cuda.get_device_name()
    path = Path(output) if output else tuned_file(gpu)
    found: Mapping[str, Mapping[str, int]] = tune(_on_the_card(repeat))
    try:
        write_tuned(found, path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; --output names another file") from None
    for kernel, sizes in found.items():
        current_output().data(f"{kernel}: {', '.join(f'{name} {value}' for name, value in sizes.items())}")
    current_output().data(f"{len(found)} kernels have sizes of their own on {gpu}: {path}")


def _on_the_card(repeat: int) -> Measure:
    """Times a kernel over a weight of 14336 x 4096 in Q4_0."""
    import torch

    from edgellm_kernels.linear_triton import run_with_sizes
    from edgellm_kernels.measure import milliseconds, random_weight
    from edgellm_kernels.registry import keep_fused
    from edgellm_kernels.weights import PlaneWeight, prepare

    keep_fused()
    device = torch.device("cuda")
    weights: list[Any] = [
        prepare(random_weight("Q4_0", 14336, 4096), device, hold="planes") for _ in range(5)
    ]
    rows = {"gemv": 1, "dot16": 8, "dot32": 32, "dot64": 64}

    def measure(kernel: str, sizes: Mapping[str, int]) -> float | None:
        x = torch.randn(rows[kernel], 4096, device=device)

        def call(turn: int) -> None:
            weight = weights[turn % len(weights)]
            assert isinstance(weight, PlaneWeight)
            run_with_sizes(x, weight, kernel, sizes)

        try:
            return milliseconds(call, device, repeat)
        except Exception as error:  # Triton has no common base for "does not fit this card"
            if "out of resource" in str(error).lower() or "shared memory" in str(error).lower():
                return None
            raise

    return measure
