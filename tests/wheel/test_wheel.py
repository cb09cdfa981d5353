"""The wheel holds all of ours and nothing else, and works with nothing but its dependencies beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = [
    ROOT / "edgellm",
    ROOT / "kernels" / "edgellm_kernels",
    ROOT / "models" / "edgellm_models",
    ROOT / "quantize" / "edgellm_quantize",
    ROOT / "tui" / "edgellm_tui",
]
LEFT_OUT = {"__pycache__"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree, so that no build folder is left in it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ["pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY.md", "setup.py", "MANIFEST.in"]:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in ["edgellm", "kernels", "models", "quantize", "tui"]:
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it; the dependencies are lent by the environment of the tests."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--force-reinstall",  # a checkout on PYTHONPATH looks installed
        str(wheel),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    site = next((folder / "lib").glob("python*/site-packages"))
    # A plain path line: the lent folder's own .pth files (an editable edgellm among them) are not processed.
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def run(installed: Path, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "EDGELLM_HOME": str(home), "HOME": str(home), "LANG": "C.UTF-8"}
    return subprocess.run(
        [str(installed / "bin" / arguments[0]), *arguments[1:]],
        capture_output=True,
        text=True,
        env=environment,
        cwd=home,
        timeout=120,
    )


def test_only_our_packages_are_inside(wheel: Path) -> None:
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    ours = {folder.name for folder in PACKAGE_FOLDERS}
    assert {name for name in top if not name.endswith(".dist-info")} == ours


def test_every_file_is_inside(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder in PACKAGE_FOLDERS:
        for path in folder.rglob("*"):
            if path.is_file() and not LEFT_OUT & set(path.parts):
                assert f"{folder.name}/{path.relative_to(folder).as_posix()}" in inside, path


def test_licences_are_inside(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for licence in ("LICENSE", "THIRD_PARTY.md"):
        assert any(name.endswith(f".dist-info/licenses/{licence}") for name in names)


def test_importing_is_light(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys, edgellm, edgellm_kernels, edgellm_models, edgellm_quantize, edgellm_tui\n"
        "print(edgellm.__file__)\n"
        "print(sorted({'torch', 'triton', 'textual', 'numpy'} & set(sys.modules)))"
    )
    done = run(installed, "python", "-c", code, home=tmp_path)
    assert done.returncode == 0, done.stderr
    where, heavy = done.stdout.splitlines()
    assert Path(where).is_relative_to(installed), "the test ran the clone, not the wheel"
    assert heavy == "[]"


def test_show_works_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "edgellm", "show", "smollm2-135m", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "SmolLM2" in done.stdout and "llama" in done.stdout
