"""What every command is: its help begins with examples, and it takes -q and -v."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from edgellm.cli.edge_option import EdgeOption
from edgellm.cli.errors import tell
from edgellm.cli.output import current_output

CONTEXT_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class EdgeCommand(click.Command):
    """A command whose help begins with examples and that takes -q and -v behind its name too."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", CONTEXT_SETTINGS)
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self.params += talk_options()

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        write_examples(formatter, self.examples)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)
        self.format_epilog(ctx, formatter)


def write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    if examples:
        with formatter.section("Examples"):
            formatter.write("".join(f"  {example}\n" for example in examples))


def talk_options() -> list[click.Parameter]:
    """-q and -v, valid before and behind the command's name."""
    return [
        EdgeOption(
            ["-q", "--quiet"],
            is_flag=True,
            expose_value=False,
            callback=_set_quiet,
            help="Say nothing but results and errors.",
        ),
        EdgeOption(
            ["-v", "--verbose"],
            count=True,
            expose_value=False,
            callback=_set_verbose,
            help="Log to standard error; twice for more.",
        ),
    ]


def _set_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        current_output().quiet = True


def _set_verbose(ctx: click.Context, param: click.Parameter, value: int) -> None:
    if value:
        from edgellm.log import show_log

        show_log(tell, everything=value > 1)
