"""Decode speed with speculation over that without, on natural prompts of six kinds, in alternating pairs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from acceptance.engines import load
from acceptance.harness import Figure
from edgellm.bench.spec_bench import greedy_answer, measure
from edgellm.bench.spec_prompts import COPIES, prompts
from edgellm.chat.request import build_request, chat_encoder
from edgellm.cli.runtime import Runtime
from edgellm.contracts import ChatMessage, PlannedSequence, SamplingParams, SequenceStart, StepPlan

MODELS = ("smollm2-135m", "gemma3-270m")
RUNS = "EDGELLM_SPEC_RUNS"
"""Models and kernels, such as ``gemma3-270m native,smollm2-135m torch``; all of them take an hour."""
PAIRS = 3
"""Of each prompt: the ratio of a class is the median over prompts times pairs."""
TOKENS = 128


def encoded(runtime: Runtime, prompts: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """Prompts as ids, turns before the last one with the model's own answers."""
    templates = runtime.load_templates()
    encoder, _ = chat_encoder(runtime.tokenizer, templates, model_name=runtime.info.name, plain_fallback=True)
    found = []
    for texts in prompts:
        messages: list[ChatMessage] = []
        for text in texts:
            messages.append(ChatMessage("user", text))
            length = runtime.info.context_length
            built = build_request(encoder, messages, SamplingParams(), context_length=length)
            ids = built.request.prompt_token_ids
            if text is not texts[-1]:
                said, _, _ = greedy_answer(runtime.core, ids, TOKENS, speculate=False)
                messages.append(ChatMessage("assistant", runtime.tokenizer.decode(said)))
        found.append(ids)
    return found


def verify_cost(runtime: Runtime, rows: int) -> float:
    """A step that verifies ``rows`` drafted tokens over one that verifies none; minima of turns."""
    runner = runtime.runner
    assert runner is not None
    sequence = SequenceStart(1 << 40, tuple(range(100, 356)), SamplingParams(temperature=0.0), 1)

    def step(ids: Sequence[int], start: int, drafted: int) -> float:
        tables = tuple(tuple(range(-(-(start + len(ids) + drafted) // 16))) for _ in range(groups))
        planned = PlannedSequence(
            sequence.sequence_id, tuple(ids), start, tables, start == 0, True, drafted, (7,) * drafted
        )
        begin = time.perf_counter()
        runner.execute(StepPlan(0, (planned,), (sequence,) if start == 0 else ()))
        return time.perf_counter() - begin

    groups = len(runner.page_parts())
    step(sequence.prompt_token_ids, 0, 0)
    plain, verify = float("inf"), float("inf")
    for _ in range(15):
        plain = min(plain, step((5,), 256, 0))
        verify = min(verify, step((5,), 256, rows))
    runner.execute(StepPlan(0, (), ended=(sequence.sequence_id,)))
    return verify / plain


def promise_of(model: str, kernels: str, kind: str) -> float:
    if kind not in COPIES or model != MODELS[0]:
        return 0.97
    return 1.25 if kernels == "native" else 1.8


def copies(prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether at least half of the answer's runs of four tokens stand in the prompt too."""
    known = {tuple(prompt[start : start + 4]) for start in range(len(prompt) - 3)}
    runs = [tuple(answer[start : start + 4]) for start in range(len(answer) - 3)]
    return 2 * sum(run in known for run in runs) >= max(1, len(runs))


def figures(model: str, kernels: str) -> Iterator[Figure]:
    """One model on one kind of kernels."""
    fresh = load(model, kernels=kernels, kv_dtype="auto", ctx=2048, spec="off")
    costs = {f"v({rows})": verify_cost(fresh, rows) for rows in (4, 8)}
    fresh.close()
    shown = ", ".join(f"{name} {value:.2f}" for name, value in costs.items())
    runtime = load(model, kernels=kernels, kv_dtype="auto", ctx=2048, spec="auto")
    for kind, texts in prompts().items():
        if kernels == "torch" and kind not in COPIES:
            continue  # a step takes ten times as long there
        asked = encoded(runtime, texts)
        runs = [(kind, asked, promise_of(model, kernels, kind))]
        if kind in COPIES and kernels == "native":  # small models copy less than they are asked to
            said = [greedy_answer(runtime.core, ids, TOKENS, speculate=False)[0] for ids in asked]
            copying = [ids for ids, answer in zip(asked, said, strict=True) if copies(ids, answer)]
            runs.append((f"{kind}, answers that copy", copying, 1.25 if model == MODELS[0] else 1.5))
        for name, ids, least in runs:
            tally = measure(runtime.core, ids, max_tokens=TOKENS, pairs=PAIRS)
            report = tally.report()
            ratio = float("nan") if report["ratio"] is None else report["ratio"]
            yield Figure(
                name=f"{model}, {kernels} kernels, {name}: decoding with --spec auto",
                value=ratio,
                unit=f"times off; {tally.accepted} of {tally.proposed} drafted tokens kept; {shown}; "
                f"{tally.different} texts differ; {tally.left_out} prompts left out",
                promise=f"at least {least}, with the same text",
                met=(ratio >= least or not tally.ratios) and tally.different == 0,
                detail={"ratios": tally.ratios, **costs},
            )
    runtime.close()


def run() -> Iterator[Figure]:
    runs = [f"{model} native" for model in MODELS] + [f"{MODELS[0]} torch"]
    for chosen in os.environ.get(RUNS, ",".join(runs)).split(","):
        model, _, kernels = chosen.partition(" ")
        yield from figures(model, kernels)
