"""``edgellm completion``: scripts for four shells."""

from __future__ import annotations

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.output import current_output
from edgellm.cli.shell_answers import PROGRAM, SHELLS, VARIABLE


@click.command(
    cls=EdgeCommand,
    examples=(
        'bash:       eval "$(edgellm completion bash)"     # in ~/.bashrc',
        'zsh:        eval "$(edgellm completion zsh)"      # in ~/.zshrc',
        "fish:       edgellm completion fish > ~/.config/fish/completions/edgellm.fish",
        "powershell: edgellm completion powershell | Out-String | Invoke-Expression",
    ),
)
@click.argument("shell", type=click.Choice(list(SHELLS)))
def command(shell: str) -> None:
    """Print the completion script of a shell. It completes commands, options and the names of models."""
    from edgellm.cli.main import cli

    current_output().data(SHELLS[shell](cli, {}, PROGRAM, VARIABLE).source().rstrip("\n"))
