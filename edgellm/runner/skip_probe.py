"""Runs and measures drafting passes for the calibration: costs, and match against the whole model."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from edgellm.cache.kv_storage import KVType, allocate_storage, kv_bytes_per_position
from edgellm.contracts import PlannedSequence
from edgellm.runner.batch_builder import build_batch
from edgellm.runner.lone_row import lone_row
from edgellm.runner.step_program import StepProgram
from edgellm.speculative.calibration import Costs, Score, SubLayer, shares_of_cost, typical
from edgellm_kernels.batch import ForwardBatch
from edgellm_kernels.ops import largest
from edgellm_models.network.decoder import Decoder
from edgellm_models.network.spec import ModelSpec
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
ROWS = 16
"""Places of one forward pass: a request that comes waits no longer than this takes."""
LIKELY = 64
"""Tokens whose probabilities are compared one by one; all others together count as one more."""
REPEATS = 9
VERIFY_ROWS = (2, 4, 8, 16)


@dataclass
class _Text:
    """A prompt and the answer so far, in pages of its own."""

    token_ids: list[int]
    table: tuple[int, ...]


@dataclass(frozen=True)
class _Likely:
    """The tokens that the model finds likeliest at a place [LIKELY], and the chance of all the others."""

    token_ids: torch.Tensor
    log_p: torch.Tensor
    others: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> _Likely:
        """``logits`` f32 [vocabulary]."""
        top = logits.topk(min(LIKELY, len(logits)))
        log_p = top.values - torch.logsumexp(logits, 0)
        return cls(top.indices, log_p, _remainder(log_p))

    def divergence(self, logits: torch.Tensor, log_total: torch.Tensor) -> float:
        """KL divergence of other logits from these, which is at most that of the whole distributions."""
        log_q = logits[self.token_ids] - log_total
        found = (self.log_p.exp() * (self.log_p - log_q)).sum()
        found += self.others * (self.others / _remainder(log_q)).log()
        return max(0.0, float(found))


def _remainder(logs: torch.Tensor) -> torch.Tensor:
    return (1.0 - logs.exp().sum()).clamp_min(1e-6)


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
        blocks, self._num_places = _room(spec, prompts)
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
        self._likely: list[list[_Likely]] = []
        """Of the first places, by batch and row."""

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
        # All before the first logits: small tensors that are made between two of them stay in the hole that
        # the first have left, and every batch would take new memory.
        parts = (rows[start : start + ROWS] for start in range(0, len(rows), ROWS))
        self._batches = [build_batch(part, BLOCK, self._device) for part in parts]
        for index, batch in enumerate(self._batches):
            logits = self._logits(batch)
            self._best.append(logits.argmax(dim=-1))
            if index * ROWS < ROUGH_PLACES:
                self._likely.append([_Likely.of(row) for row in logits])
            del logits
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

    def score(self, skipped: SkippedSubLayers, *, rough: bool) -> Generator[None, None, Score]:
        """See Probe."""
        hits: list[bool] = []
        confidences: list[float] = []
        losses: list[float] = []
        for index, batch in enumerate(self._batches[: len(self._likely)] if rough else self._batches):
            logits = self._logits(batch, skipped)
            hits += (logits.argmax(dim=-1) == self._best[index]).tolist()
            # Row by row: a second copy of many rows of a large vocabulary is more than all pages take.
            for row, found in enumerate(logits):
                log_total = torch.logsumexp(found, 0)
                confidences.append(float((found.max() - log_total).exp()))
                if index < len(self._likely):
                    losses.append(self._likely[index][row].divergence(found, log_total))
            yield
        return Score(tuple(hits), tuple(confidences), sum(losses) / max(1, len(losses)))

    def costs(self) -> Generator[None, None, Costs]:
        """See Probe."""
        middle = range(1, self.num_layers - 1)
        runs: dict[object, float] = yield from self._time(
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

    def pass_cost(self, skipped: SkippedSubLayers) -> Generator[None, None, float]:
        """See Probe."""
        found = yield from self._time({"plain": (1, None), "pass": (1, skipped)})
        return found["pass"] / found["plain"]

    def step_seconds(self) -> Generator[None, None, float]:
        """What a plain step takes."""
        return (yield from self._time({"plain": (1, None)}))["plain"]

    def _time(
        self, kinds: Mapping[object, tuple[int, SkippedSubLayers | None]]
    ) -> Generator[None, None, dict[object, float]]:
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
            yield
        return {kind: typical(times) for kind, times in seconds.items()}

    def changes(self) -> Mapping[SubLayer, float]:
        """See Probe."""
        with torch.inference_mode():
            return self._decoder.sub_layer_changes(self._batches[0], self._kv)


def probe_bytes(spec: ModelSpec, kv: KVType, prompts: Sequence[Sequence[int]]) -> int:
    """Of a probe's pages and rows of logits, about."""
    blocks, places = _room(spec, prompts)
    per_position = sum(kv_bytes_per_position(spec, len(group.layers), kv) for group in spec.kv_groups)
    return (sum(blocks) + places) * BLOCK * per_position + 2 * ROWS * spec.vocab_size * 4


def _room(spec: ModelSpec, prompts: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Blocks of each text, and places that are looked at, each with a block of its own."""
    blocks = [-(-(len(ids) + ANSWER + max(VERIFY_ROWS)) // BLOCK) for ids in prompts]
    copied = 2 * BLOCK * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
    return blocks, max(ROWS, min(PLACES, MAX_COPY_BYTES // copied))
