"""What a server counts, as Prometheus text. Names follow vLLM's shapes, so that dashboards port."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from edgellm.contracts import EngineStats, ModelInfo, Usage

LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
INTERVAL_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)

REASONS = (
    "stop",
    "length",
    "tool_calls",
    "cancelled",
    "timeout",
    "no_memory",
    "bad_request",
    "engine",
    "queue_full",
    "unavailable",
)
"""Why requests ended."""


class Histogram:
    """Cumulative buckets with a sum, as Prometheus defines them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        if times <= 0 or not math.isfinite(value):
            return
        place = next((i for i, bound in enumerate(self._bounds) if value <= bound), len(self._bounds))
        self._counts[place] += times
        self._sum += value * times

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            shown = "+Inf" if bound == math.inf else repr(bound)
            yield f'{name}_bucket{{le="{shown}"}} {total}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {total}"


class ServerMetrics:
    """Counters of one server since its start. Written and read by the event loop's thread only."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = dict.fromkeys(REASONS, 0)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.notices: dict[str, int] = defaultdict(int)
        self.ttft = Histogram(LATENCY_S)
        self.interval = Histogram(INTERVAL_S)
        self.latency = Histogram(LATENCY_S)

    def ended(self, reason: str, latency_s: float) -> None:
        """A request is over."""
        self.requests[reason] = self.requests.get(reason, 0) + 1
        self.latency.observe(latency_s)

    def refused(self, status: int, code: str | None) -> None:
        """A request was turned away before it reached the engine: the status and code of its error."""
        reasons = {429: "queue_full", 500: "engine", 503: "unavailable"}
        reason = "no_memory" if code == "out_of_memory" else reasons.get(status, "bad_request")
        self.requests[reason] += 1

    def used(self, usage: Usage, *, with_prompt: bool = True) -> None:
        """The tokens of one answer; the prompt of several answers to one request counts once."""
        if with_prompt:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
        self.generation_tokens += usage.completion_tokens

    def render(self, stats: EngineStats, info: ModelInfo | None, *, ready: bool) -> str:
        """The text exposition format 0.0.4."""
        lines: list[str] = []

        def family(name: str, kind: str, meaning: str, samples: Iterable[tuple[str, float]]) -> None:
            full = f"edgellm_{name}"
            lines.append(f"# HELP {full} {meaning}")
            lines.append(f"# TYPE {full} {kind}")
            lines.extend(f"{full}{labels} {_number(value)}" for labels, value in samples)

        def histogram(name: str, meaning: str, values: Histogram) -> None:
            full = f"edgellm_{name}"
            lines.append(f"# HELP {full} {meaning}")
            lines.append(f"# TYPE {full} histogram")
            lines.extend(values.lines(full))

        blocks = stats.kv_blocks
        all_blocks = sum(blocks.get(state, 0) for state in ("used", "shared", "cached", "free"))
        in_use = blocks.get("used", 0) + blocks.get("shared", 0)
        one = "counter", "gauge"
        family("up", one[1], "1 when the model answers.", [("", float(ready))])
        family("requests_running", one[1], "Answers in the running batch.", [("", stats.running)])
        family("requests_waiting", one[1], "Answers that wait.", [("", stats.waiting)])
        family(
            "requests_total",
            one[0],
            "Requests that ended, by reason.",
            [(_labels(status=reason), count) for reason, count in self.requests.items()],
        )
        family("prompt_tokens_total", one[0], "Tokens of prompts.", [("", self.prompt_tokens)])
        family(
            "cached_prompt_tokens_total",
            one[0],
            "Tokens of prompts whose KV was reused.",
            [("", self.cached_tokens)],
        )
        family("generation_tokens_total", one[0], "Tokens of answers.", [("", self.generation_tokens)])
        family("prefix_cache_queries_total", one[0], "Prompt tokens looked up.", [("", self.prompt_tokens)])
        family("prefix_cache_hits_total", one[0], "Prompt tokens found.", [("", self.cached_tokens)])
        histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", self.ttft)
        histogram(
            "inter_token_latency_seconds", "Between tokens; a burst of k counts k times.", self.interval
        )
        histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", self.latency)
        family(
            "kv_cache_usage_ratio",
            one[1],
            "Blocks in use over all blocks of the KV cache.",
            [("", in_use / all_blocks if all_blocks else 0.0)],
        )
        family(
            "kv_blocks",
            one[1],
            "Blocks of the KV cache by state.",
            [(_labels(state=state), count) for state, count in sorted(blocks.items())],
        )
        family("kv_waste_ratio", one[1], "Share of used KV slots without a token.", [("", stats.kv_waste)])
        family(
            "preemptions_total",
            one[0],
            "Answers that were paused to make room.",
            [("", self.notices.get("preempted", 0))],
        )
        family(
            "notices_total",
            one[0],
            "Things done differently from what was asked, by kind.",
            [(_labels(kind=kind), count) for kind, count in sorted(self.notices.items())],
        )
        family(
            "evicted_tokens_total",
            one[0],
            "Tokens that answers had lost from the model's sight when they ended, by --kv-policy.",
            [(_labels(policy=policy), count) for policy, count in sorted(stats.evicted_tokens.items())],
        )
        drafters = [(_labels(drafter=drafter.name), drafter) for drafter in stats.drafters]
        family(
            "spec_drafted_tokens_total",
            one[0],
            "Tokens that a drafter proposed and a step ran.",
            [(labels, drafter.draft.proposed) for labels, drafter in drafters],
        )
        family(
            "spec_accepted_tokens_total",
            one[0],
            "Of these, accepted.",
            [(labels, drafter.draft.accepted) for labels, drafter in drafters],
        )
        family(
            "spec_drafts_total",
            one[0],
            "Drafts that ran.",
            [(labels, drafter.draft.steps) for labels, drafter in drafters],
        )
        family(
            "spec_accepted_per_position",
            one[0],
            "Drafts of which the token at this place was accepted; 0 is the first.",
            [
                (_labels(drafter=drafter.name, position=str(place)), count)
                for drafter in stats.drafters
                for place, count in enumerate(drafter.accepted_at)
            ],
        )
        family(
            "spec_armed",
            one[1],
            "Open answers that draft with this drafter by now.",
            [(labels, drafter.armed) for labels, drafter in drafters],
        )
        family("decode_tokens_per_second", one[1], "Over the last second.", [("", stats.decode_tokens_per_s)])
        family(
            "prefill_tokens_per_second", one[1], "Over the last second.", [("", stats.prefill_tokens_per_s)]
        )
        kinds = (("weights", stats.weight_bytes), ("kv", stats.kv_bytes))
        family(
            "memory_bytes",
            one[1],
            "Memory of the model by kind.",
            [(_labels(kind=kind, device=stats.device), count) for kind, count in kinds],
        )
        if info is not None:
            labels = _labels(
                name=info.name,
                architecture=info.architecture,
                quantization=info.quantization,
                context=str(info.context_length),
                device=stats.device,
                kernels=stats.kernel_backend,
            )
            family("model_info", one[1], "The model.", [(labels, 1)])
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
