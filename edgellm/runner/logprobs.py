"""Log-probabilities of tokens under the raw softmax: no temperature, no penalty, no mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgellm.contracts import TokenLogprob
from edgellm.runner import filters

_WIDENED_BYTES = 1 << 22
"""Of rows that are widened to f64 at once; a single row may be larger."""


def raw_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Per row of ``logits`` [rows, vocab] the log-probability of its token, and the ``top`` best.

    In f64. The best are sorted, equal ones by id; ids of probability 0 are not among them.
    """
    found: list[TokenLogprob] = []
    together = max(1, _WIDENED_BYTES // (8 * logits.shape[-1]))
    for start in range(0, len(token_ids), together):
        rows = logits[start : start + together].to(device="cpu", dtype=torch.float64)
        log_p = torch.log_softmax(rows, -1)
        ids = list(token_ids[start : start + together])
        chosen = log_p[torch.arange(len(ids)), torch.tensor(ids, dtype=torch.int64)].tolist()
        best = _best(log_p, top)
        found += [TokenLogprob(*row) for row in zip(ids, chosen, best, strict=True)]
    return found


def raw_logprob(logits: torch.Tensor, token_id: int, top: int) -> TokenLogprob:
    """``raw_logprobs`` of one row [vocab]."""
    return raw_logprobs(logits.unsqueeze(0), [token_id], top)[0]


def _best(log_p: torch.Tensor, top: int) -> list[tuple[tuple[int, float], ...]]:
    top = min(top, log_p.shape[-1])
    if top == 0:
        return [()] * log_p.shape[0]
    values, ids = torch.topk(log_p, top, dim=-1)
    # topk takes any of the tokens that are equal to the last; where there are more of them than places, the
    # lowest ids are meant.
    crowded = ((log_p >= values[:, -1:]).sum(-1) > top).tolist()
    found = []
    for row, (row_ids, row_values) in enumerate(zip(ids.tolist(), values.tolist(), strict=True)):
        if crowded[row]:
            row_ids = torch.nonzero(filters.keep_best(log_p[row], top)).squeeze(1).tolist()
            row_values = log_p[row, row_ids].tolist()
        pairs = [(i, value) for i, value in zip(row_ids, row_values, strict=True) if value > float("-inf")]
        found.append(tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))))
    return found
