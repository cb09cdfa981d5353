"""Writes the generated pages of docs/, or with --check says which are out of date (exit 1)."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "kernels/edgellm_kernels": "tensor operations",
    "models/edgellm_models": "what a model is: files, network, tokenizer, template, catalog",
    "edgellm": "the runtime: cache, engine, chat, commands",
    "quantize/edgellm_quantize": "the offline toolkit",
    "tui/edgellm_tui": "the chat screen",
}
BEGIN, END = "<!-- generated: rooms -->", "<!-- end -->"
NOTE = "<!-- Written by `make docs`; change the source instead. -->\n"


def rooms() -> str:
    """One line per module: its file and the responsibility that its docstring states."""
    lines = []
    for folder, purpose in PACKAGES.items():
        lines += [f"### `{folder}/`: {purpose}", "", "| file | responsibility |", "|---|---|"]
        for path in sorted((ROOT / folder).rglob("*.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            name = path.relative_to(ROOT / folder).as_posix()
            if docstring:
                lines.append(f"| `{name}` | {docstring.splitlines()[0]} |")
            elif path.name != "__init__.py":
                sys.exit(f"{path} does not say what it is responsible for")
        lines.append("")
    return "\n".join(lines)


def structure(old: str) -> str:
    return _between(old, BEGIN, f"{rooms()}\n")


def formats(old: str) -> str:
    """The table of docs/formats.md."""
    import format_table

    return _between(old, "<!-- generated: outputs -->", f"{format_table.table()}\n\n")


def _between(old: str, begin: str, made: str) -> str:
    head, _, rest = old.partition(begin)
    _, _, tail = rest.partition(END)
    return f"{head}{begin}\n\n{made}{END}{tail}"


def command_line() -> str:
    from edgellm.cli.reference import cli_markdown

    return cli_markdown()


def environment() -> str:
    from edgellm.cli.reference import env_markdown

    return env_markdown()


def benchmarks() -> str:
    """The newest row of every figure, by script."""
    parts = [
        "# Measured figures",
        "",
        NOTE,
        "Each row is the newest run of a script in acceptance/ (`make acceptance` runs them all); older runs",
        "stay in docs/benchmarks/. Machines are noisy: a speed counts as a ratio to a peer in the same run.",
        "",
    ]
    for path in sorted((ROOT / "docs" / "benchmarks").glob("*.json")):
        newest: dict[str, dict[str, Any]] = {}
        for row in json.loads(path.read_text(encoding="utf-8")):
            newest[row["name"]] = row
        parts += [f"## {path.stem.replace('_', ' ')}", ""]
        parts += [
            "| figure | value | promised | peer, same run | commit | date |",
            "|---|---|---|---|---|---|",
        ]
        for name, row in newest.items():
            value = f"{row['value']:.4g}" if isinstance(row["value"], float) else row["value"]
            value = f"{value} {row['unit']}".strip() + ("" if row["met"] else " (missed)")
            parts.append(
                f"| {name} | {value} | {row['promise']} | {row['peer'] or '-'} "
                f"| {row['commit']} | {row['date']} |"
            )
        machines = sorted({row["machine"] for row in newest.values()})
        parts += ["", f"Measured on: {'; '.join(machines)}.", ""]
        if path.stem == "quantize_quality":
            parts += ["![KL divergence from the twin over bits per weight](quality.svg)", ""]
    return "\n".join(parts)


def quality_plot() -> str:
    """KL divergence over bits per weight."""
    import plot_quality

    return plot_quality.plot(json.loads(plot_quality.SOURCE.read_text(encoding="utf-8")))


def main() -> int:
    pages = {
        "docs/structure.md": structure,
        "docs/formats.md": formats,
        "docs/cli.md": lambda old: command_line(),
        "docs/env.md": lambda old: environment(),
        "docs/benchmarks.md": lambda old: benchmarks(),
        "docs/quality.svg": lambda old: quality_plot(),
    }
    stale = []
    for name, page in pages.items():
        path = ROOT / name
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        new = page(old).rstrip() + "\n"
        if new != old:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"out of date: {', '.join(stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
