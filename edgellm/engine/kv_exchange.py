"""Takes a chat's KV out of the cache for a file and puts it back in: what the engine does of saved_kv.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from edgellm.cache.kv_manager import KVManager
from edgellm.contracts import Runner
from edgellm.engine.saved_kv import KVIdentity, SavedKV, page_forms, read_saved, write_saved
from edgellm.scheduler.policy import shared_salt
from edgellm_models.errors import BadInputError

if TYPE_CHECKING:
    import torch


class PagedRunner(Runner, Protocol):
    """A runner whose pages can be read and written between two steps (model_runner.py)."""

    def page_parts(self) -> list[tuple[torch.Tensor, ...]]: ...

    def read_pages(self, blocks: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, ...]]: ...

    def write_pages(
        self,
        pages: Sequence[Sequence[torch.Tensor]],
        places: Sequence[Sequence[int]],
        blocks: Sequence[Sequence[int]],
    ) -> None: ...


@dataclass(frozen=True)
class KVExchange:
    """``snapshot`` and ``adopt`` run between two steps, in the engine's thread; ``read`` and ``write`` touch
    files only and may run in any thread."""

    kv: KVManager
    runner: Runner
    context_length: int
    vocab_size: int
    rope_switch_length: int | None
    identity: Callable[[], KVIdentity] | None
    """What a file must state to be of use here, found when it is first asked for; None saves nothing."""
    model_name: str = ""

    def snapshot(
        self, token_ids: Sequence[int] | None = None, *, conversation_id: str | None = None, salt: str = ""
    ) -> SavedKV:
        """The KV of a text's leading tokens, or of a conversation's last answered request, as far as it is in
        the cache, in whole blocks. BadInputError when nothing of it is."""
        if token_ids is None:
            salts = [shared_salt(salt, is_short=is_short) for is_short in (True, False)]
            found = self.kv.conversation(conversation_id or "", salts)
            if found is None:
                raise BadInputError(
                    "there is no KV of this chat to save: it has no answer yet, or many others came since"
                )
            own_salt, token_ids = found
        else:
            limit = self.rope_switch_length
            own_salt = shared_salt(salt, is_short=limit is None or len(token_ids) <= limit)
        count, blocks = self.kv.find_saved(token_ids, own_salt)
        if not count:
            raise BadInputError(
                f"nothing of these {len(token_ids)} tokens is in the KV cache: whole blocks of "
                f"{self.kv.block_size} are kept, until other requests need their memory"
            )
        pages = cast(PagedRunner, self.runner).read_pages(blocks)
        return SavedKV(tuple(token_ids[:count]), own_salt, tuple(pages))

    def adopt(self, saved: SavedKV) -> int:
        """Makes saved KV part of the prefix cache; how many tokens it holds. ResourceError when too few
        blocks are free."""
        runner = cast(PagedRunner, self.runner)

        def write(places: Sequence[Sequence[int]], blocks: Sequence[Sequence[int]]) -> None:
            runner.write_pages(saved.pages, places, blocks)

        self.kv.adopt(saved.token_ids, saved.salt, write)
        return len(saved.token_ids)

    def write(self, path: Path, saved: SavedKV, answers: Sequence[tuple[str, Sequence[int]]] = ()) -> int:
        """Writes a file; its size. ``answers`` go with it (SavedKV.answers)."""
        kept = tuple((text, tuple(ids)) for text, ids in answers)
        return write_saved(path, replace(saved, answers=kept), self._identity(), self.model_name)

    def read(self, path: Path) -> SavedKV:
        """Reads a file; BadInputError when it is not for this engine (saved_kv.read_saved)."""
        parts = cast(PagedRunner, self.runner).page_parts()
        return read_saved(
            path,
            self._identity(),
            [page_forms(group, index) for index, group in enumerate(parts)],
            self.kv.first_saved,
            block_size=self.kv.block_size,
            max_tokens=self.context_length,
            vocab_size=self.vocab_size,
        )

    def _identity(self) -> KVIdentity:
        if self.identity is None:
            raise BadInputError("this engine does not know its model's content, so it saves and loads no KV")
        return self.identity()
