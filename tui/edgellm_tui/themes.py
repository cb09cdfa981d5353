"""The screen's own two colour themes, and the one that was chosen last."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from textual.theme import Theme

MAX_NAME_BYTES = 200


def load_theme(path: Path) -> str:
    """The name of the theme that was chosen last; empty where none was, or the file cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_NAME_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def save_theme(path: Path, name: str) -> None:
    """Keeps the name; a disk that refuses costs only this convenience."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(name + "\n", encoding="utf-8")
        part.replace(path)


DARK = Theme(
    name="edgellm-dark",
    primary="#6cc3a6",
    secondary="#8aa9d6",
    accent="#e0a458",
    warning="#e0b458",
    error="#e2777a",
    success="#7cc98f",
    foreground="#d8dee3",
    background="#12161a",
    surface="#181e24",
    panel="#222a32",
    dark=True,
    variables={"footer-key-foreground": "#6cc3a6", "input-selection-background": "#6cc3a6 35%"},
)

LIGHT = Theme(
    name="edgellm-light",
    primary="#1f7a5f",
    secondary="#38609c",
    accent="#a8641a",
    warning="#8f6206",
    error="#b03a3e",
    success="#2b7d43",
    foreground="#22282d",
    background="#fbfaf7",
    surface="#f2f0ea",
    panel="#e6e3da",
    dark=False,
    variables={"footer-key-foreground": "#1f7a5f", "input-selection-background": "#1f7a5f 30%"},
)
