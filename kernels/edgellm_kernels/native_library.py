"""The native kernel library: where it lies, why it is missing, its functions and their argument types."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm_kernels.native import build

BACKEND_VARIABLE = "EDGELLM_NATIVE_BACKEND"
"""Names the back end to use in place of the fastest: what a processor without the newer instructions gets."""
_FOLDER = Path(__file__).resolve().parent / "native"
_PROTOTYPE = re.compile(r"^EDGELLM_API int (edgellm_\w+)\(([^)]*)\);", re.MULTILINE)
_SCALARS = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_STATUS = {1: "bad argument", 2: "not enough memory", 3: "internal failure"}


class NativeError(RuntimeError):
    """A native function refused its arguments or failed."""


def _prototypes() -> Iterator[tuple[str, list[Any]]]:
    """Name and argument types of every function, from the library's own headers."""
    for header in sorted(_FOLDER.glob("api_*.h")):
        for name, arguments in _PROTOTYPE.findall(header.read_text()):
            types: list[Any] = []
            for argument in filter(None, (part.strip() for part in arguments.split(","))):
                types.append(ctypes.c_void_p if "*" in argument else _SCALARS[argument.split()[-2]])
            yield name, types


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded library. ``call.edgellm_x(...)`` raises NativeError if the function returns an error."""

    path: Path
    backend: str
    """avx512vnni, avx2 or portable"""
    functions: dict[str, Callable[..., int]]

    def call(self, name: str, *arguments: Any) -> None:
        """Run a function; tensors and buffers are passed as addresses. The GIL is released meanwhile."""
        status = self.functions[name](*arguments)
        if status != 0:
            raise NativeError(f"{name}: {_STATUS.get(status, status)}")


def open_library(path: Path) -> NativeLibrary:
    """Load one library file and declare its functions. OSError if it cannot be loaded."""
    handle = ctypes.CDLL(str(path))
    functions: dict[str, Callable[..., int]] = {}
    for name, types in _prototypes():
        function = getattr(handle, name)
        function.argtypes = types
        function.restype = ctypes.c_int
        functions[name] = function
    return NativeLibrary(path, path.stem.removeprefix("libedgellm_"), functions)


def built_libraries() -> dict[str, Path]:
    """Back end -> library file, of those that were built from the sources that lie here."""
    folder = _FOLDER / build.BUILT
    if not build.is_fresh(folder):
        return {}
    return {backend: folder / build.library_name(backend) for backend in build.backends()}


def runnable_libraries() -> dict[str, Path]:
    """Those of ``built_libraries`` that this processor runs, the plainest first, the fastest last."""
    built = built_libraries()
    portable = built.get("portable")
    if portable is None:
        return {}
    try:
        probe = ctypes.CDLL(str(portable))
    except OSError:
        return {}
    return {name: path for name, path in built.items() if name == "portable" or _runs(probe, name)}


def _runs(probe: ctypes.CDLL, backend: str) -> bool:
    """Whether this processor runs a back end, as a library that it surely runs says."""
    answer = ctypes.c_int32(0)
    getattr(probe, f"edgellm_has_{backend}")(ctypes.byref(answer))
    return bool(answer.value)


def _wish() -> str:
    return os.environ.get(BACKEND_VARIABLE, "")


def unmet_wish() -> str:
    """One phrase on why the back end that the environment names cannot be used; empty where nothing is asked
    for, or it is had.
    """
    wish = _wish()
    there = runnable_libraries() if wish else {}
    if not wish or wish in there:
        return ""
    runs = ", ".join(reversed(there)) or "none that is built"
    return f"{BACKEND_VARIABLE} is {wish!r}: this processor runs {runs}"


def find_library() -> Path | None:
    """The library for this processor, or None: then ``why_missing`` says why."""
    there = runnable_libraries()
    wish = _wish()
    return there.get(wish) if wish else next(reversed(there.values()), None)


def why_chosen(library: NativeLibrary) -> str:
    """One phrase on why it is this back end."""
    if _wish() == library.backend:
        return f"as {BACKEND_VARIABLE} asks"
    return "the fastest that this processor runs"


def why_missing() -> str:
    """One phrase on why there is no native library; empty if there is one."""
    if find_library() is not None:
        return ""
    if runnable_libraries() and unmet_wish():
        return unmet_wish()
    folder = _FOLDER / build.BUILT
    with suppress(OSError):
        return (folder / build.REASON).read_text().strip()
    if built_libraries():
        return f"the library in {folder} cannot be loaded"
    again = "python -m edgellm_kernels.native.build builds it"
    if (folder / build.STAMP).exists():
        return f"the library in {folder} was built from other sources ({again})"
    return f"it was not built ({again})"


@functools.lru_cache(maxsize=1)
def load_library() -> NativeLibrary | None:
    """The library for this processor, loaded once per process; None if there is none that loads."""
    path = find_library()
    if path is None:
        return None
    try:
        return open_library(path)
    except (OSError, AttributeError):
        return None
