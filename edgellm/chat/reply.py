"""One answer from the engine's text to what a client sees: reasoning, content and tool calls apart."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Protocol

from edgellm.chat.reasoning import ReasoningSplitter
from edgellm.chat.tool_calls import Piece, ToolCallParser
from edgellm.contracts import Delta, TokenLogprob


class StopWatch(Protocol):
    """Finds stop strings in the content (engine/stop_strings.py)."""

    matched: str | None

    def push(self, text: str) -> str: ...

    def finish(self) -> str: ...


class Reply:
    """Turns the Deltas of one answer into those for its reader; the joined text does not depend on how the
    tokens came.

    Without reasoning, tools and stop strings of its own it changes nothing. Stop strings are given here only
    where reasoning is split off: they are about the content, so the engine must not see them.
    """

    def __init__(
        self,
        *,
        splitter: ReasoningSplitter | None = None,
        stop: StopWatch | None = None,
        tools: ToolCallParser | None = None,
        parallel_calls: bool = True,
        make_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}",
    ) -> None:
        self._splitter = splitter
        self._stop = stop
        self._tools = tools
        self._parallel = parallel_calls
        self._make_id = make_id
        self._logprobs: list[TokenLogprob] = []
        self._token_ids: list[int] = []
        self._content: list[str] = []
        self.reasoning_tokens = 0
        self.num_calls = 0
        self.dropped_calls = 0
        """Further calls where one was allowed."""

    @property
    def stopped(self) -> bool:
        """A stop string has come: the answer is over, whatever the engine still sends."""
        return self._stop is not None and self._stop.matched is not None

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def malformed_calls(self) -> int:
        return self._tools.malformed if self._tools is not None else 0

    def push(self, delta: Delta) -> list[Delta]:
        """What a reader gets of one delta; nothing after a stop string."""
        if self.stopped:
            return []
        self._logprobs.extend(delta.logprobs)
        self._token_ids.extend(delta.token_ids)
        reasoning, content = "", delta.text
        if self._splitter is not None:
            was_inside = self._splitter.is_reasoning
            reasoning, content = self._splitter.push(delta.text)
            if was_inside or self._splitter.is_reasoning:
                self.reasoning_tokens += len(delta.token_ids)
        return self._made(reasoning, self._pieces(content))

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """What was held back. ``cut``: the answer was ended by a limit."""
        reasoning, pieces = "", []
        if not self.stopped:
            if self._splitter is not None:
                reasoning, content = self._splitter.finish()
                pieces += self._pieces(content)
            if self._stop is not None and not self.stopped:
                pieces += self._called(self._stop.finish())
        if self._tools is not None:
            pieces += self._tools.finish(cut=cut)
        made = self._made(reasoning, pieces)
        if self._logprobs or self._token_ids:
            made.append(self._with_tokens(Delta()))
        return made

    def _pieces(self, content: str) -> list[Piece]:
        if self._stop is not None:
            content = self._stop.push(content)
        return self._called(content)

    def _called(self, content: str) -> list[Piece]:
        if self._tools is None:
            return [content] if content else []
        return self._tools.push(content) if content else []

    def _made(self, reasoning: str, pieces: list[Piece]) -> list[Delta]:
        made: list[Delta] = []
        if reasoning:
            made.append(Delta(reasoning=reasoning))
        for piece in pieces:
            if isinstance(piece, str):
                if piece:
                    self._content.append(piece)
                    made.append(Delta(text=piece))
                continue
            if self.num_calls and not self._parallel:
                self.dropped_calls += 1
                continue
            made.append(Delta(tool_call=self._call_json(piece.name, piece.arguments)))
        if made:
            made[0] = self._with_tokens(made[0])
        return made

    def _call_json(self, name: str, arguments: str) -> dict[str, Any]:
        index = self.num_calls
        self.num_calls += 1
        return {
            "index": index,
            "id": self._make_id(),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _with_tokens(self, delta: Delta) -> Delta:
        """The tokens behind a text go with the first piece of it that is shown."""
        ids, logprobs = tuple(self._token_ids), tuple(self._logprobs)
        self._token_ids.clear()
        self._logprobs.clear()
        return Delta(delta.text, delta.reasoning, delta.tool_call, ids, logprobs)
