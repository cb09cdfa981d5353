"""Executes step plans: batch, forward pass, sampling. The only part of the runtime that computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from edgellm.contracts import PlannedSequence, SequenceResult, StepPlan, StepResult, TokenLogprob
from edgellm.runner.batch_builder import build_batch, num_logit_rows
from edgellm.runner.kv_state import KVState
from edgellm.runner.late_draws import MAX_DRAWN, Fetch, FinishedStep, LateStep, has_pending, with_known
from edgellm.runner.layer_drafts import Drafted, RunnerDrafter
from edgellm.runner.lone_decode import lone_decode
from edgellm.runner.pooler import Pooler
from edgellm.runner.sampler import Draw, Sampler
from edgellm.speculative.acceptance import COUPLED, num_kept
from edgellm_kernels.batch import ForwardBatch, KVStorage, TailTables, movable
from edgellm_kernels.ops import block_scores
from edgellm_models.errors import EngineError
from edgellm_models.network.decoder import LastRows

MAX_LOGIT_BYTES = 64 << 20
"""Logits that exist at once, beyond which they are made in parts: a scored prompt wants a row per token."""


Scores = tuple[tuple[TokenLogprob, ...], str | None]
"""Logprobs of prompt tokens, or what is wrong with the rows."""


class ForwardModel(Protocol):
    """What the runner needs of a decoder."""

    def run(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> LastRows:
        """Runs all layers; the rows whose logits are wanted."""
        ...

    def run_to_states(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> LastRows:
        """As ``run``; the rows can be given to ``hidden_states`` too."""
        ...

    def logits(self, rows: LastRows) -> torch.Tensor:
        """Logits [rows, vocab] f32."""
        ...

    def hidden_states(self, rows: LastRows) -> torch.Tensor:
        """The states [rows, hidden] f32 that the head reads."""
        ...


RowSink = Callable[[int, int, torch.Tensor], None]
"""Called with a sequence's id, the position of the token of the first row, and its logits [rows, vocab] f32,
which it must not keep beyond the step: row i is about the token that follows position + i."""


class ModelRunner:
    """A decoder, the KV pages that it writes, and the sampler."""

    def __init__(
        self,
        decoder: ForwardModel,
        kv: Sequence[KVStorage],
        *,
        vocab_size: int,
        block_size: int,
        device: str = "cpu",
        host_kv: Sequence[KVStorage] = (),
        spec_rule: str = COUPLED,
        drafter: RunnerDrafter | None = None,
        num_groups: int | None = None,
    ) -> None:
        """``spec_rule``: how drafted tokens are accepted (speculative/acceptance.py); ``drafter`` drafts for
        the sequences that are planned so. ``num_groups``: the first so many of ``kv`` are the decoder's, the
        others a draft model's.
        """
        self._groups = range(len(kv) if num_groups is None else num_groups)
        self.drafter = drafter
        """May be set between two steps."""
        self._decoder = decoder
        self._kv = KVState(kv, host_kv)
        self._block_size = block_size
        self._device: str = getattr(decoder, "batch_device", device)
        f16_kv = any(torch.float16 in (pages.keys.dtype, pages.values.dtype) for pages in kv)
        self._sampler = Sampler(vocab_size, f16_kv=f16_kv, spec_rule=spec_rule)
        self._pooler = Pooler()
        self._lone = lone_decode(decoder, kv[: len(self._groups)])
        drawn: torch.Tensor | None = getattr(decoder, "drawn", None)
        self._fills_in = drawn is not None
        """The decoder puts pending ids in by itself."""
        self._drawn = torch.zeros(MAX_DRAWN, dtype=torch.int64, device=device) if drawn is None else drawn
        self._launched: FinishedStep | LateStep | None = None
        self._max_rows = max(1, MAX_LOGIT_BYTES // (4 * vocab_size))
        self.row_sink: RowSink | None = None
        """Where there is one it is given every row of logits, and prompts are not scored here."""

    def page_parts(self) -> list[tuple[torch.Tensor, ...]]:
        """Per layer group the parts of its pages [layers, blocks, ...], without content: for their forms."""
        return [tuple(part[:, :0] for part in group.pages()) for group in self._kv.storages]

    def read_pages(self, blocks: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, ...]]:
        """Copies of these blocks of each layer group, on the host. Between two steps only."""
        with torch.inference_mode(False):
            return [
                tuple(
                    movable(part)
                    .index_select(1, torch.tensor(ids, dtype=torch.int64, device=part.device))
                    .to("cpu")
                    .view(part.dtype)
                    for part in group.pages()
                )
                for group, ids in zip(self._kv.storages, blocks, strict=True)
            ]

    def write_pages(
        self,
        pages: Sequence[Sequence[torch.Tensor]],
        places: Sequence[Sequence[int]],
        blocks: Sequence[Sequence[int]],
    ) -> None:
        """Fills blocks of each layer group with those that lie in ``pages`` at ``places``. Between two steps
        only, and only blocks that nobody reads."""
        for group, parts, here, ids in zip(self._kv.storages, pages, places, blocks, strict=True):
            for target, source in zip(group.pages(), parts, strict=True):
                chosen = source if list(here) == list(range(source.shape[1])) else source[:, list(here)]
                where = torch.tensor(list(ids), dtype=torch.int64, device=target.device)
                with torch.inference_mode():
                    movable(target).index_copy_(1, where, movable(chosen).to(target.device))

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one plan. Unusable logits are an error of their sequence; a failing kernel raises."""
        if (
            self._lone is not None
            and self.row_sink is None
            and (self.drafter is None or not self.drafter.sees_every_step)
        ):
            lone = self._lone.sequence(plan)
            if lone is not None:
                drafted = Drafted(plan.sequences)
                if lone.draft_by_runner:
                    drafted = self._drafted(plan)
                    [lone] = drafted.sequences
                result = _result(lone, self._lone.draw(lone, self._sampler), {})
                return StepResult(plan.step, (result,), drafted.seconds, drafted.passes)
        return self._run(plan, self._begin(plan))

    def _run(self, plan: StepPlan, tail: TailTables | None) -> StepResult:
        if not plan.sequences:
            return StepResult(plan.step, ())
        with torch.inference_mode():
            drafted = self._drafted(plan)
            sequences = drafted.sequences
            batch = build_batch(sequences, self._block_size, self._device, tail, self._groups)
            pages = self._kv.storages[: len(self._groups)]
            embedded: dict[int, SequenceResult] = {}
            if any(s.num_states for s in sequences):
                embedded, rows = self._embed(sequences, self._decoder.run_to_states(batch, pages))
            else:
                rows = self._decoder.run(batch, pages)
            drawn, scores = self._last_logits([s for s in sequences if not s.num_states], rows)
            draws = self._draw(sequences, drawn)
            results = [
                embedded.get(s.sequence_id)
                or self._with_block_scores(s, _result(s, draws.get(s.sequence_id, ()), scores))
                for s in sequences
            ]
        return StepResult(plan.step, tuple(results), drafted.seconds, drafted.passes)

    def launch(self, plan: StepPlan) -> FinishedStep | LateStep:
        """See Runner. Where every id that the plan draws can be drawn on the device, this does not wait for
        it; elsewhere the step is over when this returns."""
        before, tail = self._launched, self._begin(plan)
        late = self._draws_late(plan)
        if before is not None and has_pending(plan) and not (late and isinstance(before, LateStep)):
            plan = with_known(plan, before.token_ids())
        if not late:
            self._launched = FinishedStep(self._run(plan, tail))
            return self._launched
        wanted = [s for s in plan.sequences if s.needs_logits]
        drawn_at = before.drawn_at if isinstance(before, LateStep) else None
        with torch.inference_mode():
            batch = build_batch(plan.sequences, self._block_size, self._device, tail, self._groups, drawn_at)
            if not self._fills_in:
                batch = batch.with_drawn(self._drawn)
            rows = self._decoder.run(batch, self._kv.storages[: len(self._groups)])
            fetch = None
            if wanted:
                ids, best = self._sampler.draw_late(
                    self._decoder.logits(rows),
                    [s.sequence_id for s in wanted],
                    [s.start_position + len(s.token_ids) for s in wanted],
                )
                self._drawn[: len(wanted)].copy_(ids)
                fetch = Fetch(ids, best)
        places = {s.sequence_id: place for place, s in enumerate(wanted)}
        self._launched = LateStep(plan, places, fetch, self._sampler)
        return self._launched

    def _draws_late(self, plan: StepPlan) -> bool:
        """Whether nothing that the plan brings needs the host before the next step runs."""
        if self.row_sink is not None or self.drafter is not None or not plan.sequences:
            return False
        if sum(s.needs_logits for s in plan.sequences) > min(MAX_DRAWN, self._max_rows):
            return False
        return all(
            not (s.draft_token_ids or s.token_masks or s.prompt_logits or s.num_states or s.score_blocks)
            and (not s.needs_logits or self._sampler.draws_late(s.sequence_id))
            for s in plan.sequences
        )

    def _begin(self, plan: StepPlan) -> TailTables | None:
        """What a plan says of sequences and of their KV before anything runs."""
        for sequence_id in plan.ended:
            self._sampler.end(sequence_id)
            self._pooler.end(sequence_id)
        for start in plan.started:
            self._sampler.start(start)
            self._pooler.start(start)
        with torch.inference_mode():
            return self._kv.prepare(plan)

    def _drafted(self, plan: StepPlan) -> Drafted:
        if self.drafter is None:
            return Drafted(plan.sequences)
        with torch.inference_mode():
            return self.drafter.add(plan, self._kv, self._sampler, self._block_size)

    def _embed(
        self, sequences: Sequence[PlannedSequence], rows: LastRows
    ) -> tuple[dict[int, SequenceResult], LastRows]:
        """By sequence id what the rows of states brought, and the rows that are left for logits."""
        found: dict[int, SequenceResult] = {}
        left: list[int] = []
        for sequence, own in _rows_of(sequences):
            if not sequence.num_states:
                left.extend(range(own.start, own.stop))
                continue
            states = self._decoder.hidden_states(rows.part(own.start, own.stop))
            embedding, error = self._pooler.add(sequence, states)
            found[sequence.sequence_id] = SequenceResult(
                sequence.sequence_id, (), embedding=embedding, error=error
            )
        return found, LastRows(rows.x[left], rows.residual[left])

    def _last_logits(
        self, sequences: Sequence[PlannedSequence], rows: LastRows
    ) -> tuple[torch.Tensor | None, dict[int, Scores]]:
        """The logits [draws, vocab] to draw from, in the order of the sequences, and by sequence id the
        logprobs of its prompt's tokens, or why there are none.

        Made in parts of ``MAX_LOGIT_BYTES`` at most where prompts are scored.
        """
        wanted = {
            row
            for s, own in _rows_of(sequences)
            if s.needs_logits
            for row in range(own.stop - len(s.draft_token_ids) - 1, own.stop)
        }
        drawn: list[torch.Tensor] = []
        scores: dict[int, Scores] = {}
        for start in range(0, len(rows), self._max_rows):
            end = min(start + self._max_rows, len(rows))
            logits = self._decoder.logits(rows if end - start == len(rows) else rows.part(start, end))
            for sequence, own in _rows_of(sequences):
                first, last = max(own.start, start), min(own.stop, end)
                if first < last:
                    position = sequence.start_position + len(sequence.rows) - own.stop + first
                    self._score(sequence, position, logits[first - start : last - start], scores)
            here = [row - start for row in range(start, end) if row in wanted]
            if here:
                drawn.append(logits if len(here) == end - start else logits[here])
        return torch.cat(drawn) if len(drawn) > 1 else drawn[0] if drawn else None, scores

    def _score(
        self, sequence: PlannedSequence, position: int, logits: torch.Tensor, scores: dict[int, Scores]
    ) -> None:
        """Takes the logits of the tokens from ``position`` on, for the sink or as logprobs of the prompt."""
        if self.row_sink is not None:
            self.row_sink(sequence.sequence_id, position, logits)
        elif sequence.prompt_logits:
            found, error = self._sampler.score_prompt(logits, sequence.sequence_id, position)
            before, wrong = scores.get(sequence.sequence_id, ((), None))
            scores[sequence.sequence_id] = (*before, *found), wrong or error

    def _with_block_scores(self, sequence: PlannedSequence, result: SequenceResult) -> SequenceResult:
        if not sequence.score_blocks or result.error is not None:
            return result
        groups = zip(self._kv.storages, sequence.score_blocks, strict=True)
        # What a draft model thinks of a block says nothing.
        scores = tuple(
            tuple(block_scores(pages, blocks)) if group in self._groups else (0.0,) * len(blocks)
            for group, (pages, blocks) in enumerate(groups)
        )
        return replace(result, block_scores=scores)

    def _draw(
        self, sequences: Sequence[PlannedSequence], logits: torch.Tensor | None
    ) -> dict[int, Sequence[Draw]]:
        """By sequence id the draws from its last rows, for those that want any."""
        wanted = [s for s in sequences if s.needs_logits]
        if logits is None:
            return {}
        ids = [s.sequence_id for s in wanted]
        positions = [s.start_position + len(s.token_ids) for s in wanted]
        masks = [mask for s in wanted for mask in _row_masks(s)]
        drafts = [s.draft_token_ids for s in wanted]
        return dict(zip(ids, self._sampler.verify(logits, ids, positions, drafts, masks), strict=True))


def _row_masks(sequence: PlannedSequence) -> Sequence[bytes | None]:
    """What each row that a sequence draws from allows; EngineError rather than leave a mask out."""
    rows = 1 + len(sequence.draft_token_ids)
    if sequence.token_masks and len(sequence.token_masks) != rows:
        raise EngineError(
            f"sequence {sequence.sequence_id} draws from {rows} rows, but {len(sequence.token_masks)} masks "
            "came"
        )
    return sequence.token_masks or (None,) * rows


def _rows_of(sequences: Sequence[PlannedSequence]) -> Iterator[tuple[PlannedSequence, slice]]:
    """Each sequence with its rows of the logits."""
    start = 0
    for sequence in sequences:
        end = start + num_logit_rows(sequence)
        yield sequence, slice(start, end)
        start = end


def _result(
    sequence: PlannedSequence,
    draws: Sequence[Draw],
    scores: Mapping[int, Scores],
) -> SequenceResult:
    sequence_id, draft = sequence.sequence_id, sequence.draft_token_ids
    prompt_logprobs, error = scores.get(sequence_id, ((), None))
    if draws and draws[0].error is not None:
        error = error or draws[0].error
    if error is not None:
        return SequenceResult(sequence_id, (), error=error)
    tokens = tuple(draw.token_id for draw in draws)
    return SequenceResult(
        sequence_id,
        tokens,
        len(draft),
        num_kept(draft, tokens),
        logprobs=tuple(draw.logprob for draw in draws if draw.logprob is not None),
        prompt_logprobs=prompt_logprobs,
    )
