"""Runs the tests of the openai client with another version of it, in an environment made for the purpose.

    python tools/check_openai_client.py ["openai<3"]

The environment lies in a temporary folder, holds the client and what that version needs, and takes everything
else from the one that runs this. Needs the package index.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDER = "openai<3"
TESTS = ["tests/cpu/test_server_models.py", "-k", "openai_client", "-q", "-p", "no:cacheprovider"]
VERSION = "import openai; print(openai.__version__)"


def main(wanted: str) -> int:
    """The exit code of pytest; 1 when the environment would have run the client that is installed anyway."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        own = _output([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        # After the environment's own packages, so that those win.
        ours = sysconfig.get_path("purelib")
        (Path(own) / "parent.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", wanted], check=True)
        installed, tried = (_output([str(p), "-c", VERSION]) for p in (sys.executable, python))
        print(f"openai {tried} (installed here: {installed})", flush=True)
        if tried == installed:
            print(f"{wanted!r} is the version that is installed anyway", file=sys.stderr)
            return 1
        return subprocess.run([str(python), "-m", "pytest", *TESTS], cwd=ROOT, check=False).returncode


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else OLDER))
