"""Numbers as the screen writes them."""

from __future__ import annotations

from pathlib import Path


def count_text(count: int) -> str:
    """12345 as 12,345."""
    return f"{count:,}"


def parameters_text(parameters: int) -> str:
    """134515008 as 135M; empty for 0."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= 0.9995 * size:
            value = parameters / size
            return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"
    return str(parameters) if parameters else ""


def seconds_text(seconds: float) -> str:
    """0.184 as 184 ms, 1.84 as 1.84 s, 75 as 1:15."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


def rate_text(per_second: float) -> str:
    """41.23 as 41.2, 412.3 as 412."""
    return f"{per_second:.1f}" if per_second < 100 else f"{per_second:.0f}"


def path_text(path: Path, cells: int = 40) -> str:
    """The end of a path, which names the file, in at most ``cells`` characters."""
    text = str(path)
    return text if len(text) <= cells else f"…{text[1 - cells :]}"


def meter(share: float, cells: int) -> str:
    """A bar of ``cells`` characters of which ``share`` is filled; any use at all shows."""
    filled = min(cells, max(1 if share > 0 else 0, round(share * cells)))
    return "▰" * filled + "▱" * (cells - filled)
