"""Runs the scripts of this folder, all or those named: python -m acceptance [NAME ...]."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from acceptance.harness import record

NOT_SCRIPTS = {
    "__init__",
    "__main__",
    "engines",
    "harness",
    "llama_cpp_server",
    "llama_cpp_slots",
    "llama_cpp_tools",
    "native_ops",
    "quality_text",
    "random_shapes",
    "twin_loss",
}


def main() -> int:
    known = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in NOT_SCRIPTS)
    wanted = sys.argv[1:] or known
    for name in wanted:
        if name not in known:
            sys.exit(f"there is no figure script {name!r}; there are: {', '.join(known)}")
    met = True
    for name in wanted:
        print(f"-- {name}", flush=True)
        met &= record(name, importlib.import_module(f"acceptance.{name}").run())
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
