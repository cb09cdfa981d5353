"""Shows that constraints.txt also resolves for the CUDA build of torch: a dry run on metadata.

    python tools/check_constraints.py [3.11 3.12 ...]

Needs a network and a pip of 24 or newer. Settings of this machine that could serve another build of torch
(pip.conf, find-links) are left out of the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INDEX = "https://pypi.org/simple"


def check(python_version: str) -> list[str]:
    """What pip would install for ``python_version`` on x86-64 Linux; exits with pip's words if it cannot."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") or k == "PIP_CERT"}
    with tempfile.TemporaryDirectory() as target:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--use-feature=fast-deps", "--only-binary=:all:", "--index-url", INDEX, "--report", "-"]
        command += ["--python-version", python_version, "--implementation", "cp", "--target", target]
        # pip takes a platform literally: older glibc tags, which the wheels also carry, must be listed.
        for glibc in range(5, 36):
            command += ["--platform", f"manylinux_2_{glibc}_x86_64"]
        command += ["--platform", "manylinux2014_x86_64", "-c", str(ROOT / "constraints.txt"), *wanted]
        done = subprocess.run(
            command, env=kept | {"PIP_CONFIG_FILE": os.devnull}, capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        sys.exit(f"Python {python_version}: constraints.txt does not resolve\n{done.stderr}")
    report = json.loads(done.stdout)
    return [f"{item['metadata']['name']}=={item['metadata']['version']}" for item in report["install"]]


def main() -> None:
    for version in sys.argv[1:] or ["3.11", "3.12", "3.13", "3.14"]:
        packages = check(version)
        cuda = [name for name in packages if name.startswith(("nvidia-", "cuda-"))]
        key = [name for name in packages if name.startswith(("torch==", "triton=="))]
        print(f"Python {version}: {len(packages)} packages, {len(cuda)} of CUDA, {', '.join(key)}")
        if not cuda:
            sys.exit("that was no CUDA build of torch")


if __name__ == "__main__":
    main()
