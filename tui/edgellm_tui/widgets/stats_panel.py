"""The live panel: speed, context, cache and queue, drawn from one snapshot of polled counters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from edgellm.contracts import DraftCounts, EngineStats, GpuUse
from edgellm_tui.live import (
    History,
    acceptance,
    bytes_text,
    context_level,
    kv_cells,
    tokens_per_step,
)
from edgellm_tui.terminal_text import safe_line
from edgellm_tui.widgets.figures import count_text, meter, rate_text, seconds_text
from edgellm_tui.widgets.status_line import CONTEXT_STYLES, Part, fit

STATE_STYLES = {
    "used": "$primary",
    "shared": "$secondary",
    "cached": "$accent",
    "free": "dim",
    "evicted": "$error",
}
WIDE_CELLS = 30
MAP_ROWS = 4
SHORT_LINES = 2
"""Of the strip, in a window with few lines."""


@dataclass(frozen=True)
class Snapshot:
    """Everything the panel shows, as of one poll. None is what nobody knows."""

    now: float | None = None
    """Tokens committed in the last second."""
    answer: float | None = None
    """Tokens per second over the answer, without its first token."""
    ttft_s: float | None = None
    first_thought_s: float | None = None
    interval_p50_s: float | None = None
    interval_p95_s: float | None = None
    prefill_done: int = 0
    prefill_total: int = 0
    prefill_cached: int = 0
    prefill_rate: float | None = None
    context_used: int = 0
    context_length: int = 0
    draft: DraftCounts = field(default_factory=DraftCounts)
    draft_off: str = ""
    """Why nothing is drafted, where that is known."""
    drafter: str = ""
    """What drafts."""
    stats: EngineStats = field(default_factory=EngineStats)
    queue_position: int = 0


def _row(name: str, value: str, style: str = "") -> Content:
    return Content.assemble((f"{name:<12}", "dim"), (value, style) if style else value)


def _rates(snap: Snapshot) -> list[tuple[str, str]]:
    dash = "–"
    now = f"{rate_text(snap.now)} tok/s" if snap.now is not None else dash
    answer = f"{rate_text(snap.answer)} tok/s" if snap.answer is not None else dash
    return [("now", now), ("answer", answer)]


def _spread(snap: Snapshot) -> str:
    if snap.interval_p50_s is None or snap.interval_p95_s is None:
        return ""
    return f"{snap.interval_p50_s * 1000:.0f} / {snap.interval_p95_s * 1000:.0f} ms"


def _draft_text(snap: Snapshot) -> str:
    share = acceptance(snap.draft.accepted, snap.draft.proposed)
    if share is None:
        return "off" if snap.draft_off else "none"
    return f"{count_text(snap.draft.accepted)} of {count_text(snap.draft.proposed)} ({share:.0%})"


def _draft_rows(snap: Snapshot, cells: int) -> list[Content]:
    draft = snap.draft
    rows = [_row("drafted by", safe_line(snap.drafter))] if snap.drafter else []
    rows.append(_row("drafts", _draft_text(snap)))
    per_step = tokens_per_step(draft.accepted, draft.steps)
    if acceptance(draft.accepted, draft.proposed) is not None and per_step is not None:
        rows.append(_row("per step", f"{per_step:.2f} tokens"))
    if snap.draft_off:
        rows += [line.stylize("dim italic") for line in Content(safe_line(snap.draft_off)).wrap(cells)]
    return rows


def _gpu_text(gpu: GpuUse) -> str:
    """How busy it is, how warm, and what that takes, as far as it is known."""
    parts = [f"{gpu.busy:.0%}"] if gpu.busy is not None else []
    parts += [f"{gpu.celsius:.0f} °C"] if gpu.celsius is not None else []
    parts += [f"{gpu.watts:.0f} W"] if gpu.watts is not None else []
    return ", ".join(parts)


def _gpu_rows(gpu: GpuUse | None) -> list[Content]:
    """Nothing where there is none."""
    if gpu is None:
        return []
    memory = f"{bytes_text(gpu.memory_used_bytes)} / {bytes_text(gpu.memory_total_bytes)}"
    rows = [_row("GPU", _gpu_text(gpu))] if _gpu_text(gpu) else []
    return [*rows, _row("its memory", memory)]


def _map(snap: Snapshot, cells: int, rows: int) -> list[Content]:
    runs = kv_cells(snap.stats.kv_blocks, cells * rows)
    if not runs:
        return []
    marks = [(mark, STATE_STYLES[state]) for state, text in runs for mark in text]
    lines = [marks[at : at + cells] for at in range(0, len(marks), cells)]
    return [Content.assemble(*line) for line in lines]


def _map_legend(snap: Snapshot) -> list[Content]:
    marks = {state: text[0] for state, text in kv_cells(snap.stats.kv_blocks, 10_000)}
    return [
        Content.assemble(
            (marks[state], STATE_STYLES[state]),
            f" {state} ",
            (count_text(snap.stats.kv_blocks[state]), "dim"),
        )
        for state in marks
    ]


def wide_lines(snap: Snapshot, history: History, cells: int, map_rows: int = MAP_ROWS) -> list[Content]:
    """The panel beside the conversation."""
    head = "bold $primary"
    lines = [Content.styled("Speed", head), *(_row(*pair) for pair in _rates(snap))]
    lines.append(Content.styled(history.line(cells), "$primary"))
    if snap.first_thought_s is not None:
        lines.append(_row("first thought", " " + seconds_text(snap.first_thought_s)))
    lines.append(_row("first token", seconds_text(snap.ttft_s) if snap.ttft_s is not None else "–"))
    if _spread(snap):
        lines.append(_row("p50 / p95", _spread(snap)))
    lines += [Content(""), Content.styled("Prompt", head)]
    if snap.prefill_total:
        lines.append(Content.styled(meter(snap.prefill_done / snap.prefill_total, cells), "$secondary"))
        lines.append(_row("read", f"{count_text(snap.prefill_done)} / {count_text(snap.prefill_total)}"))
        lines.append(_row("from cache", count_text(snap.prefill_cached)))
        if snap.prefill_rate:
            lines.append(_row("speed", f"{rate_text(snap.prefill_rate)} tok/s"))
    else:
        lines.append(_row("read", "–"))
    if snap.context_length:
        share = snap.context_used / snap.context_length
        style = CONTEXT_STYLES[context_level(snap.context_used, snap.context_length)]
        shown = "$primary" if style == "dim" else style
        figures = f"{count_text(snap.context_used)} / {count_text(snap.context_length)}"
        lines += [
            Content(""),
            Content.styled("Context", head),
            Content.styled(meter(share, cells), shown),
            _row(f"{share:.0%}", figures, "" if style == "dim" else style),
        ]
    grid = _map(snap, cells, map_rows)
    if grid:
        lines += [Content(""), Content.styled("Cache", head), *grid]
        legend = _map_legend(snap)
        for at in range(0, len(legend), 2):
            pair = legend[at : at + 2]
            left = pair[0].pad_right(max(0, cells // 2 - pair[0].cell_length))
            lines.append(Content.assemble(left, *pair[1:]))
    lines += [Content(""), Content.styled("Engine", head), *_draft_rows(snap, cells)]
    stats = snap.stats
    if stats.weight_bytes:
        lines.append(_row("weights", bytes_text(stats.weight_bytes)))
    if stats.kv_bytes:
        lines.append(_row("cache", bytes_text(stats.kv_bytes)))
    if stats.time:
        queue = f"{stats.running} run, {stats.waiting} wait"
        lines.append(_row("requests", queue))
        if snap.queue_position:
            lines.append(_row("your place", str(snap.queue_position)))
        lines.append(_row("runs on", safe_line(f"{stats.device}, {stats.kernel_backend}")))
    return [*lines, *_gpu_rows(stats.gpu)]


def narrow_lines(snap: Snapshot, history: History, cells: int) -> list[Content]:
    """The panel as a strip above the prompt: the same figures in few lines; what has no room is left out,
    the least important first."""
    now, answer = (f"{name} {value}" for name, value in _rates(snap))
    speed = [Part(Content(now)), Part(Content(answer), 2)]
    if snap.ttft_s is not None:
        speed.append(Part(Content.assemble(("first token ", "dim"), seconds_text(snap.ttft_s)), 3))
    spark = Part(Content.styled(history.line(max(8, cells // 4)), "$primary"), 1)
    prompt: list[Part] = []
    if snap.context_length:
        style = CONTEXT_STYLES[context_level(snap.context_used, snap.context_length)]
        share = snap.context_used / snap.context_length
        prompt.append(Part(Content.styled(f"context {share:.0%}", style)))
    read = f"read {count_text(snap.prefill_done)} / {count_text(snap.prefill_total)}"
    prompt.append(Part(Content(read), 1))
    prompt.append(Part(Content.styled(f"{count_text(snap.prefill_cached)} from cache", "dim"), 2))
    lines = [fit([*speed, spark], [], cells, gap="  "), fit(prompt, [], cells, gap="  ")]
    grid = _map(snap, max(8, cells // 3), 1)
    if grid:
        # What was evicted is told before what is free.
        legend = [Part(entry, rank) for entry, rank in zip(_map_legend(snap), (1, 3, 4, 5, 2), strict=False)]
        lines.append(fit([Part(grid[0]), *legend], [], cells, gap="  "))
    stats = snap.stats
    engine = [
        Part(Content(f"drafts {_draft_text(snap)}"), 1),
        Part(Content.styled(f"weights {bytes_text(stats.weight_bytes)}", "dim"), 3),
        Part(Content.styled(f"cache {bytes_text(stats.kv_bytes)}", "dim"), 2),
        Part(Content.styled(f"{stats.running} running, {stats.waiting} waiting", "dim"), 4),
    ]
    if stats.gpu is not None:
        share = stats.gpu.memory_used_bytes / stats.gpu.memory_total_bytes
        busy = f"GPU {_gpu_text(stats.gpu)}, " if _gpu_text(stats.gpu) else "GPU "
        engine.insert(0, Part(Content(f"{busy}memory {share:.0%}")))
    return [*lines, fit(engine, [], cells, gap="  ")]


def _timeless(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, stats=replace(snapshot.stats, time=1.0 if snapshot.stats.time else 0.0))


class StatsPanel(Widget):
    """Draws the newest snapshot; ``show`` is called four times a second at most, and by nothing per token."""

    snapshot: reactive[Snapshot] = reactive(Snapshot, layout=False)

    def __init__(self) -> None:
        super().__init__()
        self.history = History()

    def show(self, snapshot: Snapshot, *, sample: bool) -> None:
        """``sample``: an answer is being written, so that its rate belongs into the sparkline."""
        if sample:
            self.history.add(snapshot.now or 0.0)
        same = not sample and _timeless(snapshot) == _timeless(self.snapshot)
        self.set_reactive(StatsPanel.snapshot, snapshot)
        if self.display and not same:  # at rest nothing is drawn
            self.refresh()

    def render(self) -> Content:
        cells = max(8, self.content_size.width)
        if self.has_class("-strip"):
            lines = narrow_lines(self.snapshot, self.history, cells)
            if self.screen.has_class("-short"):
                lines = lines[:SHORT_LINES]
        else:
            lines = wide_lines(self.snapshot, self.history, cells)
            if len(lines) > self.content_size.height:
                lines = wide_lines(self.snapshot, self.history, cells, map_rows=1)
            if len(lines) > self.content_size.height:
                lines = [line for line in lines if line.plain]
        return Content("\n").join(line.truncate(cells, ellipsis=True) for line in lines)
