"""Fills each real model's whole trained context once: prefill to the brim, then decode until it is full."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

from acceptance.harness import Figure
from tests.support.corpus import corpus_lines
from tests.support.real_models import REAL_MODELS, real_model

LEFT_FOR_DECODING = 64


def run() -> Iterator[Figure]:
    from edgellm.cli.runtime import load_runtime
    from edgellm.config import EngineConfig
    from edgellm.contracts import FinishReason, GenerationRequest, SamplingParams

    for name in REAL_MODELS:
        path = real_model(name)
        runtime = load_runtime(EngineConfig(kv_dtype="f32", device="cpu").resolve(environ={}), path, name)
        context = runtime.info.trained_context
        text = "\n".join(corpus_lines())
        ids = runtime.tokenizer.encode(text)
        while len(ids) < context:
            ids += runtime.tokenizer.encode(text, add_special=False)
        prompt = tuple(ids[: context - LEFT_FOR_DECODING])
        runtime.core.submit(
            GenerationRequest("full", prompt, SamplingParams(temperature=0.0, ignore_eos=True))
        )
        answer: list[int] = []
        reason, first, start = None, None, time.monotonic()
        kinds: set[str] = set()
        while runtime.core.has_work():
            for event in runtime.core.step():
                assert event.error is None, event.error
                if event.token_ids and first is None:
                    first = time.monotonic()
                answer.extend(event.token_ids)
                reason = event.finish_reason or reason
                kinds |= {event.notice.kind} if event.notice else set()
        end = time.monotonic()
        runtime.core.check_integrity()
        runtime.close()
        assert first is not None
        filled = len(prompt) + len(answer)
        yield Figure(
            name=f"{name}: tokens in the context at its end",
            value=filled,
            unit="tokens",
            promise=f"the whole trained context of {context}, ended by a notice",
            met=filled == context and reason is FinishReason.LENGTH and "context_full" in kinds,
            detail={
                "prefill_tokens_per_s": round(len(prompt) / (first - start), 1),
                "decode_tokens_per_s_at_the_end": round((len(answer) - 1) / (end - first), 2),
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            },
        )
