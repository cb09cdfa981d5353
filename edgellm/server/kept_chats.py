"""The endpoints with which a screen has its engine keep the KV of a chat in a file, and take it up again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from edgellm.contracts import ChatMessage
from edgellm.server.answer_memory import AnswerMemory
from edgellm.server.api_errors import to_json
from edgellm.server.fields import Fields, read_object
from edgellm.server.model_host import ModelHost

SALT = ""
"""Of the screen's own requests."""


class KeptChats:
    """Only a server that a screen started for itself has these, on a socket that is this user's alone.

    Where the files lie is the server's own business: a client names a chat, never a path.
    """

    def __init__(self, host: ModelHost, memory: AnswerMemory, file_of: Callable[[str], Path]) -> None:
        """``file_of``: where the KV of the chat with this id lies or shall lie; EdgeLLMError for no id."""
        self._host = host
        self._memory = memory
        self._file_of = file_of

    async def save(self, request: Request) -> Response:
        """POST /v1/edge/chats/save: ``{conversation_id, answers: [text]}``; answers the number of tokens."""
        fields = Fields(read_object(await request.body()))
        chat = fields.text("conversation_id")
        path = self._file_of(chat)
        texts = fields.raw("answers") or []
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise fields.refuse("answers", "a list of texts")
        known = self._memory.find(SALT, [ChatMessage("assistant", text) for text in texts])
        answers = [(answer.text, answer.token_ids) for answer in known]
        async with self._host.lend(0) as model:
            tokens = await asyncio.to_thread(
                model.engine.save_kv, path, conversation_id=chat, answers=answers, salt=SALT
            )
        return _tokens(tokens)

    async def load(self, request: Request) -> Response:
        """POST /v1/edge/chats/load: ``{conversation_id}``; answers the number of tokens."""
        path = self._file_of(Fields(read_object(await request.body())).text("conversation_id"))
        async with self._host.lend(0) as model:
            saved = await asyncio.to_thread(model.engine.load_kv, path)
            for text, token_ids in saved.answers:
                self._memory.add(SALT, text, token_ids, model.tokenizer)
        return _tokens(len(saved.token_ids))


def _tokens(count: int) -> Response:
    return Response(to_json({"tokens": count}), media_type="application/json")
