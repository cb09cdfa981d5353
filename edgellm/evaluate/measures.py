"""Perplexity and KL divergence from rows of logits: sums that grow by a chunk, in f64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from edgellm_models.errors import EngineError

BLOCK = 16
"""Rows that are worked on at once: 16 of the largest vocabularies take 16 MiB as f32."""
CODE_STEP = 1.0 / 2048
"""Nats per step of a reference code."""
FAR = 65535
"""The code of all that lies 32 nats or more below the best: a probability under 1.3e-14, taken as 0."""


@dataclass(frozen=True)
class ReferenceRows:
    """Distributions of the reference as they are compared and stored: 16 bits a token.

    A code is how far a logit lies below the row's largest, in steps of 1/2048 nat, so it is off by at most
    1/4096; that noise alone makes a KL divergence of 2e-8 (its variance 2e-8, halved, twice).
    """

    best: np.ndarray
    """[rows] int32, the id of the largest logit."""
    codes: np.ndarray
    """[rows, vocab] uint16."""


def encode_rows(logits: torch.Tensor) -> ReferenceRows:
    """``logits`` [rows, vocab]. EngineError when they are not all finite."""
    best, codes = [], []
    for start in range(0, logits.shape[0], BLOCK):
        block = check_finite(logits[start : start + BLOCK].to("cpu", torch.float32))
        top, ids = block.max(dim=-1, keepdim=True)
        below = (top - block).div_(CODE_STEP).round_().clamp_(max=FAR)
        best.append(ids.squeeze(1).to(torch.int32).numpy())
        codes.append(below.to(torch.int32).numpy().astype(np.uint16))
    return ReferenceRows(np.concatenate(best), np.concatenate(codes))


def check_finite(logits: torch.Tensor) -> torch.Tensor:
    """The same rows. EngineError when any logit is NaN or infinite: no mean would mean anything then."""
    if not bool(torch.isfinite(logits).all()):
        raise EngineError("the model's logits are not all finite: it cannot be scored with these settings")
    return logits


@dataclass
class Perplexity:
    """Mean negative log-likelihood of tokens, and the standard error of its exponential."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """``logits`` [rows, vocab], ``targets`` [rows] int64: the tokens that followed."""
        assert logits.shape[0] == targets.shape[0]
        for start in range(0, logits.shape[0], BLOCK):
            rows = check_finite(logits[start : start + BLOCK].to("cpu", torch.float32))
            below, log_total = relative(rows)
            chosen = below.gather(1, targets[start : start + BLOCK].view(-1, 1)).squeeze(1).double()
            nll = log_total - chosen
            self.count += nll.numel()
            self.total += float(nll.sum())
            self.squares += float((nll * nll).sum())

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.total / self.count)
        except OverflowError:
            return math.inf

    @property
    def stderr(self) -> float:
        """perplexity x sqrt(variance of the NLL / (n - 1)), as llama-perplexity has it."""
        if self.count < 2:
            return math.inf
        mean = self.total / self.count
        variance = max(0.0, self.squares / self.count - mean * mean)
        return self.perplexity * math.sqrt(variance / (self.count - 1))


@dataclass
class Divergence:
    """KL(reference || model) of each row, in nats, and how often both have the same best token."""

    values: list[np.ndarray] = field(default_factory=list)
    agreed: int = 0

    def add(self, logits: torch.Tensor, reference: ReferenceRows) -> None:
        """``logits`` [rows, vocab] of the model at the reference's rows."""
        for start in range(0, logits.shape[0], BLOCK):
            block = slice(start, min(start + BLOCK, logits.shape[0]))
            rows = check_finite(logits[block].to("cpu", torch.float32))
            self.agreed += int((rows.argmax(dim=-1).numpy() == reference.best[block]).sum())
            self.values.append(kl_rows(reference.codes[block], rows))

    def all(self) -> np.ndarray:
        """[rows] f64."""
        return np.concatenate(self.values)


def kl_rows(codes: np.ndarray, logits: torch.Tensor) -> np.ndarray:
    """KL of each row [rows] f64: sum p (p' - q') - (log sum e^p' - log sum e^q'), p' and q' logits below the
    best. So the rounding of the two log sums, which every token shares, stays out of the sum over tokens.
    """
    p = torch.from_numpy(codes.astype(np.float32)).mul_(-CODE_STEP)
    p.masked_fill_(p <= -FAR * CODE_STEP, -math.inf)
    p_total = p.exp().sum(-1, dtype=torch.float64).log()
    q, q_total = relative(logits)
    weights = p.exp() * torch.exp(-p_total).float().unsqueeze(1)
    products = (p - q).mul_(weights).masked_fill_(p == -math.inf, 0.0)
    found: np.ndarray = (products.sum(-1, dtype=torch.float64) - (p_total - q_total)).numpy()
    return found


def relative(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits below each row's best [rows, vocab] f32, and log sum exp of those [rows] f64."""
    below = logits - logits.max(dim=-1, keepdim=True).values
    return below, below.exp().sum(-1, dtype=torch.float64).log()
