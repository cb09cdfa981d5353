"""A trace of the torch profiler with named ranges: functions are wrapped while it runs and never else."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from edgellm_models.errors import OutputError


@dataclass(frozen=True)
class Range:
    """A function, as an attribute of an object or module, and the name under which the trace shows it."""

    owner: Any
    attribute: str
    name: str | Callable[..., str]
    """A function is given the call's arguments."""


@contextlib.contextmanager
def profiled(path: Path, ranges: Sequence[Range]) -> Iterator[None]:
    """Profiles what runs inside and writes a Chrome trace to ``path`` (chrome://tracing, Perfetto).

    OutputError when the file cannot be written; it appears whole or not at all.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with contextlib.ExitStack() as stack:
        profiler = stack.enter_context(profile(activities=activities))
        for marked in ranges:
            stack.enter_context(_wrapped(marked))
        yield
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".profile-") as folder:
            part = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(part))
            part.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write the profile {path}: {error.strerror}") from None


@contextlib.contextmanager
def _wrapped(marked: Range) -> Iterator[None]:
    from torch.profiler import record_function

    owner, attribute = marked.owner, marked.attribute
    function = getattr(owner, attribute)
    own = attribute in vars(owner)  # else it is the class's, and ours is taken away again

    @functools.wraps(function)
    def ranged(*args: Any, **keywords: Any) -> Any:
        name = marked.name if isinstance(marked.name, str) else marked.name(*args, **keywords)
        with record_function(name):
            return function(*args, **keywords)

    # object's own methods also reach into a frozen dataclass, whose fields are the kernels.
    put = setattr if isinstance(owner, ModuleType) else object.__setattr__
    put(owner, attribute, ranged)
    try:
        yield
    finally:
        if own:
            put(owner, attribute, function)
        else:
            object.__delattr__(owner, attribute)
