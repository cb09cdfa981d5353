"""Gathers one snapshot for the panel from the answer in progress, the engine's counters and the last end."""

from __future__ import annotations

import time

from edgellm.contracts import DraftCounts, EngineStats, Finished, ModelInfo
from edgellm_models.errors import Notice
from edgellm_tui.stream_worker import ReplyProgress
from edgellm_tui.widgets.reply import first_token_s
from edgellm_tui.widgets.stats_panel import Snapshot

DRAFT_NOTICES = ("spec", "draft", "speculation")
"""Beginnings of the kinds of notices that say why nothing is drafted."""


def now_rate(progress: ReplyProgress, stats: EngineStats | None) -> float | None:
    """Tokens of this answer in the last second.

    The engine's own counter where it serves this answer alone; what arrived here otherwise.
    """
    if stats is not None and stats.running == 1 and stats.decode_tokens_per_s > 0:
        return stats.decode_tokens_per_s
    return progress.window.rate(time.monotonic())


def why_no_drafts(notices: list[Notice]) -> str:
    """The newest notice about speculation."""
    about = [notice.detail for notice in notices if notice.kind.startswith(DRAFT_NOTICES)]
    return about[-1] if about else ""


def drafting(stats: EngineStats, notices: list[Notice]) -> tuple[str, str]:
    """What drafts, empty where nothing does, and why it does not just now."""
    name, _, state = stats.draft_state.partition(": ")
    if not state:
        return "", why_no_drafts(notices)
    why = state.removeprefix("not drafting").lstrip(": ") if state.startswith("not drafting") else ""
    return name, why or (why_no_drafts(notices) if not stats.draft.proposed else "")


def gather(
    progress: ReplyProgress | None,
    stats: EngineStats | None,
    finished: Finished | None,
    model: ModelInfo | None,
    context_used: int,
    notices: list[Notice],
) -> Snapshot:
    """While an answer is made its own figures, afterwards those of the engine for the whole of it."""
    stats = stats or EngineStats()
    length = model.context_length if model is not None else 0
    drafter, off = drafting(stats, notices)
    if progress is not None:
        ttft = progress.ttft_s
        thought = progress.first_thought_at
        reading = progress.prefill_total - progress.prefill_cached if progress.prefill_total else 0
        return Snapshot(
            now=now_rate(progress, stats),
            answer=progress.tokens_per_s,
            ttft_s=ttft,
            first_thought_s=None if thought is None else thought - progress.started_at,
            interval_p50_s=progress.intervals.percentile(0.50),
            interval_p95_s=progress.intervals.percentile(0.95),
            prefill_done=progress.prefill_done,
            prefill_total=progress.prefill_total,
            prefill_cached=progress.prefill_cached,
            prefill_rate=stats.prefill_tokens_per_s or None if reading else None,
            context_used=context_used,
            context_length=length,
            draft=stats.draft,
            draft_off=off,
            drafter=drafter,
            stats=stats,
            queue_position=progress.queue_position if progress.phase == "queued" else 0,
        )
    if finished is None:
        return Snapshot(
            context_used=context_used,
            context_length=length,
            draft=stats.draft,
            draft_off=off,
            drafter=drafter,
            stats=stats,
        )
    usage, timings = finished.usage, finished.timings
    draft = finished.draft if finished.draft.proposed else stats.draft
    return Snapshot(
        answer=timings.decode_tokens_per_s or None,
        ttft_s=first_token_s(finished),
        prefill_done=usage.prompt_tokens,
        prefill_total=usage.prompt_tokens,
        prefill_cached=usage.cached_tokens,
        prefill_rate=timings.prefill_tokens_per_s or None,
        context_used=context_used,
        context_length=length,
        draft=draft if draft.proposed else DraftCounts(),
        draft_off=off,
        drafter=drafter,
        stats=stats,
    )
