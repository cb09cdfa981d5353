"""The root command: a table of commands, each imported when it is called, and the way out of all of them."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from edgellm.cli.collector import OWNS_PROCESS
from edgellm.cli.command import CONTEXT_SETTINGS, talk_options, write_examples
from edgellm.cli.errors import Terminated, report
from edgellm.cli.output import Output, current_output
from edgellm.cli.standard_streams import EscapeWatch, occupy_streams
from edgellm_models.errors import OutputError


@dataclass(frozen=True)
class CommandRow:
    """One line of ``edgellm --help``; the module holds a Click command called ``command``."""

    module: str
    summary: str


COMMANDS = {
    "chat": CommandRow("edgellm.cli.chat", "Talk to a model, on a screen or through pipes."),
    "complete": CommandRow("edgellm.cli.complete", "Continue a text, without a chat template."),
    "serve": CommandRow("edgellm.cli.serve", "Serve a model to programs that speak OpenAI's API."),
    "ps": CommandRow("edgellm.cli.ps", "List the servers that run."),
    "stop": CommandRow("edgellm.cli.stop", "Stop a server."),
    "history": CommandRow("edgellm.cli.history", "List, show, search and export saved chats."),
    "tokenize": CommandRow("edgellm.cli.tokenize_text", "Show the token ids of a text."),
    "eval": CommandRow("edgellm.cli.evaluate_text", "Score a text: perplexity, KL divergence."),
    "bench": CommandRow("edgellm.cli.bench", "Measure speed, latency, bandwidth and memory."),
    "pull": CommandRow("edgellm.cli.pull", "Fetch a model, with resume and verification."),
    "list": CommandRow("edgellm.cli.list_models", "List the models of the catalog and those that are here."),
    "show": CommandRow("edgellm.cli.show", "Describe a model: metadata, bits per weight, memory needed."),
    "plan": CommandRow("edgellm.cli.plan", "Say what a model needs and how fast it can be."),
    "quantize": CommandRow("edgellm.cli.quantize", "Write a model in fewer bits: GGUF, GPTQ, AWQ."),
    "rm": CommandRow("edgellm.cli.remove", "Delete a pulled model."),
    "doctor": CommandRow("edgellm.cli.doctor", "Check this machine and installation."),
    "config": CommandRow("edgellm.cli.config_commands", "Show settings and where each comes from."),
    "completion": CommandRow("edgellm.cli.completion", "Print a completion script for a shell."),
}
"""In the order of the help."""

EXAMPLES = (
    'edgellm chat -p "What is the capital of France?"',
    "edgellm list",
    "edgellm pull smollm2-135m",
)


class LazyGroup(click.Group):
    """Knows its commands by the table and imports a module only when its command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = COMMANDS.get(cmd_name)
        if row is None:
            return None
        command: click.Command = importlib.import_module(row.module).command
        return command

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        write_examples(formatter, EXAMPLES)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl([(name, row.summary) for name, row in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        names = [name for name in COMMANDS if name.startswith(incomplete)]
        if names:
            return [CompletionItem(name, help=COMMANDS[name].summary) for name in names]
        return click.Command.shell_complete(self, ctx, incomplete)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Group.format_options would list the commands, and import each of them for its summary.
        click.Command.format_options(self, ctx, formatter)


def version() -> str:
    """The installed version."""
    import edgellm

    return str(edgellm.__version__)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"edgellm {version()}")
        ctx.exit()


@click.group(cls=LazyGroup, name="edgellm", context_settings=CONTEXT_SETTINGS, params=talk_options())
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run and quantize language models on your own machine."""
    current_output()


def run(
    arguments: Sequence[str] | None = None, *, output: Output | None = None, owns_process: bool = False
) -> int:
    """Runs one command line and returns its exit code; never raises for what a user can cause.

    ``owns_process``: the process ends with the command, so that it may be arranged for it (collector.py).
    """
    if os.environ.get("_EDGELLM_COMPLETE"):
        return _complete()
    from edgellm.log import log_to_file

    with log_to_file():
        try:
            if sys.stdout is None:
                raise OutputError("cannot write the output: standard output is closed")
            args = list(sys.argv[1:] if arguments is None else arguments)
            with cli.make_context("edgellm", args, obj=output or Output()) as ctx:
                ctx.meta[OWNS_PROCESS] = owns_process
                code = cli.invoke(ctx)
            sys.stdout.flush()
            return code if isinstance(code, int) and not isinstance(code, bool) else 0
        except click.exceptions.Exit as done:
            return done.exit_code
        except (Exception, KeyboardInterrupt, Terminated) as error:
            return report(error)


def main() -> None:
    """The console script."""
    with contextlib.suppress(ValueError, OSError):  # not in the main thread, or no such signal
        signal.signal(signal.SIGTERM, _terminate)
    occupy_streams()
    escapes = EscapeWatch()
    output = Output()
    code = run(output=output, owns_process=True)
    if escapes.encoding:
        output.note(
            f"note: standard output is {escapes.encoding}: characters that it lacks were written as escapes "
            "(PYTHONUTF8=1 writes them)"
        )
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        code = report(error)
    sys.exit(code)


def _terminate(number: int, frame: object) -> None:
    raise Terminated


def _complete() -> int:
    """Answers the completion scripts, which call the program with a variable of their own."""
    from edgellm.cli.shell_answers import answer

    return int(answer(cli))
