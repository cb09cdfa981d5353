"""What one sequence's settings do to its raw logits before the temperature: penalties, then biases."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgellm.contracts import SamplingParams
from edgellm_models.errors import BadInputError

REMOVING_BIAS = -100.0
FORCING_BIAS = 100.0


class LogitAdjuster:
    """Penalties and biases of one sequence, with the token counts that they need.

    In this order: repetition penalty (ids of prompt and answer; divides logits of 0 and above, multiplies
    negative ones), presence and frequency penalties (ids of the answer), logit bias. A bias of -100 or less
    removes its token; when any id has 100 or more, every id without one is removed.
    """

    def __init__(self, sampling: SamplingParams, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._seen: torch.Tensor | None = None
        """[vocab] bool: ids of prompt and answer."""
        self._counts: torch.Tensor | None = None
        """[vocab] f64: occurrences in the answer."""
        if self._repetition != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.tensor(prompt_token_ids, dtype=torch.int64)] = True
        if self._presence != 0.0 or self._frequency != 0.0:
            self._counts = torch.zeros(vocab_size, dtype=torch.float64)
        self._bias = _bias_vector(sampling, vocab_size)

    @property
    def is_idle(self) -> bool:
        """Nothing to do: logits pass as they are."""
        return self._seen is None and self._counts is None and self._bias is None

    def observe(self, token_id: int) -> None:
        """Counts a token of the answer."""
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """[vocab] f64, which is overwritten and returned."""
        if self._seen is not None:
            ids = torch.nonzero(self._seen).squeeze(1)
            seen = logits[ids]
            logits[ids] = torch.where(seen < 0, seen * self._repetition, seen / self._repetition)
        if self._counts is not None:
            ids = torch.nonzero(self._counts).squeeze(1)
            logits[ids] -= self._counts[ids] * self._frequency + self._presence
        if self._bias is not None:
            logits += self._bias
        return logits


def _bias_vector(sampling: SamplingParams, vocab_size: int) -> torch.Tensor | None:
    """[vocab] f64 to add, -inf where a token is removed. BadInputError when nothing stays."""
    if not sampling.logit_bias:
        return None
    ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
    values = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float64)
    if int(ids.max()) >= vocab_size:
        raise BadInputError(
            f"logit_bias names token {int(ids.max())}, but the vocabulary has {vocab_size} tokens"
        )
    forced = values >= FORCING_BIAS
    bias = torch.full((vocab_size,), float("-inf") if bool(forced.any()) else 0.0, dtype=torch.float64)
    if bool(forced.any()):
        bias[ids[forced]] = values[forced]
    else:
        bias[ids] = torch.where(values <= REMOVING_BIAS, float("-inf"), values)
    if bool(torch.isneginf(bias).all()):
        raise BadInputError("logit_bias removes every token of the vocabulary")
    return bias
