"""Drafts for the sequences of a step: asks the drafter, lets the controller decide, tells both the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgellm.contracts import DraftCounts, PlannedSequence
from edgellm.speculative.controller import Candidate, Controller, bucket_of
from edgellm.speculative.drafter import MAX_DRAFT, Draft, Drafter
from edgellm.speculative.ngram import NgramDrafter


@dataclass(frozen=True)
class Room:
    """A sequence that may draft in the next step."""

    sequence_id: int
    most: int
    """Drafted tokens at most."""
    usable: Callable[[tuple[int, ...]], tuple[int, ...]]
    """The leading tokens of a draft that could be kept: none behind one that ends the answer."""


class Speculator:
    """One engine's drafting. Without a controller every proposal runs (``--spec ngram``)."""

    def __init__(
        self,
        drafter: Drafter,
        controller: Controller | None = None,
        *,
        max_draft: int = MAX_DRAFT,
        layer_tokens: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``layer_tokens``: tokens that the runner drafts by layers where the drafter knows nothing."""
        self._drafter = drafter
        self._controller = controller
        self._layer_tokens = layer_tokens
        self.layer_counts: dict[int, int] = {}
        """For the next step, tokens that the runner drafts by layers, by sequence id."""
        self._max_draft = max_draft
        self._clock = clock
        self._open: set[int] = set()
        self._told: set[int] = set()
        self._buckets: dict[int, int] = {}
        """Of the proposals of the step that is being made."""
        self._draft_seconds = 0.0
        self.counts = DraftCounts()
        """Of all sequences since the start; steps are those of a sequence with a draft."""

    def begin(
        self, sequence_id: int, prompt: Sequence[int], *, prediction: Sequence[int] = (), salt: str = ""
    ) -> None:
        """Takes up a sequence. Its drafts cost nothing before its first token: lookups begin behind it."""
        self._drafter.begin(sequence_id, prompt, prediction=prediction, salt=salt)
        if self._controller is not None:
            self._controller.begin(sequence_id)
        self._open.add(sequence_id)

    def end(self, sequence_id: int) -> None:
        """Forgets a sequence; one that was never begun is ignored."""
        if sequence_id in self._open:
            self._open.discard(sequence_id)
            self._told.discard(sequence_id)
            self._drafter.end(sequence_id)
            if self._controller is not None:
                self._controller.end(sequence_id)

    def propose(self, rooms: Sequence[Room], num_decoding: int, *, mixed: bool) -> dict[int, tuple[int, ...]]:
        """The drafts of the next step by sequence id. ``mixed``: prompts run beside, which rows of drafts
        would delay."""
        self._buckets, self._draft_seconds, self.layer_counts = {}, 0.0, {}
        controller = self._controller
        rooms = [room for room in rooms if room.sequence_id in self._open and room.most > 0]
        if not rooms or (controller is not None and (mixed or not controller.may_propose)):
            return {}
        begin = self._clock()
        drafts: dict[int, Draft] = {}
        for room in rooms:
            draft = self._drafter.propose(room.sequence_id, min(room.most, self._max_draft))
            tokens = () if draft is None else room.usable(draft.token_ids)
            if draft is not None and tokens:
                drafts[room.sequence_id] = Draft(tokens, draft.match)
                self._buckets[room.sequence_id] = bucket_of(draft.match)
            elif self._layer_tokens:
                self.layer_counts[room.sequence_id] = min(room.most, self._max_draft, self._layer_tokens)
        chosen = self._choose(num_decoding, drafts)
        self._draft_seconds = self._clock() - begin
        return {sequence_id: drafts[sequence_id].token_ids[:count] for sequence_id, count in chosen.items()}

    def _choose(self, num_decoding: int, drafts: Mapping[int, Draft]) -> dict[int, int]:
        controller = self._controller
        if controller is None:
            return {sequence_id: len(draft.token_ids) for sequence_id, draft in drafts.items()}
        candidates = [
            Candidate(sequence_id, self._buckets[sequence_id], len(draft.token_ids))
            for sequence_id, draft in drafts.items()
        ]
        chosen = controller.choose(num_decoding, candidates)
        for sequence_id, draft in drafts.items():
            if sequence_id not in chosen:
                controller.shadow(sequence_id, self._buckets[sequence_id], draft.token_ids)
        return chosen

    def settle(
        self,
        planned: Sequence[PlannedSequence],
        brought: Mapping[int, Sequence[int]],
        seconds: float,
    ) -> None:
        """Tells what a step ran, what tokens it ``brought`` by sequence id, and how long it took."""
        decoding = [s for s in planned if s.needs_logits and not s.is_prefill]
        for sequence in planned:
            tokens = brought.get(sequence.sequence_id, ())
            if sequence.sequence_id not in self._open or not tokens:
                continue
            draft = sequence.draft_token_ids
            if draft:
                self._count(draft, tokens)
            self._drafter.observe(sequence.sequence_id, tokens)
            if self._controller is not None:
                if draft:
                    bucket = self._buckets.get(sequence.sequence_id, 0)
                    self._controller.learn(sequence.sequence_id, bucket, draft, tokens)
                self._controller.watch(sequence.sequence_id, tokens)
        if self._controller is not None:
            self._controller.account(
                len(decoding),
                sum(len(s.rows) for s in decoding),
                sum(len(brought.get(s.sequence_id, ())) for s in decoding),
                seconds,
                self._draft_seconds,
                mixed=len(decoding) < len(planned),
            )

    def _count(self, draft: Sequence[int], tokens: Sequence[int]) -> None:
        kept = 0
        while kept < min(len(draft), len(tokens)) and draft[kept] == tokens[kept]:
            kept += 1
        counts = self.counts
        self.counts = replace(
            counts,
            proposed=counts.proposed + len(draft),
            accepted=counts.accepted + kept,
            steps=counts.steps + 1,
        )

    def disarmed(self) -> list[tuple[int, str]]:
        """Sequences that stopped drafting since the last call, for the first time, and why."""
        if self._controller is None:
            return []
        found, self._controller.disarmed = self._controller.disarmed, []
        fresh = [one for one in found if one[0] in self._open and one[0] not in self._told]
        self._told.update(sequence_id for sequence_id, _ in fresh)
        return fresh

    @property
    def lookahead(self) -> int:
        """Positions beyond the committed ones that a step may write."""
        return self._max_draft

    @property
    def state(self) -> str:
        """In a few words: the drafter, and whether it drafts or why not."""
        name = self._drafter.name
        if self._controller is None:
            return f"{name}: always"
        controls = [self._controller.control(sequence_id) for sequence_id in sorted(self._open)]
        if any(control.armed for control in controls):
            return f"{name}: armed"
        if not controls:
            return f"{name}: ready"
        return f"{name}: not drafting: {controls[-1].why}"


ALWAYS_DRAFT = 8
"""Tokens per draft where no controller chooses."""


def make_speculator(spec: str) -> Speculator | None:
    """For a value of ``--spec``: off, ngram (lookups, always) or auto (lookups where they pay)."""
    if spec == "off":
        return None
    if spec == "ngram":
        return Speculator(NgramDrafter(), max_draft=ALWAYS_DRAFT)
    assert spec == "auto", spec
    return Speculator(NgramDrafter(), Controller())
