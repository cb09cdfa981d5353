"""Launches of the Triton kernels as they are made for real shapes, to be compiled for other GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from edgellm_kernels.gpu_configs import DOT_REGISTERS, attention_tile, configurations, dot_sizes, sizes_of
from edgellm_kernels.gpu_layouts import FORMS
from edgellm_kernels.weights import BlockLayout, BlockQuantWeight, PlaneWeight, prepare
from tests.support.cubins import SHARED_LIMITS, Compiled, compile_call
from tests.support.native import random_rows

CEILINGS = {
    "gemv": {"Q4_0": 4.6, "Q4_1": 5.2, "INT4": 4.8, "Q8_0": 4.7, "Q4_K": 5.7, "Q5_0": 6.2, "Q5_1": 6.8,
             "Q5_K": 7.3, "Q6_K": 6.5, "Q3_K": 7.2, "Q2_K": 6.7},
    "int_gemv": {"Q4_0": 2.0, "Q4_1": 2.1, "INT4": 2.1, "Q8_0": 2.1, "Q4_K": 2.6, "Q5_0": 3.2, "Q5_1": 3.4,
                 "Q5_K": 3.8, "Q2_K": 4.1, "Q6_K": 4.9, "Q3_K": 5.5},
    "dot16": {"Q4_0": 7.0, "INT4": 7.5, "Q4_K": 7.5, "Q6_K": 8.3},
}  # fmt: skip
"""Instructions of the main loop per weight; forms that are not named have none."""


@dataclass(frozen=True)
class Case:
    """One launch."""

    name: str
    kernel: Any
    arguments: Mapping[str, Any]
    on_hopper: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that differ on sm_90."""
    weights_per_thread: float = 0.0
    """Weights that a thread decodes in one turn of the main loop."""
    ceiling: float = 0.0
    is_gemv: bool = False
    has_dot: bool = False
    has_dot4: bool = False

    def compile(self, architecture: int) -> Compiled:
        other = self.on_hopper if architecture == 90 else {}
        return compile_call(self.kernel, {**self.arguments, **other}, architecture)

    def instructions_per_weight(self, compiled: Compiled) -> float | None:
        if not self.weights_per_thread:
            return None
        return len(compiled.loops[0].lines) / self.weights_per_thread


def faults(case: Case, compiled: Compiled, architecture: int) -> list[str]:
    """What the machine code must not show, in words."""
    found = []
    if compiled.resources["STACK"] or compiled.resources["LOCAL"] or compiled.count("LDL", "STL"):
        found.append(f"spills: {dict(compiled.resources)}")
    if compiled.shared_bytes > SHARED_LIMITS[architecture]:
        found.append(f"{compiled.shared_bytes} bytes of shared memory")
    if case.has_dot and not compiled.count("HMMA", "HGMMA", "WGMMA"):
        found.append("no tensor-core instruction")
    if case.has_dot4 and not compiled.loops[0].count("IDP"):
        found.append("no product of four bytes")
    per_weight = case.instructions_per_weight(compiled)
    if case.ceiling and per_weight is not None and per_weight > case.ceiling:
        found.append(f"{per_weight:.2f} instructions per weight, at most {case.ceiling}")
    if case.is_gemv:
        loop = compiled.loops[0]
        if loop.count("BAR", "STS", "LDS"):
            found.append("the loop meets a barrier or shared memory")
        if not loop.count("LDG.E.128") or compiled.resources["REG"] > 128:
            found.append("no load of 16 bytes, or more than 128 registers")
    return found


def weight(form: str, n: int = 32, k: int = 4096) -> PlaneWeight:
    """A weight in planes; random bytes will do, only its shapes are compiled."""
    if form == "INT4":
        from edgellm_kernels.int_groups import int_weight

        codes = torch.zeros((n, k), dtype=torch.uint8)
        zeros = torch.zeros((n, k // 128), dtype=torch.uint8)
        scales = torch.ones((n, k // 128), dtype=torch.float16)
        held = prepare(int_weight(codes, scales, bits=4, group_size=128, zeros=zeros), hold="planes")
    else:
        held = prepare(BlockQuantWeight(random_rows(form, n, k), BlockLayout[form], k), hold="planes")
    assert isinstance(held, PlaneWeight)
    return held


def gemv_case(form: str, activation: int = 0) -> Case:
    from edgellm_kernels.linear_triton import gemv_kernel
    from edgellm_kernels.planes_triton import plane_arguments

    planes, constants = plane_arguments(weight(form))
    sizes = sizes_of(configurations(), "gemv", form)
    x = torch.empty(4096)
    arguments = {
        "x": x, "bias": x, "add": x, "out": x, "n": 4096, **planes, **constants, "HAS_BIAS": False,
        "HAS_ADD": activation == 0, "ACTIVATION": activation, "ROWS": sizes["rows"],
        "BLOCKS": sizes["blocks"], "EVEN": True, "num_warps": sizes["warps"], "num_stages": 1,
    }  # fmt: skip
    per_thread = sizes["rows"] * sizes["blocks"] / sizes["warps"]
    ceiling = CEILINGS["gemv"].get(form, 0.0) * (1.05 if activation else 1.0)
    name = f"gemv {form}" + (" gate" if activation else "")
    return Case(name, gemv_kernel, arguments, {}, per_thread, ceiling, is_gemv=True)


def int_gemv_case(form: str, fine: bool = False) -> Case:
    from edgellm_kernels.int_gemv_triton import int_gemv_kernel, keeps_halves
    from edgellm_kernels.planes_triton import plane_arguments

    planes, constants = plane_arguments(weight(form))
    sizes = sizes_of(configurations(), "gemv", form)
    f, x = torch.empty(4096), torch.empty(1024, dtype=torch.int32)
    arguments = {
        "x": x, "fine": x, "x_scales": f, "bias": f, "add": f, "out": f, "n": 4096, **planes, **constants,
        "HAS_BIAS": False, "HAS_ADD": True, "ROWS": sizes["rows"], "BLOCKS": sizes["blocks"], "EVEN": True,
        "HALVES": keeps_halves(constants), "FINE": fine, "ASM": True, "num_warps": sizes["warps"],
        "num_stages": 1,
    }  # fmt: skip
    per_thread = sizes["rows"] * sizes["blocks"] / sizes["warps"]
    name = f"int_gemv {form}" + (" int16" if fine else "")
    ceiling = 0.0 if fine else CEILINGS["int_gemv"].get(form, 0.0)
    return Case(name, int_gemv_kernel, arguments, {}, per_thread, ceiling, is_gemv=True, has_dot4=True)


def quantize_case(fine: bool) -> Case:
    from edgellm_kernels.int_gemv_triton import quantize_kernel

    f, x = torch.empty(64), torch.empty(64, dtype=torch.int8)
    arguments = {
        "x": f, "coarse": x, "fine": x, "scales": f, "num_blocks": 128, "HALVES": True, "FINE": fine,
        "BLOCKS": 32,
    }  # fmt: skip
    return Case("quantize" + " int16" * fine, quantize_kernel, arguments)


def dot_case(form: str, kernel: str, half: bool = True) -> Case:
    from edgellm_kernels.linear_triton import dot_kernel
    from edgellm_kernels.planes_triton import plane_arguments

    planes, constants = plane_arguments(weight(form))
    sizes = dot_sizes(configurations(), kernel, form, half)
    x = torch.empty(4096, dtype=torch.float16 if half else torch.float32)
    f = torch.empty(4096)
    arguments = {
        "x": x, "factors": f, "bias": f, "add": f, "out": f, "tokens": 7, "splits": 1,
        "n": 4096, **planes, **constants,
        "HAS_BIAS": False, "HAS_ADD": True, "HALF": half, "ROWS": sizes["rows"], "TOKENS": sizes["tokens"],
        "BLOCKS": sizes["blocks"], "SPLIT": False, "EVEN": True, "num_warps": sizes["warps"],
        "num_stages": sizes["stages"], "maxnreg": DOT_REGISTERS,
    }  # fmt: skip
    per_thread = sizes["rows"] * sizes["blocks"] / sizes["warps"]
    ceiling = CEILINGS.get(kernel, {}).get(form, 0.0) if half else 0.0
    name = f"{kernel} {form}" + ("" if half else " f32")
    return Case(name, dot_kernel, arguments, {}, per_thread, ceiling, has_dot=True)


def decode_case(form: str) -> Case:
    from edgellm_kernels.planes_triton import decode_kernel, plane_arguments

    planes, constants = plane_arguments(weight(form))
    sizes = configurations()["decode"]
    out = torch.empty(64, dtype=torch.bfloat16)
    arguments = {
        "row_ids": out, "out": out, "first_row": 0, "num_rows": 4096, "scale": 1.5, **planes, **constants,
        "CHOSEN": False, "ROWS": sizes["rows"], "BLOCKS": sizes["blocks"], "num_warps": sizes["warps"],
    }  # fmt: skip
    return Case(f"decode {form}", decode_kernel, arguments)


_PAGES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "int8": torch.int8,
    "f32": torch.float32,
    "fp8": torch.int8,
}  # bytes, see kv_pages_triton
_QUANTIZED = ("int8", "fp8")
_FORMS = {"int8": 1, "fp8": 2}
"""INT8 and FP8 of kv_pages_triton; others are 0."""


def attention_case(pages: str, dim: int, rows: int, exact: bool = False, sinks: bool = False) -> Case:
    from edgellm_kernels.attention_triton import attention_kernel

    sizes = attention_tile(rows, dim, pages in _QUANTIZED, exact, fp8=pages == "fp8")
    page = torch.empty(64, dtype=_PAGES[pages])
    f, half = torch.empty(64), torch.empty(64, dtype=torch.float16)
    i32, i64 = torch.empty(64, dtype=torch.int32), torch.empty(64, dtype=torch.int64)
    pad = 1 << (dim - 1).bit_length()
    arguments = {
        "q": f, "keys": page, "values": page, "key_scales": half, "value_scales": half, "block_table": i32,
        "block_starts": i32, "key_lengths": i32, "positions": i64, "query_starts": i32, "sinks": f, "out": f,
        "peaks": f, "sums": f, "table_width": 100, "num_rows": 3, "num_heads": 32, "num_kv_heads": 8,
        "scale": 0.1, "window": 1024, "softcap": 0.0, "splits": 8, "GROUP": 4, "K_DIM": dim, "V_DIM": dim,
        "K_PAD": pad, "V_PAD": pad, "PAGE": 16, "ROWS": sizes.rows, "KEYS": sizes.keys,
        "KEYS_AS": _FORMS.get(pages, 0), "VALUES_AS": _FORMS.get(pages, 0),
        "WINDOWED": True, "CAPPED": False, "SINKS": sinks, "SPLIT": True,
        "PRECISION": sizes.precision, "TABLE": 64, "num_warps": sizes.warps, "num_stages": sizes.stages,
    }  # fmt: skip
    name = f"attention {pages} {dim} x {rows}" + " exact" * exact + " sinks" * sinks
    hopper = attention_tile(rows, dim, pages in _QUANTIZED, exact, True, pages == "fp8")
    other = {"ROWS": hopper.rows, "KEYS": hopper.keys, "num_warps": hopper.warps, "num_stages": hopper.stages}
    other = {name: value for name, value in other.items() if value != arguments[name]}
    return Case(name, attention_kernel, arguments, other, has_dot=sizes.precision != "ieee")


def combine_case(dim: int = 128) -> Case:
    from edgellm_kernels.attention_triton import combine_kernel

    f, starts = torch.empty(64), torch.empty(64, dtype=torch.int32)
    arguments = {
        "parts": f, "peaks": f, "sums": f, "query_starts": starts, "out": f, "num_rows": 3, "sequences": 3,
        "splits": 8, "V_DIM": dim, "V_PAD": 1 << (dim - 1).bit_length(), "MAX_SPLITS": 64, "AT_ONCE": 8,
        "num_warps": 1,
    }  # fmt: skip
    return Case(f"combine {dim}", combine_kernel, arguments)


def norm_case(n: int = 4096) -> Case:
    from edgellm_kernels.norm_triton import add_rms_norm_kernel

    f = torch.empty(64)
    arguments = {
        "x": f, "residual": f, "weight": f, "post_norm": f, "total_out": f, "out": f, "n": n, "eps": 1e-6,
        "HAS_X": True, "HAS_POST_NORM": True, "BLOCK": n, "num_warps": 8,
    }  # fmt: skip
    return Case("add_rms_norm", add_rms_norm_kernel, arguments)


def draw_case(n: int = 128256) -> Case:
    from edgellm_kernels.sampling_triton import draw_kernel

    f, d, i64 = torch.empty(64), torch.empty(64, dtype=torch.float64), torch.empty(64, dtype=torch.int64)
    arguments = {
        "logits": f, "values": f, "temperatures": d, "keys": i64, "cuts": d, "last_ids": i64, "scores": d,
        "ids": torch.empty(64, dtype=torch.int32), "n": n, "CHUNK": 2048,
        "CHUNKS": 1 << (-(-n // 2048) - 1).bit_length(),
    }  # fmt: skip
    return Case("draw", draw_kernel, arguments)


def rope_case(pages: str = "int8") -> Case:
    from edgellm_kernels.rope_triton import rope_store_kernel

    f, page = torch.empty(64), torch.empty(64, dtype=_PAGES[pages])
    half, slots = torch.empty(64, dtype=torch.float16), torch.empty(64, dtype=torch.int64)
    arguments = {
        "qkv": f, "q_norm": f, "k_norm": f, "cos": f, "sin": f, "slots": slots, "q_out": f, "keys": page,
        "values": page, "key_scales": half, "value_scales": half, "eps": 1e-6, "num_heads": 32,
        "num_kv_heads": 8, "pairs": 64, "K_DIM": 128, "V_DIM": 128, "BLOCK": 128, "HAS_Q_NORM": True,
        "HAS_K_NORM": True, "KEYS_AS": _FORMS.get(pages, 0), "VALUES_AS": _FORMS.get(pages, 0),
        "ROTATED": pages == "int8", "num_warps": 1,
    }  # fmt: skip
    return Case(f"qk_norm_rope_store {pages}", rope_store_kernel, arguments)


def hadamard_case() -> Case:
    from edgellm_kernels.rope_triton import hadamard_kernel

    f = torch.empty(64)
    return Case("hadamard", hadamard_kernel, {"x": f, "out": f, "DIM": 256, "num_warps": 1})


def cases(full: bool = False, simple: bool = True) -> Iterator[Case]:
    """One launch of each kernel, or without ``simple`` of those with a loop; with ``full`` every format, tile
    and precision.
    """
    if not full:
        yield gemv_case("Q4_0")
        yield int_gemv_case("Q4_0")
        yield dot_case("Q4_0", "dot16")
        yield attention_case("bf16", 128, 4)
        yield attention_case("fp8", 128, 4)
        if simple:
            yield norm_case()
            yield rope_case()
            yield rope_case("fp8")
            yield hadamard_case()
            yield draw_case()
            yield combine_case()
        return
    for form in FORMS:
        if form == "INT8":
            continue
        yield gemv_case(form)
        yield int_gemv_case(form)
        yield decode_case(form)
        for kernel in ("dot16", "dot32", "dot64"):
            yield dot_case(form, kernel)
    yield gemv_case("Q4_K", activation=1)
    yield gemv_case("Q4_0", activation=2)
    for form in ("Q4_0", "Q4_K", "Q6_K", "INT4"):
        yield int_gemv_case(form, fine=True)
    for fine in (False, True):
        yield quantize_case(fine)
    for kernel in ("dot16", "dot32", "dot64"):
        yield dot_case("Q4_0", kernel, half=False)
    for pages in ("bf16", "f16", "int8", "fp8"):
        for dim in (64, 80, 112, 128, 256):
            for rows in (4, 24, 512):
                yield attention_case(pages, dim, rows)
    for dim in (64, 128, 256):
        for pages in ("f32", "bf16", "int8", "fp8"):
            yield attention_case(pages, dim, 4, exact=True)
    for rows in (4, 24, 512):
        yield attention_case("bf16", 64, rows, sinks=True)
    for dim in (64, 80, 128, 256):
        yield combine_case(dim)
    yield norm_case()
    yield draw_case()
    for pages in ("bf16", "int8", "fp8"):
        yield rope_case(pages)
    yield hadamard_case()
