"""Keeps the KV of a saved chat in a file between two commands, so that going on with it needs no prefill."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from edgellm_models.errors import EdgeLLMError, Notice

if TYPE_CHECKING:
    from edgellm.cli.runtime import OnNotice
    from edgellm.contracts import ChatBackend
    from edgellm.history.kv_files import KVFiles

MIN_TOKENS = 512
"""Of a conversation whose KV is worth a file: fewer are computed anew in about the time of reading them."""


@runtime_checkable
class SavesKV(Protocol):
    """A backend whose engine is in this process. A server keeps the KV of its chats itself."""

    async def save_chat(self, conversation_id: str, path: Path) -> int: ...

    async def load_chat(self, conversation_id: str, path: Path) -> int: ...


class ChatKV:
    """Loads before the first answer and saves at the end, both only for chats of MIN_TOKENS or more.

    When it is done: by the line mode when it ends, and by ``-p --continue``, which is one of several commands
    of one chat. Never by a plain ``-p``: most such chats are never gone on with, and none should wait for a
    disk. What fails is a notice, and the chat is then computed anew.
    """

    def __init__(self, files: KVFiles, on_notice: OnNotice, min_tokens: int = MIN_TOKENS) -> None:
        self._files = files
        self._on_notice = on_notice
        self._min_tokens = min_tokens

    async def load(self, backend: ChatBackend, chat_id: str, tokens: int) -> None:
        """``tokens``: of the conversation, when it was last answered."""
        if tokens < self._min_tokens or not self._files.max_bytes or not isinstance(backend, SavesKV):
            return
        path = self._files.find(chat_id)
        if path is None:
            why = "is not in the cache folder (any more)"
            self._on_notice(
                Notice("kv_missing", f"the KV of this chat {why}: its {tokens:,} tokens are computed anew")
            )
            return
        try:
            await backend.load_chat(chat_id, path)
        except EdgeLLMError as error:
            detail = (
                f"the saved KV of this chat is not used: {error}; its {tokens:,} tokens are computed anew"
            )
            self._on_notice(Notice("kv_refused", detail))

    async def save(self, backend: ChatBackend, chat_id: str, tokens: int) -> None:
        if tokens < self._min_tokens or not self._files.max_bytes or not isinstance(backend, SavesKV):
            return
        try:
            path = self._files.prepare(chat_id)
            await backend.save_chat(chat_id, path)
        except EdgeLLMError as error:
            self._on_notice(Notice("kv_not_saved", f"the KV of this chat was not saved: {error}"))
            return
        removed = self._files.make_room()
        if not removed:
            return
        limit = f"{self._files.max_bytes / 1e6:,.0f} MB (EDGELLM_CHAT_KV)"
        if path in removed:
            detail = f"the KV of this chat was not kept: it is larger than the limit of {limit}"
            self._on_notice(Notice("kv_not_saved", detail))
        if older := len(removed) - (path in removed):
            chats = "1 older chat" if older == 1 else f"{older} older chats"
            detail = f"the KV of {chats} was removed, to keep to {limit}; the chats themselves stay"
            self._on_notice(Notice("kv_evicted", detail))
