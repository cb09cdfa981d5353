"""A chat's KV in a file: written whole or not at all, and read back only by the engine that it belongs to.

A safetensors file: ``token_ids`` [tokens] I64, and for each layer group the parts of its pages
(``keys.0`` [layers, blocks, block_size, kv_heads, width], ``values.0``, ``key_scales.0``, ...): all blocks,
or of a group with a window those that the next token sees. ``__metadata__`` holds what decides the content
of KV besides the tokens (KVIdentity), the salt, the answers as text and ids, and a CRC-32 of everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_models.checkpoint.safetensors_header import SafeTensor, read_safetensors_header
from edgellm_models.errors import BadInputError, NotFoundError, OutputError, PermissionDeniedError

if TYPE_CHECKING:
    import torch

FORMAT = "edgellm-kv"
VERSION = "2"
MAX_HEADER_BYTES = 8 << 20
_CRC = '"crc32":"'
_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
    "uint8": "U8",
    "int64": "I64",
}


FirstBlocks = Callable[[int], tuple[int, ...]]
"""Where each group's saved blocks begin, for a number of whole blocks (cache/saved_blocks.py)."""


@dataclass(frozen=True)
class KVIdentity:
    """What must be equal for stored KV to be of use, as texts."""

    model: str
    """Its content (checkpoint/fingerprint.py)."""
    kv_type: str
    block_size: str
    rope: str


@dataclass(frozen=True)
class SavedKV:
    """KV of whole blocks of tokens, in memory."""

    token_ids: tuple[int, ...]
    salt: str
    """What the request that computed it was salted with (policy.kv_salt)."""
    pages: tuple[tuple[torch.Tensor, ...], ...]
    """Per layer group the parts of its pages [layers, blocks, ...], on the host."""
    answers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Earlier answers of the chat as the text that was shown and the ids that it was."""


@dataclass(frozen=True)
class PageForm:
    """The pages of one part of a layer group, without their number of blocks."""

    name: str
    dtype: str
    """As safetensors spells it."""
    num_layers: int
    rest: tuple[int, ...]
    """Behind the blocks: block_size, kv_heads, width."""


def page_forms(pages: Sequence[torch.Tensor], group: int) -> tuple[PageForm, ...]:
    """The forms of a group's pages, in their order."""
    names = ("keys", "values", "key_scales", "value_scales")
    return tuple(
        PageForm(f"{name}.{group}", _dtype_name(part), part.shape[0], tuple(part.shape[2:]))
        for name, part in zip(names, pages, strict=False)
    )


def _dtype_name(tensor: torch.Tensor) -> str:
    return _NAMES[str(tensor.dtype).removeprefix("torch.")]


def write_saved(path: Path, saved: SavedKV, identity: KVIdentity, model_name: str) -> int:
    """Writes the file, readable by its owner only; its size in bytes. OutputError when that fails."""
    import torch

    parts: list[tuple[str, torch.Tensor]] = [("token_ids", torch.tensor(saved.token_ids, dtype=torch.int64))]
    for group, pages in enumerate(saved.pages):
        forms = page_forms(pages, group)
        parts += [(form.name, part.contiguous()) for form, part in zip(forms, pages, strict=True)]
    parts.sort(key=lambda part: -part[1].element_size())  # so that each begins where its type may
    entries: dict[str, object] = {}
    position = 0
    for name, tensor in parts:
        offsets = [position, position + tensor.nbytes]
        entries[name] = {"dtype": _dtype_name(tensor), "shape": list(tensor.shape), "data_offsets": offsets}
        position += tensor.nbytes
    metadata = {"format": FORMAT, "version": VERSION, "crc32": "00000000", "model_name": model_name}
    metadata |= {field.name: getattr(identity, field.name) for field in fields(identity)}
    metadata |= {"salt": saved.salt, "answers": json.dumps(saved.answers)}
    text = json.dumps({"__metadata__": metadata} | entries, separators=(",", ":"))
    text += " " * (-len(text.encode()) % 64)
    if len(text.encode()) > MAX_HEADER_BYTES:
        raise OutputError(f"{path}: the answers of this chat take over {MAX_HEADER_BYTES >> 20} MiB as text")
    data = [tensor.view(-1).view(torch.uint8).numpy().data for _, tensor in parts if tensor.nbytes]
    crc = zlib.crc32(text.encode())
    for piece in data:
        crc = zlib.crc32(piece, crc)
    header = text.replace(_CRC + "00000000", f"{_CRC}{crc:08x}", 1).encode()
    _write_whole(path, [struct.pack("<Q", len(header)), header, *data])
    return 8 + len(header) + position


def _write_whole(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    temporary: str | None = None
    try:
        # mkstemp makes a file that only its owner may read.
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:80]}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"cannot write {path}: {why}; nothing was left there") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def read_saved(
    path: Path,
    identity: KVIdentity,
    forms: Sequence[Sequence[PageForm]],
    first_blocks: FirstBlocks,
    *,
    block_size: int,
    max_tokens: int,
    vocab_size: int,
) -> SavedKV:
    """Reads a file for an engine whose pages have these forms. ``first_blocks`` says, for a number of blocks,
    where each group's begin.

    Everything is checked against the file's real size and the engine before memory is taken for it.
    BadInputError, one line with both values, for a file of another model, KV type or version, a damaged or a
    truncated one; NotFoundError, PermissionDeniedError.
    """
    label = str(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadInputError(f"{label}: saved KV is a regular file, and this is none")
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            raw = _read_header(file.read(8), size, label)
            header = file.read(raw)
            tensors = read_safetensors_header(struct.pack("<Q", raw) + header, size, label)
            metadata = _metadata(header, label)
            _check_identity(metadata, identity, label)
            _check_tensors(tensors, forms, first_blocks, block_size, max_tokens, label)
            data = bytearray(size - 8 - raw)
            if file.readinto(data) != len(data):
                raise BadInputError(f"{label}: it ended while it was read; save the chat again")
    except FileNotFoundError:
        raise NotFoundError(f"{label}: there is no such file of saved KV") from None
    except PermissionError as error:
        raise PermissionDeniedError(f"{label}: {error.strerror}") from error
    except OSError as error:
        raise BadInputError(f"{label}: cannot be read: {error.strerror or error}") from error
    stated = metadata.get("crc32", "")
    zeroed = header.replace(f"{_CRC}{stated}".encode(), f"{_CRC}00000000".encode(), 1)
    found = f"{zlib.crc32(data, zlib.crc32(zeroed)):08x}"
    if found != stated:
        raise BadInputError(f"{label}: damaged: its CRC-32 is {found}, it states {stated[:8]!r}; delete it")
    return _parse(data, 8 + raw, tensors, metadata, forms, vocab_size, label)


def _read_header(start: bytes, size: int, label: str) -> int:
    length: int = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise BadInputError(
            f"{label}: no saved KV or a truncated one: a header of {length:,} bytes in a file of {size:,}"
        )
    return length


def _metadata(header: bytes, label: str) -> dict[str, str]:
    found = json.loads(header).get("__metadata__")
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise BadInputError(f"{label}: a safetensors file without the metadata of saved KV")
    if found.get("format") != FORMAT:
        raise BadInputError(f"{label}: no saved KV: its format is {str(found.get('format'))[:40]!r}")
    if found.get("version") != VERSION:
        raise BadInputError(
            f"{label}: saved KV of version {str(found.get('version'))[:20]!r}, this edgellm reads {VERSION!r}"
        )
    return found


def _check_identity(metadata: dict[str, str], identity: KVIdentity, label: str) -> None:
    words = {
        "model": "another model's KV: content",
        "kv_type": "KV of type",
        "block_size": "KV in blocks of",
        "rope": "KV under the rotary embedding",
    }
    for name, what in words.items():
        theirs, ours = metadata.get(name, ""), getattr(identity, name)
        if theirs != ours:
            of = f" ({metadata.get('model_name', '')[:60]})" if name == "model" else ""
            raise BadInputError(
                f"{label}: {what} {theirs[:80]!r}{of}, this engine has {ours[:80]!r}; start without it"
            )


def _check_tensors(
    tensors: dict[str, SafeTensor],
    forms: Sequence[Sequence[PageForm]],
    first_blocks: FirstBlocks,
    block_size: int,
    max_tokens: int,
    label: str,
) -> None:
    ids = tensors.get("token_ids")
    if ids is None or ids.dtype != "I64" or len(ids.shape) != 1:
        raise BadInputError(f"{label}: damaged: there is no list of token ids")
    count = ids.shape[0]
    if not 0 < count <= max_tokens or count % block_size:
        raise BadInputError(
            f"{label}: it holds {count} tokens; this engine takes whole blocks of {block_size}, up to its "
            f"context of {max_tokens}"
        )
    first = first_blocks(count // block_size)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {"token_ids": ("I64", (count,))}
    for group, parts in enumerate(forms):
        for form in parts:
            blocks = count // block_size - first[group]
            expected[form.name] = (form.dtype, (form.num_layers, blocks, *form.rest))
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        name = next(n for n in (*expected, *found) if expected.get(n) != found.get(n))
        raise BadInputError(
            f"{label}: damaged: {name[:60]!r} is {found.get(name)}, this engine needs {expected.get(name)}"
        )


def _parse(
    data: bytearray,
    data_start: int,
    tensors: dict[str, SafeTensor],
    metadata: dict[str, str],
    forms: Sequence[Sequence[PageForm]],
    vocab_size: int,
    label: str,
) -> SavedKV:
    import torch

    dtypes = {name: getattr(torch, dtype) for dtype, name in _NAMES.items()}

    def load(name: str) -> torch.Tensor:
        tensor = tensors[name]
        raw = torch.frombuffer(data, dtype=torch.uint8)[tensor.start - data_start :][: tensor.nbytes]
        return raw.view(dtypes[tensor.dtype]).view(tensor.shape)

    ids = load("token_ids")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise BadInputError(
            f"{label}: damaged: token ids from {low} to {high}, but the vocabulary has {vocab_size}"
        )
    pages = tuple(tuple(load(form.name) for form in parts) for parts in forms)
    for part in (part for parts in pages for part in parts if part.is_floating_point() and part.numel()):
        if part.dtype == torch.float8_e4m3fn:  # NaN is the code of all ones; there is no infinity
            finite = int((part.view(torch.uint8) & 127).max()) < 127
        else:
            finite = bool(torch.isfinite(torch.stack(torch.aminmax(part))).all())
        if not finite:
            raise BadInputError(f"{label}: damaged: its KV holds values that are no numbers")
    answers = _answers(metadata, vocab_size, label)
    return SavedKV(tuple(ids.tolist()), metadata.get("salt", ""), pages, answers)


def _answers(
    metadata: dict[str, str], vocab_size: int, label: str
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    try:
        found = json.loads(metadata.get("answers", "[]"))
        answers: tuple[tuple[str, tuple[int, ...]], ...] = tuple((text, tuple(ids)) for text, ids in found)
    except (ValueError, TypeError, RecursionError):
        found, answers = None, ()
    sound = found is not None and all(
        isinstance(text, str) and all(type(t) is int and 0 <= t < vocab_size for t in ids)
        for text, ids in answers
    )
    if not sound:
        raise BadInputError(f"{label}: damaged: its list of answers is none")
    return answers
