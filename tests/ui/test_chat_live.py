"""The live figures are what their definitions say, and the panel shows them in words and in colours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from textual.content import Content

from edgellm.contracts import DraftCounts, EngineStats, GpuUse
from edgellm_tui.live import (
    History,
    Intervals,
    RateWindow,
    acceptance,
    bytes_text,
    context_level,
    kv_cells,
    share_cells,
    tokens_per_step,
)
from edgellm_tui.stream_worker import ReplyProgress
from edgellm_tui.widgets.stats_panel import Snapshot, narrow_lines, wide_lines


def test_now_is_the_tokens_of_the_last_second_whatever_their_bursts() -> None:
    even, bursts = RateWindow(), RateWindow()
    for step in range(1, 201):
        even.add(step / 50, 1)
    for step in range(1, 41):
        bursts.add(step / 10, 5)
    assert even.rate(4.0) == bursts.rate(4.0) == 50.0
    assert even.rate(4.5) == pytest.approx(25.0, abs=1.0)
    assert even.rate(6.0) == 0.0


def test_now_is_not_told_before_a_second_has_passed() -> None:
    window = RateWindow()
    window.add(10.0, 8)
    assert window.rate(10.01) is None
    assert window.rate(10.99) is None
    assert window.rate(11.0) == 0.0


def test_the_window_holds_one_second_only() -> None:
    window = RateWindow()
    for step in range(10_000):
        window.add(step / 100, 1)
    assert len(window._events) <= 101


def test_a_burst_counts_as_its_tokens_with_an_equal_part_of_the_interval() -> None:
    intervals = Intervals()
    intervals.add(0.0, 1)
    intervals.add(0.4, 4)  # four tokens of 0.1 s
    intervals.add(0.9, 1)  # one of 0.5 s
    assert intervals.percentile(0.50) == pytest.approx(0.1)
    assert intervals.percentile(0.80) == pytest.approx(0.1)
    assert intervals.percentile(0.95) == pytest.approx(0.5)
    assert Intervals().percentile(0.5) is None


def test_first_token_and_rate_of_the_answer() -> None:
    progress = ReplyProgress(tokens=21, started_at=10.0, first_token_at=10.25, last_token_at=12.25)
    assert progress.ttft_s == 0.25
    assert progress.tokens_per_s == 10.0  # the first token belongs to the prompt
    assert ReplyProgress(tokens=1, first_token_at=1.0, last_token_at=1.0).tokens_per_s is None


def test_acceptance_and_tokens_per_step() -> None:
    assert acceptance(30, 40) == 0.75
    assert acceptance(0, 0) is None
    assert tokens_per_step(30, 10) == 4.0  # three accepted and the verifier's own
    assert tokens_per_step(0, 0) is None


@pytest.mark.parametrize(
    ("used", "level"),
    [(0, "ok"), (749, "ok"), (750, "warning"), (899, "warning"), (900, "alarm"), (1000, "alarm")],
)
def test_context_levels(used: int, level: str) -> None:
    assert context_level(used, 1000) == level
    assert context_level(used, 0) == "ok"


@pytest.mark.parametrize("counts", [(1, 0, 0, 9999, 0), (3, 5, 7, 11, 13), (1, 1, 1, 1, 1), (0, 0, 0, 50, 0)])
@pytest.mark.parametrize("cells", [5, 30, 120])
def test_map_fills_its_cells_and_hides_nobody(counts: tuple[int, ...], cells: int) -> None:
    given = share_cells(counts, cells)
    assert sum(given) == cells
    for count, part in zip(counts, given, strict=True):
        assert (part > 0) == (count > 0)


def test_shared_blocks_are_a_part_of_those_in_use() -> None:
    runs = dict(kv_cells({"used": 10, "shared": 4, "cached": 3, "free": 2, "evicted": 1, "host": 9}, 100))
    assert {state: len(text) for state, text in runs.items()} == {
        "used": 6, "shared": 4, "cached": 3, "free": 2, "evicted": 1,
    }  # fmt: skip
    assert len({text[0] for text in runs.values()}) == 5  # told apart without colours


def test_sparkline_has_one_bar_per_poll_with_the_newest_on_the_right() -> None:
    history = History()
    for rate in (0.0, 50.0, 100.0):
        history.add(rate)
    assert history.line(5) == "  ▁▄█"
    for _ in range(500):
        history.add(1.0)
    assert len(history.samples) == 120


def test_sizes() -> None:
    assert [bytes_text(n) for n in (0, 999, 98_000_000, 1_500_000_000)] == [
        "0 B",
        "999 B",
        "98.0 MB",
        "1.5 GB",
    ]


SNAPSHOT = Snapshot(
    now=42.0,
    answer=40.3,
    ttft_s=0.184,
    prefill_done=1024,
    prefill_total=2048,
    prefill_cached=256,
    context_used=7500,
    context_length=8192,
    draft=DraftCounts(40, 30, 10),
    stats=EngineStats(
        time=1.0, running=2, waiting=1,
        kv_blocks={"used": 40, "shared": 8, "cached": 20, "free": 60, "evicted": 3},
        weight_bytes=98_000_000, kv_bytes=380_000_000,
    ),
)  # fmt: skip


@pytest.mark.parametrize(("lines", "cells"), [(wide_lines, 30), (narrow_lines, 120)])
def test_panel_shows_every_figure(lines, cells: int) -> None:  # type: ignore[no-untyped-def]
    page = "\n".join(line.plain for line in lines(SNAPSHOT, History(), cells))
    for part in (
        "42.0 tok/s",
        "40.3 tok/s",
        "184 ms",
        "1,024 / 2,048",
        "256",
        "92%",
        "30 of 40 (75%)",
        "98.0 MB",
    ):
        assert part in page, part
    for state in ("used", "shared", "cached", "free", "evicted"):
        assert state in page


def test_panel_says_why_nothing_is_drafted() -> None:
    page = "\n".join(
        line.plain for line in wide_lines(Snapshot(draft_off="drafting does not pay here"), History(), 30)
    )
    assert "drafting does not pay here" in page


def test_panel_shows_the_gpu_where_there_is_one() -> None:
    def page(gpu: GpuUse | None, lines: Callable[..., list[Content]], cells: int) -> str:
        shown = replace(SNAPSHOT, stats=replace(SNAPSHOT.stats, gpu=gpu))
        return "\n".join(line.plain for line in lines(shown, History(), cells))

    whole = GpuUse(5_100_000_000, 12_000_000_000, 0.63, 143.4, 71.0)
    wide = page(whole, wide_lines, 30)
    assert "GPU         63%, 71 °C, 143 W" in wide and "5.1 GB / 12.0 GB" in wide
    assert max(len(line) for line in wide.split("\n")) <= 30
    assert "GPU 63%, 71 °C, 143 W, memory 42%" in page(whole, narrow_lines, 120)
    little = GpuUse(5_100_000_000, 12_000_000_000)
    assert "5.1 GB / 12.0 GB" in page(little, wide_lines, 30)
    assert "%" not in page(little, wide_lines, 30).split("5.1 GB")[0].split("runs on")[1]
    assert "GPU memory 42%" in page(little, narrow_lines, 120)
    for lines, cells in ((wide_lines, 30), (narrow_lines, 120)):
        assert "GPU" not in page(None, lines, cells)


def test_steps_that_are_read_in_one_go_are_one_burst() -> None:
    """A busy screen reads what waited for it: no interval of nothing."""
    intervals = Intervals()
    for second in range(3):
        for place in range(10):
            intervals.add(second + place * 1e-5, 1)
    assert intervals.percentile(0.5) == pytest.approx(0.1) == intervals.percentile(0.95)
