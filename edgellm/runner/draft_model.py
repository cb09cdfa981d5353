"""Drafts by a smaller model of the same vocabulary, with layer groups of its own in the same cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from edgellm.contracts import PENDING, PlannedSequence, StepPlan
from edgellm.runner.batch_builder import build_batch
from edgellm.runner.kv_state import KVState
from edgellm.runner.layer_drafts import Drafted, extend_drafts, with_drafts
from edgellm.runner.sampler import Sampler
from edgellm.runner.step_program import StepProgram
from edgellm_models.network.decoder import Decoder

CHUNK = 512
"""Tokens at most that one pass makes up for."""
STOP_BELOW = 0.2
"""A draft ends behind a token that is less likely than what a pass costs."""


@dataclass
class _Text:
    """What the draft model knows of one sequence."""

    token_ids: list[int]
    """The sequence's tokens."""
    done: int = 0
    """Of these so many have KV of the draft model in its pages."""
    guessed: list[int] = field(default_factory=list)
    """Behind these, drafted tokens that have: right or not, the next plan tells."""
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    """By block index, its block of every group of the draft model."""
    drafted: tuple[int, ...] = ()
    """What was drafted in the last step."""
    contents: list[int] = field(default_factory=list)
    """By block index, a hash of all tokens up to the end of the block, as far as it was asked for."""
    noted: int = 0
    """Full blocks that are entered as filled."""

    def content(self, index: int, block_size: int) -> int:
        while len(self.contents) <= index:
            start = len(self.contents) * block_size
            before = self.contents[-1] if self.contents else 0
            self.contents.append(hash((before, *self.token_ids[start : start + block_size])))
        return self.contents[index]


class DraftModel:
    """A RunnerDrafter. Runs along with the prompts of the sequences that may draft, then only where it
    drafts: what a sequence said in between is made up for in the first pass.

    A prefix that is reused may lack its KV: which blocks hold it is known by their content, and what is
    missing is run, with the same bits whoever shares the block.
    """

    sees_every_step = True

    def __init__(
        self, program: Decoder | StepProgram, groups: range, vocab_size: int, device: str = "cpu"
    ) -> None:
        """``groups``: which of the cache's layer groups are the draft model's. ``vocab_size``: ids that the
        target's sampler knows; rows of padding are cut off or added."""
        self._program = program
        self._groups = groups
        self._vocab_size = vocab_size
        self._device = device
        self._texts: dict[int, _Text] = {}
        self._contents: dict[tuple[int, ...], int] = {}
        """By block of every group, a hash of all tokens up to its end, where the draft model filled it."""

    def add(self, plan: StepPlan, kv: KVState, sampler: Sampler, block_size: int) -> Drafted:
        """See RunnerDrafter. Time that goes in prompts is not drafting's."""
        self._follow(plan, block_size)
        wanted = [s for s in plan.sequences if s.draft_by_runner and PENDING not in s.token_ids]
        prompts = [s for s in wanted if s.is_prefill]
        for sequence in prompts:
            self._run_missing([sequence], kv, block_size, spare=0)
        open_ = [s for s in wanted if not s.is_prefill and s.draft_limit > 0]
        drafts: dict[int, list[int]] = {s.sequence_id: [] for s in plan.sequences if s.draft_by_runner}
        begin, passes = time.perf_counter(), 0
        while open_:
            if passes == 0:
                self._run_missing(open_, kv, block_size, spare=CHUNK)
                rows = [self._missing(s, needs_logits=True) for s in open_]
            else:
                rows = [self._guessed_row(s, drafts[s.sequence_id]) for s in open_]
            logits = self._run(rows, kv, block_size)
            for sequence in open_:
                text = self._texts[sequence.sequence_id]
                if passes == 0:
                    text.done = len(text.token_ids)
                else:
                    text.guessed.append(drafts[sequence.sequence_id][-1])
            passes += 1
            open_ = extend_drafts(open_, drafts, sampler, logits, STOP_BELOW)
        seconds = time.perf_counter() - begin
        for sequence in wanted:
            self._note_contents(self._texts[sequence.sequence_id], block_size)
        sequences = with_drafts(plan.sequences, drafts)
        for sequence in sequences:
            self._texts[sequence.sequence_id].drafted = sequence.draft_token_ids
        return Drafted(sequences, seconds if passes else 0.0, passes)

    # --- what is known of the sequences ---

    def _follow(self, plan: StepPlan, block_size: int) -> None:
        """Takes over what a plan says: tokens, blocks, and what is no longer so."""
        for sequence_id in plan.ended:
            self._texts.pop(sequence_id, None)
        for start in plan.started:
            self._texts[start.sequence_id] = _Text(list(start.prompt_token_ids))
        # What was copied over a block is not known by its content.
        written = {(copy.group, copy.target) for copy in plan.block_copies}
        written |= {(copy.group, copy.block) for copy in plan.host_copies if not copy.to_host}
        for group, target in written:
            if group in self._groups:
                place = group - self._groups.start
                for key in [key for key in self._contents if key[place] == target]:
                    del self._contents[key]
        for sequence in plan.sequences:
            text = self._texts[sequence.sequence_id]
            known, end = text.token_ids, sequence.start_position + len(sequence.token_ids)
            # What lies between is of the last draft, whoever made it.
            known.extend(text.drafted[: max(0, sequence.start_position - len(known))])
            assert len(known) >= sequence.start_position, "tokens came that no plan has shown"
            if known[sequence.start_position : end] != list(sequence.token_ids):
                known[sequence.start_position :] = sequence.token_ids
            if not sequence.is_prefill:
                del known[end:]
            del text.contents[sequence.start_position // block_size :]
            while text.guessed and text.done < len(known) and known[text.done] == text.guessed[0]:
                text.done += 1
                del text.guessed[0]
            text.guessed = []
            text.done = min(text.done, end)
            text.noted = min(text.noted, text.done // block_size)
            if sequence.draft_by_runner:
                self._follow_blocks(text, sequence, block_size)

    def _follow_blocks(self, text: _Text, sequence: PlannedSequence, block_size: int) -> None:
        """KV in blocks that the sequence no longer has is gone; that in blocks it shares may be there."""
        blocks = list(zip(*(sequence.block_tables[group] for group in self._groups), strict=True))
        known = text.blocks[: -(-text.done // block_size)]
        if blocks[: len(known)] != known:
            same = next(i for i, pair in enumerate(zip(blocks, known, strict=False)) if pair[0] != pair[1])
            text.done = min(text.done, same * block_size)
            text.noted = min(text.noted, same)
        text.blocks = blocks
        full = (sequence.start_position + len(sequence.token_ids)) // block_size
        for index in range(text.done // block_size, full):
            if text.done < index * block_size or self._contents.get(blocks[index]) != text.content(
                index, block_size
            ):
                break
            text.done = (index + 1) * block_size

    def _note_contents(self, text: _Text, block_size: int) -> None:
        """Enters the blocks that were filled since the last time."""
        for index in range(text.noted, text.done // block_size):
            self._contents[text.blocks[index]] = text.content(index, block_size)
        text.noted = text.done // block_size

    # --- passes ---

    def _missing(
        self, sequence: PlannedSequence, *, needs_logits: bool, most: int | None = None
    ) -> PlannedSequence:
        """The tokens up to the end of the sequence's own that have no KV yet, or the first ``most``."""
        text = self._texts[sequence.sequence_id]
        end = sequence.start_position + len(sequence.token_ids)
        # The last token runs in any case: its row is the draft's first.
        start = min(text.done, end - 1) if needs_logits else text.done
        stop = end if most is None else min(end, start + most)
        return replace(
            sequence,
            token_ids=tuple(text.token_ids[start:stop]),
            start_position=start,
            needs_logits=needs_logits,
            prompt_logits=False,
            draft_token_ids=(),
            total_length=0 if most is None else max(sequence.total_length, end),
        )

    def _run_missing(
        self, sequences: Sequence[PlannedSequence], kv: KVState, block_size: int, spare: int
    ) -> None:
        """Runs what is missing, but for the last ``spare`` tokens, which a drafting pass runs itself."""
        for sequence in sequences:
            text = self._texts[sequence.sequence_id]
            end = sequence.start_position + len(sequence.token_ids)
            while end - text.done > spare:
                row = self._missing(sequence, needs_logits=False, most=CHUNK)
                self._run([row], kv, block_size)
                text.done += len(row.token_ids)

    def _guessed_row(self, sequence: PlannedSequence, draft: Sequence[int]) -> PlannedSequence:
        return replace(
            sequence,
            token_ids=(draft[-1],),
            start_position=sequence.start_position + len(sequence.token_ids) - 1 + len(draft),
            total_length=0,
            prompt_logits=False,
            draft_token_ids=(),
        )

    def _run(self, rows: Sequence[PlannedSequence], kv: KVState, block_size: int) -> torch.Tensor:
        """Logits [rows that need them, vocab_size]."""
        batch = build_batch(rows, block_size, self._device, groups=self._groups)
        storages = [kv.storages[group] for group in self._groups]
        logits = self._program.logits(self._program.run(batch, storages))
        width = logits.shape[1]
        if width > self._vocab_size:
            return logits[:, : self._vocab_size].contiguous()
        if width < self._vocab_size:
            return torch.nn.functional.pad(logits, (0, self._vocab_size - width), value=float("-inf"))
        return logits
