"""``edgellm chat``: chooses between the screen, one answer as text, and the line mode."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.main import EdgeCommand
from edgellm.cli.options import (
    check_text,
    constraint_options,
    engine_options,
    json_option,
    option,
    planned_options,
    sampling_options,
)
from edgellm.cli.piped_text import read_stdin

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from edgellm.cli.runtime import OnNotice, Runtime
    from edgellm.config import ResolvedConfig
    from edgellm.contracts import ConstraintSpec, SamplingParams
    from edgellm_models.catalog import ResolvedModel

FALLBACK_SAMPLING: dict[str, float | int] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""When neither the user nor the catalog nor the model says anything."""

SCREEN_TERMINALS = (
    "xterm", "screen", "tmux", "rxvt", "linux", "vt220", "alacritty", "kitty", "foot", "wezterm", "ghostty",
    "konsole", "gnome", "vte", "putty", "iterm", "contour", "eterm", "st-", "ansi", "cygwin", "ms-terminal",
)  # fmt: skip
"""Beginnings of TERM that can show the screen; others are looked up in the terminal database."""


@click.command(
    "chat",
    cls=EdgeCommand,
    examples=(
        "edgellm chat",
        'edgellm chat "What is the capital of France?"',
        'edgellm chat -m ./model.gguf -p "Explain this" < notes.txt',
    ),
)
@click.argument("words", metavar="[MODEL] [PROMPT]...", nargs=-1)
@option("-p", "--prompt", metavar="TEXT", help="The prompt, exactly; every word before it must be the MODEL.")
@option("--system", metavar="TEXT", help="The system prompt.")
@option("--plain", is_flag=True, help="Lines instead of the screen.")
@engine_options
@sampling_options
@constraint_options
@json_option
@planned_options("--url URL", "--continue", "--no-save")
def command(
    words: tuple[str, ...],
    prompt: str | None,
    system: str | None,
    plain: bool,
    schema: str | None,
    grammar: str | None,
    as_json: bool,
    **settings: Any,
) -> int:
    """Talk to a model.

    Opens the chat screen on a terminal. With a PROMPT, or with piped input (which goes before the PROMPT),
    prints one answer: the text on standard output, everything else on standard error. The first word is the
    MODEL if it is a catalog name, an existing path or begins with hf:. --json prints chat events as JSON
    lines; the last one has the whole text.
    """
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
    resolved = resolve_settings(settings, model=model)
    resolved.sampling_params(SamplingParams())  # a bad value is told before anything is loaded
    constraint = read_constraint(schema, grammar)
    output = current_output()
    prompt = with_piped_text(prompt)
    mode = choose_mode(os.environ, has_prompt=prompt is not None, plain=plain or as_json)
    if mode.kind == "none":
        raise UsageError(
            'there is no prompt and no terminal to ask on: edgellm chat "What is the capital of France?"'
        )
    if as_json and prompt is None:
        raise UsageError('--json needs a prompt: edgellm chat --json "What is the capital of France?"')
    if mode.why:
        output.note(mode.why)

    from edgellm.cli.model_access import local_model, named_by

    with named_by(resolved):
        found, path = local_model(resolved.model, output)
    unnamed = bool(words) and model is None and resolved.origins.get("model") != FLAG
    opening = Opening(resolved, found, path, constraint, unnamed)
    if mode.kind == "screen":
        return run_screen(opening, system or "")
    from edgellm.cli import plain_chat

    if prompt is None:
        return plain_chat.converse(opening, system or "", output)
    return plain_chat.answer_once(opening, system or "", prompt, output, as_json=as_json)


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


# --- loading ---


@dataclass(frozen=True)
class Opening:
    """A model that is here and the settings for it; ``load`` does the work."""

    resolved: ResolvedConfig
    model: ResolvedModel
    path: Path
    constraint: ConstraintSpec | None = None
    unnamed: bool = False
    """The command line has a prompt and no model: it is said which one answers."""

    def load(self, on_notice: OnNotice) -> tuple[Runtime, SamplingParams]:
        """The model and how to choose its tokens."""
        from edgellm.cli.runtime import default_model_notice, load_runtime

        if self.unnamed:
            on_notice(default_model_notice(self.model.name))
        runtime = load_runtime(self.resolved, self.path, self.model.name, on_notice)
        return runtime, self.sampling(runtime.sampling_defaults)

    @property
    def kv_policy(self) -> str:
        """A chat that is told nothing goes on when its context is full."""
        from edgellm.config import BUILT_IN

        said = self.resolved.origins.get("kv_policy", BUILT_IN) != BUILT_IN
        return self.resolved.kv_policy if said else "trim"

    def sampling(self, model_defaults: Mapping[str, float | int]) -> SamplingParams:
        """What the user said, over the catalog's values, else the model's own, else FALLBACK_SAMPLING."""
        from edgellm.contracts import SamplingParams

        catalog = self.model.entry.sampling if self.model.entry is not None else {}
        base: dict[str, Any] = dict(catalog or model_defaults or FALLBACK_SAMPLING)
        return self.resolved.sampling_params(SamplingParams(**base))


def run_screen(opening: Opening, system: str) -> int:
    """The Textual screen; the model is loaded behind it. Returns the exit code."""
    import gc

    from edgellm.contracts import ChatBackend
    from edgellm_tui.app import EdgeChat
    from edgellm_tui.settings import ChatSettings

    def opener(on_notice: OnNotice) -> tuple[ChatBackend, ChatSettings]:
        runtime, sampling = opening.load(on_notice)
        return runtime.client(kv_policy=opening.kv_policy), ChatSettings(
            sampling=sampling, system_prompt=system, constraint=opening.constraint
        )

    app = EdgeChat(opener=opener, model_name=opening.model.name)
    # A screen makes many small objects, and each full collection looks at all that torch and the libraries
    # hold too: a visible pause. What lives now lives until the end.
    gc.freeze()
    gc.set_threshold(5_000, 10, 100)
    app.run()
    code = app.return_code or 0
    if app.opening:
        # The model is still loading in a thread that cannot be interrupted; nothing of it is worth waiting
        # for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
