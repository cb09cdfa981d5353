"""The KV of saved chats, one file each in the cache folder: a limit in bytes, the longest unused go first."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from edgellm_models.errors import NotFoundError, OutputError

SUFFIX = ".kv.safetensors"


class KVFiles:
    """Knows files only; engine/saved_kv.py writes and checks what is in them."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def path(self, chat_id: str) -> Path:
        """Where a chat's KV belongs. Ids are hexadecimal, so no path leads out of the folder."""
        if not chat_id or not all(c in "0123456789abcdef" for c in chat_id):
            raise NotFoundError(f"{chat_id!r} is no id of a chat")
        return self.folder / f"{chat_id}{SUFFIX}"

    def find(self, chat_id: str) -> Path | None:
        """The file, which counts as used now, or None."""
        path = self.path(chat_id)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError:  # on a disk that is only read the order of use stays as it is
            return path if path.is_file() else None
        return path

    def prepare(self, chat_id: str) -> Path:
        """Where to write a chat's KV; makes the folder, for its owner only. OutputError."""
        path = self.path(chat_id)
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
        except OSError as error:
            raise OutputError(f"cannot make the folder {self.folder}: {error.strerror}") from None
        return path

    def make_room(self) -> list[Path]:
        """Removes files that were unused for longest until the rest keeps to the limit; those that went."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.folder.glob(f"*{SUFFIX}"):
                with contextlib.suppress(OSError):
                    state = path.stat()
                    found.append((state.st_mtime_ns, state.st_size, path))
        total = sum(size for _, size, _ in found)
        removed = []
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
                total -= size
        return removed

    def remove(self, chat_id: str) -> bool:
        """Removes a chat's KV; whether there was any."""
        try:
            self.path(chat_id).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise OutputError(f"cannot remove {self.path(chat_id)}: {error.strerror}") from None
        return True
