"""Finds the tool calls in an answer: Hermes and Qwen, Llama 3 as JSON and pythonic, Mistral."""

from __future__ import annotations

import ast
import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.chat.reasoning import held_length

MAX_CALL_CHARS = 1 << 18
"""Of text that is held back because it may be a call; more is text."""
MAX_PYTHON_CHARS = 1 << 14
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_TAG = "[TOOL_CALLS]"
_ARGS_TAG = "[ARGS]"
_DECODER = json.JSONDecoder()


class ToolFamily(enum.Enum):
    """How a model family writes its calls."""

    HERMES = "hermes"
    """``<tool_call>{"name": .., "arguments": {..}}</tool_call>``: Hermes, Qwen, and models without a form of
    their own."""
    LLAMA_JSON = "llama_json"
    """The whole answer is ``{"name": .., "parameters": {..}}``, several divided by ``;``."""
    LLAMA_PYTHONIC = "llama_pythonic"
    """The whole answer is ``[name(argument=value), ..]``."""
    MISTRAL = "mistral"
    """``[TOOL_CALLS]`` and a list of objects, or ``name[ARGS]{..}``."""


def tool_family(template: str) -> ToolFamily:
    """The family by what a chat template spells out."""
    if MISTRAL_TAG in template:
        return ToolFamily.MISTRAL
    if OPEN in template:
        return ToolFamily.HERMES
    if re.search(r"\[func_name1?\(", template):
        return ToolFamily.LLAMA_PYTHONIC
    if PYTHON_TAG in template or '"parameters"' in template or "'parameters'" in template:
        return ToolFamily.LLAMA_JSON
    return ToolFamily.HERMES


def tag_texts(family: ToolFamily) -> tuple[str, ...]:
    """Spellings of control tokens by which the family marks calls: they must be shown to be seen."""
    return {
        ToolFamily.HERMES: (OPEN, CLOSE),
        ToolFamily.LLAMA_JSON: (PYTHON_TAG,),
        ToolFamily.LLAMA_PYTHONIC: (PYTHON_TAG,),
        ToolFamily.MISTRAL: (MISTRAL_TAG, _ARGS_TAG),
    }[family]


@dataclass(frozen=True)
class ToolCall:
    """One call, whole. ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


Piece = str | ToolCall
"""Text for the reader, or a call."""


class ToolCallParser:
    """Follows one answer's text. A call is told when it is whole, never half; what is no call after all is
    text. No markup of calls is ever text."""

    def __init__(self, family: ToolFamily, names: Sequence[str]) -> None:
        """``names``: the tools of the request, by which bare JSON or Python is told from an answer."""
        self._family = family
        self._names = frozenset(names)
        self._held = ""
        self._state = "start"  # start, text, call (between the tags), whole (until the end)
        self.num_calls = 0
        self.malformed = 0
        """Calls that were none, whose text was shown."""

    def push(self, text: str) -> list[Piece]:
        """What became certain."""
        self._held += text
        pieces: list[Piece] = []
        if self._family is ToolFamily.HERMES:
            self._tagged(pieces)
        else:
            self._undivided(pieces)
        return _joined(pieces)

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """What was held. ``cut``: the answer was ended by a limit, so that its last call may be half."""
        held, self._held = self._held, ""
        pieces: list[Piece] = []
        if self._state == "call" and self._family is ToolFamily.HERMES:
            calls = read_hermes(held)  # a model may end its answer instead of closing the tag
            if calls:
                self._add(pieces, calls)
            else:
                self._broken(pieces, held)
        elif self._state in ("whole", "call"):
            calls = self._read_whole(held)
            if calls:
                self._add(pieces, calls)
            else:
                self._broken(pieces, self._without_tags(held), counts=self._state == "call")
        elif held.strip() or not self.num_calls:
            pieces.append(held)
        return _joined(pieces)

    # --- Hermes: calls between tags, anywhere ---

    def _tagged(self, pieces: list[Piece]) -> None:
        while self._held:
            if self._state == "call":
                place = self._held.find(CLOSE)
                if place < 0:
                    if len(self._held) > MAX_CALL_CHARS:
                        self._broken(pieces, self._held)
                        self._held, self._state = "", "text"
                    return
                inner, self._held = self._held[:place], self._held[place + len(CLOSE) :]
                self._state = "text"
                calls = read_hermes(inner)
                if calls:
                    self._add(pieces, calls)
                else:
                    self._broken(pieces, inner)
                continue
            place = self._held.find(OPEN)
            if place >= 0:
                before = self._held[:place]
                # White space before a call, or between two, is layout.
                if before.strip():
                    pieces.append(before.rstrip())
                self._held, self._state = self._held[place + len(OPEN) :], "call"
                continue
            keep = held_length(self._held, OPEN)
            body = self._held[: len(self._held) - keep]
            kept = body.rstrip()
            if not kept:
                return  # nothing but white space so far: a call may follow
            # White space at the end waits for what follows it.
            pieces.append(kept)
            self._held = self._held[len(kept) :]
            self._state = "text"
            return

    # --- the others: the whole answer is calls, or text ---

    def _undivided(self, pieces: list[Piece]) -> None:
        tag = MISTRAL_TAG if self._family is ToolFamily.MISTRAL else PYTHON_TAG
        if self._state == "start":
            rest = self._held.lstrip()
            if rest.startswith(tag):
                self._held, self._state = rest[len(tag) :], "call"
            elif tag.startswith(rest):
                return
            elif self._may_be_calls(rest):
                if len(rest) > MAX_CALL_CHARS:
                    self._state = "text"
                elif self._decided(rest):
                    self._state = "whole"
                else:
                    return
            else:
                self._state = "text"
        if self._state == "text":
            place = self._held.find(tag)
            if place >= 0:  # a word to the reader first, then calls
                if self._held[:place].strip():
                    pieces.append(self._held[:place].rstrip())
                self._held, self._state = self._held[place + len(tag) :], "call"
                return
            keep = held_length(self._held, tag)
            body = self._held[: len(self._held) - keep].rstrip()
            pieces.append(body)
            self._held = self._held[len(body) :]
        elif len(self._held) > MAX_CALL_CHARS:
            self._broken(pieces, self._without_tags(self._held))
            self._held, self._state = "", "text"

    def _may_be_calls(self, rest: str) -> bool:
        """Whether an answer that begins so may be bare calls."""
        if self._family is ToolFamily.LLAMA_PYTHONIC:
            name = re.match(r"\[\s*([A-Za-z_][\w.]*)?", rest)
            if name is None:
                return False
            found = name.group(1) or ""
            if name.end() == len(rest):
                return any(known.startswith(found) for known in self._names)
            return found in self._names and rest[name.end() :].lstrip()[:1] in ("", "(")
        opening = r"\[?\s*\{" if self._family is ToolFamily.MISTRAL else r"\{"
        match = re.match(opening, rest)
        if match is None:
            return self._family is ToolFamily.MISTRAL and bool(re.fullmatch(r"\[\s*", rest))
        key = re.match(r'\s*(?:"([^"\\]*)("?)?)?', rest[match.end() :])
        assert key is not None
        if key.group(1) is None:
            return match.end() + key.end() == len(rest)
        known_keys = ("name", "type", "function", "parameters", "arguments", "id")
        if key.group(2):
            return key.group(1) in known_keys
        return any(known.startswith(key.group(1)) for known in known_keys)

    def _decided(self, rest: str) -> bool:
        """Nothing more is asked before the end: all the rest is held."""
        return len(rest) > 16

    def _read_whole(self, text: str) -> list[ToolCall]:
        text = self._without_tags(text)
        if self._family is ToolFamily.LLAMA_PYTHONIC:
            calls = read_pythonic(text)
        elif self._family is ToolFamily.MISTRAL:
            calls = read_mistral(text)
        else:
            calls = read_llama_json(text)
        if self._state == "whole" and not all(call.name in self._names for call in calls):
            return []  # without a tag it is a call only if there is such a tool
        return calls

    def _without_tags(self, text: str) -> str:
        for tag in (MISTRAL_TAG, PYTHON_TAG):
            text = text.replace(tag, ";" if tag == PYTHON_TAG else "")
        return text.strip(" \t\r\n;") if self._state == "call" else text

    # --- both ---

    def _add(self, pieces: list[Piece], calls: Sequence[ToolCall]) -> None:
        self.num_calls += len(calls)
        pieces.extend(calls)

    def _broken(self, pieces: list[Piece], text: str, *, counts: bool = True) -> None:
        self.malformed += int(counts)
        text = text.replace(OPEN, "").replace(CLOSE, "").replace(_ARGS_TAG, "")
        if text:
            pieces.append(text.strip("\n") if counts else text)


def read_hermes(text: str) -> list[ToolCall]:
    """The call between two tags; several in a row happen. None where anything is not as it should be."""
    return _objects(text, ("arguments", "parameters"))


def read_llama_json(text: str) -> list[ToolCall]:
    """``{..}`` or several, divided by semicolons or white space."""
    return _objects(text, ("parameters", "arguments"), divider=";")


def read_mistral(text: str) -> list[ToolCall]:
    """``[{..}, ..]``, or ``name[ARGS]{..}`` one after the other (also without the middle tag)."""
    text = text.strip()
    if text.startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return []
        calls = (
            [_call(item, ("arguments", "parameters")) for item in found] if isinstance(found, list) else []
        )
        return [call for call in calls if call is not None] if calls and None not in calls else []
    if text.startswith("{"):
        return _objects(text, ("arguments", "parameters"))
    result = []
    while text:
        match = re.match(r"([A-Za-z_][\w.-]{0,255})\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*(?=\{)", text)
        if match is None:
            return []
        try:
            arguments, end = _DECODER.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            return []
        result.append(ToolCall(match.group(1), json.dumps(arguments, ensure_ascii=False)))
        text = text[end:].strip()
    return result


def read_pythonic(text: str) -> list[ToolCall]:
    """``[name(argument=literal), ..]``; nothing is evaluated but literals."""
    text = text.strip()
    if not text.startswith("[") or len(text) > MAX_PYTHON_CHARS:
        return []
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return []
        calls = []
        for node in tree.elts:
            if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
                return []
            values = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
            arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
            calls.append(ToolCall(ast.unparse(node.func), arguments))
        return calls
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return []


def _objects(text: str, keys: Sequence[str], divider: str = "") -> list[ToolCall]:
    calls: list[ToolCall] = []
    text = text.strip()
    while text:
        try:
            found, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        items = found if isinstance(found, list) and found else [found]
        for item in items:
            call = _call(item, keys)
            if call is None:
                return []
            calls.append(call)
        text = text[end:].strip(" \t\r\n" + divider)
    return calls


def _call(item: Any, keys: Sequence[str]) -> ToolCall | None:
    if not isinstance(item, Mapping):
        return None
    if isinstance(item.get("function"), Mapping):
        item = item["function"]
    name = item.get("name", item.get("function"))
    arguments: Any = next((item[key] for key in keys if key in item), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        return None
    try:
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        return None


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbouring texts as one; no empty ones."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str):
            if not piece:
                continue
            if found and isinstance(found[-1], str):
                found[-1] += piece
                continue
        found.append(piece)
    return found
