"""How long one decoding step of the decoder alone takes, for any number of sequences."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from edgellm_models.network.decoder import Decoder
from tests.support.paged import PagedRun


class DecodeTimer:
    """Sequences of given lengths whose KV is noise: no prefill is needed to time what follows one."""

    def __init__(self, decoder: Decoder, lengths: Sequence[int], kv_type: str = "f32") -> None:
        self.run = PagedRun(
            decoder,
            num_blocks=sum(n // 16 + 4 for n in lengths) + 8,
            block_size=16,
            kv_type=kv_type,
            tails=False,
        )
        for storage in self.run.storages:
            for part in storage.pages():
                if part.dtype in (torch.int8, torch.uint8):
                    part.random_()
                else:
                    part.normal_(std=0.02 if part.dtype == torch.float16 else 1.0)
        self.names = [f"s{i}" for i in range(len(lengths))]
        for name, length in zip(self.names, lengths, strict=True):
            self.run.lengths[name] = length
            self.run.tables[name] = [
                {index: free.pop() for index in range(length // 16 + 1)} for free in self.run.free
            ]

    def step_s(self, names: Sequence[str], repeat: int) -> list[float]:
        """Seconds of ``repeat`` steps of one token each."""
        times = []
        for _ in range(repeat):
            begin = time.perf_counter()
            self.run.step([(name, [17]) for name in names])
            times.append(time.perf_counter() - begin)
        return times

    def ratio(self, repeat: int = 5) -> tuple[float, float, float]:
        """Tokens per second of all sequences over those of the middle one, and the median seconds of one and
        of all. Steps of both kinds alternate, so that a busy machine disturbs both.
        """
        one: list[float] = []
        everyone: list[float] = []
        middle = self.names[len(self.names) // 2]
        self.step_s([middle], 1)
        self.step_s(self.names, 1)
        for _ in range(repeat):
            one += self.step_s([middle], 1)
            everyone += self.step_s(self.names, 1)
        alone, together = statistics.median(one), statistics.median(everyone)
        return len(self.names) * alone / together, alone, together
