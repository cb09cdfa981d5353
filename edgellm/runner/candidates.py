"""What may be drawn at a temperature above 0: scores narrowed by the filters, and the draw itself.

Whatever the logits look like, flat or peaked, it all takes little more than the scores and one sorted copy of
them: removed tokens stay in place at -inf until few are left, noise is made in pieces, and nothing else is as
long as the vocabulary but masks, and places of flat logits once the sorted copy is gone. So a plan can say
what drawing takes (planning/workspace.py).
"""

from __future__ import annotations

import numpy as np
import torch

from edgellm.contracts import SamplingParams
from edgellm.runner import filters
from edgellm.runner.noise import gumbel_noise, places_of_noise

_PIECE = 1 << 13
"""Tokens whose noise is made at once: eight numbers of 8 bytes each take half a MiB."""
_HASHED = 1 << 15
"""Tokens that are hashed at once: in the second-level cache, and little beside the scores."""
_NEAR = 8.0
"""Scores no further below the best one have their noise computed. Of the others about one in 3,000 has enough
to win."""
_FEW = 4
"""From a fourth of the tokens down those that are left are copied together."""


class Candidates:
    """Scores of what may be drawn, [n] f64, -inf where a token was removed, and their ids."""

    def __init__(self, logits: torch.Tensor, sampling: SamplingParams) -> None:
        """``logits`` [vocab] f64 are those after penalties, bias and mask; the largest is finite. They are
        overwritten: the caller gives them away."""
        # Relative to the best, so that no temperature, however small, overflows: the best score is 0.
        self.scores = logits.sub_(logits.max()).div_(sampling.temperature)
        self._ids: torch.Tensor | None = None
        """[n] int64, ascending; None for all from 0 on."""
        if sampling.top_k > 0:
            self._keep(filters.top_k(self.scores, sampling.top_k))
        if sampling.typical_p < 1:
            self._gather(self.scores > float("-inf"))
            self._keep(filters.typical(self.scores, sampling.typical_p))
        if sampling.top_p >= 1:
            if sampling.min_p > 0:
                self._keep(filters.min_p(self.scores, sampling.min_p))
            return
        # min-p looks at nothing but the best token, which top-p never removes, so it may come first, where
        # it leaves top-p little to rank; the nucleus is still one of the whole mass.
        total = filters.log_total(self.scores)
        if sampling.min_p > 0:
            self._keep(filters.min_p(self.scores, sampling.min_p))
        self._keep(filters.top_p(self.scores, sampling.top_p, total))

    def left(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [n] int64, ascending, and scores [n] f64 of what was not removed."""
        self._gather(self.scores > float("-inf"))
        assert self._ids is not None
        return self._ids, self.scores

    def probability(self, token_id: int) -> float:
        """Of one token among those that are left; 0 of a removed one."""
        place = self._place(token_id)
        if place is None:
            return 0.0
        return float(torch.exp(self.scores[place] - filters.log_total(self.scores)))

    def remove(self, token_id: int) -> bool:
        """Takes one out; false, and it stays, where it is the only one left."""
        place = self._place(token_id)
        assert place is not None
        kept = float(self.scores[place])
        self.scores[place] = float("-inf")
        if bool(self.scores.max() > float("-inf")):
            return True
        self.scores[place] = kept
        return False

    def draw(self, key: int) -> int:
        """The id of the largest score + noise (noise.py); of equal ones the lowest.

        Those near the best score are computed. Of the others, which are most, only those whose noise makes up
        for being far can win: integers tell that, without a logarithm for every entry of the vocabulary.
        """
        scores = self.scores.numpy()
        ids = None if self._ids is None else self._ids.numpy()
        edge = float(scores.max()) - _NEAR
        winner, most = _best_of(scores, ids, np.flatnonzero(scores >= edge), key)
        found = []
        for start in range(0, len(scores), _HASHED):
            piece = scores[start : start + _HASHED]
            here = np.arange(start, start + len(piece)) if ids is None else ids[start : start + _HASHED]
            places = places_of_noise(key, here, most - edge)
            found.append(start + places[piece[places] < edge])
        other, total = _best_of(scores, ids, np.concatenate(found), key)
        return other if total > most or (total == most and other < winner) else winner

    def _place(self, token_id: int) -> int | None:
        """Where a token stands; None where it was removed."""
        if self._ids is None:
            place = token_id
        else:
            found = torch.nonzero(self._ids == token_id).flatten().tolist()
            if not found:
                return None
            place = found[0]
        return place if bool(self.scores[place] > float("-inf")) else None

    def _keep(self, mask: torch.Tensor) -> None:
        """Removes what ``mask`` [n] lacks."""
        count = filters.count_true(mask)
        if count == mask.numel():
            return
        if count * _FEW > mask.numel():
            self.scores.masked_fill_(mask.logical_not_(), float("-inf"))
        else:
            self._gather(mask)

    def _gather(self, mask: torch.Tensor) -> None:
        """Copies what ``mask`` keeps together."""
        places = torch.nonzero(mask).squeeze(1)
        self.scores = self.scores[places]
        self._ids = places if self._ids is None else self._ids[places]


def _best_of(scores: np.ndarray, ids: np.ndarray | None, places: np.ndarray, key: int) -> tuple[int, float]:
    """(id, score + noise) of the best of these places, ascending; (-1, -inf) where there is none."""
    winner, most = -1, float("-inf")
    for start in range(0, len(places), _PIECE):
        piece = places[start : start + _PIECE]
        chosen = piece if ids is None else ids[piece]
        totals = gumbel_noise(key, chosen)
        totals += scores[piece]
        at = int(totals.argmax())
        if totals[at] > most:
            winner, most = int(chosen[at]), float(totals[at])
    return winner, most
