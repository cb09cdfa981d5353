"""Standard input as every command reads it, and text in encodings that lack its characters."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from edgellm.cli import chat, piped_text, tokenize_text
from edgellm_models.errors import BadInputError

READERS: dict[str, Callable[[], str | None]] = {
    "chat": lambda: chat.with_piped_text(None),
    "complete": piped_text.read_stdin,
    "tokenize": lambda: tokenize_text._given_text(None),
}


def pipe_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", ["a", "Grüße 你好 😊", "line one\nline two", "\x00\x1b[31m"])
def test_text_is_utf_8_whatever_the_locale_says(
    monkeypatch: pytest.MonkeyPatch, reader: str, text: str
) -> None:
    pipe_in(monkeypatch, text.encode())
    assert READERS[reader]() == text


@pytest.mark.parametrize("reader", READERS)
def test_what_is_too_long_is_refused_before_all_of_it_is_read(
    monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    monkeypatch.setattr(piped_text, "MAX_STDIN_BYTES", 10)
    pipe_in(monkeypatch, b"x" * 10)
    assert READERS[reader]() == "x" * 10
    pipe_in(monkeypatch, b"x" * 100)
    with pytest.raises(BadInputError, match="over 10 bytes"):
        READERS[reader]()
    assert sys.stdin.buffer.tell() == 11


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("data", [b"\xff\xfe", b"caf\xc3", b"a\xed\xa0\x80", b"\xef\xbb\xbfab\xff"])
def test_bytes_that_are_no_text_are_named_by_place_and_value(
    monkeypatch: pytest.MonkeyPatch, reader: str, data: bytes
) -> None:
    pipe_in(monkeypatch, data)
    with pytest.raises(UnicodeDecodeError) as expected:
        data.decode()
    start = expected.value.start
    with pytest.raises(BadInputError, match=rf"not UTF-8 text: byte {start} is 0x{data[start]:02x}"):
        READERS[reader]()


def test_a_mark_at_the_begin_is_dropped_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"\xef\xbb\xbfhi")
    assert piped_text.read_stdin("utf-8-sig") == "hi"
    pipe_in(monkeypatch, b"\xef\xbb\xbfhi")
    assert piped_text.read_stdin() == "\ufeffhi"


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("utf-8", "é 你".encode()),
        ("ascii", b"\\xe9 \\u4f60"),
        ("latin-1", b"\xe9 \\u4f60"),
    ],
)
def test_a_character_that_the_locale_lacks_becomes_an_escape(encoding: str, expected: bytes) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
    piped_text.write_text(stream, "é 你")
    assert raw.getvalue() == expected, "and it is flushed"
