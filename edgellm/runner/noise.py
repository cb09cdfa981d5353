"""The noise of Gumbel-max sampling: a pure hash of (seed, sample index, absolute position, token id).

It depends on nothing else (no request id, no generator, no batch), so that the same seed draws the same token
whatever else runs, in whatever order, and speculation can check a draft with the very noise that the plain
step would have used. A twin on another device must give the same 32-bit hashes; this is the whole definition,
all arithmetic modulo 2**64 (mix64) or 2**32 (fmix32) on unsigned integers:

    mix64(x):   x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31
    fmix32(x):  x ^= x >> 16;  x *= 0x85EBCA6B;  x ^= x >> 13;  x *= 0xC2B2AE35;  x ^= x >> 16

    on the host, once per row:
        key = mix64(seed + G)              G = 0x9E3779B97F4A7C15; seed taken modulo 2**64
        key = mix64(key ^ (sample + G))
        key = mix64(key ^ (position + G))
        k0, k1 = key & 0xFFFFFFFF, key >> 32
    per token id:
        h = fmix32(fmix32(id ^ k0) ^ k1)
        u = (h + 0.5) / 2**32              in f64: never 0, never 1
        noise = -log(-log(u))              standard Gumbel, from -3.15 to 22.9

mix64 is the finalizer of SplitMix64 (Steele, Lea, Flood 2014), fmix32 that of MurmurHash3 (Appleby, public
domain). For one key h is a bijection of the id, so two tokens never share their noise.
"""

from __future__ import annotations

import math

import numpy as np

_M32 = 0xFFFFFFFF
_M64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15

_MARGIN = 1e-6
"""By which a bound of the noise is taken too low: far more than its arithmetic can be off."""


def _mix64(x: int) -> int:
    x &= _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def row_key(seed: int, sample: int, position: int) -> int:
    """The 64-bit key of one draw. ``position`` is the absolute position of the token that is drawn."""
    key = _mix64(seed + _GOLDEN)
    key = _mix64(key ^ (sample + _GOLDEN))
    return _mix64(key ^ (position + _GOLDEN))


def uniform(key: int, token_id: int) -> float:
    """In (0, 1), independent of ``gumbel_noise`` of the same key: by which a drafted token is kept under the
    rejection rule."""
    own = _mix64(key ^ _GOLDEN)
    return (int(hash32(own, np.array([token_id]))[0]) + 0.5) / 2**32


def hash32(key: int, ids: np.ndarray) -> np.ndarray:
    """[n] ids of any integer type -> [n] uint32 hashes."""
    h = ids.astype(np.uint32)
    shifted = np.empty_like(h)
    for part in (key & _M32, key >> 32):
        h ^= np.uint32(part)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
            np.right_shift(h, np.uint32(shift), out=shifted)
            h ^= shifted
            if factor is not None:
                h *= np.uint32(factor)
    return h


def gumbel_noise(key: int, ids: np.ndarray) -> np.ndarray:
    """[n] ids -> [n] f64 standard Gumbel noise."""
    u = hash32(key, ids).astype(np.float64)
    u += 0.5
    u *= 2.0**-32
    for _ in range(2):
        np.log(u, out=u)
        np.negative(u, out=u)
    return u


def places_of_noise(key: int, ids: np.ndarray, least: float) -> np.ndarray:
    """Places [n] int64, ascending, of those ids whose noise may be ``least`` or more: none of those is
    missing, and hardly another is there.

    Noise grows with the hash, so the bound is one of integers, and no logarithm is needed.
    """
    bound = math.exp(-math.exp(min(700.0, _MARGIN - least))) * 2.0**32 - 2.0
    return np.flatnonzero(hash32(key, ids) >= np.uint32(max(0.0, bound)))
