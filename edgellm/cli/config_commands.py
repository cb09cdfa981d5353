"""``edgellm config``: the settings in force, where each comes from, and where the files are."""

from __future__ import annotations

from typing import Any

import click

from edgellm.cli.command import CONTEXT_SETTINGS, EdgeCommand
from edgellm.cli.errors import one_line
from edgellm.cli.options import engine_options, json_option, option, resolve_settings, sampling_options
from edgellm.cli.output import current_output
from edgellm.config import Problems
from edgellm_models.errors import ConfigError


@click.group(name="config", context_settings=CONTEXT_SETTINGS)
def command() -> None:
    """Show settings and where each comes from."""


@command.command(
    cls=EdgeCommand,
    name="show",
    examples=("edgellm config show --origin", "EDGELLM_CTX=4096 edgellm config show --json"),
)
@option("--origin", is_flag=True, help="Also say where each value comes from.")
@json_option
@engine_options
@sampling_options
def show(origin: bool, as_json: bool, **settings: Any) -> None:
    """Show every setting with its value: flag, environment, project file, user file or built-in."""
    import json

    from edgellm.config import SETTINGS

    output = current_output()
    problems: Problems = {}
    resolved = resolve_settings(settings, problems=problems)
    values = {setting.name: getattr(resolved, setting.name) for setting in SETTINGS}
    if as_json:
        wrong = {"problems": {name: str(error) for name, error in problems.items()}} if problems else {}
        output.json({"settings": values, "origins": resolved.origins, **wrong})
    for name, value in values.items() if not as_json else ():
        # JSON spells texts, numbers and lists as TOML does, so a line can be pasted into config.toml.
        text = f"# {name} is unset" if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}"
        remark = f"wrong: {one_line(str(problems[name]))}" if name in problems else resolved.origins[name]
        output.data(f"{text:<36} # {remark}" if origin or name in problems else text)
    if problems:
        # What is in force elsewhere was shown; every other command refuses it.
        raise ConfigError("; ".join(map(str, problems.values())))


@command.command(cls=EdgeCommand, name="path", examples=("edgellm config path",))
@json_option
def path(as_json: bool) -> None:
    """Show where the configuration and the other files are. Nothing is made."""
    from edgellm.config import find_project_file
    from edgellm.locations import Locations

    output = current_output()
    locations = Locations.from_environment()
    project = find_project_file()
    places = {
        "user_file": locations.config_file,
        "project_file": project,
        "config": locations.config,
        "models": locations.models,
        "data": locations.data,
        "cache": locations.cache,
        "state": locations.state,
        "runtime": locations.runtime,
    }
    if as_json:
        output.json(places)
        return
    for name, place in places.items():
        output.data(f"{name:<13} {place if place is not None else 'none'}")
