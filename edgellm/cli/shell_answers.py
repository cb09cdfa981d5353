"""Shells that completion is made for, and the answers that their scripts ask for."""

from __future__ import annotations

import os

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    split_arg_string,
)

PROGRAM = "edgellm"
VARIABLE = "_EDGELLM_COMPLETE"

_POWERSHELL = """\
Register-ArgumentCompleter -Native -CommandName %(prog_name)s -ScriptBlock {
    param($wordToComplete, $commandAst, $cursorPosition)
    $env:%(complete_var)s = 'powershell_complete'
    $env:COMP_WORDS = $commandAst.ToString()
    $env:COMP_CWORD = $wordToComplete
    try {
        & %(prog_name)s | ForEach-Object {
            $type, $value, $help = $_ -split "`t", 3
            if ($type -eq 'plain') {
                if (-not $help) { $help = $value }
                [System.Management.Automation.CompletionResult]::new($value, $value, 'ParameterValue', $help)
            }
        }
    } finally {
        Remove-Item Env:%(complete_var)s, Env:COMP_WORDS, Env:COMP_CWORD
    }
}
"""


class QuietBashComplete(BashComplete):
    """Without the check that runs the bash of this machine, which need not be the one the script is for."""

    @staticmethod
    def _check_version() -> None:
        return None


class PowerShellComplete(ShellComplete):
    """What Click lacks. Files are left to PowerShell, which completes them when nothing is offered."""

    name = "powershell"
    source_template = _POWERSHELL

    def get_completion_args(self) -> tuple[list[str], str]:
        words = split_arg_string(os.environ.get("COMP_WORDS", ""))[1:]
        incomplete = os.environ.get("COMP_CWORD", "")
        if incomplete and words and words[-1] == incomplete:
            words.pop()
        return words, incomplete

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type}\t{item.value}\t{item.help or ''}"


SHELLS: dict[str, type[ShellComplete]] = {
    "bash": QuietBashComplete,
    "zsh": ZshComplete,
    "fish": FishComplete,
    "powershell": PowerShellComplete,
}


def answer(cli: click.Command) -> int:
    """Prints the completions that a script asks for through its variable. Never an error message."""
    shell, _, instruction = os.environ.get(VARIABLE, "").partition("_")
    kind = SHELLS.get(shell)
    if kind is None or instruction not in ("complete", "source"):
        return 1
    completer = kind(cli, {}, PROGRAM, VARIABLE)
    try:
        click.echo(completer.source() if instruction == "source" else completer.complete())
    except Exception:  # a fault here would garble the line that is being typed
        return 1
    return 0
