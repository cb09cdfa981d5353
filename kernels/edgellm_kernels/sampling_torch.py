"""Reference of drawing on the device: Gumbel-max over scores above a cut, noise keyed by position and id."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_M32 = 0xFFFFFFFF


@dataclass(frozen=True)
class DrawTables:
    """How each row of logits is drawn from, one entry per row, on the logits' device.

    A row's scores are (logit - largest) / temperature in f64. What may be drawn: finite scores above the cut,
    and those equal to it up to an id.
    """

    temperatures: torch.Tensor
    """[rows] f64; 0 takes the largest logit, of equal ones the first."""
    keys: torch.Tensor
    """[rows, 2] int64: the low and the high 32 bits of each draw's key."""
    cuts: torch.Tensor
    """[rows] f64; -inf cuts nothing."""
    last_ids: torch.Tensor
    """[rows] int64: the last id whose score may equal the cut."""


def hash32(low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """fmix32(fmix32(id ^ low) ^ high), MurmurHash3's finalizer twice: int64 values of 32 bits."""
    return _fmix32(_fmix32(ids ^ low) ^ high)


def _fmix32(x: torch.Tensor) -> torch.Tensor:
    # NOTE: the int64 products wrap; their low 32 bits, the only ones kept, are those of the unsigned product.
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _M32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _M32
    return x ^ (x >> 16)


def draw(logits: torch.Tensor, tables: DrawTables) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, n] f32 -> of every row the drawn id, int64 [rows], and its largest logit, f32 [rows] (NaN where
    there is one: the id then means nothing).

    The noise is -log(-log((hash + 0.5) / 2**32)), in f64.
    """
    largest = logits.max(dim=-1).values
    ids = torch.arange(logits.shape[1], device=logits.device)
    hashes = hash32(tables.keys[:, :1], tables.keys[:, 1:], ids)
    noise = -torch.log(-torch.log((hashes.double() + 0.5) / 2**32))
    hot = (tables.temperatures > 0)[:, None]
    above = logits.double() - largest.double()[:, None]
    scores = above / torch.where(hot, tables.temperatures[:, None], 1.0)
    cut = tables.cuts[:, None]
    keep = torch.isfinite(scores) & ((scores > cut) | ((scores == cut) & (ids <= tables.last_ids[:, None])))
    scores = torch.where(keep, scores + torch.where(hot, noise, 0.0), float("-inf"))
    return scores.argmax(dim=-1), largest
