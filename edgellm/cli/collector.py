"""Keeps Python's garbage collector from looking through a model while it is loaded, and ever after."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import click

OWNS_PROCESS = "edgellm.owns_process"
"""In the meta of a command's context: whether the process is there for this command alone."""


@contextmanager
def uncollected() -> Iterator[None]:
    """For a command that loads one model and keeps it to its end, in a process of its own: elsewhere it does
    nothing. Cycles that are there at the end are never collected.

    Importing torch makes hundreds of thousands of objects, and a large vocabulary as many again. The
    collector walks along all of them several times: 0.2 of 1.8 s of processor time of an import of torch, 0.2
    of 0.7 s of a vocabulary of 262,144 tokens. Later a full collection stops an answer for a tenth of a
    second.
    """
    context = click.get_current_context(silent=True)
    if context is None or not context.meta.get(OWNS_PROCESS):
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
