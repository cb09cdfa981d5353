"""Decides how many drafted tokens each sequence may run, so that drafting pays and never costs more than 2%.

Three things are known at every step: what steps of so many rows take (StepCosts), how often drafts that
matched so many tokens turn out right (Acceptance), and the account: time lost to drafting against plain
decoding, time won, and a hundredth of all time that passes, which may be lost.

Lookups need no probing at the price of rows: what was proposed and not run is compared with what plain
decoding then brings, which tells the acceptance just as well. So a sequence that does not draft runs exactly
the rows of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgellm.speculative.step_costs import StepCosts

ARM_GAIN = 1.05
"""Predicted tokens per time, over plain decoding, from which a sequence begins to draft."""
KEEP_GAIN = 1.01
"""The same for one that drafts already."""
MAX_BATCH = 16
"""No drafts where more sequences decode: rows are dear then."""
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


def bucket_of(match: int) -> int:
    """Matches of about equal worth: 0-2, 3, 4-5, 6-8, 9-15 and 16 or more tokens."""
    return sum(match >= bound for bound in (3, 4, 6, 9, 16))


NUM_BUCKETS = 6
_PRIOR_FIRST = (0.25, 0.35, 0.45, 0.55, 0.7, 0.8)
_PRIOR_LATER = (0.6, 0.65, 0.7, 0.75, 0.8, 0.9)
_PRIOR_WEIGHT = 3.0
_DECAY = 0.97
"""Weight of a trial after the next: about the last 33 count."""


class _Share:
    """A share of trials that turn out well, the last ones counting most."""

    def __init__(self) -> None:
        self.hits = self.trials = 0.0

    def add(self, hit: bool) -> None:
        self.hits = self.hits * _DECAY + hit
        self.trials = self.trials * _DECAY + 1.0

    def estimate(self, prior: float, weight: float) -> float:
        return (self.hits + prior * weight) / (self.trials + weight)


class Acceptance:
    """How often the first drafted token is right, and the next where the one before was, by match length."""

    def __init__(self, prior: Acceptance | None = None) -> None:
        """``prior``: that of all sequences together."""
        self._prior = prior
        self._first = [_Share() for _ in range(NUM_BUCKETS)]
        self._later = [_Share() for _ in range(NUM_BUCKETS)]

    def estimate(self, bucket: int) -> tuple[float, float]:
        """(first, later)"""
        if self._prior is None:
            first, later = _PRIOR_FIRST[bucket], _PRIOR_LATER[bucket]
        else:
            first, later = self._prior.estimate(bucket)
        return (
            self._first[bucket].estimate(first, _PRIOR_WEIGHT),
            self._later[bucket].estimate(later, _PRIOR_WEIGHT),
        )

    def learn(self, bucket: int, index: int, hit: bool) -> None:
        """Whether the drafted token at ``index`` was right, all before it having been."""
        (self._later if index else self._first)[bucket].add(hit)
        if self._prior is not None:
            self._prior.learn(bucket, index, hit)


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


@dataclass(frozen=True)
class Candidate:
    """A sequence with a proposal."""

    sequence_id: int
    bucket: int
    length: int


class Controller:
    """Pure: knows no clock, is told what steps took."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.credit = FIRST_CREDIT
        self._overall = Acceptance()
        self._controls: dict[int, SequenceControl] = {}
        self._prices: dict[int, float] = {}
        """What each sequence's drafted rows of the step in flight cost, in plain tokens."""
        self.disarmed: list[tuple[int, str]] = []
        """Sequences disarmed since somebody looked, and why."""

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

    def choose(self, num_decoding: int, candidates: Sequence[Candidate]) -> dict[int, int]:
        """Drafted tokens by sequence id, of those that draft, for a step of so many decoding sequences."""
        self._prices = {}
        if not candidates or not self.costs.is_known:
            return {}
        if num_decoding > MAX_BATCH:
            self._say(candidates, f"more than {MAX_BATCH} answers run at once")
            return {}
        ready = [c for c in candidates if not self._controls[c.sequence_id].resting]
        chosen = self._best(num_decoding, ready)
        chosen = self._within_credit(num_decoding, chosen)
        for candidate in ready:
            if candidate.sequence_id not in chosen:
                self._controls[candidate.sequence_id].armed = False
        if not chosen:
            self._say(ready, "drafts would not pay by now")
            return {}
        price = (self.costs.ratio(num_decoding + sum(chosen.values()), num_decoding) - 1.0) * num_decoding
        for sequence_id, count in chosen.items():
            control = self._controls[sequence_id]
            if not control.armed:
                control.armed, control.balance, control.best, control.barren = True, 0.0, 0.0, 0
            self._prices[sequence_id] = price * count / sum(chosen.values())
        return chosen

    def _say(self, candidates: Sequence[Candidate], why: str) -> None:
        for candidate in candidates:
            control = self._controls[candidate.sequence_id]
            if not control.armed:
                control.why = why

    def _best(self, num_decoding: int, candidates: Sequence[Candidate]) -> dict[int, int]:
        """The lengths of the most tokens per time, sequence by sequence, the likeliest drafts first."""
        chosen: dict[int, int] = {}
        rows, tokens = num_decoding, float(num_decoding)
        estimates = {
            c.sequence_id: self._controls[c.sequence_id].acceptance.estimate(c.bucket) for c in candidates
        }
        for candidate in sorted(candidates, key=lambda c: -estimates[c.sequence_id][0]):
            first, later = estimates[candidate.sequence_id]
            best, best_rate, best_gain = 0, tokens / self.costs.seconds(rows), 0.0
            chance, gain = first, 0.0
            for count in range(1, candidate.length + 1):
                gain += chance
                chance *= later
                rate = (tokens + gain) / self.costs.seconds(rows + count)
                if rate > best_rate:
                    best, best_rate, best_gain = count, rate, gain
            if best:
                chosen[candidate.sequence_id] = best
                rows, tokens = rows + best, tokens + best_gain
        if not chosen:
            return {}
        gain = tokens / num_decoding / self.costs.ratio(rows, num_decoding)
        armed = all(self._controls[sequence_id].armed for sequence_id in chosen)
        return chosen if gain >= (KEEP_GAIN if armed else ARM_GAIN) else {}

    def _within_credit(self, num_decoding: int, chosen: dict[int, int]) -> dict[int, int]:
        """Shorter drafts where the loss, should nothing be kept, would overdraw the account: so the first of
        all are short, until it is known what their rows cost."""
        plain = self.costs.seconds(num_decoding)
        while chosen:
            rows = num_decoding + sum(chosen.values())
            if self.costs.worst(rows) - plain <= self.credit * plain:
                break
            longest = max(chosen, key=lambda sequence_id: chosen[sequence_id])
            chosen[longest] -= 1
            if not chosen[longest]:
                del chosen[longest]
        return chosen

    # --- what a step brought ---

    def learn(self, sequence_id: int, bucket: int, draft: Sequence[int], tokens: Sequence[int]) -> None:
        """A draft that ran, and the tokens that its step brought."""
        control = self._controls[sequence_id]
        kept = 0
        for index, (drafted, token) in enumerate(zip(draft, tokens, strict=False)):
            control.acceptance.learn(bucket, index, drafted == token)
            if drafted != token:
                break
            kept += 1
        control.shadow = []
        control.proposed += len(draft)
        control.kept += kept
        control.balance += kept - self._prices.get(sequence_id, 0.0)
        control.best = max(control.best, control.balance)
        control.barren = 0 if kept else control.barren + 1
        if control.balance > DISARM_LOSS:
            control.rest = FIRST_REST
        lost = control.best - control.balance
        if lost >= DISARM_LOSS or control.barren >= DISARM_ROUNDS:
            self._disarm(sequence_id, control)

    def _disarm(self, sequence_id: int, control: SequenceControl) -> None:
        control.armed = False
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

    def _add(self, steps: float) -> None:
        self.credit = min(MAX_CREDIT, self.credit + steps)
