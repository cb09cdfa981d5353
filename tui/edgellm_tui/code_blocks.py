"""The code blocks of an answer, as a person copies them."""

from __future__ import annotations

from edgellm_tui.markdown_rows import chat_parser


def code_blocks(text: str) -> list[str]:
    """Contents of all fenced and indented blocks in order, an open fence at the end included."""
    tokens = chat_parser().parse(text)
    return [token.content for token in tokens if token.type in ("fence", "code_block")]
