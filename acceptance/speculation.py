"""Decode speed with speculation over that without, on natural prompts of four kinds, in alternating pairs."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from acceptance.engines import load
from acceptance.harness import Figure
from edgellm.chat.request import build_request, chat_encoder
from edgellm.cli.runtime import Runtime
from edgellm.contracts import (
    ChatMessage,
    DraftCounts,
    PlannedSequence,
    RequestTimings,
    SamplingParams,
    SequenceStart,
    StepPlan,
)

MODELS = ("smollm2-135m", "gemma3-270m")
PAIRS = 3
"""Of each prompt: the ratio of a class is the median over prompts times pairs."""
TOKENS = 128
COPIES = ("summary", "code edit", "retrieval")
"""Classes whose answers repeat their prompts."""

PASSAGES = (
    "The harbour of Lisbow was built in 1743 by the engineer Marten Hoek. It had two stone piers and a "
    "lighthouse of green glass. In 1802 a storm broke the northern pier, and the town council decided to "
    "rebuild it from granite that was brought by ship from Norway. The work took eleven years.",
    "Bees find flowers by colour and scent. A worker that has found a rich field returns to the hive and "
    "dances on the comb. The angle of the dance tells the direction relative to the sun, and its length "
    "tells the distance. Other workers follow the dance in the dark and then fly to the field.",
    "The committee met on Tuesday in the library. Anna Berg reported that the roof repair will cost 48,000 "
    "crowns. Jonas Lind proposed to pay half of it from the reserve fund. The proposal was accepted with "
    "seven votes against two. The next meeting is on the fourth of May at six o'clock.",
    "To reset the thermostat, press and hold the round button for ten seconds until the display shows three "
    "dashes. Release the button and wait for the blue light. If the light stays red, the sensor cable is "
    "loose: switch the power off, open the cover and push the white connector in until it clicks.",
    "Glaciers move because ice under pressure deforms and slides over its bed. Meltwater at the base works "
    "as a lubricant, so that many glaciers are faster in summer. Where a glacier ends in the sea, pieces "
    "break off and float away as icebergs. Scientists measure the movement with radar and with satellites.",
    "Clara's grandmother kept a small shop in Weaver Street. She sold thread, buttons and blue ink, and "
    "every child who came in was given one peppermint. When the shop closed in 1968, the counter was given "
    "to the museum, where it still stands beside the window with the brass scale and the box of buttons.",
)
SNIPPETS = (
    "def total_price(items, tax_rate):\n    subtotal = 0\n    for item in items:\n        subtotal += "
    "item.price * item.quantity\n    tax = subtotal * tax_rate\n    return subtotal + tax",
    "class Counter:\n    def __init__(self):\n        self.count = 0\n\n    def increment(self):\n        "
    "self.count += 1\n\n    def reset(self):\n        self.count = 0",
    "function average(values) {\n  let sum = 0;\n  for (const value of values) {\n    sum += value;\n  }\n"
    "  return sum / values.length;\n}",
    "def read_lines(path):\n    with open(path) as file:\n        lines = file.readlines()\n    return "
    "[line.strip() for line in lines if line.strip()]",
    "SELECT name, city, COUNT(*) AS orders\nFROM customers\nJOIN orders ON orders.customer_id = "
    "customers.id\nWHERE city = 'Oslo'\nGROUP BY name, city\nORDER BY orders DESC;",
    "def binary_search(values, target):\n    low, high = 0, len(values) - 1\n    while low <= high:\n        "
    "middle = (low + high) // 2\n        if values[middle] == target:\n            return middle\n        if "
    "values[middle] < target:\n            low = middle + 1\n        else:\n            high = middle - 1\n"
    "    return -1",
)
EDITS = (
    "Rename tax_rate to rate",
    "Rename count to total",
    "Rename sum to result",
    "Rename lines to rows",
    "Change Oslo to Bergen",
    "Rename middle to mid",
)
ASKED = (
    "who built the harbour",
    "what the length of the dance tells",
    "what the roof repair will cost",
    "what to do if the light stays red",
    "why many glaciers are faster in summer",
    "what was given to the museum",
)
CHATS = (
    "Give me three ideas for a rainy afternoon with two children.",
    "Explain in simple words why the sky is blue.",
    "Write a short poem about the sea in winter.",
    "What should I pack for a weekend in the mountains?",
    "How do I politely decline an invitation to a wedding?",
    "Tell me about a day in the life of a baker.",
)


def prompts() -> dict[str, list[str]]:
    """At least six natural prompts of each class."""
    return {
        "summary": [f"{p}\n\nSummarize this text in its own words, sentence by sentence." for p in PASSAGES],
        "code edit": [
            f"{edit} in this code and write the whole code again:\n\n{snippet}"
            for edit, snippet in zip(EDITS, SNIPPETS, strict=True)
        ],
        "retrieval": [
            f"{p}\n\nCopy the sentences of the text that say {asked}, then the whole text."
            for p, asked in zip(PASSAGES, ASKED, strict=True)
        ],
        "chat": list(CHATS),
    }


@dataclass
class Tally:
    """What one class brought."""

    ratios: list[float] = field(default_factory=list)
    drafted: int = 0
    kept: int = 0
    different: int = 0
    looping: int = 0
    """Answers left out because they repeat themselves."""


def loops(token_ids: Sequence[int]) -> bool:
    """Whether the last half repeats one 8-gram more than 3 times: such an answer is drafted too easily."""
    half = token_ids[len(token_ids) // 2 :]
    grams = Counter(tuple(half[i : i + 8]) for i in range(len(half) - 7))
    return max(grams.values(), default=0) > 3


def answer(
    runtime: Runtime, ids: Sequence[int], name: str, *, speculate: bool
) -> tuple[list[int], RequestTimings, DraftCounts]:
    """One greedy answer. Each has a salt of its own: no run sees what another one answered."""
    from edgellm.contracts import GenerationRequest

    sampling = SamplingParams(temperature=0.0, max_new_tokens=TOKENS)
    runtime.core.submit(GenerationRequest(name, tuple(ids), sampling, speculate=speculate, cache_salt=name))
    found: list[int] = []
    last = None
    while runtime.core.has_work():
        for event in runtime.core.step():
            assert event.error is None, event.error
            found += event.token_ids
            last = event if event.finish_reason is not None else last
    assert last is not None and last.timings is not None and last.draft is not None
    return found, last.timings, last.draft


def measure(runtime: Runtime, texts: Sequence[str]) -> Tally:
    """Alternating pairs of every prompt."""
    templates = runtime.load_templates()
    encoder, _ = chat_encoder(runtime.tokenizer, templates, model_name=runtime.info.name, plain_fallback=True)
    tally = Tally()
    for index, text in enumerate(texts):
        messages = [ChatMessage("user", text)]
        built = build_request(encoder, messages, SamplingParams(), context_length=runtime.info.context_length)
        ids = built.request.prompt_token_ids
        for pair in range(PAIRS):
            runs = {}
            for speculate in (True, False) if pair % 2 else (False, True):
                name = f"{text[:20]}-{index}-{pair}-{speculate}-{time.monotonic()}"
                runs[speculate] = answer(runtime, ids, name, speculate=speculate)
            (with_ids, with_times, counts), (plain_ids, plain_times, _) = runs[True], runs[False]
            tally.different += with_ids != plain_ids
            if loops(plain_ids) or len(plain_ids) < 16:
                tally.looping += 1
                continue
            tally.drafted += counts.proposed
            tally.kept += counts.accepted
            tally.ratios.append(with_times.decode_tokens_per_s / plain_times.decode_tokens_per_s)
    return tally


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


def figures(model: str, kernels: str) -> Iterator[Figure]:
    """One model on one kind of kernels."""
    fresh = load(model, kernels=kernels, kv_dtype="auto", ctx=2048, spec="off")
    costs = {f"v({rows})": verify_cost(fresh, rows) for rows in (4, 8)}
    fresh.close()
    shown = ", ".join(f"{name} {value:.2f}" for name, value in costs.items())
    runtime = load(model, kernels=kernels, kv_dtype="auto", ctx=2048, spec="auto")
    for kind, texts in prompts().items():
        tally = measure(runtime, texts)
        ratio = statistics.median(tally.ratios) if tally.ratios else float("nan")
        least = (1.25 if kernels == "native" else 1.8) if kind in COPIES and model == MODELS[0] else 0.97
        yield Figure(
            name=f"{model}, {kernels} kernels, {kind}: decoding with --spec auto",
            value=ratio,
            unit=f"times off; {tally.kept} of {tally.drafted} drafted tokens kept; {shown}; "
            f"{tally.different} texts differ; {tally.looping} runs left out",
            promise=f"at least {least}, with the same text",
            met=ratio >= least and tally.different == 0,
            detail={"ratios": tally.ratios, **costs},
        )
    runtime.close()


def run() -> Iterator[Figure]:
    for model in MODELS:
        yield from figures(model, "native")
    yield from figures(MODELS[0], "torch")
