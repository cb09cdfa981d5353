"""``edgellm chat``: chooses between the screen, one answer as text, and the line mode."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.opening import Opening
from edgellm.cli.options import (
    check_text,
    constraint_options,
    engine_options,
    json_option,
    option,
    sampling_options,
)
from edgellm.cli.piped_text import read_stdin

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from edgellm.cli.chat_session import ChatSession

SCREEN_TERMINALS = (
    "xterm", "screen", "tmux", "rxvt", "linux", "vt220", "alacritty", "kitty", "foot", "wezterm", "ghostty",
    "konsole", "gnome", "vte", "putty", "iterm", "contour", "eterm", "st-", "ansi", "cygwin", "ms-terminal",
)  # fmt: skip
"""Beginnings of TERM that can show the screen; others are looked up in the terminal database."""


_ID = re.compile("[0-9a-fA-F]{6,32}")


class ChatCommand(EdgeCommand):
    """Takes the word behind ``--continue`` for an id when it is one; any other word is the prompt's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.with_explicit_ids(args))

    def with_explicit_ids(self, args: list[str]) -> list[str]:
        taking = {
            name
            for found in self.params
            if isinstance(found, click.Option) and not (found.is_flag or found.count)
            for name in found.opts
        }
        explicit, rest = list[str](), list(args)
        while rest:
            word = rest.pop(0)
            if word == "--":
                return [*explicit, word, *rest]
            if word in ("-c", "--continue"):
                has_id = bool(rest) and _ID.fullmatch(rest[0]) is not None
                explicit.append(f"--continue={rest.pop(0) if has_id else 'last'}")
                continue
            explicit.append(word)
            if word in taking and rest:  # its value, whatever that looks like
                explicit.append(rest.pop(0))
        return explicit


@click.command(
    "chat",
    cls=ChatCommand,
    examples=(
        "edgellm chat",
        'edgellm chat "What is the capital of France?"',
        'edgellm chat --continue "And of Norway?"',
        'edgellm chat -m ./model.gguf -p "Explain this" < notes.txt',
    ),
)
@click.argument("words", metavar="[MODEL] [PROMPT]...", nargs=-1)
@option("-p", "--prompt", metavar="TEXT", help="The prompt, exactly; every word before it must be the MODEL.")
@option("--system", metavar="TEXT", help="The system prompt.")
@option("--plain", is_flag=True, help="Lines instead of the screen.")
@option(
    "-c",
    "--continue",
    "continued",
    metavar="[ID]",
    help="Go on with the last saved chat, or with that whose id begins so (edgellm history list).",
)
@option("--no-save", is_flag=True, help="Do not save this chat.")
@option("--url", metavar="URL", help="Talk to this OpenAI-compatible server; MODEL is then its name there.")
@option("--api-key-file", metavar="FILE", help="A file with the key that the server of --url wants.")
@engine_options
@sampling_options
@constraint_options
@json_option
def command(
    words: tuple[str, ...],
    prompt: str | None,
    system: str | None,
    plain: bool,
    continued: str | None,
    no_save: bool,
    url: str | None,
    api_key_file: str | None,
    schema: str | None,
    grammar: str | None,
    as_json: bool,
    **settings: Any,
) -> int:
    """Talk to a model.

    Opens the chat screen on a terminal. With a PROMPT, or with piped input (which goes before the PROMPT),
    prints one answer: the text on standard output, everything else on standard error. The first word is the
    MODEL if it is a catalog name, an existing path or begins with hf:. --json prints chat events as JSON
    lines; the last one has the whole text. Chats are saved: edgellm history lists and finds them. A running
    edgellm serve that has the same model open answers, instead of loading it twice.
    """
    from edgellm.cli.chat_session import ChatSession
    from edgellm.cli.constraint_files import read_constraint
    from edgellm.cli.options import resolve_settings
    from edgellm.cli.output import current_output
    from edgellm.config import FLAG
    from edgellm.contracts import SamplingParams
    from edgellm_models.errors import UsageError

    ctx = click.get_current_context()  # not a parameter: --ctx has that name
    for name, text in (("PROMPT", " ".join(words)), ("--prompt", prompt), ("--system", system)):
        check_text(name, text or "")
    from_environment = ctx.get_parameter_source("prompt") is click.core.ParameterSource.ENVIRONMENT
    model, prompt = split_words(
        words, prompt, model_named=settings.get("model") is not None, soft=from_environment
    )
    if api_key_file and not url:
        raise UsageError("--api-key-file is the key of a server: it needs --url")
    output = current_output()
    session = ChatSession(output, as_json=as_json, saves=not no_save)
    named = model is not None or settings.get("model") is not None
    if continued is not None:
        session.take_up(continued)
    resolved = resolve_settings(settings, model=model if named else session.continued_model)
    resolved.sampling_params(SamplingParams())  # a bad value is told before anything is loaded
    constraint = read_constraint(schema, grammar)
    prompt = with_piped_text(prompt)
    mode = choose_mode(os.environ, has_prompt=prompt is not None, plain=plain or as_json)
    if mode.kind == "none":
        raise UsageError(
            'there is no prompt and no terminal to ask on: edgellm chat "What is the capital of France?"'
        )
    if as_json and prompt is None:
        raise UsageError('--json needs a prompt: edgellm chat --json "What is the capital of France?"')
    if mode.kind == "screen" and continued is not None and no_save:
        mode = Mode("lines", "--continue with --no-save is answered in lines, not on the screen")
    if mode.why:
        output.note(mode.why)

    unnamed = bool(words) and not named and continued is None and resolved.origins.get("model") != FLAG
    if url is not None:
        opening = Opening(
            resolved, None, None, constraint, url=url, api_key_file=api_key_file, is_named=named
        )
    else:
        from edgellm.cli.model_access import local_model, named_by

        with named_by(resolved), _chat_named(session, not named):
            found, path = local_model(resolved.model, output)
        opening = Opening(resolved, found, path, constraint, unnamed, is_named=named)
    if mode.kind == "screen":
        from edgellm.cli.screen_chat import run_screen

        return run_screen(opening, session, system or "")
    from edgellm.cli import plain_chat

    try:
        if prompt is None:
            return plain_chat.converse(opening, session, system or "")
        return plain_chat.answer_once(opening, session, system or "", prompt)
    finally:
        session.close()


@contextlib.contextmanager
def _chat_named(session: ChatSession, is_relevant: bool) -> Iterator[None]:
    """Says of a model that is gone that a saved chat was begun with it."""
    from edgellm_models.errors import BadInputError, NotFoundError

    try:
        yield
    except (NotFoundError, BadInputError) as error:
        if not is_relevant or session.continued_model is None or session.continued is None:
            raise
        begun = f"chat {session.continued.id[:8]} was begun with it; -m names another model"
        raise type(error)(f"{error} ({begun})") from None


# --- what was asked for ---


def split_words(
    words: tuple[str, ...], prompt: str | None, *, model_named: bool, soft: bool = False
) -> tuple[str | None, str | None]:
    """MODEL and PROMPT of the command line. A ``soft`` prompt (from the environment) yields to words.

    UsageError when two prompts are given, NotFoundError when the first word looks like a path and is none.
    """
    from edgellm.cli.options import models_folder
    from edgellm_models.catalog import is_model_argument
    from edgellm_models.errors import UsageError

    model = None
    if (
        words
        and not model_named
        and is_model_argument(
            words[0], models_folder(), more_words=len(words) > 1 or (prompt is not None and not soft)
        )
    ):
        model, words = words[0], words[1:]
    if words and prompt is not None and not soft:
        raise UsageError(f"two prompts were given: {' '.join(words)[:80]!r} and -p {prompt[:80]!r}; give one")
    text = " ".join(words) if words else prompt
    # An empty one counts as none: `make chat` passes the variable whether it has a value or not.
    return model, text or None


def with_piped_text(prompt: str | None) -> str | None:
    """Piped standard input, then the prompt, with an empty line between; either may be absent."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return prompt
    text = read_stdin("utf-8-sig").rstrip("\r\n")
    if not text.strip():
        return prompt
    return f"{text}\n\n{prompt}" if prompt else text


@dataclass(frozen=True)
class Mode:
    kind: str
    """screen, lines (a conversation in lines), once (one answer) or none (nothing to ask and nobody to
    ask).
    """
    why: str = ""
    """Why it is lines although a screen was to be expected."""


def choose_mode(environ: Mapping[str, str], *, has_prompt: bool, plain: bool) -> Mode:
    """The screen where a person sits at a terminal that can show it, unless there is a prompt already."""
    from edgellm.cli.output import is_terminal

    if has_prompt:
        return Mode("once")
    if not (sys.stdin is not None and sys.stdin.isatty()):
        return Mode("none")
    if plain or not sys.stdout.isatty():
        return Mode("lines")
    if os.name != "nt" and not is_terminal(sys.__stderr__):
        # There Textual draws on standard error; redirected, the screen would go into the file.
        return Mode("lines", "standard error is no terminal, so here is the line mode instead of the screen")
    term = environ.get("TERM", "")
    if not can_show_screen(term):
        shown = f"TERM={term}" if term else "TERM is not set"
        return Mode("lines", f"{shown}: this terminal cannot show the chat screen, so here is the line mode")
    return Mode("screen")


def can_show_screen(term: str) -> bool:
    """Whether a terminal of this TERM moves its cursor as the screen needs it."""
    if os.name == "nt":
        return True
    if term in ("", "dumb", "unknown"):
        return False
    if term.startswith(SCREEN_TERMINALS) or term == "st":
        return True
    try:
        import curses
    except ImportError:  # a Python without it: the names above must do
        return False
    try:
        # A descriptor that is no terminal: only the database is asked.
        with open(os.devnull, "wb") as nowhere:
            curses.setupterm(term, nowhere.fileno())
        return bool(curses.tigetstr("cup"))
    except (OSError, ValueError, curses.error):
        return False
