"""Runs and measures drafting passes for the calibration: costs, and match against the whole model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from edgellm.cache.kv_storage import KVType, allocate_storage
from edgellm.contracts import PlannedSequence
from edgellm.runner.batch_builder import build_batch
from edgellm.runner.lone_row import lone_row
from edgellm.runner.step_program import StepProgram
from edgellm.speculative.calibration import Costs, Score, SubLayer, shares_of_cost, typical
from edgellm_kernels.batch import ForwardBatch
from edgellm_kernels.ops import largest
from edgellm_models.network.decoder import Decoder
from edgellm_models.network.sub_layers import SkippedSubLayers

BLOCK = 8
"""Positions per block of the probe's own pages: each place of the text has a copy of its last block."""
ANSWER = 40
"""Tokens that the model says to each prompt."""
TEMPERATURE = 0.8
"""So that small models do not repeat themselves, which would be drafted too easily."""
PLACES, ROUGH_PLACES = 128, 32
"""Places of the text at which a pass is compared with the model."""
MAX_COPY_BYTES = 256 << 20
ROWS = 32
"""Places of one forward pass: a request that comes waits no longer than this takes."""
REPEATS = 9
VERIFY_ROWS = (2, 4, 8, 16)


@dataclass
class _Text:
    """A prompt and the answer so far, in pages of its own."""

    token_ids: list[int]
    table: tuple[int, ...]


class SkipProbe:
    """A speculative.calibration.Probe over a decoder, with KV of its own, of the type that requests use.

    A draft reads the KV that the whole model has written for the text before it, so every place of the text
    is a row of its own, with a private copy of the block that holds it: what a pass writes there is seen by
    nobody else.
    """

    def __init__(
        self,
        program: Decoder | StepProgram,
        kv: KVType,
        prompts: Sequence[Sequence[int]],
        device: str = "cpu",
        seed: int = 1,
    ) -> None:
        assert not kv.has_tail, "drafting passes would displace the unquantized rows of int4"
        self._program = program
        self._decoder = program.decoder if isinstance(program, StepProgram) else program
        spec = self._decoder.spec
        self.num_layers = spec.num_layers
        self._device = device
        self._random = torch.Generator().manual_seed(seed)
        lengths = [len(ids) + ANSWER + max(VERIFY_ROWS) for ids in prompts]
        blocks = [-(-length // BLOCK) for length in lengths]
        copied = 2 * BLOCK * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
        self._num_places = max(ROWS, min(PLACES, MAX_COPY_BYTES // copied))
        total = sum(blocks) + self._num_places
        self._groups = len(spec.kv_groups)
        self._kv = allocate_storage(spec, [total] * self._groups, kv, device, block_size=BLOCK)
        starts = [sum(blocks[:index]) for index in range(len(blocks))]
        self._texts = [
            _Text(list(ids), tuple(range(start, start + count)))
            for ids, start, count in zip(prompts, starts, blocks, strict=True)
        ]
        self._copies = range(sum(blocks), total)
        self._batches: list[ForwardBatch] = []
        self._best: list[torch.Tensor] = []
        self._log_p: list[torch.Tensor] = []

    # --- the text ---

    def prepare(self) -> Iterator[None]:
        """Lets the model answer the prompts and looks at what it says, in parts."""
        tokens = []
        for text in self._texts:
            logits = self._run([self._planned(0, text.token_ids, 0, text.table)])
            tokens.append(self._draw(logits)[0])
            yield
        for _ in range(ANSWER):
            rows = []
            for index, (text, token) in enumerate(zip(self._texts, tokens, strict=True)):
                text.token_ids.append(token)
                rows.append(self._planned(index, [token], len(text.token_ids) - 1, text.table))
            tokens = self._draw(self._run(rows))
            yield
        yield from self._look()

    def _draw(self, logits: torch.Tensor) -> list[int]:
        chances = torch.softmax(logits.float().cpu() / TEMPERATURE, dim=-1)
        drawn = torch.multinomial(chances, 1, generator=self._random).squeeze(1)
        return [int(token) for token in drawn]

    def _look(self) -> Iterator[None]:
        """Chooses the places, copies their blocks and notes what the model says there."""
        places = [
            (text, position)
            for text in self._texts
            for position in range(len(text.token_ids) - ANSWER, len(text.token_ids))
        ]
        step = max(1.0, len(places) / self._num_places)
        chosen = [places[int(index * step)] for index in range(min(self._num_places, len(places)))]
        # The first ROUGH_PLACES are spread over the text too.
        stride = max(1, len(chosen) // ROUGH_PLACES)
        chosen = [place for first in range(stride) for place in chosen[first::stride]]
        rows = []
        for index, ((text, position), copy) in enumerate(zip(chosen, self._copies, strict=False)):
            last = position // BLOCK
            for pages in self._kv:
                for part in pages.pages():
                    with torch.inference_mode(part.is_inference()):
                        part[:, copy] = part[:, text.table[last]]
            table = (*text.table[:last], copy)
            rows.append(self._planned(index, [text.token_ids[position]], position, table))
        for start in range(0, len(rows), ROWS):
            batch = build_batch(rows[start : start + ROWS], BLOCK, self._device)
            logits = self._logits(batch)
            self._batches.append(batch)
            self._best.append(logits.argmax(dim=-1))
            if start < ROUGH_PLACES:
                self._log_p.append(torch.log_softmax(logits, dim=-1))
            yield

    def _planned(
        self, sequence_id: int, token_ids: Sequence[int], start: int, table: tuple[int, ...]
    ) -> PlannedSequence:
        used = table[: -(-(start + len(token_ids)) // BLOCK)]
        return PlannedSequence(
            sequence_id, tuple(token_ids), start, (used,) * self._groups, is_prefill=False, needs_logits=True
        )

    def _run(self, rows: Sequence[PlannedSequence]) -> torch.Tensor:
        return self._logits(build_batch(rows, BLOCK, self._device))

    def _logits(self, batch: ForwardBatch, skipped: SkippedSubLayers | None = None) -> torch.Tensor:
        with torch.inference_mode():
            return self._program.logits(self._program.run(batch, self._kv, skipped))

    # --- speculative.calibration.Probe ---

    def score(self, skipped: SkippedSubLayers, *, rough: bool) -> Score:
        """See Probe."""
        hits: list[bool] = []
        confidences: list[float] = []
        losses: list[float] = []
        with torch.inference_mode():
            for index, batch in enumerate(self._batches):
                if rough and index >= len(self._log_p):
                    break
                log_q = torch.log_softmax(self._logits(batch, skipped), dim=-1)
                top = log_q.max(dim=-1)
                hits += (top.indices == self._best[index]).tolist()
                confidences += top.values.exp().tolist()
                if index < len(self._log_p):
                    log_p = self._log_p[index]
                    losses += (log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp_min(0.0).tolist()
        return Score(tuple(hits), tuple(confidences), sum(losses) / max(1, len(losses)))

    def costs(self) -> Costs:
        """See Probe."""
        middle = range(1, self.num_layers - 1)
        runs: dict[object, float] = self._time(
            {
                "plain": (1, None),
                "no attention": (1, SkippedSubLayers.of(attention=middle)),
                "no feed-forward": (1, SkippedSubLayers.of(feed_forward=middle)),
                **{rows: (rows, None) for rows in VERIFY_ROWS},
            }
        )
        plain = runs["plain"]
        costs = shares_of_cost(plain, runs["no attention"], runs["no feed-forward"], len(middle))
        return replace(costs, verify={rows: max(1.0, runs[rows] / plain) for rows in VERIFY_ROWS})

    def pass_cost(self, skipped: SkippedSubLayers) -> float:
        """See Probe."""
        found = self._time({"plain": (1, None), "pass": (1, skipped)})
        return found["pass"] / found["plain"]

    def step_seconds(self) -> float:
        """What a plain step takes."""
        return self._time({"plain": (1, None)})["plain"]

    def _time(self, kinds: Mapping[object, tuple[int, SkippedSubLayers | None]]) -> dict[object, float]:
        """Seconds of steps of so many rows without some sub-layers, in turns, as a lone answer runs them."""
        text = self._texts[0]
        end = len(text.token_ids)
        lone = {
            kind: lone_row(self._program, self._kv, skipped, max_rows=rows)
            for kind, (rows, skipped) in kinds.items()
        }
        seconds: dict[object, list[float]] = {kind: [] for kind in kinds}
        for _ in range(REPEATS):
            for kind, (rows, skipped) in kinds.items():
                begin = time.perf_counter()
                row, ids = lone[kind], [text.token_ids[-1]] * rows
                planned = self._planned(0, ids, end, text.table)
                if row is not None:
                    row.run(ids, end, planned.block_tables)
                    for index in range(rows):
                        row.largest(index)
                else:
                    if rows > 1:  # a verification wants the logits of every row
                        planned = replace(planned, prompt_logits=True)
                    largest(self._logits(build_batch([planned], BLOCK, self._device), skipped))
                seconds[kind].append(time.perf_counter() - begin)
        return {kind: typical(times) for kind, times in seconds.items()}

    def changes(self) -> Mapping[SubLayer, float]:
        """See Probe."""
        with torch.inference_mode():
            return self._decoder.sub_layer_changes(self._batches[0], self._kv)
