"""Runs windows through the engine as scoring requests and hands on their rows of logits, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from edgellm.contracts import GenerationRequest, SamplingParams
from edgellm.engine.engine import Engine
from edgellm.evaluate.windows import WindowPlan
from edgellm.runner.model_runner import ModelRunner
from edgellm_models.errors import EngineError, Notice


@dataclass(frozen=True)
class Rows:
    """Logits of some tokens of a window, in order."""

    start: int
    """Position in the window of the token of the first row."""
    logits: torch.Tensor
    """[rows, vocab] f32; row i is about the token that follows position start + i."""


class EngineRows:
    """The rows of one loaded model. Only rows that count are computed and handed on; none is kept."""

    def __init__(
        self,
        engine: Engine,
        runner: ModelRunner,
        *,
        kv_policy: str = "stop",
        on_notice: Callable[[Notice], None] = lambda notice: None,
    ) -> None:
        """``on_notice`` hears what happened to a window (an eviction), each kind once."""
        self._engine = engine
        self._runner = runner
        self._kv_policy = kv_policy
        self._on_notice = on_notice
        self._told: set[str] = set()

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    def window(self, plan: WindowPlan, index: int) -> Generator[Rows, None, None]:
        """Rows ``plan.first_row`` to ``ctx - 2`` of a window in order. EngineError when some are missing."""
        last = plan.ctx - 1
        found: list[Rows] = []

        def take(sequence_id: int, start: int, logits: torch.Tensor) -> None:
            skipped = max(0, plan.first_row - start)
            if skipped < logits.shape[0]:
                found.append(Rows(start + skipped, logits[skipped:]))

        request = GenerationRequest(
            f"score-{index}",
            # The last token is only scored: no row of its own is needed, and one step fewer fills a context.
            plan.window(index)[:last],
            SamplingParams(temperature=0.0, max_new_tokens=1),
            prompt_logprobs=0,
            score_from=plan.first_row + 1,
            speculate=False,
            kv_policy=self._kv_policy,
        )
        expected = plan.first_row
        self._runner.row_sink = take
        try:
            self._engine.submit(request)
            while self._engine.has_work():
                for event in self._engine.step():
                    if event.error is not None:
                        raise EngineError(f"window {index} could not be scored: {event.error}")
                    if event.notice is not None and event.notice.kind not in self._told:
                        self._told.add(event.notice.kind)
                        self._on_notice(event.notice)
                for rows in found:
                    if rows.start != expected:  # a preempted window runs again from its start
                        raise EngineError(f"window {index} came back to position {rows.start} of {expected}")
                    expected += rows.logits.shape[0]
                    yield rows
                found.clear()
        finally:
            self._runner.row_sink = None
            if self._engine.has_work():
                self._engine.cancel(request.request_id)
                self._engine.step()
        if expected != last:
            raise EngineError(f"window {index} was scored up to position {expected} of {last}")
