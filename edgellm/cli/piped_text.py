"""Standard input as text, and text to a stream in whatever encoding its locale has."""

from __future__ import annotations

import sys
from typing import TextIO

MAX_STDIN_BYTES = 64 << 20


def read_stdin(encoding: str = "utf-8") -> str:
    """All of standard input; ``utf-8-sig`` drops a mark at its begin. BadInputError when it is not UTF-8 or
    over MAX_STDIN_BYTES.
    """
    from edgellm_models.errors import BadInputError

    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise BadInputError(f"standard input is over {MAX_STDIN_BYTES:,} bytes; that is no prompt")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        start = error.start
        if encoding == "utf-8-sig" and data.startswith(b"\xef\xbb\xbf"):
            start += 3  # the decoder counts from behind the mark
        raise BadInputError(
            f"standard input is not UTF-8 text: byte {start} is 0x{data[start]:02x}"
        ) from None


def write_text(stream: TextIO, text: str) -> None:
    """Writes and flushes. What the locale has no character for, as under LANG=C, becomes an escape."""
    try:
        stream.write(text)
    except UnicodeEncodeError:  # an escape beats a traceback
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
