"""`make acceptance` runs every script of acceptance/: each is one, or is known to be none."""

from __future__ import annotations

import ast
from pathlib import Path

from acceptance.__main__ import NOT_SCRIPTS
from acceptance.harness import ROOT


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_file_has_figures_or_is_none() -> None:
    files = {path.stem: functions(path) for path in (ROOT / "acceptance").glob("*.py")}
    assert {name for name, found in files.items() if "run" in found} == files.keys() - NOT_SCRIPTS
