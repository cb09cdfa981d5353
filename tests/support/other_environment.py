"""An environment for a program or a version that is not a dependency: made for the purpose, then gone."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def make_environment(folder: Path, *requirements: str) -> Path:
    """Installs into a new environment in ``folder`` what is asked for; the folder of its programs.

    Everything else comes from the environment that runs this, behind the new one's own packages. Needs the
    package index; CalledProcessError without it.
    """
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if sys.platform == "win32" else "bin")
    python = str(programs / "python")
    own = output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
    ours = sysconfig.get_path("purelib")
    (Path(own) / "parent.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
    return programs


def output(command: list[str]) -> str:
    """What a command prints. CalledProcessError when it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
