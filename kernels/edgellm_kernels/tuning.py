"""Finds the launch sizes of the GPU linears that are fastest on this card, and writes them as data."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path

from edgellm_kernels.gpu_configs import configurations, file_name

Measure = Callable[[str, Mapping[str, int]], float | None]
"""Milliseconds of a kernel with these launch sizes; None where the card cannot run it so."""
_CHOICES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "gemv": {"rows": (4, 8, 16), "blocks": (16, 32, 64), "warps": (2, 4, 8)},
    "dot16": {"rows": (32, 64), "blocks": (4, 8), "warps": (2, 4), "stages": (2, 3, 4)},
    "dot32": {"rows": (32, 64), "blocks": (4, 8), "warps": (4, 8), "stages": (2, 3)},
    "dot64": {"rows": (64,), "blocks": (4,), "warps": (4, 8), "stages": (2, 3)},
}
GAIN = 0.97
"""Sizes replace the default only where they take less than this share of its time."""


def candidates(kernel: str) -> Iterator[dict[str, int]]:
    """Launch sizes to try, the default first; what is not listed stays as it is."""
    default = dict(configurations()[kernel])
    yield default
    choices = _CHOICES[kernel]
    for values in itertools.product(*choices.values()):
        sizes = default | dict(zip(choices, values, strict=True))
        if sizes != default:
            yield sizes


def tune(measure: Measure) -> dict[str, dict[str, int]]:
    """By kernel the sizes that beat the default clearly."""
    found = {}
    for kernel in _CHOICES:
        timed = [(sizes, measure(kernel, sizes)) for sizes in candidates(kernel)]
        default = timed[0][1]
        fine = [(taken, index) for index, (_, taken) in enumerate(timed) if taken is not None]
        if not fine:
            continue
        taken, index = min(fine)
        if index and (default is None or taken < GAIN * default):
            found[kernel] = timed[index][0]
    return found


def tuned_file(gpu: str) -> Path:
    """Where ``configurations`` looks for this GPU's sizes."""
    return Path(str(resources.files("edgellm_kernels"))) / "tuned" / file_name(gpu)


def write_tuned(found: Mapping[str, Mapping[str, int]], path: Path) -> None:
    """The sizes as JSON, written whole. OSError where that fails."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(found, indent=1) + "\n")
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
