"""BPE vocabularies through the ``tokenizers`` library: a tokenizer.json as it is, or a pipeline built from
GGUF fields."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Any

from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer.base import LiteralText, TokenKind
from edgellm_models.tokenizer.shared import MAX_TEXT_CHARS, SPECIAL_KINDS, SharedTokenizer
from edgellm_models.tokenizer.vocabulary import SpecialFinder, SpecialIds, SpecialToken, Vocabulary


def pipeline_ids(pipeline: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Ids of a text. BadInputError where the library fails, such as at a pattern that goes back too often."""
    try:
        return list(pipeline.encode(text, add_special_tokens=add_special_tokens).ids)
    except BaseException as error:  # the library's panics are no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInputError(
            f"a text of {len(text)} characters cannot be tokenized with this vocabulary: {reason}"
        ) from error


class BpeTokenizer(SharedTokenizer):
    """Lets the library find special tokens and merge.

    For text in which special tokens must not be found there is a second pipeline over the same model (nothing
    is copied), whose special tokens have secret names: what a text spells can never be one of them.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        special: SpecialIds,
        pipeline: Any,
        *,
        strips_leading_space: bool,
        growth: int = 1,
    ) -> None:
        """``pipeline`` is a ``tokenizers.Tokenizer``; its added tokens are the vocabulary's special ones.
        ``growth`` is how many times longer its normalizer may make a text."""
        super().__init__(vocabulary, special, strips_leading_space=strips_leading_space)
        self._pipeline = pipeline
        self._growth = growth
        self._lock = threading.Lock()
        self._literal: tuple[Any, SpecialFinder, dict[int, str], dict[int, int]] | None = None

    def pipeline_json(self) -> str:
        """The pipeline as the text of a tokenizer.json."""
        text: str = self._pipeline.to_str(pretty=False)
        return text

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        if parse_special:
            self._check_growth(len(text))
            return pipeline_ids(self._pipeline, text)
        return self._encode_run([LiteralText(text)], True)

    def _check_growth(self, chars: int) -> None:
        if chars * self._growth > MAX_TEXT_CHARS:
            raise BadInputError(
                f"the text has {chars} characters, of which this tokenizer may make {self._growth} times as"
                f" many; at most {MAX_TEXT_CHARS} are tokenized at once"
            )

    def _encode_run(self, parts: Sequence[str | LiteralText], first: bool) -> list[int]:
        if all(isinstance(part, str) for part in parts):
            return self._encode_text("".join(part for part in parts if isinstance(part, str)), True)
        pipeline, finder, names, original = self._literal_pipeline()
        texts: list[str] = []
        for part in parts:
            if isinstance(part, LiteralText):
                texts.append(part.text)
            else:
                texts += (
                    names[item.token_id] if isinstance(item, SpecialToken) else item
                    for item in finder.split(part, SPECIAL_KINDS)
                )
        self._check_growth(sum(len(part.text if isinstance(part, LiteralText) else part) for part in parts))
        ids: list[int] = []
        for token_id in pipeline_ids(pipeline, "".join(texts)):
            if token_id in original:
                ids.append(original[token_id])
            elif self.vocabulary.kind(token_id) is TokenKind.CONTROL:
                # A word that is a control token's spelling was taken whole: spell it out instead.
                for char in self.vocabulary.text(token_id):
                    ids.extend(pipeline_ids(pipeline, char))
            else:
                ids.append(token_id)
        return ids

    def _literal_pipeline(self) -> tuple[Any, SpecialFinder, dict[int, str], dict[int, int]]:
        """The second pipeline, the finder of special tokens, their secret names by id, and the way back."""
        with self._lock:
            if self._literal is None:
                from tokenizers import AddedToken, Tokenizer

                pipeline: Any = Tokenizer(self._pipeline.model)
                if self._pipeline.normalizer is not None:
                    pipeline.normalizer = self._pipeline.normalizer
                if self._pipeline.pre_tokenizer is not None:
                    pipeline.pre_tokenizer = self._pipeline.pre_tokenizer
                secret = secrets.token_hex(16)
                names: dict[int, str] = {}
                # Ids of the second pipeline's tokens begin above every id of the vocabulary, holes included.
                holes = len(self.vocabulary) - pipeline.get_vocab_size()
                tokens = [AddedToken(f"\U0010fffe{secret}x{i:x}\U0010fffe") for i in range(holes)]
                added = self._pipeline.get_added_tokens_decoder()
                for token_id, token in added.items():
                    if token.single_word:  # its neighbours decide; in literal text it stays text
                        continue
                    names[token_id] = f"\U0010fffe{secret}{token_id:x}\U0010fffe"
                    tokens.append(
                        AddedToken(
                            names[token_id],
                            lstrip=token.lstrip,
                            rstrip=token.rstrip,
                            normalized=token.normalized,
                            special=False,
                        )
                    )
                pipeline.add_tokens(tokens)
                original = {pipeline.token_to_id(name): token_id for token_id, name in names.items()}
                finder = SpecialFinder(
                    SpecialToken(token_id, added[token_id].content, self.vocabulary.kind(token_id))
                    for token_id in names
                )
                self._literal = (pipeline, finder, names, original)
            return self._literal
