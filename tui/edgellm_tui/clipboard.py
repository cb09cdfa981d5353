"""Copying text: a native tool where there is one, else the terminal's own clipboard (OSC 52)."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Mapping

from textual.app import App

from edgellm_tui.terminal_text import safe_text

TOOL_TIMEOUT_S = 2.0


def native_tool(environ: Mapping[str, str], platform: str = sys.platform) -> tuple[str, ...] | None:
    """The command that takes text on its standard input into the clipboard of the person's own machine.

    Over SSH there is none: a tool there would fill the clipboard of the far machine.
    """
    if environ.get("SSH_CONNECTION") or environ.get("SSH_TTY"):
        return None
    candidates: list[tuple[str, ...]] = []
    if platform == "darwin":
        candidates.append(("pbcopy",))
    if environ.get("WAYLAND_DISPLAY"):
        candidates.append(("wl-copy",))
    if environ.get("DISPLAY"):
        candidates += [("xclip", "-selection", "clipboard"), ("xsel", "--clipboard", "--input")]
    path = environ.get("PATH")
    return next((command for command in candidates if shutil.which(command[0], path=path)), None)


async def copy_text(app: App[int], text: str, environ: Mapping[str, str]) -> str:
    """Copies ``text`` (control characters made visible, for it may be pasted into a shell); says what
    happened.
    """
    text = safe_text(text)
    size = f"{len(text):,} character{'' if len(text) == 1 else 's'}"
    tool = native_tool(environ)
    if tool is not None and await _feed(tool, text):
        return f"Copied {size} with {tool[0]}"
    app.copy_to_clipboard(text)
    return f"Copied {size} (OSC 52); if nothing arrives: /save FILE"


async def _feed(tool: tuple[str, ...], text: str) -> bool:
    quiet = asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *tool, stdin=asyncio.subprocess.PIPE, stdout=quiet, stderr=quiet
        )
    except OSError:
        return False
    try:
        async with asyncio.timeout(TOOL_TIMEOUT_S):
            await process.communicate(text.encode("utf-8"))
    except (TimeoutError, OSError):
        if process.returncode is None:
            process.kill()
        return False
    return process.returncode == 0
