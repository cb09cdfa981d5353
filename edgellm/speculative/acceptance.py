"""How drafted tokens are accepted: the two rules, and where a run of accepted tokens ends. No tensors.

``coupled`` (the default): at every position the target draws with the noise that plain decoding would use
there, argmax(log p + noise of the position); a drafter that samples uses the same noise on its own q. A
drafted token is kept iff it is the token that the target draws, and the first that is not is replaced by that
draw. So the tokens of a seed are those of plain decoding, whatever drafted and wherever drafts ended.

``rejection`` (Leviathan et al., 2211.17192): a token drafted from q is kept with probability min(1, p / q),
else replaced by a draw from max(0, p - q), normalized. The distribution is the target's, the text of a seed
is not that of plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

COUPLED = "coupled"
REJECTION = "rejection"


def verified_run(draft: Sequence[int], draw: Callable[[int], int | None]) -> list[int]:
    """The tokens that a verification commits: 1 to len(draft) + 1.

    ``draw(i)`` is the target's token in the place of ``draft[i]``, or behind the draft; it is asked in order,
    and only while all before were as drafted. None, for a row that cannot be drawn from, ends the run before
    it: the next step finds the same.
    """
    tokens: list[int] = []
    for index in range(len(draft) + 1):
        token = draw(index)
        if token is None:
            break
        tokens.append(token)
        if index == len(draft) or token != draft[index]:
            break
    return tokens


def num_kept(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """How many drafted tokens a run of ``verified_run`` has kept."""
    kept = 0
    for drafted, token in zip(draft, tokens, strict=False):
        if drafted != token:
            break
        kept += 1
    return kept


def gumbel_pick(probabilities: Sequence[float], noise: Sequence[float]) -> int:
    """The index that Gumbel-max draws: argmax(log p + noise), of equal ones the first."""
    best, best_score = -1, -math.inf
    for index, (p, g) in enumerate(zip(probabilities, noise, strict=True)):
        if p > 0 and math.log(p) + g > best_score:
            best, best_score = index, math.log(p) + g
    return best


def residual(target: Sequence[float], draft: Sequence[float]) -> list[float]:
    """max(0, p - q), normalized: what a rejected token is replaced from."""
    excess = [max(0.0, p - q) for p, q in zip(target, draft, strict=True)]
    total = sum(excess)
    return [value / total for value in excess] if total > 0 else list(target)


def rejection_pick(
    target: Sequence[float],
    draft: Sequence[float],
    drafted: int,
    uniform: float,
    noise: Sequence[float],
) -> int:
    """The token in the place of one drafted from ``draft``. ``uniform`` in (0, 1) and the Gumbel ``noise``
    are independent of each other and of what drew the draft."""
    if uniform * draft[drafted] < target[drafted]:
        return drafted
    return gumbel_pick(residual(target, draft), noise)
