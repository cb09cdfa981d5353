"""What a file looks like from its first bytes: kinds that could be mistaken for one another."""

from __future__ import annotations

import pickle
import struct

import pytest

from edgellm_models.checkpoint.sniff import FileKind, sniff_bytes


@pytest.mark.parametrize(
    "length", [640, 0x0380, 0x0480, 0x0580, 0x5A4D, 0x8B1F, 0x685A42, 0x464425, 0x04034B50]
)
def test_a_safetensors_header_length_is_no_other_formats_magic(length: int) -> None:
    """A header of 640 bytes begins like a pickle of protocol 2, one of 35,615 like gzip, and so on."""
    head = struct.pack("<Q", length) + b'{"__metadata__":{"format":"pt"}}'
    assert sniff_bytes(head, 1 << 30).kind is FileKind.SAFETENSORS


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"GGUF\x03\0\0\0", FileKind.GGUF),
        (b"\x80\x02ctorch\nload\n", FileKind.PICKLE),
        (pickle.dumps({"a": [1]}, protocol=4), FileKind.PICKLE),
        (b"PK\x03\x04" + bytes(26) + b"model/data.pkl", FileKind.PICKLE),
        (b"PK\x03\x04" + bytes(40), FileKind.OTHER),
        (b"<html>", FileKind.OTHER),
        (b"", FileKind.OTHER),
        (b"\x07\x13", FileKind.UNKNOWN),
        (b"plain words", FileKind.UNKNOWN),
    ],
)
def test_kinds(head: bytes, kind: FileKind) -> None:
    assert sniff_bytes(head, len(head)).kind is kind
