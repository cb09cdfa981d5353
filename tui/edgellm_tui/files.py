"""Text files that the chat reads and writes: bounded reads, and never over what is there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path

from edgellm_models.errors import BadInputError, NotFoundError, OutputError
from edgellm_tui.widgets.figures import path_text

MAX_ATTACHED_BYTES = 2 << 20
MAX_PROMPTS_BYTES = 1 << 20
MAX_PROMPTS = 200


def write_new(name: str, folder: Path | None, text: str) -> Path:
    """Writes ``text`` to a file that is not there yet; OutputError in one line when that cannot be."""
    path = Path(name)
    try:
        path = (folder or Path.cwd()) / path.expanduser()
        data = text.encode()
        # "x": a file that is there is somebody's work.
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError:
        raise OutputError(f"{path_text(path)} exists already and was left alone") from None
    except UnicodeEncodeError:
        raise OutputError("Not saved: a part of the answer is no text that a file can hold") from None
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise OutputError(f"Not saved, {why.lower()}: {path_text(path, 30)}") from None
    except (RuntimeError, ValueError):  # a home folder that is not known, a NUL
        raise OutputError(f"Not saved, no such path: {path_text(path, 30)}") from None
    return path


def read_text_file(name: str) -> tuple[str, str]:
    """Name and text of a file to attach; NotFoundError or BadInputError in one line."""
    path = Path(name)
    try:
        path = path.expanduser()
        if not path.is_file():
            raise NotFoundError(f"No such file: {path_text(path)}")
        with path.open("rb") as file:
            data = file.read(MAX_ATTACHED_BYTES + 1)
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadInputError(f"Not attached, {why.lower()}: {path_text(path, 30)}") from None
    if len(data) > MAX_ATTACHED_BYTES:
        raise BadInputError(f"Not attached: {path_text(path, 30)} is over {MAX_ATTACHED_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInputError(f"Not attached: {path_text(path, 30)} is no UTF-8 text") from None
    if "\0" in text:
        raise BadInputError(f"Not attached: {path_text(path, 30)} is no text (it has a NUL)")
    return path.name, text


def with_attachments(question: str, attached: list[tuple[str, str]]) -> str:
    """The files as fenced blocks, then the question; a fence is longer than any in its file."""
    parts = []
    for name, text in attached:
        longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
        fence = "`" * (longest + 1)
        body = text if text.endswith("\n") else text + "\n"
        parts.append(f"{' '.join(name.split())}:\n\n{fence}\n{body}{fence}")
    return "\n\n".join([*parts, question])


def export_name(title: str, suffix: str = ".md") -> str:
    """A file name from a chat's title."""
    words = re.sub(r"[^\w]+", "-", title.lower()).strip("-")[:40].strip("-") or "chat"
    return f"{words}-{time.strftime('%Y%m%d-%H%M%S')}{suffix}"


def load_prompts(path: Path | None) -> list[str]:
    """Questions of earlier sessions; a file that cannot be read is as good as none."""
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PROMPTS_BYTES)
    except OSError:
        return []
    found = []
    # Not splitlines: what others wrote may hold U+2028 within a string, which is no end of a line there.
    for line in data.decode("utf-8", "replace").split("\n"):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, str):
            found.append(value)
    return found[-MAX_PROMPTS:]


def save_prompts(path: Path | None, prompts: list[str]) -> None:
    """Replaces the file, readable by its owner only; a disk that refuses costs only this convenience."""
    if path is None or not prompts:
        return
    lines, size = [], 0
    for prompt in reversed(prompts[-MAX_PROMPTS:]):
        line = json.dumps(prompt) + "\n"
        size += len(line)
        if size > MAX_PROMPTS_BYTES:
            break
        lines.append(line)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(reversed(lines))
        part.replace(path)
