"""Where a native decode step's time goes: milliseconds by kind of op, at short and long context.

Run as ``python -m acceptance.native_ops MODEL.gguf [--threads N] [--kv-dtype f32] [--context 128 4096]``.
Medians of alternating rounds; the times are those that the step program counts itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from edgellm.cache.kv_storage import BLOCK_SIZE, allocate_storage, kv_type
from edgellm.runner.choose_program import choose_program
from edgellm.runner.step_program import StepProgram
from edgellm_kernels import native_threads
from edgellm_kernels.batch import ForwardBatch, GroupTables, KVStorage
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder

STEPS = 15
ROUNDS = 5


def one_row(kv: tuple[KVStorage, ...], position: int) -> ForwardBatch:
    """A decode step of one sequence that lies in the first blocks."""
    blocks = position // BLOCK_SIZE + 1
    table = torch.arange(blocks, dtype=torch.int32)[None]
    group = GroupTables(
        table, table * BLOCK_SIZE, torch.tensor([position]), torch.tensor([position + 1], dtype=torch.int32)
    )
    return ForwardBatch(
        torch.tensor([5]),
        torch.tensor([position]),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([0]),
        1,
        blocks * BLOCK_SIZE,
        (group,) * len(kv),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=native_threads.available_cores())
    parser.add_argument("--kv-dtype", default="f32")
    parser.add_argument("--context", type=int, nargs="+", default=[128, 4096])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    native_threads.set_threads(chosen.threads)
    decoder = build_decoder(open_checkpoint(chosen.model), kernels="native")
    blocks = max(chosen.context) // BLOCK_SIZE + 2
    kv = allocate_storage(decoder.spec, [blocks] * len(decoder.spec.kv_groups), kv_type(chosen.kv_dtype))
    for storage in kv:  # attention reads all of it: numbers of a usual size, memory that is really there
        for pages in storage.pages():
            pages.fill_(1)
    program = choose_program(decoder, kv)
    assert isinstance(program, StepProgram)
    rounds: dict[int, list[dict[str, float]]] = {context: [] for context in chosen.context}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for context in chosen.context:
                batch = one_row(kv, context - 1)
                program.forward(batch, kv)
                program.native.take_seconds()
                begin = time.perf_counter()
                for _ in range(STEPS):
                    program.forward(batch, kv)
                whole = (time.perf_counter() - begin) / STEPS
                times = {op: s / STEPS for op, s in program.native.take_seconds().items()}
                rounds[context].append({**times, "outside": whole - sum(times.values()), "step": whole})
    names = list(rounds[chosen.context[0]][0])
    print(f"{chosen.model.name}, {chosen.threads} threads, {chosen.kv_dtype} KV: ms per decode step")
    print("op".ljust(12) + "".join(f"context {c:>6}".rjust(16) for c in chosen.context))
    for name in names:
        medians = (statistics.median(found[name] for found in rounds[c]) * 1e3 for c in chosen.context)
        print(name.ljust(12) + "".join(f"{value:16.3f}" for value in medians))


if __name__ == "__main__":
    main()
