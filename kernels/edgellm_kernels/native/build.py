"""Compiles the native kernel library with the system's C++ compiler: once per instruction set.

Standard library only: ``setup.py`` loads this file before anything is installed. ``python -m
edgellm_kernels.native.build`` builds in place, into a folder beside the sources that version control ignores.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
BUILT = "built"
"""Folder beside the sources that holds the libraries, or the reason why there are none."""
REASON = "reason.txt"
STAMP = "sources.txt"
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno")
WARNING_FLAGS = ("-Wall", "-Wextra", "-Wno-psabi")
_AVX2 = ("-DEDGELLM_AVX2", "-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=256")
X86_BACKENDS = {"avx2": _AVX2, "avx512vnni": (*_AVX2, "-DEDGELLM_VNNI", *_AVX512)}
"""From the plainest on; the same bits, so that a processor's age shows in nothing but speed."""
COMPILE_TIMEOUT_S = 1800
"""Of one source. Seconds on a free machine; one that is busy must not cost the user the library."""


class BuildError(RuntimeError):
    """The library could not be compiled; the message says why, in one line."""


def backends() -> dict[str, tuple[str, ...]]:
    """Instruction sets that are compiled for this machine's architecture, each with its flags."""
    machine = platform.machine().lower()
    extra = X86_BACKENDS if machine in ("x86_64", "amd64") else {}
    return {"portable": (), **extra}


def library_name(backend: str) -> str:
    return f"libedgellm_{backend}.so"


def source_stamp(sources: Path = SOURCES) -> str:
    """A digest of everything the libraries are made of: sources, headers and flags."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, backends())).encode())
    for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def is_fresh(folder: Path, sources: Path = SOURCES) -> bool:
    """Whether the folder holds libraries that were built from these very sources."""
    try:
        stamp = (folder / STAMP).read_text().strip()
    except OSError:
        return False
    built = all((folder / library_name(backend)).is_file() for backend in backends())
    return built and stamp == source_stamp(sources)


def find_compiler() -> list[str]:
    """$CXX, which may hold arguments, or the first compiler that is there. BuildError if there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        if shutil.which(named[0]) is None:
            raise BuildError(f"the compiler that CXX names, {named[0]}, was not found")
        return named
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler was found (c++, g++ or clang++); CXX names another one")


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{what} failed: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        first = (lines or done.stderr.splitlines() or [f"exit code {done.returncode}"])[0]
        raise BuildError(f"{what} failed: {first.strip()[:500]}")


def _with_headers(source: Path) -> bytes:
    """The text of a source and of every header beside it that it includes, directly or not."""
    texts: dict[str, bytes] = {}
    open_names = [source.name]
    while open_names:
        name = open_names.pop()
        path = source.parent / name
        if name not in texts and path.is_file():
            texts[name] = path.read_bytes()
            open_names += re.findall(r'#\s*include\s+"([^"]+)"', texts[name].decode("utf-8", "replace"))
    return b"".join(name.encode() + b"\0" + texts[name] for name in sorted(texts))


def _object(compiler: list[str], flags: list[str], source: Path, folder: Path) -> Path:
    """The object file of one source; one that was made from the same text and flags is taken as it is."""
    digest = hashlib.sha256(repr((compiler, flags)).encode() + _with_headers(source)).hexdigest()
    target = folder / f"{source.stem}-{digest[:24]}.o"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        _run([*compiler, *flags, "-c", str(source), "-o", str(partial)], f"compiling {source.name}")
        partial.replace(target)
    return target


def compile_libraries(
    target: Path, sources: Path = SOURCES, objects: Path | None = None, extra: tuple[str, ...] = ()
) -> None:
    """Compile and link every back end into ``target``, each file renamed into place when it is whole.

    ``objects`` keeps object files between builds; ``extra`` flags go to compiler and linker. BuildError if
    that fails.
    """
    compiler = find_compiler()
    stamp = source_stamp(sources)
    files = sorted(sources.glob("*.cpp"))
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = objects or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            jobs = {}
            for backend, flags in backends().items():
                options = [*COMMON_FLAGS, *WARNING_FLAGS, *flags, *extra]
                jobs[backend] = [pool.submit(_object, compiler, options, f, folder) for f in files]
            made = {backend: [str(job.result()) for job in row] for backend, row in jobs.items()}
        for backend, objects_made in made.items():
            partial = target / f"{library_name(backend)}.{os.getpid()}.tmp"
            link = [*compiler, "-shared", "-pthread", *extra, *objects_made, "-o", str(partial)]
            _run(link, f"linking {library_name(backend)}")
            partial.replace(target / library_name(backend))
    _write(target / STAMP, stamp)
    (target / REASON).unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(text + "\n")
    partial.replace(path)


def build_or_explain(target: Path, sources: Path = SOURCES, objects: Path | None = None) -> str | None:
    """Build into ``target`` unless it is fresh. None, or the reason of the failure, which is kept there too.

    An installation goes on without the library: torch computes then, more slowly.
    """
    if is_fresh(target, sources):
        return None
    beside = sources / BUILT
    if is_fresh(beside, sources):
        target.mkdir(parents=True, exist_ok=True)
        for name in (*map(library_name, backends()), STAMP):
            shutil.copy2(beside / name, target / name)
        return None
    try:
        compile_libraries(target, sources, objects)
    except BuildError as error:
        target.mkdir(parents=True, exist_ok=True)
        for name in (*map(library_name, backends()), STAMP):
            (target / name).unlink(missing_ok=True)
        _write(target / REASON, str(error))
        return str(error)
    return None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time, where the system has such locks; a process that dies lets go."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_in_place() -> str | None:
    """Build beside the sources, for a tree that is used without an installation; see build_or_explain."""
    if is_fresh(SOURCES / BUILT):
        return None  # without waiting for a build of another tree
    objects = Path(tempfile.gettempdir()) / f"edgellm-native-objects-{os.getuid()}"
    objects.mkdir(mode=0o700, exist_ok=True)
    if objects.stat().st_uid != os.getuid():
        return build_or_explain(SOURCES / BUILT)
    with _alone(objects / "lock"):  # test runs beside each other compile once
        return build_or_explain(SOURCES / BUILT, objects=objects)


def main() -> int:
    reason = build_in_place()
    print(reason or f"built in {SOURCES / BUILT}")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
