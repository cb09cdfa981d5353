"""From a MODEL argument to something that can be opened: resolves it and pulls what is not here yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.cli.options import models_folder
from edgellm.cli.output import Output
from edgellm_models.errors import BadInputError, NotFoundError

if TYPE_CHECKING:
    from edgellm.config import ResolvedConfig
    from edgellm_models.catalog import Entry, ResolvedModel
    from edgellm_models.errors import Notice


def local_model(argument: str, output: Output) -> tuple[ResolvedModel, Path]:
    """The model and the path to open. One with a source is pulled on first use, its licence shown before."""
    from edgellm_models.catalog import resolve_model

    resolved = resolve_model(argument, models_folder())
    if resolved.path is not None:
        return resolved, resolved.path
    assert resolved.entry is not None
    return resolved, fetch(resolved.entry, output)


@contextlib.contextmanager
def named_by(resolved: ResolvedConfig) -> Iterator[None]:
    """Says of a model that cannot be had where its name comes from, unless the command line has it."""
    from edgellm.config import BUILT_IN, FLAG

    try:
        yield
    except (NotFoundError, BadInputError) as error:
        origin = resolved.origins["model"]
        if origin in (FLAG, BUILT_IN):
            raise
        raise type(error)(f"{error} (the name comes from {origin})") from None


def fetch(entry: Entry, output: Output) -> Path:
    """Pulls one model with progress and returns the path to open."""
    from edgellm.locations import Locations
    from edgellm.log import log_notice
    from edgellm_models.catalog import pull_model

    locations = Locations.from_environment()
    locations.ensure(locations.models)
    output.note(announcement(entry))

    def on_notice(notice: Notice) -> None:
        log_notice(notice)
        output.notice(notice)

    try:
        pulled = pull_model(
            entry,
            locations.models,
            on_progress=output.progress,
            on_notice=on_notice,
            stall_s=stall_timeout(),
        )
    finally:
        output.end_progress()
    return pulled.path


def announcement(entry: Entry) -> str:
    """What is said before the first byte: the model, its size, its licence."""
    from edgellm.cli.output import megabytes

    size = f" ({megabytes(entry.weight_bytes)})" if entry.weight_bytes else ""
    licence = f"; licence: {entry.licence}" if entry.licence else ""
    link = f" {entry.licence_url}" if entry.licence_url else ""
    return f"pulling {entry.name}{size}{licence}{link}"


def stall_timeout() -> float:
    """Seconds without a byte after which a pull is given up, from EDGELLM_STALL_TIMEOUT."""
    import os

    from edgellm_models.errors import ConfigError

    text = os.environ.get("EDGELLM_STALL_TIMEOUT", "")
    if not text:
        return 60.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ConfigError(f"EDGELLM_STALL_TIMEOUT must be a number of seconds above 0, not {text!r}")
    return seconds
