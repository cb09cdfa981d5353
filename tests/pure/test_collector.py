"""While a command loads its model nothing is collected, where the process is the command's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import click
import pytest

from edgellm.cli.collector import OWNS_PROCESS, uncollected


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    assert gc.isenabled() and gc.get_freeze_count() == 0
    yield
    gc.enable()
    gc.unfreeze()


def context(owns_process: bool) -> click.Context:
    made = click.Context(click.Command("complete"))
    made.meta[OWNS_PROCESS] = owns_process
    return made


def test_collection_stops_while_loading_and_goes_on_without_what_was_loaded() -> None:
    with context(True).scope():
        with uncollected():
            assert not gc.isenabled()
            loaded = [[] for _ in range(5)]  # type: ignore[var-annotated]
        assert gc.isenabled() and gc.get_freeze_count() > 0
        assert all(one is not loaded for one in gc.get_objects())


def test_a_load_that_fails_and_a_collector_that_is_off_stay_what_they_are() -> None:
    gc.disable()
    with context(True).scope(), pytest.raises(ValueError), uncollected():
        raise ValueError
    assert not gc.isenabled()


def test_in_a_process_of_somebody_else_nothing_changes() -> None:
    with context(False).scope(), uncollected():
        assert gc.isenabled()
    with uncollected():  # called without a command
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0
