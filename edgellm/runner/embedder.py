"""Embeds texts: the hidden states behind the last layer, averaged or of the last token, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgellm.cache.kv_storage import BLOCK_SIZE, allocate_storage, kv_type
from edgellm.contracts import PlannedSequence
from edgellm.runner.batch_builder import build_batch
from edgellm_models.network.decoder import Decoder

CHUNK = 256
"""Tokens per step, so that answers between two steps do not wait for a long text."""


class Embedding:
    """One text on its way through the model, with KV of its own: nothing of it is cached or shared.

    The states are those that a head would read: behind the output norm, as transformers'
    ``last_hidden_state`` has them. The KV is f32 and takes memory only while the object lives.
    """

    def __init__(self, decoder: Decoder, token_ids: Sequence[int], device: str = "cpu") -> None:
        self._decoder = decoder
        self._token_ids = tuple(token_ids)
        self._device = device
        spec = decoder.spec
        blocks = -(-len(self._token_ids) // BLOCK_SIZE)
        self._kv = allocate_storage(spec, [blocks] * len(spec.kv_groups), kv_type("f32"), device)
        self._table = tuple(tuple(range(blocks)) for _ in spec.kv_groups)
        self._done = 0
        self._sum = torch.zeros(spec.hidden_size, dtype=torch.float64)
        self._last = torch.zeros(spec.hidden_size)

    def step(self) -> bool:
        """Runs the next tokens; whether that was all. In the thread that owns the decoder's kernels."""
        chunk = self._token_ids[self._done : self._done + CHUNK]
        planned = PlannedSequence(
            sequence_id=0,
            token_ids=chunk,
            start_position=self._done,
            block_tables=self._table,
            is_prefill=True,
            needs_logits=False,
            total_length=len(self._token_ids),
            prompt_logits=True,  # every row, not only the last
        )
        with torch.inference_mode():
            batch = build_batch([planned], BLOCK_SIZE, self._device)
            states = self._decoder.hidden_states(self._decoder.run(batch, self._kv)).to("cpu")
            self._sum += states.sum(dim=0, dtype=torch.float64)
            self._last = states[-1].float()
        self._done += len(chunk)
        return self._done >= len(self._token_ids)

    def pooled(self, pooling: str) -> list[float]:
        """The ``mean`` of all states, or the ``last`` one."""
        if pooling == "last":
            return [float(value) for value in self._last]
        return [float(value) for value in (self._sum / len(self._token_ids)).float()]
