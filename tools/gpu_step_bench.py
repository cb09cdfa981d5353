"""Times whole decode steps of 1B, 3B and 8B shapes with random weights, as CUDA graphs and without."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgellm.cache.kv_storage import BLOCK_SIZE, allocate_storage, kv_type
from edgellm.contracts import PlannedSequence
from edgellm.runner.batch_builder import build_batch
from edgellm.runner.decode_graphs import DecodeGraphs, Graphs
from edgellm_kernels.measure import copy_gb_per_s, random_weight
from edgellm_kernels.ops import Kernels, load_kernels
from edgellm_kernels.weights import prepare
from edgellm_models.network.decoder import Decoder, DecoderWeights
from edgellm_models.network.layers import LayerWeights
from edgellm_models.network.spec import LayerSpec, ModelSpec, RopeSpec

KEYS = 512
"""Tokens that each sequence has behind it."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 256)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model of the llama family."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


SHAPES = (
    Shape("1B", 16, 2048, 32, 8, 64, 8192, 128256),
    Shape("3B", 28, 3072, 24, 8, 128, 8192, 128256),
    Shape("8B", 32, 4096, 32, 8, 128, 14336, 128256),
)


def random_decoder(shape: Shape, kernels: Kernels, form: str, head_form: str, hold: str) -> Decoder:
    """A model of random weights; the layers share one layer's weights in turns of four, which is more than
    any cache holds of the larger shapes."""
    spec = ModelSpec(
        architecture="llama",
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn_size=shape.ffn,
        vocab_size=shape.vocab,
        context_length=8192,
        rms_eps=1e-5,
        activation="silu",
        layers=tuple(LayerSpec(None, 0) for _ in range(shape.layers)),
        ropes=(RopeSpec(5e5, shape.head_dim),),
        query_scale=shape.head_dim**-0.5,
    )
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    gain = torch.ones(shape.hidden, device=kernels.device)

    def weight(op: str, n: int, k: int, of: str = form) -> Any:
        return prepare(random_weight(of, n, k), kernels.device, op, hold, kernels.dtype)

    def layer() -> LayerWeights:
        return LayerWeights(
            gain,
            weight("linear", qkv, shape.hidden),
            weight("linear", shape.hidden, shape.heads * shape.head_dim),
            gain,
            weight("gate_up", 2 * shape.ffn, shape.hidden),
            weight("linear", shape.hidden, shape.ffn),
        )

    made = [layer() for _ in range(min(4, shape.layers))]
    head = weight("lm_head", shape.vocab, shape.hidden, head_form)
    layers = tuple(made[index % len(made)] for index in range(shape.layers))
    return Decoder(spec, DecoderWeights(head, layers, gain, head), kernels)


def step_ms(decoder: Decoder, batch: int, graphs: Graphs | None, repeat: int, keys: int = KEYS) -> float:
    """Median milliseconds of a decode step of so many sequences, its logits' largest read on the host."""
    device = decoder.kernels.device
    blocks = -(-(keys + 1) // BLOCK_SIZE)
    kv = allocate_storage(decoder.spec, [blocks * batch], kv_type("bf16"), device.type)
    for pages in kv:
        for part in pages.pages():
            part.zero_()
    program = decoder if graphs is None else DecodeGraphs(decoder, kv, max_blocks=blocks, graphs=graphs)
    sequences = [
        PlannedSequence(
            sequence_id=index,
            token_ids=(index + 1,),
            start_position=keys,
            block_tables=(tuple(range(index * blocks, (index + 1) * blocks)),),
            is_prefill=False,
            needs_logits=True,
        )
        for index in range(batch)
    ]
    where = "cpu" if graphs is not None else device.type
    times = []
    with torch.inference_mode():
        for turn in range(repeat + 3):
            begin = time.perf_counter()
            logits = program.logits(program.run(build_batch(sequences, BLOCK_SIZE, where), kv))
            logits.max(dim=-1).indices.tolist()  # waits for the step
            if turn >= 3:
                times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def rows(
    shapes: Sequence[Shape],
    batches: Sequence[int],
    make: Callable[[Shape, str], Decoder],
    captured: Callable[[], Graphs],
    copy: float,
    repeat: int,
) -> list[dict[str, Any]]:
    """One row per shape, weights, batch and way of launching; 16-bit weights for the smallest shape only."""
    found = []
    for index, shape in enumerate(shapes):
        for form in ("Q4_0", "F16") if index == 0 else ("Q4_0",):
            decoder = make(shape, form)
            for batch in batches:
                ways: list[tuple[str, Graphs | None]] = [("single launches", None)]
                if batch <= 16:
                    ways.append(("graph", captured()))
                for way, graphs in ways:
                    taken = step_ms(decoder, batch, graphs, repeat)
                    share = decoder.weight_bytes / taken / 1e6 / copy
                    row = {"shape": shape.name, "weights": form, "batch": batch, "way": way, "ms": taken,
                           "tokens_per_s": 1e3 * batch / taken, "of_copy": share}  # fmt: skip
                    found.append(row)
                    print(
                        f"{shape.name:>3} {form:<5}{batch:>4}  {way:<16}{taken:9.3f} ms"
                        f"{row['tokens_per_s']:10.1f} tok/s  {share:5.2f} of copy",
                        flush=True,
                    )
            del decoder
    return found


def main() -> None:
    from edgellm.runner.decode_graphs import CudaGraphs

    kernels = load_kernels("cuda", torch.bfloat16)
    copy = copy_gb_per_s(kernels.device, 20)

    def make(shape: Shape, form: str) -> Decoder:
        hold = "planes" if form != "F16" else "dense"
        return random_decoder(shape, kernels, form, "Q6_K" if form != "F16" else "F16", hold)

    print(f"copy {copy:.0f} GB/s")
    found = rows(SHAPES, BATCHES, make, CudaGraphs, copy, repeat=20)
    report = {"gpu": torch.cuda.get_device_name(), "copy_gb_per_s": copy, "steps": found}
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
