"""How often drafted tokens turn out right, by what led to them: shares of trials, the last counting most."""

from __future__ import annotations

_BOUNDS = (1, 2, 3, 4, 6, 9, 16)
AGREED, DISPUTED = len(_BOUNDS) + 1, len(_BOUNDS) + 2
"""Short matches in several places that go on as the proposed one does, or none does: in measured answers they
were right 19 times in 20, and one time in two or less."""
RUNNER = DISPUTED + 1
"""The bucket of what the runner drafts itself: by fewer layers, or by a draft model."""
NUM_BUCKETS = RUNNER + 1
_SURE = 9
"""Tokens from which a match is as good as any, whatever other places say."""


def bucket_of(match: int, agreed: bool | None = None) -> int:
    """Matches of about equal worth: 0 and 1 (a copy that is resumed, see ngram.py), 2, 3, 4-5, 6-8, 9-15 and
    16 or more tokens; those shorter than 9 apart where other places agree or do not (``Draft.agreed``)."""
    if agreed is not None and match < _SURE:
        return AGREED if agreed else DISPUTED
    return sum(match >= bound for bound in _BOUNDS)


_PRIOR_FIRST = (0.15, 0.4, 0.3, 0.4, 0.45, 0.55, 0.7, 0.8, 0.8, 0.3, 0.5)
_PRIOR_LATER = (0.6, 0.7, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9, 0.8, 0.6, 0.5)
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
    """How often the first drafted token is right, and the next where the one before was, by bucket."""

    def __init__(self, prior: Acceptance | None = None) -> None:
        """``prior``: that of all sequences together."""
        self._prior = prior
        self._first = [_Share() for _ in range(NUM_BUCKETS)]
        self._later = [_Share() for _ in range(NUM_BUCKETS)]
        self.runner_match: float | None = None
        """What calibration found of the runner's own drafts, in place of the prior."""

    def estimate(self, bucket: int) -> tuple[float, float]:
        """(first, later)"""
        if self._prior is not None:
            first, later = self._prior.estimate(bucket)
        elif bucket == RUNNER and self.runner_match is not None:
            first = later = self.runner_match
        else:
            first, later = _PRIOR_FIRST[bucket], _PRIOR_LATER[bucket]
        return (
            self._first[bucket].estimate(first, _PRIOR_WEIGHT),
            self._later[bucket].estimate(later, _PRIOR_WEIGHT),
        )

    def learn(self, bucket: int, index: int, hit: bool) -> None:
        """Whether the drafted token at ``index`` was right, all before it having been."""
        (self._later if index else self._first)[bucket].add(hit)
        if self._prior is not None:
            self._prior.learn(bucket, index, hit)

    def forget(self, bucket: int) -> None:
        """Forgets all trials: who cannot be watched is given another chance."""
        self._first[bucket], self._later[bucket] = _Share(), _Share()
        if self._prior is not None:
            self._prior.forget(bucket)
