"""Messages to token ids: special tokens inside what people wrote stay text, earlier answers keep their
ids."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgellm_models.errors import BadInputError, Notice
from edgellm_models.tokenizer.base import KnownIds, LiteralText, PromptPart, Tokenizer, TokenKind
from edgellm_models.tokenizer.chat_template import ChatTemplates, PreparedChat
from edgellm_models.tokenizer.shared import HIDDEN_KINDS, SPECIAL_KINDS
from edgellm_models.tokenizer.vocabulary import SpecialFinder, SpecialToken

MAX_TURN_PROBES = 64
"""Renderings spent on finding where turns begin; of longer conversations every n-th turn is found."""


@dataclass(frozen=True)
class RememberedAnswer:
    """An answer of this model earlier in the conversation: the text it was shown as, and the ids it really
    was."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class EncodedChat:
    """A prompt and what is known of its inside."""

    text: str
    token_ids: tuple[int, ...]
    turn_starts: tuple[int, ...]
    """Positions at which a message begins, those that could be found, ascending; the first message's is left
    out."""
    system_tokens: int
    """Leading tokens up to the end of the system prompt; where there is none, those before any text (BOS)."""
    notices: tuple[Notice, ...] = ()


@dataclass
class _StandIns:
    """Numbers that no one can guess, standing in a rendered text for a part of the prompt.

    Digits pass through every filter that templates use on texts (trim, upper, tojson) unchanged.
    """

    secret: str = field(default_factory=lambda: str(10**29 + secrets.randbelow(9 * 10**29)))
    parts: list[LiteralText | KnownIds] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, part: LiteralText | KnownIds, text: str) -> str:
        self.parts.append(part)
        self.texts.append(text)
        return f"{self.secret}{len(self.parts) - 1:06d}"

    def split(self, text: str) -> list[PromptPart]:
        pieces = re.split(self.secret + r"(\d{6})", text)
        parts: list[PromptPart] = []
        for index, piece in enumerate(pieces):
            if index % 2:
                parts.append(self.parts[int(piece)])
            elif piece:
                parts.append(piece)
        return parts

    def restore(self, text: str, *, stripped: bool = False) -> str:
        def shown(match: re.Match[str]) -> str:
            number = int(match.group(1))
            known = self.texts[number]
            return known.strip() if stripped and isinstance(self.parts[number], KnownIds) else known

        return re.sub(self.secret + r"(\d{6})", shown, text)


class ChatEncoder:
    """Encodes conversations for one model."""

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates) -> None:
        self.tokenizer = tokenizer
        self.templates = templates
        self._lock = threading.Lock()
        self._finders: dict[str, SpecialFinder] = {}

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        remembered: Sequence[RememberedAnswer] = (),
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> EncodedChat:
        """The prompt of a conversation.

        Control tokens (and user-defined ones that the template itself writes) in messages of any role but
        assistant, and in tools, become ordinary text. Remembered answers are matched to assistant messages of
        equal text, in order. Without either the ids are those of the rendered text. BadInputError as
        ``ChatTemplates.render``.
        """
        chat = self.templates.prepare(messages, tools)
        finder = self._finder(chat.template)
        stand_ins = _StandIns()
        masked = PreparedChat(
            chat.template,
            [_masked_message(message, finder, stand_ins) for message in chat.messages],
            _masked(chat.tools, finder, stand_ins),
            chat.notices,
        )
        plain = self.templates.render_prepared(masked, add_generation_prompt, **variables)
        if remembered:
            spliced, text = self._spliced(
                masked, plain, remembered, stand_ins, add_generation_prompt, variables
            )
        else:
            spliced, text = masked, plain
        ids = self.tokenizer.encode_parts(self._parts(stand_ins, text))
        offsets = self._turn_offsets(spliced, text, variables)
        positions = self._positions(stand_ins, text, sorted(set(offsets.values())), ids)
        leading = 0
        for message in chat.messages:
            if message["role"] != "system":
                break
            leading += 1
        starts = 1 if ids[:1] == [self.tokenizer.bos_id] else 0
        system = positions.get(offsets.get(leading, -1), starts) if leading else starts
        return EncodedChat(
            stand_ins.restore(text),
            tuple(ids),
            tuple(sorted(set(positions.values()))),
            system,
            chat.notices,
        )

    def _finder(self, template: str) -> SpecialFinder:
        """Finds what must not be parsed in messages."""
        with self._lock:
            if template not in self._finders:
                source = self.templates.templates[template]
                tokens: list[SpecialToken] = []
                for token_id in range(self.tokenizer.vocab_size):
                    kind = self.tokenizer.token_kind(token_id)
                    if kind not in SPECIAL_KINDS:
                        continue
                    text = self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
                    # A user-defined token that no template gives a meaning (runs of spaces, <b>) is ordinary
                    # text.
                    if kind in HIDDEN_KINDS or (text.strip() and text in source):
                        tokens.append(SpecialToken(token_id, text, TokenKind.CONTROL))
                self._finders[template] = SpecialFinder(tokens)
            return self._finders[template]

    def _parts(self, stand_ins: _StandIns, text: str) -> list[PromptPart]:
        """The parts of a rendered text.

        Templates of the Llama-2 kind write a space before an answer. Where the answer's first token holds
        that space itself (the dummy space that decoding removed), it would be there twice.
        """
        parts = stand_ins.split(text)
        for index, part in enumerate(parts[1:], start=1):
            before = parts[index - 1]
            if (
                isinstance(part, KnownIds)
                and self.tokenizer.strips_leading_space
                and isinstance(before, str)
                and before.endswith(" ")
                and self.tokenizer.token_bytes(part.token_ids[0]).startswith(b" ")
            ):
                parts[index - 1] = before[:-1]
        return [part for part in parts if part != ""]

    def _spliced(
        self,
        chat: PreparedChat,
        plain: str,
        remembered: Sequence[RememberedAnswer],
        stand_ins: _StandIns,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> tuple[PreparedChat, str]:
        """The chat with stand-ins for remembered answers, and its rendering; unchanged where a template does
        more with an answer than print it (such as cutting off its reasoning)."""
        waiting = list(remembered)
        messages: list[dict[str, Any]] = []
        for message in chat.messages:
            content = message["content"]
            found = None
            if message["role"] == "assistant" and isinstance(content, str) and not message.get("tool_calls"):
                found = next((i for i, answer in enumerate(waiting) if answer.text == content), None)
            if found is None or not waiting[found].token_ids:
                messages.append(message)
                continue
            ids = waiting[found].token_ids
            del waiting[: found + 1]
            while ids and ids[-1] in self.tokenizer.eos_ids:
                ids = ids[:-1]
            messages.append({**message, "content": stand_ins.add(KnownIds(ids), content) if ids else content})
        spliced = PreparedChat(chat.template, messages, chat.tools, chat.notices)
        try:
            text = self.templates.render_prepared(spliced, add_generation_prompt, **variables)
        except BadInputError:
            return chat, plain
        shown = stand_ins.restore(plain)
        if stand_ins.restore(text) == shown or stand_ins.restore(text, stripped=True) == shown:
            return spliced, text
        return chat, plain

    def _turn_offsets(self, chat: PreparedChat, text: str, variables: Mapping[str, Any]) -> dict[int, int]:
        """Message number -> character at which it begins, by rendering the messages before it alone."""
        count = len(chat.messages)
        stride = max(1, -(-count // MAX_TURN_PROBES))
        wanted = set(range(stride, count, stride))
        wanted.update(k for k in range(1, count) if chat.messages[k - 1]["role"] == "system")
        found: dict[int, int] = {}
        for number in sorted(wanted)[: 2 * MAX_TURN_PROBES]:
            before = PreparedChat(chat.template, chat.messages[:number], chat.tools)
            try:
                prefix = self.templates.render_prepared(before, False, **variables)
            except BadInputError:
                continue
            if prefix and text.startswith(prefix) and len(prefix) < len(text):
                found[number] = len(prefix)
        return found

    def _positions(
        self, stand_ins: _StandIns, text: str, offsets: list[int], ids: list[int]
    ) -> dict[int, int]:
        """Character offset -> token position, for those offsets at which two tokens meet."""
        if not offsets:
            return {}
        encode = self.tokenizer.encode_parts
        positions: dict[int, int] = {}
        joined: list[int] = []
        for start, end in zip([0, *offsets], [*offsets, len(text)], strict=True):
            if start:
                positions[start] = len(joined)
            joined += encode(self._parts(stand_ins, text[start:end]), add_bos=not start)
        if joined == ids:
            return positions
        positions = {}
        for offset in offsets[:8]:
            before = encode(self._parts(stand_ins, text[:offset]))
            if ids[: len(before)] == before:
                positions[offset] = len(before)
        return positions


def _masked(value: Any, finder: SpecialFinder, stand_ins: _StandIns) -> Any:
    """A value whose strings have stand-ins for special tokens."""
    if isinstance(value, str):
        parts = finder.split(value, HIDDEN_KINDS)
        if all(isinstance(part, str) for part in parts):
            return value
        return "".join(
            part if isinstance(part, str) else stand_ins.add(LiteralText(part.text), part.text)
            for part in parts
        )
    if isinstance(value, Mapping):
        return {key: _masked(item, finder, stand_ins) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, finder, stand_ins) for item in value]
    return value


def _masked_message(
    message: Mapping[str, Any], finder: SpecialFinder, stand_ins: _StandIns
) -> dict[str, Any]:
    if message["role"] == "assistant":
        return dict(message)  # the model's own words, which may hold its own markup
    return {
        key: value if key == "role" else _masked(value, finder, stand_ins) for key, value in message.items()
    }
