"""Decode steps as fixed sequences of launches over static buffers, captured in CUDA graphs by their size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from edgellm.runner.late_draws import MAX_DRAWN
from edgellm.runner.step_buffers import StepBuffers, StepSize
from edgellm.runner.step_program import ReadyRows
from edgellm_kernels.batch import ForwardBatch, KVStorage, sent
from edgellm_models.network.decoder import Decoder, LastRows
from edgellm_models.network.sub_layers import SkippedSubLayers

SEQUENCES = (1, 2, 4, 8, 16)
QUERIES = (1, 2, 4, 8, 16)
MAX_ROWS = 16
"""Token rows of a captured step: as many as one tile of the linears; all of them get logits."""
FEWEST_BLOCKS, BLOCKS_FACTOR = 16, 4
"""Widths of block tables: 16, 64, 256, ... blocks, so that short contexts do not pay for long ones."""


class Graphs(Protocol):
    """How a sequence of launches is recorded."""

    def capture(self, run: Callable[[], None]) -> Callable[[], Any]:
        """Runs it, and gives what runs it again: with the same addresses, whatever lies there by then."""
        ...


class EagerReplay:
    """No recording: the launches are made anew each time."""

    def capture(self, run: Callable[[], None]) -> Callable[[], Any]:
        run()
        return run


class CudaGraphs:
    """CUDA graphs that share one memory pool: they never run at the same time."""

    def __init__(self, api: Any = None) -> None:
        """``api``: torch.cuda, or what stands for it in tests."""
        self._cuda = torch.cuda if api is None else api
        self._pool: Any = None

    def capture(self, run: Callable[[], None]) -> Callable[[], Any]:
        cuda = self._cuda
        # Once outside of the graph: what is made on first use (kernels, workspaces) must not be in it.
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            run()
        cuda.current_stream().wait_stream(stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._pool):
            run()
        if self._pool is None:
            self._pool = graph.pool()
        replay: Callable[[], Any] = graph.replay
        replay()  # what was recorded has not run yet
        return replay


@dataclass
class StepCounts:
    """How steps were run so far."""

    captured: int = 0
    replayed: int = 0
    eager: int = 0
    """Steps of more rows or longer tables than are captured, prefill among them."""


@dataclass(frozen=True)
class _Captured:
    buffers: StepBuffers
    logits: torch.Tensor
    """[rows, vocab], written by each replay."""
    replay: Callable[[], Any]


class DecodeGraphs(Decoder):
    """A decoder whose small steps (a token of up to 16 sequences, or a few drafted ones of fewer) replay a
    recorded sequence of launches. Everything that varies lies in static buffers: ids, positions, tables and
    lengths; rows and sequences that a size has more than a step needs are padding that stores nothing and
    sees nothing. Larger steps run as the decoder runs them.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[KVStorage],
        *,
        max_blocks: int,
        graphs: Graphs | None = None,
        poison: bool = False,
    ) -> None:
        """``max_blocks``: the widest block table that is captured. ``poison``: static memory is filled with
        NaN and invalid ids before each step, for tests: what a step reads it must have been given."""
        super().__init__(decoder.spec, decoder.weights, decoder.kernels, decoder.notices)
        self.batch_device = "cpu"
        """Where whoever makes batches should make them: filling the buffers is then one copy."""
        self.counts = StepCounts()
        self.drawn = torch.zeros(MAX_DRAWN, dtype=torch.int64, device=decoder.kernels.device)
        """The ids that the last step drew, where pending ones of the next are taken from."""
        self._kv = tuple(kv)
        self._max_blocks = max_blocks
        self._graphs = graphs or CudaGraphs()
        self._poison = poison
        self._captured: dict[StepSize, _Captured] = {}
        self._device = decoder.kernels.device
        self._empty = torch.empty(0, device=self._device)

    def run(
        self, batch: ForwardBatch, kv: Sequence[KVStorage], skipped: SkippedSubLayers | None = None
    ) -> LastRows:
        """See Decoder.run. The batch may lie on the host. The logits of a replayed step are good until the
        next one."""
        size = None if skipped is not None and len(skipped) else self._size_of(batch, kv)
        if size is None:
            self.counts.eager += 1
            return super().run(batch.to(self._device).with_drawn(self.drawn), kv, skipped)
        known = self._captured.get(size)
        if known is None:
            known = self._capture(size, batch)
        else:
            self._fill(known.buffers, batch)
            if self._poison:
                known.logits.fill_(float("nan"))
            known.replay()
            self.counts.replayed += 1
        rows, wanted = batch.token_ids.shape[0], batch.logit_rows.shape[0]
        logits = known.logits[:rows]
        if wanted != rows:
            logits = logits[sent(batch.logit_rows, self._device)]
        return ReadyRows(self._empty, self._empty, logits)

    def logits(self, rows: LastRows) -> torch.Tensor:
        """See Decoder.logits."""
        return rows.ready if isinstance(rows, ReadyRows) else super().logits(rows)

    def _size_of(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> StepSize | None:
        """The smallest captured size that holds the step; None where there is none."""
        same_pages = len(kv) == len(self._kv) and all(a is b for a, b in zip(kv, self._kv, strict=True))
        if not same_pages or any(group.tail is not None for group in batch.groups):
            return None
        sequences, widths = batch.groups[0].key_lengths.shape[0], []
        for group in batch.groups:
            width = FEWEST_BLOCKS
            while width < group.block_table.shape[1]:
                width *= BLOCKS_FACTOR
            widths.append(width)
        if max(group.block_table.shape[1] for group in batch.groups) > self._max_blocks:
            return None
        queries = next((n for n in QUERIES if n >= batch.max_query), None)
        many = next((n for n in SEQUENCES if n >= sequences), None)
        if queries is None or many is None or queries * many > MAX_ROWS:
            return None
        return StepSize(many, queries, tuple(widths))

    def _capture(self, size: StepSize, batch: ForwardBatch) -> _Captured:
        """Makes the buffers of a size, runs the step in them and records it."""
        buffers = StepBuffers(size, self._kv[0].block_size, self._device)
        logits = torch.empty((size.rows, self.spec.vocab_size), dtype=torch.float32, device=self._device)
        self._fill(buffers, batch)
        kv, static, run_all, head = self._kv, buffers.batch, super().run, super().logits

        def run() -> None:
            with torch.no_grad():
                logits.copy_(head(run_all(static.with_drawn(self.drawn), kv)))

        self._captured[size] = made = _Captured(buffers, logits, self._graphs.capture(run))
        self.counts.captured += 1
        return made

    def _fill(self, buffers: StepBuffers, batch: ForwardBatch) -> None:
        if self._poison:
            buffers.poison()
        buffers.fill(batch)
