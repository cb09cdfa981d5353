"""Drafters for tests: by lot, always right, right until it hurts; and what engines with them bring."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from edgellm.speculative.drafter import Draft


class _Scripted:
    """Knows each sequence's tokens; subclasses say what they make of them."""

    name = "scripted"

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}

    def begin(
        self, sequence_id: int, prompt: Sequence[int], *, prediction: Sequence[int] = (), salt: str = ""
    ) -> None:
        self.texts[sequence_id] = list(prompt)
        self.prompts[sequence_id] = len(prompt)

    def observe(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        self.texts[sequence_id].extend(token_ids)

    def end(self, sequence_id: int) -> None:
        self.texts.pop(sequence_id, None)

    def propose(self, sequence_id: int, most: int) -> Draft | None:
        raise NotImplementedError


class RandomDrafter(_Scripted):
    """Tokens and lengths by lot, end ids and ids that pad the vocabulary among them."""

    name = "random"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size

    def propose(self, sequence_id: int, most: int) -> Draft | None:
        count = self._rng.randint(0, most)
        return Draft(tuple(self._rng.randrange(self._vocab_size) for _ in range(count))) if count else None


class OracleDrafter(_Scripted):
    """Knows the answers. ``wrong_every``: every so many drafted tokens, one is another; 0 is never."""

    name = "oracle"

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], wrong_every: int = 0) -> None:
        super().__init__()
        self._answers = answers
        self._wrong_every = wrong_every
        self._count = 0

    def propose(self, sequence_id: int, most: int) -> Draft | None:
        length = self.prompts[sequence_id]
        prompt, so_far = tuple(self.texts[sequence_id][:length]), self.texts[sequence_id][length:]
        answer = self._answers.get(prompt, ())
        draft = list(answer[len(so_far) : len(so_far) + most])
        for index in range(len(draft)):
            self._count += 1
            if self._wrong_every and self._count % self._wrong_every == 0:
                draft[index] = (draft[index] + 1) % 100
        # Behind the answer's end it goes on: the engine must not.
        draft += [5] * (most - len(draft))
        return Draft(tuple(draft), 16) if draft else None
