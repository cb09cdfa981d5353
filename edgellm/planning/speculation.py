"""The arithmetic of speculative decoding: tokens per round, speed-up, and the acceptance at which it pays.

Symbols of the literature (Leviathan et al., 2211.17192): ``acceptance`` a per drafted token, draft length k,
``draft_cost`` c of one draft step and ``verify_cost`` v of one verification, both over a plain step.
"""

from __future__ import annotations


def expected_accepted(acceptance: float, draft_tokens: int) -> float:
    """Drafted tokens of a round that are kept: a (1 - a^k) / (1 - a)."""
    return expected_tokens(acceptance, draft_tokens) - 1.0


def expected_tokens(acceptance: float, draft_tokens: int) -> float:
    """Tokens that a round commits, the one of the target model included: (1 - a^(k+1)) / (1 - a)."""
    return sum(acceptance**i for i in range(draft_tokens + 1))


def speed_up(acceptance: float, draft_tokens: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Tokens per time over those of plain decoding: tokens per round / (k c + v)."""
    return expected_tokens(acceptance, draft_tokens) / (draft_tokens * draft_cost + verify_cost)


def break_even_acceptance(draft_tokens: int, draft_cost: float, verify_cost: float = 1.0) -> float | None:
    """The acceptance from which a round is no slower than plain decoding; None where not even 1 is enough."""
    if speed_up(1.0, draft_tokens, draft_cost, verify_cost) < 1.0:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if speed_up(middle, draft_tokens, draft_cost, verify_cost) < 1.0:
            low = middle
        else:
            high = middle
    return high


def best_draft_tokens(
    acceptance: float, draft_cost: float, verify_cost: float = 1.0, most: int = 16
) -> tuple[int, float]:
    """The draft length of the largest speed-up and that speed-up; (0, 1.0) where no length pays."""
    candidates = [(speed_up(acceptance, k, draft_cost, verify_cost), -k) for k in range(1, most + 1)]
    gain, negative = max(candidates)
    return (-negative, gain) if gain > 1.0 else (0, 1.0)


def accepted_rejection(target: tuple[float, ...], draft: tuple[float, ...]) -> float:
    """Share of drafted tokens that the rejection rule keeps: the sum of min(p, q) over the vocabulary."""
    return sum(min(p, q) for p, q in zip(target, draft, strict=True))
