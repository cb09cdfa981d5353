"""schemathesis against a server of a small model: every operation of our document, well and badly formed."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from acceptance.harness import Figure, version
from tests.support.openapi_cases import OPERATIONS, try_operation
from tests.support.served import TEMPLATE, Running, loaded_model, serving
from tests.support.tiny_models import make_tiny

EXAMPLES = int(os.environ.get("EDGELLM_TEST_OPENAPI_EXAMPLES", "60"))
"""Of each operation and form."""
CONTEXT = 64
"""What bounds an answer whose request names no limit, or a huge one."""


def run() -> Iterator[Figure]:
    cases, statuses = 0, Counter[int]()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny("llama", Path(folder) / "m", chat_template=TEMPLATE)
        with serving(lambda: loaded_model(tiny, ctx=CONTEXT), queue=1000, request_timeout_s=10.0) as running:
            for operation in OPERATIONS:
                figure, found = _operation(running, operation)
                cases += sum(found.values())
                statuses += found
                if not figure.met:
                    wrong.append(operation)
                yield figure
    yield Figure(
        f"schemathesis {version('schemathesis')}: {len(OPERATIONS)} operations, {EXAMPLES} examples a form",
        cases,
        f"requests answered; by status {_by_status(statuses)}",
        "no 5xx but 503 while loading, every answer of the documented form",
        not wrong and not any(status >= 500 for status in statuses),
        detail={"statuses": {str(k): v for k, v in sorted(statuses.items())}, "wrong": wrong},
    )


def _operation(running: Running, operation: str) -> tuple[Figure, Counter[int]]:
    begin = time.monotonic()
    seen: list[tuple[int, float]] = []
    problem = ""
    try:
        seen = try_operation(running.address, operation, EXAMPLES)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = f"{type(error).__name__}: {error}"[:600]
    statuses = Counter(status for status, _ in seen)
    slowest = max((seconds for _, seconds in seen), default=0.0)
    figure = Figure(
        f"schemathesis: {operation}",
        len(seen),
        f"requests in {time.monotonic() - begin:.0f} s (slowest {slowest:.2f} s); by status "
        f"{_by_status(statuses)}",
        "no 5xx but 503 while loading",
        bool(seen) and not problem,
        detail={"problem": problem} if problem else {},
    )
    return figure, statuses


def _by_status(statuses: Counter[int]) -> str:
    return ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
