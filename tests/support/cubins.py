"""Kernels compiled ahead of time for GPUs that are not here, and what their machine code shows."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from edgellm_kernels.registry import keep_fused

ARCHITECTURES = (80, 86, 89, 90, 120)
SHARED_LIMITS = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8", torch.uint8: "u8",
    torch.int16: "i16", torch.uint16: "u16", torch.int32: "i32", torch.uint32: "u32", torch.int64: "i64",
    torch.float64: "fp64",
}  # fmt: skip


@dataclass(frozen=True)
class Loop:
    """The instructions between a backward branch and its target."""

    lines: tuple[str, ...]

    def count(self, *names: str) -> int:
        """Instructions whose name starts with one of these."""
        return sum(1 for line in self.lines if line.startswith(names))


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture."""

    sass: tuple[str, ...]
    """Instructions and labels (``.L_x_1:``) in order, predicates taken away."""
    resources: Mapping[str, int]
    """REG, STACK, LOCAL, as cuobjdump says."""
    shared_bytes: int
    """Dynamic and static shared memory."""
    num_warps: int

    def count(self, *names: str) -> int:
        return Loop(self.sass).count(*names)

    @cached_property
    def loops(self) -> list[Loop]:
        """Every loop, the longest first. A loop that holds another loop is left out."""
        labels = {line[:-1]: place for place, line in enumerate(self.sass) if line.endswith(":")}
        spans = []
        for place, line in enumerate(self.sass):
            found = re.search(r"^BRA\S* .*?`\((\.L_x_\d+)\)", line)
            if found and labels.get(found.group(1), place) < place:
                spans.append((labels[found.group(1)], place))
        spans = [
            span for span in spans
            if span[1] - span[0] > 1
            and not any(span[0] <= other[0] and other[1] <= span[1] and other != span for other in spans)
        ]  # fmt: skip
        bodies = [tuple(line for line in self.sass[a : b + 1] if not line.endswith(":")) for a, b in spans]
        return [Loop(body) for body in sorted(bodies, key=len, reverse=True)]

    def loop_with(self, *names: str) -> Loop:
        """The longest loop that holds such an instruction."""
        return next(loop for loop in self.loops if loop.count(*names))


def compile_call(kernel: Any, arguments: Mapping[str, Any], architecture: int) -> Compiled:
    """Compile a kernel as a launch with these arguments would: tensors and integers with the hints that the
    launcher derives from them (pointers and multiples of 16, ones as constants).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    keep_fused()
    options = {name: arguments[name] for name in ("num_warps", "num_stages", "maxnreg") if name in arguments}
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        value = arguments[name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{_NAMES[value.dtype]}"
            if value.data_ptr() % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif parameter.do_not_specialize:
            signature[name] = "i32"
        elif value == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    sass, resources = _disassemble(made.asm["cubin"])
    return Compiled(sass, resources, made.metadata.shared + resources["SHARED"], made.metadata.num_warps)


def _disassemble(cubin: bytes) -> tuple[tuple[str, ...], dict[str, int]]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        def run(tool: str, *arguments: str) -> str:
            command = [str(tools / tool), *arguments, str(path)]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        text, usage = run("nvdisasm", "-c"), run("cuobjdump", "-res-usage")
    lines = []
    for raw in text.splitlines():
        line = raw.strip()
        if re.fullmatch(r"\.L_x_\d+:", line):
            lines.append(line)
            continue
        found = re.match(r"/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?(\S.*?)\s*;", line)
        if found and not found.group(1).startswith("NOP"):
            lines.append(found.group(1))
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    return tuple(lines), numbers
