"""Drafts for the sequences of a step: asks the drafter, lets the controller decide, tells both the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgellm.contracts import DraftCounts, DrafterStats, PlannedSequence
from edgellm.speculative.acceptance import num_kept
from edgellm.speculative.controller import Candidate, Controller
from edgellm.speculative.drafter import MAX_DRAFT, Draft, Drafter
from edgellm.speculative.estimates import RUNNER, bucket_of
from edgellm.speculative.ngram import NgramDrafter


@dataclass(frozen=True)
class Room:
    """A sequence that may draft in the next step."""

    sequence_id: int
    most: int
    """Drafted tokens at most."""
    usable: Callable[[tuple[int, ...]], tuple[int, ...]]
    """The leading tokens of a draft that could be kept: none behind one that ends the answer."""
    runner_may_draft: bool = True
    """False where the masks of drafted rows must be made before the step."""


class Speculator:
    """One engine's drafting. Without a controller every proposal runs (``--spec ngram``, ``--spec skip``)."""

    def __init__(
        self,
        drafter: Drafter | None,
        controller: Controller | None = None,
        *,
        max_draft: int = MAX_DRAFT,
        runner_tokens: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``drafter`` proposes; where it knows nothing, or nothing that pays as well, the runner drafts up to
        ``runner_tokens`` itself (by fewer layers, or by a draft model)."""
        self._drafter = drafter
        self._controller = controller
        self.runner_name = "skip"
        """What the runner's own drafts are called."""
        self.runner_follows = False
        """Whether the runner's drafter must see prompts too: a draft model."""
        self.runner_tokens = runner_tokens
        self.runner_why_not = ""
        """Why the runner drafts nothing, where somebody may wonder."""
        self.runner_counts: dict[int, int] = {}
        """For the next step, tokens that the runner drafts itself, by sequence id."""
        self._max_draft = max_draft
        self._clock = clock
        self._open: set[int] = set()
        self._told: set[int] = set()
        self._buckets: dict[int, int] = {}
        """Of what drafts in the step that is being made."""
        self._draft_seconds = 0.0
        self.counts = DraftCounts()
        """Of all sequences since the start; steps are those of a sequence with a draft."""
        self.runner_drafts = DraftCounts()
        """The part of it that the runner drafted itself."""
        self._accepted_at: dict[bool, list[int]] = {False: [], True: []}
        """Drafts whose token at each place was kept: proposed here, and by the runner."""
        self._by_runner: set[int] = set()
        """Open sequences whose last draft the runner made."""

    def expect_runner_drafts(
        self, tokens: int, match: float, pass_share: float, verify: Mapping[int, float]
    ) -> None:
        """From now on the runner may draft up to ``tokens`` itself; see Controller.expect_runner_drafts."""
        self.runner_tokens, self.runner_why_not = min(tokens, self._max_draft), ""
        if self._controller is not None:
            self._controller.expect_runner_drafts(match, pass_share, verify)

    def begin(
        self, sequence_id: int, prompt: Sequence[int], *, prediction: Sequence[int] = (), salt: str = ""
    ) -> None:
        """Takes up a sequence. Its drafts cost nothing before its first token: lookups begin behind it."""
        if self._drafter is not None:
            self._drafter.begin(sequence_id, prompt, prediction=prediction, salt=salt)
        if self._controller is not None:
            self._controller.begin(sequence_id)
        self._open.add(sequence_id)

    def end(self, sequence_id: int) -> None:
        """Forgets a sequence; one that was never begun is ignored."""
        if sequence_id in self._open:
            self._open.discard(sequence_id)
            self._by_runner.discard(sequence_id)
            self._told.discard(sequence_id)
            if self._drafter is not None:
                self._drafter.end(sequence_id)
            if self._controller is not None:
                self._controller.end(sequence_id)

    def propose(self, rooms: Sequence[Room], num_decoding: int, *, mixed: bool) -> dict[int, tuple[int, ...]]:
        """The drafts of the next step by sequence id. ``mixed``: prompts run beside, which rows of drafts
        would delay."""
        self._buckets, self._draft_seconds, self.runner_counts = {}, 0.0, {}
        controller = self._controller
        rooms = [room for room in rooms if room.sequence_id in self._open and room.most > 0]
        if not rooms or (controller is not None and (mixed or not controller.may_propose)):
            return {}
        begin = self._clock()
        drafts: dict[int, Draft] = {}
        if self._drafter is not None:
            for room in rooms:
                draft = self._drafter.propose(room.sequence_id, min(room.most, self._max_draft))
                tokens = () if draft is None else room.usable(draft.token_ids)
                # What follows nothing but the hope that a copy goes on runs only where somebody judges it.
                if draft is not None and tokens and (draft.match or controller is not None):
                    drafts[room.sequence_id] = replace(draft, token_ids=tokens)
        limits = {
            room.sequence_id: min(room.most, self.runner_tokens)
            for room in rooms
            if self.runner_tokens and room.runner_may_draft
        }
        if controller is None:
            self.runner_counts = {i: most for i, most in limits.items() if i not in drafts}
            found = {sequence_id: draft.token_ids for sequence_id, draft in drafts.items()}
        else:
            found = self._choose(controller, num_decoding, drafts, limits)
        self._draft_seconds = self._clock() - begin
        return found

    def _choose(
        self,
        controller: Controller,
        num_decoding: int,
        drafts: Mapping[int, Draft],
        limits: Mapping[int, int],
    ) -> dict[int, tuple[int, ...]]:
        candidates = [Candidate(i, bucket_of(d.match, d.agreed), len(d.token_ids)) for i, d in drafts.items()]
        candidates += [Candidate(i, RUNNER, most) for i, most in limits.items()]
        chosen = controller.choose(num_decoding, candidates)
        found = {}
        for sequence_id, choice in chosen.items():
            self._buckets[sequence_id] = choice.bucket
            if choice.bucket == RUNNER:
                self.runner_counts[sequence_id] = choice.count
            else:
                found[sequence_id] = drafts[sequence_id].token_ids[: choice.count]
        for sequence_id, draft in drafts.items():
            if sequence_id not in found:
                controller.shadow(sequence_id, bucket_of(draft.match, draft.agreed), draft.token_ids)
        return found

    def settle(
        self,
        planned: Sequence[PlannedSequence],
        brought: Mapping[int, Sequence[int]],
        seconds: float,
        drafted: Mapping[int, tuple[int, int]] | None = None,
        *,
        pass_seconds: float = 0.0,
        passes: int = 0,
    ) -> None:
        """Tells what a step ran, what tokens it ``brought`` by sequence id, and how long it took.

        ``drafted``: (drafted tokens, kept ones) by sequence id; None is what the plan says. ``pass_seconds``
        of the step went in ``passes`` of the runner's own drafting.
        """
        if drafted is None:
            drafted = {
                s.sequence_id: (len(s.draft_token_ids), num_kept(s.draft_token_ids, brought[s.sequence_id]))
                for s in planned
                if s.sequence_id in brought
            }
        decoding = [s for s in planned if s.needs_logits and not s.is_prefill]
        for sequence in planned:
            sequence_id = sequence.sequence_id
            tokens = brought.get(sequence_id, ())
            if sequence_id not in self._open or not tokens:
                continue
            proposed, kept = drafted.get(sequence_id, (0, 0))
            if proposed:
                by_runner = sequence_id in self.runner_counts
                if by_runner:
                    self._by_runner.add(sequence_id)
                else:
                    self._by_runner.discard(sequence_id)
                self._count(proposed, min(kept, len(tokens)), by_runner=by_runner)
            if self._drafter is not None:
                self._drafter.observe(sequence_id, tokens)
            if self._controller is not None:
                if proposed:
                    bucket = self._buckets.get(sequence_id, 0)
                    self._controller.learn(sequence_id, bucket, proposed, kept)
                self._controller.watch(sequence_id, tokens)
        if self._controller is not None:
            self._controller.record_passes(len(self.runner_counts), passes, pass_seconds)
            self._controller.account(
                len(decoding),
                sum(len(s.token_ids) + drafted.get(s.sequence_id, (0, 0))[0] for s in decoding),
                sum(len(brought.get(s.sequence_id, ())) for s in decoding),
                max(0.0, seconds - pass_seconds),
                self._draft_seconds + pass_seconds,
                mixed=len(decoding) < len(planned),
            )

    def _count(self, proposed: int, kept: int, *, by_runner: bool) -> None:
        self.counts = _more(self.counts, proposed, kept)
        if by_runner:
            self.runner_drafts = _more(self.runner_drafts, proposed, kept)
        places = self._accepted_at[by_runner]
        places += [0] * (kept - len(places))
        for place in range(kept):
            places[place] += 1

    def drafters(self) -> tuple[DrafterStats, ...]:
        """Each drafter apart: what it did, and how many open sequences drafted with it when they last did and
        would again."""
        controller = self._controller
        armed = [i for i in self._open if controller is None or controller.control(i).armed]
        by_runner = sum(i in self._by_runner for i in armed)
        found = []
        if self._drafter is not None:
            own, rest = self.counts, self.runner_drafts
            counts = DraftCounts(
                own.proposed - rest.proposed, own.accepted - rest.accepted, own.steps - rest.steps
            )
            places = tuple(self._accepted_at[False])
            found.append(DrafterStats(self._drafter.name, len(armed) - by_runner, counts, places))
        if self.runner_tokens:
            places = tuple(self._accepted_at[True])
            count = by_runner if self._drafter is not None else len(armed)
            found.append(DrafterStats(self.runner_name, count, self.runner_drafts, places))
        return tuple(found)

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
        """In a few words: the drafters, and whether they draft or why not."""
        names = [] if self._drafter is None else [self._drafter.name]
        names += [self.runner_name] if self.runner_tokens else []
        name = "+".join(names) or "none"
        why_not = f" ({self.runner_why_not})" if self.runner_why_not else ""
        if self._controller is None:
            return f"{name}: always{why_not}"
        controls = [self._controller.control(sequence_id) for sequence_id in sorted(self._open)]
        if any(control.armed for control in controls):
            return f"{name}: armed{why_not}"
        if not controls:
            return f"{name}: ready{why_not}"
        return f"{name}: not drafting: {controls[-1].why}{why_not}"


def _more(counts: DraftCounts, proposed: int, kept: int) -> DraftCounts:
    return replace(
        counts,
        proposed=counts.proposed + proposed,
        accepted=counts.accepted + kept,
        steps=counts.steps + 1,
    )


ALWAYS_DRAFT = 8
"""Tokens per draft where no controller chooses."""


def make_speculator(spec: str) -> Speculator | None:
    """For a value of ``--spec``: off, ngram (lookups, always), skip (by fewer layers, always, once there is a
    profile of the model) or auto (lookups, then layers, where they pay)."""
    if spec == "off":
        return None
    if spec == "ngram":
        return Speculator(NgramDrafter(), max_draft=ALWAYS_DRAFT)
    if spec == "skip":
        return Speculator(None)
    assert spec == "auto", spec
    return Speculator(NgramDrafter(), Controller())
