"""``edgellm doctor``: what this machine and installation can do, what is wrong, and what was never tried."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.main import COMMANDS, version
from edgellm.cli.options import json_option
from edgellm.cli.output import current_output, is_terminal, megabytes
from edgellm_models.errors import EdgeLLMError

OK, WARNING, PROBLEM = "ok", "warning", "problem"
LIBRARIES = ("torch", "triton", "numpy", "gguf", "safetensors", "tokenizers", "sentencepiece", "jinja2")
MORE_LIBRARIES = ("huggingface_hub", "textual", "click", "platformdirs")
TESTED_PLATFORM = ("Linux", "x86_64")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: str
    detail: str


@click.command(cls=EdgeCommand, examples=("edgellm doctor", "edgellm doctor --json"))
@json_option
def command(as_json: bool) -> int:
    """Check this machine and installation. Exit code 0 when nothing is in the way, else 1."""
    output = current_output()
    findings = list(examine())
    healthy = all(finding.status != PROBLEM for finding in findings)
    if as_json:
        output.json({"ok": healthy, "findings": findings})
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = {OK: "ok     ", WARNING: "note   ", PROBLEM: "PROBLEM"}[finding.status]
            output.data(f"{mark}  {finding.name:<{width}}  {finding.detail}")
    return 0 if healthy else 1


def examine() -> Iterator[Finding]:
    """Every check. One that fails is a finding, never an exception."""
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("versions", _versions),
        ("platform", _platform),
        ("device", _device),
        ("kernels", _kernels),
        ("compiler", _compiler),
        ("memory", _memory),
        ("folders", _folders),
        ("settings", _settings),
        ("models", _models),
        ("pip", _pip),
        ("terminal", _terminal),
    )
    for name, check in checks:
        try:
            yield from check()
        except EdgeLLMError as error:
            yield Finding(name, PROBLEM, str(error))
        except Exception as error:
            yield Finding(name, PROBLEM, f"{type(error).__name__}: {error}")


def _versions() -> Iterator[Finding]:
    from importlib import metadata

    yield Finding("edgellm", OK, f"{version()}, Python {platform.python_version()} at {sys.executable}")
    for name in (*LIBRARIES, *MORE_LIBRARIES):
        try:
            yield Finding(name, OK, metadata.version(name))
        except metadata.PackageNotFoundError:
            if name == "triton":
                yield Finding(name, OK, "not installed (only GPU kernels need it)")
            else:
                yield Finding(name, PROBLEM, f"not installed: pip install {name}")


def _platform() -> Iterator[Finding]:
    here = (platform.system(), platform.machine())
    text = f"{here[0]} {platform.release()} {here[1]}, {os.cpu_count()} CPUs"
    if here == TESTED_PLATFORM:
        yield Finding("platform", OK, text)
    else:
        yield Finding("platform", WARNING, f"{text}: never tested here; only {' '.join(TESTED_PLATFORM)} is")


def _device() -> Iterator[Finding]:
    import torch

    yield Finding("cpu", OK, f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        )
        yield Finding("cuda", OK, f"no device ({built}); nothing of ours has run on a GPU here")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        capability = ".".join(str(part) for part in torch.cuda.get_device_capability(index))
        name = torch.cuda.get_device_name(index)
        memory = f"{megabytes(free)} of {megabytes(total)} free"
        yield Finding(f"cuda:{index}", OK, f"{name}, compute capability {capability}, {memory}")


def _activations(linears: str) -> str:
    """What --activations can be, by the phrase on what runs the linears."""
    if linears.startswith("native"):
        return "int16 (16-bit integers); exact on request"
    if linears.startswith("triton"):
        return "exact; on request int16 (15 bits) or int8 for single rows, both rounded by 32"
    return "exact, nothing else"


def _kernels() -> Iterator[Finding]:
    import torch

    from edgellm_kernels import native_library
    from edgellm_kernels.registry import explain

    device = "cuda" if torch.cuda.is_available() else "cpu"
    explained = explain(device)
    for op, phrase in explained.items():
        yield Finding(f"kernel {op}", OK, f"{phrase} on {device}")
    yield Finding("activations", OK, _activations(explained["linear"]))
    library = native_library.load_library()
    if library is None:
        reason = native_library.why_missing()
        yield Finding("native library", WARNING, f"none, so torch computes, more slowly: {reason}")
    else:
        runs = native_library.runnable_libraries()
        others = [name for name in reversed(runs) if name != library.backend]
        also = f"this processor also runs {' and '.join(others)}; " if others else ""
        lacks = [name for name in native_library.built_libraries() if name not in runs]
        never = f"{' and '.join(lacks)} not run here; " if lacks else ""
        why = native_library.why_chosen(library)
        yield Finding("native library", OK, f"{library.backend} back end, {why}; {also}{never}{library.path}")
        if platform.machine().lower() not in ("x86_64", "amd64"):
            yield Finding("native silicon", WARNING, "native kernels have only ever run on x86-64")
        yield Finding(
            "fp8, int4 KV", OK, "attention on torch: the native kernels read f32, f16, bf16 and int8"
        )
        yield Finding(
            "GPTQ and AWQ",
            OK,
            "native linears on packed grids: codes of 4 bits (2 and 3 as 4) and of 8, groups of 32 n, any "
            "column order; other groups, and scales that f16 cannot hold, as f32",
        )


def _compiler() -> Iterator[Finding]:
    found = next((path for name in ("c++", "g++", "clang++", "cl") if (path := shutil.which(name))), None)
    if found is None:
        yield Finding("compiler", OK, "no C++ compiler found: only building the native kernels needs one")
        return
    try:
        shown = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=False)
        line = (shown.stdout or shown.stderr).splitlines()[:1]
    except (OSError, subprocess.TimeoutExpired):
        line = []
    yield Finding("compiler", OK, " ".join([found, *line]) + "; only building the native kernels needs it")


def _memory() -> Iterator[Finding]:
    from edgellm_models.network.hold import free_memory_bytes

    free = free_memory_bytes()
    if free is None:
        yield Finding("memory", WARNING, "this system does not say how much memory is free")
    else:
        status = OK if free >= 1_000_000_000 else WARNING
        yield Finding("memory", status, f"{megabytes(free)} free; the default model needs about 1 GB")


def _folders() -> Iterator[Finding]:
    from edgellm.locations import Locations

    locations = Locations.from_environment()
    for name in ("config", "data", "cache", "state", "runtime"):
        folder: Path = getattr(locations, name)
        place = _existing_parent(folder)
        if not os.access(place, os.W_OK | os.X_OK):
            yield Finding(name, PROBLEM, f"{folder}: {place} is not writable; EDGELLM_HOME moves all folders")
        elif folder.exists() and not folder.is_dir():
            yield Finding(name, PROBLEM, f"{folder} is a file; a folder is needed")
        else:
            yield Finding(name, OK, f"{folder}{'' if folder.exists() else ' (made when needed)'}")
    free = shutil.disk_usage(_existing_parent(locations.models)).free
    yield Finding("disk", OK if free > 2_000_000_000 else WARNING, f"{megabytes(free)} free for models")


def _existing_parent(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())


def _settings() -> Iterator[Finding]:
    from edgellm.config import BUILT_IN, EngineConfig

    resolved = EngineConfig().resolve()
    changed = [f"{name} ({origin})" for name, origin in resolved.origins.items() if origin != BUILT_IN]
    yield Finding("settings", OK, "all built-in" if not changed else "not built-in: " + ", ".join(changed))
    known = known_variables()
    unknown = sorted(name for name in os.environ if name.startswith("EDGELLM_") and name not in known)
    if unknown:
        yield Finding("environment", WARNING, f"nothing reads {', '.join(unknown)}")


def known_variables() -> set[str]:
    """Every EDGELLM_* variable that something reads: settings, switches and the options of all commands."""
    from edgellm.cli.reference import all_switches

    return {switch.name for _, switches in all_switches() for switch in switches}


def _models() -> Iterator[Finding]:
    from edgellm.cli.options import models_folder
    from edgellm_models.catalog import list_local, load_catalog

    local = list_local(models_folder())
    names = ", ".join(f"{model.name} ({megabytes(model.bytes)})" for model in local)
    yield Finding("models", OK, names or "none here yet; the default is pulled on first use")
    missing = commands_missing()
    if missing:
        yield Finding("commands", PROBLEM, f"the installation lacks {', '.join(missing)}; install it again")
    untried = [entry.name for entry in load_catalog().values() if not entry.tried]
    yield Finding(
        "untried", OK, f"models of the catalog that were never run by this project: {', '.join(untried)}"
    )


def _pip() -> Iterator[Finding]:
    import importlib.util

    if importlib.util.find_spec("pip") is None:
        yield Finding("pip", WARNING, "not in this environment: models come from the hub only")
    else:
        yield Finding("pip", OK, "can fetch models that lie in wheels")
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        yield Finding("hub", WARNING, "HF_HUB_OFFLINE is set: the hub is not asked")


def _terminal() -> Iterator[Finding]:
    term = os.environ.get("TERM", "")
    encoding = getattr(sys.stdout, "encoding", None) or "unknown"
    size = shutil.get_terminal_size()
    if not is_terminal(sys.stdout):
        yield Finding("terminal", OK, f"output is no terminal: plain text, {encoding}")
        return
    colour = "no colour (NO_COLOR)" if os.environ.get("NO_COLOR") else "colour as the terminal can"
    plain = term in ("", "dumb")
    detail = f"TERM={term or 'unset'}, {size.columns}x{size.lines}, {encoding}, {colour}"
    yield Finding("terminal", OK, detail + (": chat is line by line" if plain else ""))
    if "utf" not in encoding.lower():
        yield Finding("encoding", WARNING, f"{encoding} cannot show all characters; set a UTF-8 locale")


def commands_missing() -> list[str]:
    """Commands of the table whose module is not there (a broken installation)."""
    import importlib.util

    return [name for name, row in COMMANDS.items() if importlib.util.find_spec(row.module) is None]
