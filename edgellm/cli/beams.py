"""``edgellm complete --beams``: the best answer of a beam search instead of a drawn one."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edgellm.cli.completion_run import Completion
    from edgellm.cli.runtime import Runtime
    from edgellm.contracts import GenerationRequest, SamplingParams
    from edgellm_models.errors import Notice

CHOOSING_SETTINGS = (
    "temp", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty",
    "stop",
)  # fmt: skip
"""Settings that say how tokens are drawn or where text ends: a beam search does neither."""


def refuse_with_beams(settings: Mapping[str, Any], **others: Any) -> None:
    """UsageError when options were given that a beam search has no use for. ``others`` by parameter name."""
    from edgellm_models.errors import UsageError

    given = [name for name in CHOOSING_SETTINGS if settings.get(name) not in (None, ())]
    given += [name for name, value in others.items() if value not in (None, (), False)]
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(
            f"--beams takes the most likely text as a whole; it cannot be combined with {options}"
        )


def unused_settings(sampling: SamplingParams) -> Notice | None:
    """What to say when a configuration file or variable chooses how tokens are drawn: no flag did."""
    from edgellm.contracts import SamplingParams
    from edgellm_models.errors import Notice

    plain = SamplingParams(
        temperature=0.0,
        max_new_tokens=sampling.max_new_tokens,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
    )
    if sampling == plain:
        return None
    return Notice("beams", "--beams takes the most likely text: the sampling settings have no effect on it")


def run_beams(runtime: Runtime, request: GenerationRequest, num_beams: int, result: Completion) -> None:
    """Searches and hands the best answer to ``result`` as the one event of its request.

    Ctrl-C ends it without an answer: until the end none is the best. EngineError when the engine could not go
    on, BadInputError for a search that cannot be served.
    """
    from edgellm.contracts import DraftCounts, FinishReason, RequestTimings, TokenEvent, Usage
    from edgellm.engine.beam_search import EngineExpander, beam_search, check_beams
    from edgellm_models.errors import EngineError
    from edgellm_models.tokenizer.stream_decoder import StreamDecoder

    tokenizer, context = runtime.tokenizer, runtime.info.context_length
    end_ids = frozenset() if request.sampling.ignore_eos else tokenizer.eos_ids
    prompt = request.prompt_token_ids
    check_beams(num_beams, len(end_ids), len(prompt), context)
    asked = request.sampling.max_new_tokens
    room = context - len(prompt)
    expander = EngineExpander(runtime.engine, request.request_id)
    began = time.monotonic()

    async def search() -> Any:
        return await beam_search(
            expander,
            prompt,
            num_beams=num_beams,
            max_new_tokens=room if asked is None else min(asked, room),
            end_ids=end_ids,
        )

    try:
        beams = asyncio.run(search())
    except KeyboardInterrupt:
        result.interrupted = True
        beams = []
    if not beams and asked != 0 and not result.interrupted:
        raise EngineError("the beam search found no continuation of the prompt")
    ids: tuple[int, ...] = beams[0].token_ids if beams else ()
    decoder = StreamDecoder(tokenizer, continues_text=request.continues_text)
    text = decoder.push(i for i in ids if i not in end_ids and i < tokenizer.vocab_size) + decoder.finish()
    ended = bool(ids) and ids[-1] in end_ids
    reason = FinishReason.CANCELLED if result.interrupted else FinishReason.LENGTH
    first = expander.first_timings or RequestTimings(0.0, 0.0, 0.0)
    # The prompt's scores are the first call's; every further call adds a token to each beam.
    decode_s = max(0.0, time.monotonic() - began - first.ttft_s)
    timings = RequestTimings(first.queued_s, first.prefill_s, decode_s, len(prompt), len(ids))
    result.add(
        TokenEvent(
            request.request_id,
            token_ids=ids,
            text=text,
            finish_reason=FinishReason.STOP if ended else reason,
            usage=Usage(len(prompt), 0, len(ids)),
            timings=timings,
            draft=DraftCounts(),
            seed=request.sampling.seed or 0,
        )
    )
    result.score = beams[0].score if beams else None
    result.end()
