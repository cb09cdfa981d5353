"""What a file looks like from its first bytes, for messages that say more than "bad magic number"."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from pathlib import Path

from edgellm_models.checkpoint.mapped_file import file_error, regular_file_size

HEAD_BYTES = 4096


class FileKind(enum.Enum):
    """The kinds that lead somewhere."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    PICKLE = "pickle"
    OTHER = "other"
    """Recognised, and no model file."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Looks:
    """What a file seems to be."""

    kind: FileKind
    text: str
    """Ends the sentence "this looks like ...", with what to do about it."""


PICKLE_ADVICE = (
    "pickle files can run code and are not read; convert with transformers: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT), which writes safetensors"
)

_MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"\xfd7zXZ\x00", "an xz archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive: unpack it first"),
    (b"BZh", "a bzip2 archive: unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it first"),
    (b"%PDF", "a PDF document"),
    (b"\x89HDF", "an HDF5 file (Keras or TensorFlow weights); a GGUF file or safetensors folder is needed"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a Windows program"),
)
_OLD_GGML = (b"lmgg", b"fmgg", b"tjgg", b"algg", b"ggml", b"ggmf", b"ggjt", b"ggla")


def sniff_bytes(head: bytes, size: int) -> Looks:
    """Judge a file by its first bytes (up to HEAD_BYTES) and its size."""
    if size == 0:
        return Looks(FileKind.OTHER, "an empty file (0 bytes): fetch it again")
    if head[:4] == b"GGUF":
        return Looks(FileKind.GGUF, "a GGUF file")
    # before all else: the length of its header may be spelled like another format's magic
    if len(head) > 8 and head[8:9] == b"{" and 2 <= struct.unpack_from("<Q", head)[0] <= 10**9:
        return Looks(
            FileKind.SAFETENSORS,
            "a safetensors file: give the Hugging Face folder that holds it and config.json",
        )
    if head[:4] == b"FUGG":
        return Looks(FileKind.OTHER, "a GGUF file with its bytes swapped: fetch a little-endian one")
    if head.startswith(b"version https://git-lfs.github.com/spec"):
        return Looks(
            FileKind.OTHER, "a Git-LFS pointer, not the file itself: run `git lfs pull` or fetch it again"
        )
    if head[:4] == b"PK\x03\x04":
        names = ("data.pkl", "/data/", "archive/")
        if any(name.encode() in head for name in names):
            return Looks(FileKind.PICKLE, f"a PyTorch pickle file: {PICKLE_ADVICE}")
        return Looks(
            FileKind.OTHER, "a zip archive (or a PyTorch pickle file, which is not read): unpack it first"
        )
    if len(head) > 2 and head[0] == 0x80 and head[1] in range(2, 6):
        return Looks(FileKind.PICKLE, f"a Python pickle file: {PICKLE_ADVICE}")
    if head[:4] in _OLD_GGML:
        return Looks(FileKind.OTHER, "a GGML file from before GGUF (2023): fetch or convert it as GGUF")
    for magic, text in _MAGICS:
        if head.startswith(magic):
            return Looks(FileKind.OTHER, text)
    if head[257:262] == b"ustar":
        return Looks(FileKind.OTHER, "a tar archive: unpack it first")
    return _sniff_text(head)


def _sniff_text(head: bytes) -> Looks:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<!--")):
        return Looks(
            FileKind.OTHER, "an HTML page, not a model: the download gave a web page, fetch it again"
        )
    if start.startswith((b"<?xml", b"<error")):
        return Looks(FileKind.OTHER, "an XML document, perhaps a server's error message: fetch it again")
    if start.startswith((b"{", b"[")):
        return Looks(FileKind.OTHER, "a JSON text: for a Hugging Face model give its folder")
    if head.count(0) == len(head):
        return Looks(FileKind.OTHER, "a file of zeros: the download was not finished, fetch it again")
    printable = sum(byte in b"\t\r\n" or 32 <= byte < 127 for byte in head)
    if printable == len(head):
        return Looks(FileKind.UNKNOWN, f"a text file that begins {head[:40].decode('ascii')!r}")
    return Looks(FileKind.UNKNOWN, f"an unknown binary file that begins with the bytes {head[:8].hex(' ')}")


def sniff_file(path: Path) -> Looks:
    """Judge a regular file. NotFoundError, PermissionDeniedError, or BadInputError for a folder or a pipe."""
    size = regular_file_size(path)
    try:
        with path.open("rb") as file:
            return sniff_bytes(file.read(HEAD_BYTES), size)
    except OSError as error:
        raise file_error(path, error) from error
