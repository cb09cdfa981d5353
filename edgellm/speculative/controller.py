"""Decides how many drafted tokens each sequence may run, so that drafting pays and never costs more than 2%.

Three things are known at every step: what steps of so many rows take (StepCosts), how often drafts that
matched so many tokens turn out right (Acceptance), and the account: time lost to drafting against plain
decoding, time won, and a hundredth of all time that passes, which may be lost.

Lookups need no probing at the price of rows: what was proposed and not run is compared with what plain
decoding then brings, which tells the acceptance just as well. So a sequence that does not draft runs exactly
the rows of plain decoding. What the runner drafts itself, by fewer layers or by a draft model, costs passes
and cannot be watched for nothing: it is tried again after ever longer rests, within the same account.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgellm.speculative.estimates import RUNNER, Acceptance
from edgellm.speculative.step_costs import StepCosts

ARM_GAIN = 1.05
"""Predicted tokens per time, over plain decoding, from which a sequence begins to draft."""
KEEP_GAIN = 1.01
"""The same for one that drafts already."""
MAX_BATCH = 16
"""No drafts where more sequences decode: rows are dear then."""
MAX_RUNNER_BATCH = 4
"""The runner itself drafts for no more sequences at once."""
ALLOWANCE = 0.01
"""Share of all time that drafting may lose."""
FIRST_CREDIT = 1.0
"""Plain steps that may be lost before any time has passed. With the allowance: at most 2% of 100 steps, and
less of more."""
MAX_CREDIT = 8.0
"""Of what was won, plain steps that may be lost again."""
DISARM_LOSS = 3.0
"""A sequence that has lost so many plain steps since it stood best stops drafting ..."""
DISARM_ROUNDS = 8
"""... and so does one of whose drafts nothing was kept in so many rounds one after another."""
FIRST_REST, MAX_REST = 32, 1024
"""Tokens for which a sequence that was disarmed does not draft; twice as many each time."""


@dataclass
class SequenceControl:
    """What is known of one sequence's drafts."""

    acceptance: Acceptance
    armed: bool = False
    resting: int = 0
    """Tokens until it may be armed again."""
    rest: int = FIRST_REST
    balance: float = 0.0
    """Plain steps won since it was armed."""
    best: float = 0.0
    barren: int = 0
    """Rounds one after another of which nothing was kept."""
    why: str = "nothing was drafted yet"
    """Why it does not draft."""
    shadow: list[int] = field(default_factory=list)
    """Tokens that were proposed and not run."""
    shadow_bucket: int = 0
    shadow_index: int = 0
    proposed: int = 0
    kept: int = 0
    runner_drafts: bool = False
    """What it ran last was drafted by the runner."""
    runner_resting: int = 0
    runner_rest: int = FIRST_REST
    """As ``resting`` and ``rest``, of the runner's drafts alone: lookups may go on."""

    def rests(self, bucket: int) -> bool:
        return (self.runner_resting if bucket == RUNNER else self.resting) > 0

    def rest_runner(self) -> None:
        """Nobody can watch what is not drafted: behind the rest it is judged as if for the first time."""
        self.runner_drafts = False
        self.runner_resting, self.runner_rest = self.runner_rest, min(2 * self.runner_rest, MAX_REST)
        self.acceptance.forget(RUNNER)


@dataclass(frozen=True)
class Candidate:
    """A sequence with a proposal, or one for which the runner may draft (bucket RUNNER)."""

    sequence_id: int
    bucket: int
    length: int


@dataclass(frozen=True)
class Choice:
    """What a sequence runs."""

    bucket: int
    count: int
    """Drafted tokens."""


class Controller:
    """Pure: knows no clock, is told what steps took."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.pass_costs = StepCosts()
        """Of the runner's drafting passes, by sequences that draft together."""
        self._pass_share: float | None = None
        """Until one was measured, what a drafting pass costs of a plain step."""
        self.credit = FIRST_CREDIT
        self._overall = Acceptance()
        self._controls: dict[int, SequenceControl] = {}
        self._prices: dict[int, float] = {}
        """What each sequence's drafted tokens of the step in flight cost, in plain tokens apiece."""
        self.disarmed: list[tuple[int, str]] = []
        """Sequences disarmed since somebody looked, and why."""

    def expect_runner_drafts(self, match: float, pass_share: float, verify: Mapping[int, float]) -> None:
        """What calibration says: how often a token that the runner drafts is right, what a drafting pass
        costs of a plain step, and by rows what steps take over one of one row."""
        self._overall.runner_match = match
        self._pass_share = pass_share
        self.costs.expect(verify)

    def begin(self, sequence_id: int) -> None:
        self._controls[sequence_id] = SequenceControl(Acceptance(self._overall))

    def end(self, sequence_id: int) -> None:
        self._controls.pop(sequence_id, None)

    def control(self, sequence_id: int) -> SequenceControl:
        return self._controls[sequence_id]

    @property
    def may_propose(self) -> bool:
        """Whether drafting may take any time: proposals alone cost some."""
        return self.credit > 0.0 and self.costs.is_known

    def choose(self, num_decoding: int, candidates: Sequence[Candidate]) -> dict[int, Choice]:
        """What those run that draft, for a step of so many decoding sequences. A sequence may be a candidate
        twice, with a proposal and for the runner."""
        self._prices = {}
        if not candidates or not self.costs.is_known:
            return {}
        if num_decoding > MAX_BATCH:
            self._say(candidates, f"more than {MAX_BATCH} answers run at once")
            return {}
        ready = [c for c in candidates if not self._controls[c.sequence_id].rests(c.bucket)]
        if num_decoding > MAX_RUNNER_BATCH:
            ready = [c for c in ready if c.bucket != RUNNER]
        chosen = self._best(num_decoding, ready)
        chosen = self._within_credit(num_decoding, chosen)
        for candidate in ready:
            if candidate.sequence_id not in chosen:
                control = self._controls[candidate.sequence_id]
                control.armed = False
                if control.runner_drafts and candidate.bucket == RUNNER:
                    control.rest_runner()
        if not chosen:
            self._say(ready, "drafts would not pay by now")
            return {}
        plain, drafted = self.costs.seconds(num_decoding), _rows(chosen)
        by_runner = sum(choice.count for choice in chosen.values() if choice.bucket == RUNNER)
        price = (self.costs.ratio(num_decoding + drafted, num_decoding) - 1.0) * num_decoding
        for sequence_id, choice in chosen.items():
            control = self._controls[sequence_id]
            if not control.armed:
                control.armed, control.balance, control.best, control.barren = True, 0.0, 0.0, 0
            control.runner_drafts = choice.bucket == RUNNER
            each = price / drafted
            if control.runner_drafts and plain > 0:
                each += self._drafting(chosen) / plain * num_decoding / by_runner
            self._prices[sequence_id] = each
        return chosen

    def _drafting(self, chosen: Mapping[int, Choice]) -> float:
        """Seconds of the runner's drafting passes."""
        counts = [choice.count for choice in chosen.values() if choice.bucket == RUNNER]
        return max(counts) * self.pass_seconds(len(counts)) if counts else 0.0

    def pass_seconds(self, sequences: int) -> float:
        """What a drafting pass for so many sequences takes."""
        if self.pass_costs.is_known:
            return self.pass_costs.seconds(sequences)
        share = 1.0 if self._pass_share is None else self._pass_share
        return share * self.costs.seconds(sequences)

    def _say(self, candidates: Sequence[Candidate], why: str) -> None:
        for candidate in candidates:
            control = self._controls[candidate.sequence_id]
            if not control.armed:
                control.why = why

    def _best(self, num_decoding: int, candidates: Sequence[Candidate]) -> dict[int, Choice]:
        """The lengths of the most tokens per time, sequence by sequence, the likeliest drafts first."""
        chosen: dict[int, Choice] = {}
        rows, tokens = num_decoding, float(num_decoding)
        by_sequence: dict[int, list[tuple[float, float, Candidate]]] = {}
        for one in candidates:
            first, later = self._controls[one.sequence_id].acceptance.estimate(one.bucket)
            by_sequence.setdefault(one.sequence_id, []).append((first, later, one))
        for sequence_id in sorted(by_sequence, key=lambda i: -max(first for first, _, _ in by_sequence[i])):
            now = self._drafting(chosen)
            best_choice, best_gain = None, 0.0
            best_rate = tokens / (self.costs.seconds(rows) + now)
            for first, later, candidate in by_sequence[sequence_id]:
                chance, gain = first, 0.0
                for count in range(1, candidate.length + 1):
                    gain += chance
                    chance *= later
                    choice = Choice(candidate.bucket, count)
                    drafting = now
                    if candidate.bucket == RUNNER:
                        drafting = self._drafting({**chosen, sequence_id: choice})
                    rate = (tokens + gain) / (self.costs.seconds(rows + count) + drafting)
                    if rate > best_rate:
                        best_choice, best_rate, best_gain = choice, rate, gain
            if best_choice is not None:
                chosen[sequence_id] = best_choice
                rows, tokens = rows + best_choice.count, tokens + best_gain
        if not chosen:
            return {}
        plain = self.costs.seconds(num_decoding)
        gain = tokens / num_decoding / (self.costs.ratio(rows, num_decoding) + self._drafting(chosen) / plain)
        armed = all(self._controls[sequence_id].armed for sequence_id in chosen)
        return chosen if gain >= (KEEP_GAIN if armed else ARM_GAIN) else {}

    def _within_credit(self, num_decoding: int, chosen: dict[int, Choice]) -> dict[int, Choice]:
        """Shorter drafts where the loss, should nothing be kept, would overdraw the account: so the first of
        all are short, until it is known what their rows cost."""
        plain = self.costs.seconds(num_decoding)
        while chosen:
            lost = self.costs.worst(num_decoding + _rows(chosen)) - plain + self._drafting(chosen)
            if lost <= self.credit * plain:
                break
            longest = max(chosen, key=lambda sequence_id: chosen[sequence_id].count)
            choice = chosen.pop(longest)
            if choice.count > 1:
                chosen[longest] = Choice(choice.bucket, choice.count - 1)
        return chosen

    # --- what a step brought ---

    def learn(self, sequence_id: int, bucket: int, proposed: int, kept: int) -> None:
        """A draft of ``proposed`` tokens that ran, and how many of them its step kept."""
        control = self._controls[sequence_id]
        for index in range(min(kept + 1, proposed)):
            control.acceptance.learn(bucket, index, index < kept)
        control.shadow = []
        control.proposed += proposed
        control.kept += kept
        control.balance += kept - proposed * self._prices.get(sequence_id, 0.0)
        control.best = max(control.best, control.balance)
        control.barren = 0 if kept else control.barren + 1
        if control.balance > DISARM_LOSS:
            control.rest = control.runner_rest = FIRST_REST
        lost = control.best - control.balance
        if lost >= DISARM_LOSS or control.barren >= DISARM_ROUNDS:
            self._disarm(sequence_id, control, bucket)

    def _disarm(self, sequence_id: int, control: SequenceControl, bucket: int) -> None:
        control.armed = False
        if bucket == RUNNER:
            control.rest_runner()
        else:
            control.resting, control.rest = control.rest, min(2 * control.rest, MAX_REST)
        control.why = (
            f"{control.kept} of {control.proposed} drafted tokens were right, which costs more than it saves"
        )
        self.disarmed.append((sequence_id, control.why))

    def shadow(self, sequence_id: int, bucket: int, draft: Sequence[int]) -> None:
        """A proposal that does not run; it counts once the step has brought what comes."""
        control = self._controls[sequence_id]
        if not control.shadow:
            control.shadow, control.shadow_bucket, control.shadow_index = list(draft), bucket, 0

    def watch(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Tokens that a step brought without a draft, or with one: rests run out, shadows are compared."""
        control = self._controls[sequence_id]
        control.resting = max(0, control.resting - len(tokens))
        control.runner_resting = max(0, control.runner_resting - len(tokens))
        for token in tokens:
            if not control.shadow:
                return
            hit = control.shadow[control.shadow_index] == token
            control.acceptance.learn(control.shadow_bucket, control.shadow_index, hit)
            control.shadow_index += 1
            if not hit or control.shadow_index == len(control.shadow):
                control.shadow = []

    def account(
        self, num_decoding: int, rows: int, tokens: int, seconds: float, draft_seconds: float, *, mixed: bool
    ) -> None:
        """Books a step: ``rows`` of decode and drafts that brought ``tokens`` and took ``seconds``, and the
        ``draft_seconds`` of its proposals. ``mixed``: prompt rows ran too, so its time says nothing of
        decoding."""
        if not mixed and rows:
            self.costs.record(rows, seconds)
        if not self.costs.is_known or not num_decoding:
            plain = self.costs.seconds(1) if self.costs.is_known else 0.0
            self._add(ALLOWANCE * seconds / plain if plain > 0 else 0.0)
            return
        plain = self.costs.seconds(num_decoding)
        won = tokens / num_decoding - self.costs.ratio(rows, num_decoding)
        self._add(won + (ALLOWANCE * seconds - draft_seconds) / plain if plain > 0 else won)

    def record_passes(self, sequences: int, passes: int, seconds: float) -> None:
        """What the runner's drafting for so many sequences took."""
        if passes:
            self.pass_costs.record(sequences, seconds / passes)

    def _add(self, steps: float) -> None:
        self.credit = min(MAX_CREDIT, self.credit + steps)


def _rows(chosen: Mapping[int, Choice]) -> int:
    """Drafted rows of a step."""
    return sum(choice.count for choice in chosen.values())
