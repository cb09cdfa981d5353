"""``edgellm list``: the models of the catalog and those that were pulled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.errors import one_line
from edgellm.cli.options import json_option, models_folder
from edgellm.cli.output import current_output, megabytes

if TYPE_CHECKING:
    from edgellm_models.catalog import Entry, LocalModel


@click.command(cls=EdgeCommand, name="list", examples=("edgellm list", "edgellm list --json"))
@json_option
def command(as_json: bool) -> None:
    """List the models that are here and those that can be pulled by name."""
    from edgellm_models.catalog import list_local, load_catalog

    output = current_output()
    catalog = load_catalog()
    local = {model.name: model for model in list_local(models_folder())}
    rows = [
        _row(name, catalog.get(name), local.get(name))
        for name in [*catalog, *(n for n in local if n not in catalog)]
    ]
    if as_json:
        output.json({"models": rows})
        return
    lines = [("NAME", "HERE", "SIZE", "TYPE", "LICENCE", "")]
    for row in rows:
        size = "" if row["bytes"] is None else ("" if row["exact"] else "~") + megabytes(row["bytes"])
        remarks = ["base (complete only)"] if row["chat"] is False else []
        if not (row["tried"] or row["pulled"]):
            remarks.append("not tried by this project")
        here = "yes" if row["pulled"] else "-"
        name, kind, licence = (one_line(row[key]) for key in ("name", "quantization", "licence"))
        lines.append((name, here, size, kind, licence, "; ".join(remarks)))
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    for line in lines:
        # Names and licences may come from a hub: no control character of theirs reaches a terminal.
        output.data("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _row(name: str, entry: Entry | None, local: LocalModel | None) -> dict[str, Any]:
    size = local.bytes if local else entry.weight_bytes if entry else None
    return {
        "name": name,
        "title": entry.title if entry else "",
        "pulled": local is not None,
        "path": local.path if local else None,
        "bytes": size,
        "exact": local is not None or (entry is not None and entry.bytes is not None),
        "parameters": entry.parameters if entry else None,
        "quantization": entry.quantization if entry else "",
        "family": entry.family if entry else "",
        "chat": entry.chat if entry else None,
        "licence": entry.licence if entry else local.licence if local else "",
        "sources": [source.label for source in entry.sources] if entry else [local.source] if local else [],
        "tried": entry is not None and entry.tried,
    }
