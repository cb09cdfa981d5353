"""What the decoder gains from running sequences together, in processor time of one thread."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from tests.support.decode_speed import DecodeTimer
from tests.support.real_models import real_model


@pytest.mark.real_model
def test_sixteen_sequences_decode_several_times_the_tokens_of_one() -> None:
    """A Python loop over sequences in every layer, or fresh memory for every gather, falls below this bound.

    It is below the 5 that a quiet machine shows: other processes slow the memory down for one and for sixteen
    by different amounts.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        decoder = build_decoder(open_checkpoint(real_model("smollm2-135m")), hold="dense")
        timer = DecodeTimer(decoder, [200 + 20 * i for i in range(16)])
        with torch.inference_mode():
            timer.step_s(timer.names, 1)
            one, everyone = [], []
            for _ in range(5):
                for names, times in (([timer.names[8]], one), (timer.names, everyone)):
                    begin = time.process_time()
                    timer.step_s(names, 1)
                    times.append(time.process_time() - begin)
    finally:
        torch.set_num_threads(threads)
    ratio = 16 * statistics.median(one) / statistics.median(everyone)
    print(f"one {statistics.median(one) * 1e3:.0f} ms, sixteen {statistics.median(everyone) * 1e3:.0f} ms")
    assert ratio > 4.0, ratio
