"""Drafts by looking up: what followed the last tokens when they came before, in text, prediction or past."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from edgellm.speculative.drafter import Draft

MIN_MATCH = 2
"""Tokens that must agree; how much a match of so many is worth is the controller's to judge."""
MAX_MATCH = 32
"""Tokens that are compared backwards: a longer match is not surer."""
NUM_PLACES = 4
"""Places that are kept of an n-gram, the last ones."""
MAX_TEXT = 32_768
"""Tokens of a text that are looked up: the last ones, up to twice as many between two clean-ups."""
MAX_PAST = 8_192
"""The same of what the sequences of one salt have said before."""
MAX_SALTS = 16
"""Salts whose past answers are kept, those used last."""
MAX_DRIFT = 8
"""Tokens after which a copy that was left by another word is no longer expected to go on."""
NEAR = 6
"""Tokens around the place where a copy should go on in which its last token is looked for."""
PREDICTED = MAX_MATCH
"""What a prediction that the answer has followed so far counts as, from its first token on."""

_SEPARATOR = -1
"""Between past answers; no token, so nothing matches across it."""


def _key(tokens: Sequence[int]) -> int:
    """Two or three ids as one integer; collisions are found out by comparing."""
    key = len(tokens)
    for token in tokens:
        key = (key << 21) ^ token
    return key


class TextIndex:
    """A growing text and where each of its bigrams and trigrams came last.

    ``append`` costs two table entries, ``find`` and ``agreed`` at most 2 * NUM_PLACES * MAX_MATCH
    comparisons, whatever the length of the text.
    """

    def __init__(self, tokens: Sequence[int] = (), keep: int = MAX_TEXT) -> None:
        self._keep = keep
        self.tokens: list[int] = []
        self.clean_ups = 0
        """Times that places have moved."""
        self._places: dict[int, tuple[int, ...]] = {}
        self.extend(tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        tokens, places = self.tokens, self._places
        if len(tokens) + len(token_ids) > 2 * self._keep:
            kept = [*tokens, *token_ids][-self._keep :]
            tokens.clear()
            places.clear()
            self.clean_ups += 1
            token_ids = kept
        for token in token_ids:
            # An n-gram is entered with what follows it, so that the end of the text never finds itself.
            end = len(tokens)
            for n in (2, 3):
                if end >= n:
                    key = _key(tokens[end - n :])
                    places[key] = (end, *places.get(key, ())[: NUM_PLACES - 1])
            tokens.append(token)

    def find(self, context: Sequence[int]) -> tuple[int, int]:
        """(where the text goes on, how many of the context's last tokens came before that): the longest
        match, of equal ones the latest; (0, 0) is none."""
        best, longest = 0, MIN_MATCH - 1
        for n in (3, 2):
            if len(context) < n or longest >= n:
                continue
            for place in self._places.get(_key(context[-n:]), ()):
                length = self.common(context, place)
                if length > longest:
                    best, longest = place, length
        return (best, longest) if longest >= MIN_MATCH else (0, 0)

    def agreed(self, context: Sequence[int], place: int) -> bool | None:
        """Whether the other places of the context's last three tokens, or of its last two where three have no
        others, go on as ``place`` does: True where all do, False where none does, else None."""
        tokens = self.tokens
        for n in (3, 2):
            same = others = 0
            for found in self._places.get(_key(context[-n:]), ()) if len(context) >= n else ():
                if found != place and tokens[found] != _SEPARATOR and self.common(context, found) >= n:
                    same += tokens[found] == tokens[place]
                    others += 1
            if others:
                return True if same == others else None if same else False
        return None

    def near(self, token: int, place: int) -> int:
        """The place behind a ``token`` near ``place``, the nearest one; 0 is none."""
        tokens = self.tokens
        for distance in range(NEAR):
            for found in (place + distance, place - distance):
                if 0 < found < len(tokens) and tokens[found - 1] == token:
                    return found
        return 0

    def common(self, context: Sequence[int], place: int) -> int:
        """How many of the context's last tokens come before ``place``."""
        tokens = self.tokens
        most = min(MAX_MATCH, place, len(context))
        length = 0
        while length < most and tokens[place - 1 - length] == context[-1 - length]:
            length += 1
        return length

    def copy(self, place: int, most: int, *, goes_on: bool) -> tuple[int, ...]:
        """Up to ``most`` tokens from ``place`` on. ``goes_on``: a copy that reaches the end of the text
        copies itself, as of a text that repeats."""
        found = list(self.tokens[place : place + most])
        if goes_on:
            period = len(found)
            while found and len(found) < most:
                found.append(found[len(found) - period])
        if _SEPARATOR in found:
            del found[found.index(_SEPARATOR) :]
        return tuple(found)


class _State:
    """One sequence: its own text, and what is expected of it."""

    def __init__(self, prompt: Sequence[int], prediction: Sequence[int], salt: str) -> None:
        self._text = TextIndex()
        self._fresh: list[int] = list(prompt[-MAX_TEXT:])
        """Tokens that are not in the index yet: they enter it when something is looked up."""
        self.prediction = TextIndex(prediction[:MAX_TEXT]) if prediction else None
        self.salt = salt
        self.answer: list[int] = []
        self.predicted: int | None = 0
        """The answer's length while it is the beginning of the prediction."""
        self._source: TextIndex | None = None
        """What is being copied."""
        self._place = self._clean_ups = 0
        """Where in it the next token is expected."""
        self._drift = 0
        """Tokens since several in a row were as expected."""

    @property
    def text(self) -> TextIndex:
        if self._fresh:
            self._text.extend(self._fresh)
            self._fresh = []
        return self._text

    def add(self, token_ids: Sequence[int]) -> None:
        self._fresh.extend(token_ids)
        self._place += len(token_ids)
        self._drift += len(token_ids)

    def copies(self, source: TextIndex, place: int, match: int) -> None:
        """Notes what was proposed, for ``resumed``."""
        self._source, self._place, self._clean_ups = source, place, source.clean_ups
        if match >= MIN_MATCH:
            self._drift = 0

    def resumed(self, longest: int) -> tuple[TextIndex, int, int] | None:
        """(source, place, match) where the copy that was being made goes on, if that is as good as a match of
        ``longest`` tokens.

        An edited text is left for a word and goes on behind it: at the place that lies so many tokens on, or
        behind the last token's twin nearby, if another number of tokens stands for the word.
        """
        source = self._source
        if source is None or self._drift > MAX_DRIFT or source.clean_ups != self._clean_ups:
            return None
        if 0 < self._place < len(source.tokens):
            match = source.common(self._text.tokens, self._place)
            if match >= max(longest, 1):
                return source, self._place, match
        if longest >= MIN_MATCH:
            return None
        place = source.near(self._text.tokens[-1], self._place)
        if place:
            return source, place, 1
        return (source, self._place, 0) if 0 < self._place < len(source.tokens) else None

    def follow(self, token_ids: Sequence[int]) -> None:
        """Notes whether the answer is still the beginning of the prediction."""
        for token in token_ids if self.prediction is not None else ():
            expected = self.prediction.tokens if self.prediction is not None else []
            if self.predicted is None or self.predicted >= len(expected):
                return
            self.predicted = self.predicted + 1 if expected[self.predicted] == token else None


class NgramDrafter:
    """Looks the last tokens up in the sequence's own text, in its caller's prediction and in what sequences
    of the same salt have said before; the longest match wins, in this order where several are as long.

    An answer that begins as the prediction does is drafted from it by place.
    """

    name = "ngram"

    def __init__(self, *, remember: bool = True) -> None:
        """``remember``: past answers are looked up too."""
        self._remember = remember
        self._states: dict[int, _State] = {}
        self._past: OrderedDict[str, TextIndex] = OrderedDict()

    def begin(
        self, sequence_id: int, prompt: Sequence[int], *, prediction: Sequence[int] = (), salt: str = ""
    ) -> None:
        """See Drafter."""
        self._states[sequence_id] = _State(prompt, prediction, salt)

    def observe(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """See Drafter."""
        state = self._states[sequence_id]
        state.add(token_ids)
        state.follow(token_ids)
        if self._remember and len(state.answer) < MAX_PAST:
            state.answer.extend(token_ids)

    def propose(self, sequence_id: int, most: int) -> Draft | None:
        """See Drafter."""
        state = self._states[sequence_id]
        if state.prediction is not None and state.predicted is not None:
            found = state.prediction.copy(state.predicted, most, goes_on=False)
            if found:
                return Draft(found, PREDICTED)
        context = state.text.tokens
        sources = [state.text, state.prediction, self._past.get(state.salt)]
        best: TextIndex | None = None
        place = longest = 0
        for source in sources:
            if source is not None:
                where, length = source.find(context)
                if length > longest:
                    best, place, longest = source, where, length
        again = state.resumed(longest)
        if again is not None:
            best, place, longest = again
        if best is None:
            return None
        state.copies(best, place, longest)
        found = best.copy(place, most, goes_on=best is state.text)
        if not found:
            return None
        return Draft(found, longest, best.agreed(context, place) if longest >= MIN_MATCH else None)

    def end(self, sequence_id: int) -> None:
        """See Drafter. The answer joins the past of its salt."""
        state = self._states.pop(sequence_id, None)
        if state is None or not self._remember or not state.answer:
            return
        past = self._past.setdefault(state.salt, TextIndex(keep=MAX_PAST))
        past.extend([*state.answer[:MAX_PAST], _SEPARATOR])
        self._past.move_to_end(state.salt)
        while len(self._past) > MAX_SALTS:
            self._past.popitem(last=False)
