"""``edgellm rm``: deletes a pulled model."""

from __future__ import annotations

import sys

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.options import json_option, model_argument, models_folder, option
from edgellm.cli.output import current_output, is_terminal, megabytes
from edgellm_models.errors import UsageError


@click.command(cls=EdgeCommand, name="rm", examples=("edgellm rm smollm2-135m", "edgellm rm -y gemma3-270m"))
@model_argument(required=True)
@option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def command(model_name: str, yes: bool, as_json: bool) -> None:
    """Delete a pulled model, and what is left of an unfinished pull."""
    from edgellm_models.catalog import find_local, remove_local, resolve_model

    output = current_output()
    folder = models_folder()
    local = find_local(model_name, folder)
    name = model_name
    if local is None:
        resolved = resolve_model(model_name, folder)
        if resolved.entry is None:
            raise UsageError(f"{model_name} is a path; rm deletes pulled models, so delete the file yourself")
        name = resolved.name
    if not yes:
        if not is_terminal(sys.stdin):
            raise UsageError(f"rm asks before it deletes {name}; add -y where nobody can answer")
        size = f" ({megabytes(local.bytes)})" if local else ""
        if not click.confirm(f"Delete {name}{size}?", err=True):
            output.note("nothing was deleted")
            return
    freed = remove_local(name, folder)
    if as_json:
        output.json({"name": name, "freed_bytes": freed})
    else:
        output.data(f"deleted {name}, {megabytes(freed)} freed")
