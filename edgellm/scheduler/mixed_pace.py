"""How many prompt rows a step has beside running answers, by what steps cost: these keep flowing."""

from __future__ import annotations

from collections import deque

SLOWDOWN = 3.0
"""Times that a step with prompt rows may take of one without. A prompt that is read beside answers then takes
about 1 + 1/(SLOWDOWN - 1) times its time alone: both sides give alike."""
FIRST_ROWS = 32
"""Before anything was measured."""
FEWEST_ROWS = 16
"""Below, a step's fixed costs would be all that a long prompt gets."""
MOST_SHARES = 4
"""A step with prompt rows takes at most about 1 + 4 * (SLOWDOWN - 1) times one without, however many wait."""


def shared_rows(rows: int, prompts: int, answers: int) -> int:
    """Prompt rows of a step where ``prompts`` wait beside ``answers``: who waits for a first token counts as
    much as who waits for the next one, so prompts beyond the first add to the ``rows`` that one would get."""
    return int(rows * min(MOST_SHARES, 1 + max(0, prompts - 1) / answers))


class MixedPace:
    """The number of prompt rows, set anew after every step. Not thread-safe.

    What a row costs differs a hundredfold between devices, kernels and places in a long prompt, so it is
    measured: medians of the last few steps, which one slow step does not move.
    """

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self._decode_s: deque[float] = deque(maxlen=9)
        self._row_s: deque[float] = deque(maxlen=5)
        self.rows = min(FIRST_ROWS, most_rows)

    def observe(self, decode_rows: int, prompt_rows: int, seconds: float) -> None:
        """A step ended: rows of running answers and of prompts, and the time that it took."""
        if not prompt_rows:
            if decode_rows:
                self._decode_s.append(seconds)
            return
        if not decode_rows or not self._decode_s:
            return
        import statistics  # with what it imports a few milliseconds, for steps that most sessions never have

        alone = statistics.median(self._decode_s)
        # A step that seems to cost nothing is noise, or a device with room to spare: there rows double.
        self._row_s.append(max(seconds - alone, seconds * 1e-3, 1e-9) / prompt_rows)
        affordable = (SLOWDOWN - 1) * alone / statistics.median(self._row_s)
        self.rows = int(max(FEWEST_ROWS, min(affordable, 2 * self.rows)))
        self.rows = min(self.rows, self._most_rows)
