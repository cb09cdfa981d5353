"""One evaluation: windows of a text through a model, beside a reference that runs or was kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from edgellm.evaluate.measures import Divergence, Perplexity, ReferenceRows, encode_rows
from edgellm.evaluate.reference_cache import CachedRows, RowWriter
from edgellm.evaluate.rows import EngineRows, Rows
from edgellm.evaluate.windows import WindowPlan
from edgellm_models.errors import BadInputError, EngineError

Progress = Callable[[int, int, float], None]
"""Windows done, windows in all, perplexity so far."""


@dataclass(frozen=True)
class DivergenceResult:
    """KL(reference || model) over the scored tokens, in nats."""

    mean_kld: float
    mean_kld_stderr: float
    median_kld: float
    p99_kld: float
    max_kld: float
    top1_agreement: float
    """Share of tokens at which both have the same best token."""


@dataclass(frozen=True)
class EvaluationResult:
    perplexity: float
    perplexity_stderr: float
    tokens: int
    """Scored tokens."""
    windows: int
    divergence: DivergenceResult | None = None


class Reference(Protocol):
    """Gives the reference's rows in the order in which the model is scored."""

    def begin(self, plan: WindowPlan, index: int) -> None: ...

    def read(self, count: int) -> ReferenceRows: ...


class KeptReference:
    """Rows of a cache file."""

    def __init__(self, rows: CachedRows) -> None:
        self._rows = rows

    def begin(self, plan: WindowPlan, index: int) -> None:
        """The rows of all windows follow each other."""

    def read(self, count: int) -> ReferenceRows:
        return self._rows.read(count)


class RunningReference:
    """A second engine, a step ahead of the model's at most; what it computes can be kept."""

    def __init__(self, rows: EngineRows, writer: RowWriter | None = None) -> None:
        self._source = rows
        self._writer = writer
        self._window: Generator[Rows, None, None] | None = None
        self._waiting: list[ReferenceRows] = []

    def begin(self, plan: WindowPlan, index: int) -> None:
        if self._window is not None:
            self._window.close()  # all its rows were read; its request is still open
        self._window = self._source.window(plan, index)
        self._waiting = []

    def read(self, count: int) -> ReferenceRows:
        while sum(len(part.best) for part in self._waiting) < count:
            assert self._window is not None
            rows = next(self._window, None)
            if rows is None:
                raise EngineError("the reference has fewer rows than the model")
            encoded = encode_rows(rows.logits)
            if self._writer is not None:
                self._writer.append(encoded)
            self._waiting.append(encoded)
        best = np.concatenate([part.best for part in self._waiting])
        codes = np.concatenate([part.codes for part in self._waiting])
        self._waiting = [ReferenceRows(best[count:], codes[count:])] if len(best) > count else []
        return ReferenceRows(best[:count], codes[:count])


def evaluate(
    model: EngineRows,
    plan: WindowPlan,
    reference: Reference | None = None,
    on_progress: Progress = lambda done, total, perplexity: None,
) -> EvaluationResult:
    """Scores every window. Memory: the rows of one chunk of each model, and 8 bytes per scored token."""
    perplexity, divergence = Perplexity(), Divergence()
    for index in range(plan.num_windows):
        ids = torch.tensor(plan.window(index), dtype=torch.int64)
        if reference is not None:
            reference.begin(plan, index)
        for rows in model.window(plan, index):
            count = rows.logits.shape[0]
            perplexity.add(rows.logits, ids[rows.start + 1 : rows.start + 1 + count])
            if reference is not None:
                divergence.add(rows.logits, reference.read(count))
        on_progress(index + 1, plan.num_windows, perplexity.perplexity)
    return EvaluationResult(
        perplexity.perplexity,
        perplexity.stderr,
        perplexity.count,
        plan.num_windows,
        None if reference is None else summarize(divergence),
    )


def summarize(divergence: Divergence) -> DivergenceResult:
    values = divergence.all()
    median, p99 = np.quantile(values, (0.5, 0.99))
    spread = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return DivergenceResult(
        mean_kld=float(values.mean()),
        mean_kld_stderr=spread,
        median_kld=float(median),
        p99_kld=float(p99),
        max_kld=float(values.max()),
        top1_agreement=divergence.agreed / len(values),
    )


def check_same_vocabulary(
    model: tuple[int, list[int]], reference: tuple[int, list[int]], names: tuple[str, str]
) -> None:
    """BadInputError unless both (vocabulary size, ids of the text) are the same: rows must be comparable."""
    if model[0] != reference[0]:
        raise BadInputError(
            f"{names[0]} has a vocabulary of {model[0]} tokens and the reference {names[1]} one of "
            f"{reference[0]}; KL divergence compares models of one vocabulary"
        )
    if model[1] != reference[1]:
        at = next(
            (i for i, (a, b) in enumerate(zip(model[1], reference[1], strict=False)) if a != b),
            min(len(model[1]), len(reference[1])),
        )
        raise BadInputError(
            f"{names[0]} and the reference {names[1]} read the text as different tokens from token {at} on; "
            "KL divergence compares models of one tokenizer"
        )
