"""Draws the next token of each sequence from its logits.

The order: repetition, presence and frequency penalties; logit bias; temperature; top-k; typical-p; top-p;
min-p; then Gumbel-max, argmax(score + noise), which draws from the softmax of what is left (noise.py). The
edges of the filters are in filters.py, those of penalties and biases in penalties.py. Temperature 0 takes the
largest logit after penalties and bias, of equal ones the lowest id. Arithmetic after the logits is f64.

A row whose logits hold NaN or +inf, or nothing above -inf, is an error of its own sequence only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edgellm.contracts import SequenceStart, TokenLogprob
from edgellm.runner import filters
from edgellm.runner.noise import NOISE_SPAN, gumbel_noise, row_key
from edgellm.runner.penalties import LogitAdjuster


@dataclass(frozen=True)
class Draw:
    """One drawn token, or why none could be drawn."""

    token_id: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None


class SamplerState:
    """What the sampler keeps of one sequence."""

    def __init__(self, start: SequenceStart, vocab_size: int) -> None:
        self.sampling = start.sampling
        self.seed = start.seed
        self.sample = start.sample
        self.logprobs = start.logprobs
        self.adjuster = LogitAdjuster(start.sampling, start.prompt_token_ids, vocab_size)


def candidates(logits: torch.Tensor, state: SamplerState) -> tuple[torch.Tensor, torch.Tensor]:
    """What may be drawn at a temperature above 0: ids [n] int64, ascending, and scores [n] f64.

    ``logits`` [vocab] f64 are those after penalties and bias; the largest is finite.
    """
    sampling = state.sampling
    # Relative to the best, so that no temperature, however small, overflows: the best score is 0.
    scores = (logits - logits.max()) / sampling.temperature
    ids = torch.arange(scores.numel(), device=scores.device)
    keep = torch.isfinite(scores)
    if sampling.top_k > 0:
        keep &= filters.top_k(scores, sampling.top_k)
    ids, scores = ids[keep], scores[keep]
    if sampling.typical_p < 1:
        keep = filters.typical(scores, sampling.typical_p)
        ids, scores = ids[keep], scores[keep]
    if sampling.top_p >= 1:
        keep = filters.min_p(scores, sampling.min_p)
        return ids[keep], scores[keep]
    # min-p looks at nothing but the best token, which top-p never removes, so it may come first, where it
    # leaves top-p little to rank; the nucleus is still one of the whole mass.
    log_total = torch.logsumexp(scores, 0)
    keep = filters.min_p(scores, sampling.min_p)
    ids, scores = ids[keep], scores[keep]
    keep = filters.top_p(scores, sampling.top_p, log_total)
    return ids[keep], scores[keep]


class Sampler:
    """Sampling states by sequence id, and the drawing."""

    def __init__(self, vocab_size: int, *, f16_kv: bool = False) -> None:
        self._f16_kv = f16_kv
        self._vocab_size = vocab_size
        self._states: dict[int, SamplerState] = {}

    def start(self, start: SequenceStart) -> None:
        """Makes the state of a sequence. BadInputError when its settings do not fit the vocabulary."""
        self._states[start.sequence_id] = SamplerState(start, self._vocab_size)

    def end(self, sequence_id: int) -> None:
        """Forgets a sequence."""
        self._states.pop(sequence_id, None)

    def sample(
        self, logits: torch.Tensor, sequence_ids: Sequence[int], positions: Sequence[int]
    ) -> list[Draw]:
        """One draw per row of ``logits`` [rows, vocab] f32.

        ``positions`` are the absolute positions of the drawn tokens, which the penalties count from then on.
        """
        best, best_ids = logits.max(dim=-1)  # of equal logits the first; NaN when there is one
        usable = torch.isfinite(best).tolist()
        greedy_ids = best_ids.tolist()
        draws = []
        for row, (sequence_id, position) in enumerate(zip(sequence_ids, positions, strict=True)):
            if not usable[row]:
                draws.append(Draw(error=_describe_bad(logits[row], position, self._f16_kv)))
                continue
            state = self._states[sequence_id]
            if state.sampling.temperature == 0 and state.adjuster.is_idle:
                token_id = int(greedy_ids[row])
            else:
                drawn = self._draw(logits[row], state, position)
                if drawn is None:
                    draws.append(
                        Draw(error=f"no token is left to draw at position {position}: logit_bias removed all")
                    )
                    continue
                token_id = drawn
            state.adjuster.observe(token_id)
            logprob = None if state.logprobs is None else raw_logprob(logits[row], token_id, state.logprobs)
            draws.append(Draw(token_id, logprob))
        return draws

    def _draw(self, logits: torch.Tensor, state: SamplerState, position: int) -> int | None:
        adjusted = state.adjuster.apply(logits.to(device="cpu", dtype=torch.float64))
        if not bool(torch.isfinite(adjusted.max())):
            return None
        if state.sampling.temperature == 0:
            return int(torch.argmax(adjusted))
        ids, scores = candidates(adjusted, state)
        alive = scores >= scores.max() - NOISE_SPAN
        ids, scores = ids[alive], scores[alive]
        noise = gumbel_noise(row_key(state.seed, state.sample, position), ids)
        return int(ids[torch.argmax(scores + noise)])


def raw_logprob(logits: torch.Tensor, token_id: int, top: int) -> TokenLogprob:
    """Log-probability of a token, and the ``top`` best, under the raw softmax: no temperature, no penalty."""
    log_p = torch.log_softmax(logits.to(device="cpu", dtype=torch.float64), -1)
    best: tuple[tuple[int, float], ...] = ()
    if top > 0:
        ids = torch.nonzero(filters.keep_best(log_p, top)).squeeze(1)
        ids = ids[torch.isfinite(log_p[ids])]
        order = torch.sort(log_p[ids], descending=True, stable=True).indices
        best = tuple((int(i), float(log_p[i])) for i in ids[order])
    return TokenLogprob(token_id, float(log_p[token_id]), best)


def _describe_bad(row: torch.Tensor, position: int, f16_kv: bool = False) -> str:
    nans, infinite = int(torch.isnan(row).sum()), int(torch.isposinf(row).sum())
    what = f"{nans} NaN and {infinite} infinite values" if nans or infinite else "nothing but -inf"
    why = "damaged weights?"
    if f16_kv:
        why = "the KV cache is f16, which ends at 65504: try --kv-dtype bf16 or f32; else damaged weights?"
    return f"the model computed {what} in {row.numel()} logits at position {position}; {why}"
