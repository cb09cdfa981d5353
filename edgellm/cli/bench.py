"""``edgellm bench``: the group of the benchmarks; without a name it is ``bench model``."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import click

from edgellm.cli.command import CONTEXT_SETTINGS, write_examples

SUBCOMMANDS = {
    "model": "edgellm.cli.bench_model",
    "ops": "edgellm.cli.bench_ops",
    "spec": "edgellm.cli.bench_spec",
}
"""By name the module that holds a Click command called ``command``; without its module a name is unknown."""
DEFAULT = "model"
EXAMPLES = (
    "edgellm bench",
    "edgellm bench -m ./model.gguf --batch 1,2,4,8,16 --slo ttft=1,tps=20",
    "edgellm bench --against llama.cpp",
)


class BenchGroup(click.Group):
    """Imports a benchmark when it is called; what is no name of one belongs to ``model``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, module in SUBCOMMANDS.items() if importlib.util.find_spec(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(SUBCOMMANDS[cmd_name]).command
        return command

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        write_examples(formatter, EXAMPLES)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else None
        if first is None or (first not in SUBCOMMANDS and first not in ctx.help_option_names):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


@click.group(name="bench", cls=BenchGroup, context_settings=CONTEXT_SETTINGS)
def command(**_: Any) -> None:
    """Measure speed and memory: a model (the default), kernels, speculation."""
