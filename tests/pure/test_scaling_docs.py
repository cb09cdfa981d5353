"""The commands of docs/scaling.md are commands that there are, and its bounds those in force."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from edgellm.cli.main import cli
from edgellm.engine.engine import MAX_RUNNING
from edgellm.engine.event_queue import MAX_PENDING
from edgellm.server.settings import MAX_BODY_BYTES, ServerSettings
from tests.support.command_line import ROOT

PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"(?:^\s+|`)edgellm ([a-z]+ [^`\n]*)", PAGE, re.MULTILINE)))


def options_of(name: str) -> set[str]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, name
    return {text for parameter in command.params for text in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("line", COMMANDS)
def test_options_exist(line: str) -> None:
    name, *words = shlex.split(line)
    asked = [word for word in words if word.startswith("--")]
    assert set(asked) <= options_of(name)


def test_the_page_has_the_commands_that_it_is_about() -> None:
    assert {line.split()[0] for line in COMMANDS} >= {"quantize", "chat", "plan"}


def test_the_bounds_are_those_in_force() -> None:
    assert f"up to {MAX_RUNNING} answers at once" in PAGE
    assert f"| `--queue`, {ServerSettings().queue} |" in PAGE
    assert f"| body | {MAX_BODY_BYTES >> 20} MiB |" in PAGE
    assert f"{MAX_PENDING} events" in PAGE
    for option in re.findall(r"`(--[a-z-]+)[ `]", PAGE):
        assert any(option in options_of(name) for name in ("serve", "quantize", "chat", "plan")), option
