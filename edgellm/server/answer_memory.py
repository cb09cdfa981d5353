"""Answers that were given lately, as ids by their text: a history that brings them back keeps their KV."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from edgellm.chat.remembered import shown_ids
from edgellm.contracts import ChatMessage
from edgellm_models.tokenizer.base import Tokenizer
from edgellm_models.tokenizer.chat_encoding import RememberedAnswer

MAX_ANSWERS = 4096
MAX_IDS = 1 << 21
"""Over all answers: some 16 MB."""


class AnswerMemory:
    """Clients send texts, not ids, and a text may be tokenized otherwise than it was generated.

    Keyed by cache salt too: what clients of different salts were told never meets.
    """

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[str, str], tuple[int, ...]] = OrderedDict()
        self._num_ids = 0

    def add(self, salt: str, text: str, token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        """Remembers an answer, unless no number of its ids spells what was shown."""
        ids = shown_ids(text, token_ids, tokenizer)
        if not ids or len(ids) > MAX_IDS:
            return
        self._num_ids += len(ids) - len(self._answers.pop((salt, text), ()))
        self._answers[salt, text] = ids
        while len(self._answers) > MAX_ANSWERS or self._num_ids > MAX_IDS:
            self._num_ids -= len(self._answers.popitem(last=False)[1])

    def find(self, salt: str, messages: Sequence[ChatMessage]) -> tuple[RememberedAnswer, ...]:
        """Those of the answers in a history that were given here, in its order."""
        found = []
        for message in messages:
            if message.role == "assistant" and isinstance(message.content, str):
                ids = self._answers.get((salt, message.content))
                if ids is not None:
                    self._answers.move_to_end((salt, message.content))
                    found.append(RememberedAnswer(message.content, ids))
        return tuple(found)
