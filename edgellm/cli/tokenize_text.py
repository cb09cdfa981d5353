"""``edgellm tokenize``: the token ids of a text."""

from __future__ import annotations

import sys

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.options import check_text, json_option, model_argument, option
from edgellm.cli.output import counted, current_output, is_terminal
from edgellm.cli.piped_text import read_stdin
from edgellm_models.errors import UsageError


@click.command(
    cls=EdgeCommand,
    name="tokenize",
    examples=(
        'edgellm tokenize smollm2-135m "Hello world"',
        "edgellm tokenize smollm2-135m --json < text.txt",
    ),
)
@model_argument(required=True)
@click.argument("text", required=False)
@option("--no-special", is_flag=True, help="Treat control strings as text and add no BOS.")
@json_option
def command(model_name: str, text: str | None, no_special: bool, as_json: bool) -> None:
    """Show the token ids of TEXT (or of standard input) and how the vocabulary spells them."""
    from edgellm.cli.model_access import local_model
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.tokenizer import load_tokenizer

    output = current_output()
    text = _given_text(text)
    _, path = local_model(model_name, output)
    checkpoint = open_checkpoint(path)
    try:
        tokenizer = load_tokenizer(checkpoint.path, checkpoint.file_format, checkpoint.metadata)
    finally:
        checkpoint.close()
    ids = tokenizer.encode(text, add_special=not no_special, parse_special=not no_special)
    pieces = [tokenizer.token_text(token_id) for token_id in ids]
    if as_json:
        output.json({"token_ids": ids, "pieces": pieces})
        return
    for token_id, piece in zip(ids, pieces, strict=True):
        # A piece may hold line breaks and terminal commands; what is shown is its escaped spelling.
        shown = piece if piece.isprintable() else repr(piece)[1:-1]
        output.data(f"{token_id}\t{shown}")
    output.note(counted(len(ids), "token"))


def _given_text(text: str | None) -> str:
    if text is None:
        if sys.stdin is None or is_terminal(sys.stdin):
            raise UsageError("no TEXT: give it as an argument or through a pipe")
        return read_stdin()
    check_text("TEXT", text)
    return text
