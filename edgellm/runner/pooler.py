"""Pools the hidden states of prompts that are embedded: their mean, or the last one, over chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgellm.contracts import PlannedSequence, SequenceStart
from edgellm_models.errors import EngineError


@dataclass
class _Pool:
    pooling: str
    length: int
    """Tokens of the prompt."""
    counted: int = 0
    """Leading tokens whose states are in the sum."""
    sum: torch.Tensor | None = None
    """f64 [hidden]"""


class Pooler:
    """One pool per sequence that is embedded. The sums are f64, so that chunks change nothing that f32 shows.

    The states are those that a head reads: behind the output norm, as transformers' ``last_hidden_state``.
    """

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def start(self, start: SequenceStart) -> None:
        """Takes up a sequence, if it is one that is embedded."""
        if start.pooling is not None:
            self._pools[start.sequence_id] = _Pool(start.pooling, len(start.prompt_token_ids))

    def end(self, sequence_id: int) -> None:
        """Forgets a sequence; others than those that are embedded are ignored."""
        self._pools.pop(sequence_id, None)

    def add(
        self, planned: PlannedSequence, states: torch.Tensor
    ) -> tuple[tuple[float, ...] | None, str | None]:
        """Takes the states [num_states, hidden] of a step: the embedding behind the last token, else None;
        and what is wrong with the states.

        What runs again after a preemption is counted once.
        """
        pool = self._pools[planned.sequence_id]
        end = planned.start_position + len(planned.token_ids)
        fresh = states[max(0, pool.counted - (end - planned.num_states)) :]
        if pool.pooling == "mean" and end - planned.num_states > pool.counted:
            raise EngineError(
                f"the states of positions {pool.counted} to {end - planned.num_states} of sequence "
                f"{planned.sequence_id} were never pooled"
            )
        if len(fresh):
            part = fresh.sum(dim=0, dtype=torch.float64) if pool.pooling == "mean" else fresh[-1].double()
            part = part.cpu()
            pool.sum = part if pool.sum is None or pool.pooling == "last" else pool.sum + part
            pool.counted = end
        if end < pool.length:
            return None, None
        assert pool.sum is not None
        found = (pool.sum / pool.length if pool.pooling == "mean" else pool.sum).float()
        if not bool(torch.isfinite(found).all()):
            return None, "the hidden states are not finite: the weights or the kernels are damaged"
        return tuple(found.tolist()), None
