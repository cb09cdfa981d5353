"""What every test gets: a home of its own and an environment that the developer's settings cannot reach."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything loads torch: tests that run beside each other must not spin in each other's way.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if "PYTEST_XDIST_WORKER" in os.environ:  # a test on every core: more threads would only be in their way
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A run that a shell started in the background ignores SIGINT, and so would the programs that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

KEPT = {"EDGELLM_TEST_MODELS", "EDGELLM_TEST_HOME"}


def pytest_configure(config: pytest.Config) -> None:
    """Builds the native library from its sources as they are now, before any test is collected, once for all
    workers. A failure is kept in a file that ``native_library.why_missing`` reads: the tests that need the
    library show it.
    """
    if not hasattr(config, "workerinput"):
        from edgellm_kernels.native.build import build_in_place

        build_in_place()


@pytest.fixture(autouse=True)
def isolated_home(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """An empty EDGELLM_HOME; no EDGELLM_* setting of the developer's shell; model hubs never asked."""
    for name in list(os.environ):
        if name.startswith("EDGELLM_") and name not in KEPT:
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("EDGELLM_HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    # Programs that tests start buffer their output as they do for users.
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    yield home
