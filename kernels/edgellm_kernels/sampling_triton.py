"""Triton argmax and Gumbel-max draws over the vocabulary: three launches whatever the settings."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgellm_kernels.sampling_torch import DrawTables

_CHUNK = 2048
"""Ids of a program."""


@triton.jit
def _fmix32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _first_largest(values, ids):
    """The largest value and the first id that has it; where there is NaN, NaN and its id."""
    is_nan = values != values
    any_nan = tl.sum(is_nan.to(tl.int32), axis=0) > 0
    largest = tl.max(tl.where(is_nan, float("-inf"), values), axis=0)
    best = tl.where(any_nan, is_nan, values == largest)
    first = tl.min(tl.where(best, ids, 2147483647), axis=0)
    return tl.where(any_nan, float("nan"), largest), first


@triton.jit
def largest_kernel(logits, values, n, CHUNK: tl.constexpr):
    """Of every row and chunk of ids the largest logit: [rows, chunks] f32."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * n + ids, mask=ids < n, other=float("-inf"))
    largest, _ = _first_largest(x, ids)
    tl.store(values + row * tl.num_programs(1) + chunk, largest)


@triton.jit
def draw_kernel(
    logits, values, temperatures, keys, cuts, last_ids, scores, ids, n, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of every row and chunk the best noisy score, f64, and its id; see sampling_torch."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    part = tl.arange(0, CHUNKS)
    row_largest = tl.load(values + row * chunks + part, mask=part < chunks, other=float("-inf"))
    largest, _ = _first_largest(row_largest, part)
    here = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * n + here, mask=here < n, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    hot = temperature > 0.0
    divisor = tl.where(hot, temperature, 1.0)
    score = (x.to(tl.float64) - largest.to(tl.float64)) / (tl.zeros([CHUNK], tl.float64) + divisor)
    cut = tl.load(cuts + row)
    keep = (score > cut) | ((score == cut) & (here <= tl.load(last_ids + row)))
    keep = keep & (here < n) & (score > float("-inf")) & (score < float("inf"))
    low = tl.load(keys + row * 2).to(tl.uint32)
    high = tl.load(keys + row * 2 + 1).to(tl.uint32)
    hashed = _fmix32(_fmix32(here.to(tl.uint32) ^ low) ^ high)
    noise = -tl.log(-tl.log((hashed.to(tl.float64) + 0.5) / 4294967296.0))
    score = tl.where(keep, score + tl.where(hot, noise, 0.0), float("-inf"))
    best, first = _first_largest(score, here)
    tl.store(scores + row * chunks + chunk, best)
    tl.store(ids + row * chunks + chunk, first)


@triton.jit
def choose_kernel(values, scores, ids, largest_out, out, chunks, CHUNKS: tl.constexpr):
    """The chunks of a row made one: its largest logit, and the first id of the best score."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, CHUNKS)
    there = part < chunks
    row_largest = tl.load(values + row * chunks + part, mask=there, other=float("-inf"))
    largest, _ = _first_largest(row_largest, part)
    tl.store(largest_out + row, largest)
    score = tl.load(scores + row * chunks + part, mask=there, other=float("-inf"))
    _, best = _first_largest(score, part)
    tl.store(out + row, tl.load(ids + row * chunks + best).to(tl.int64))


def draw(logits: torch.Tensor, tables: DrawTables) -> tuple[torch.Tensor, torch.Tensor]:
    """See sampling_torch.draw: the same ids."""
    logits = logits.contiguous()
    rows, n = logits.shape
    chunks = triton.cdiv(n, _CHUNK)
    padded = triton.next_power_of_2(chunks)
    values = logits.new_empty((rows, chunks))
    scores = torch.empty((rows, chunks), dtype=torch.float64, device=logits.device)
    ids = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    largest = logits.new_empty(rows)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        largest_kernel[(rows, chunks)](logits=logits, values=values, n=n, CHUNK=_CHUNK)
        draw_kernel[(rows, chunks)](
            logits=logits,
            values=values,
            temperatures=tables.temperatures,
            keys=tables.keys,
            cuts=tables.cuts,
            last_ids=tables.last_ids,
            scores=scores,
            ids=ids,
            n=n,
            CHUNK=_CHUNK,
            CHUNKS=padded,
        )
        choose_kernel[(rows,)](
            values=values,
            scores=scores,
            ids=ids,
            largest_out=largest,
            out=out,
            chunks=chunks,
            CHUNKS=padded,
            num_warps=1,
        )
    return out, largest
