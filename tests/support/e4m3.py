"""The eight-bit float e4m3 from its definition, apart from torch and from our kernels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise

import torch


def value(code: int) -> Fraction:
    """What a code other than NaN (0x7f, 0xff) stands for: a sign, four bits of exponent (bias 7), three of
    mantissa. The exponent of all ones is an ordinary one: there is no infinity.
    """
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    assert code & 127 != 127
    if exponent == 0:
        size = Fraction(mantissa, 8) / 2**6
    else:
        size = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -size if sign else size


SIZES = [value(code) for code in range(127)]
"""Ascending, by code."""


def nearest(x: float) -> int:
    """The code nearest to x, of two as near the even one; beyond 448 that of 448."""
    size = abs(Fraction(x))
    negative = torch.signbit(torch.tensor(x)).item()
    above = bisect_left(SIZES, size)
    if above == 127:
        code = 126
    elif SIZES[above] == size:
        code = above
    else:
        low, high = size - SIZES[above - 1], SIZES[above] - size
        code = above if high < low or (high == low and above % 2 == 0) else above - 1
    return code | (128 if negative else 0)


def telling_values() -> torch.Tensor:
    """f32, both signs: every value, every midpoint of two neighbours and the f32 on either side of it, where
    f32 ends, and random ones of every size up to 448.
    """
    middles = [(low + high) / 2 for low, high in pairwise(SIZES)]
    exact = torch.tensor([float(x) for x in (*SIZES, *middles)])
    up, down = (exact.nextafter(torch.tensor(limit)) for limit in (1e9, 0.0))
    rng = torch.Generator().manual_seed(1)
    random = torch.rand(2000, generator=rng) * torch.exp2(torch.randint(-20, 9, (2000,), generator=rng))
    tiny = torch.tensor([2.0**-149, 2.0**-126, 2.0**-24])
    sizes = torch.cat((exact, up, down, random, tiny)).clamp_max(448.0)
    return torch.cat((sizes, -sizes))


def nearest_codes(values: Iterable[float]) -> torch.Tensor:
    """uint8"""
    return torch.tensor([nearest(x) for x in values], dtype=torch.uint8)
