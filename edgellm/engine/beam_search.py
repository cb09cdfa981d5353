"""Beam search above an engine: the continuation of the highest summed log-probability that a beam finds.

The algorithm is that of transformers' ``generate(num_beams=K, length_penalty=1.0, early_stopping=False)``
(generation/utils.py, _beam_search), whose answer it gives where no two sums are closer than rounding. Each
step ranks the continuations of all running beams by summed log-probability. Those among the first K that end
(with an end id, or with the last token that is allowed) are finished with their sum over their length; the K
best of the others run on. It is over when K are finished and the best running beam, over its present length,
is no better than the worst of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from edgellm.contracts import GenerationRequest, RequestTimings, SamplingParams
from edgellm.engine.async_engine import AsyncEngine
from edgellm.engine.checks import MAX_LOGPROBS
from edgellm_models.errors import BadInputError, EngineError

Continuations = Sequence[tuple[int, float]]
"""Token ids with their log-probabilities under the raw softmax, the best first."""


class Expander(Protocol):
    """Scores what may come next; an engine's forks or its prefix cache make it cheap."""

    async def expand(self, prefixes: Sequence[tuple[int, ...]], top: int) -> list[Continuations]:
        """The ``top`` most likely next tokens of each prefix. All but the first call's prefixes are one token
        longer than those of the call before."""
        ...


@dataclass(frozen=True)
class Beam:
    """One answer."""

    token_ids: tuple[int, ...]
    """Without the prompt; an end id that ended it included."""
    score: float
    """Mean log-probability of its tokens."""


async def beam_search(
    expander: Expander,
    prompt: Sequence[int],
    *,
    num_beams: int,
    max_new_tokens: int,
    end_ids: Collection[int] = (),
) -> list[Beam]:
    """At most ``num_beams`` answers, the best first; fewer where so few continuations are possible."""
    if max_new_tokens < 1:
        return []
    # Of one beam's continuations no more than these can be among the first K or among the K best that do not
    # end.
    top = num_beams + len(end_ids)
    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[Beam] = []
    for length in range(1, max_new_tokens + 1):
        found = await expander.expand([(*prompt, *ids) for ids, _ in running], top)
        ranked = [
            ((*ids, token_id), total + logprob)
            for (ids, total), continuations in zip(running, found, strict=True)
            for token_id, logprob in continuations
        ]
        ranked.sort(
            key=lambda beam: -beam[1]
        )  # stable: of equal sums the better beam's, then its better token's
        is_last = length == max_new_tokens
        ending = [is_last or ids[-1] in end_ids for ids, _ in ranked]
        for (ids, total), ends in zip(ranked[:num_beams], ending, strict=False):
            if ends:
                finished.append(Beam(ids, total / length))
        finished = sorted(finished, key=lambda beam: -beam.score)[:num_beams]
        running = [beam for beam, ends in zip(ranked, ending, strict=True) if not ends][:num_beams]
        if not running:
            break
        if len(finished) == num_beams and running[0][1] / length <= finished[-1].score:
            break
    return finished


class EngineExpander:
    """Scores prefixes as requests for one token each, all at once, so that the engine may batch them."""

    def __init__(self, engine: AsyncEngine, request_id: str, *, cache_salt: str = "") -> None:
        self._engine = engine
        self._request_id = request_id
        self._cache_salt = cache_salt
        self._calls = 0
        self.first_timings: RequestTimings | None = None
        """Of the first call, which computes the prompt."""

    async def expand(self, prefixes: Sequence[tuple[int, ...]], top: int) -> list[Continuations]:
        """EngineError when the engine fails, or cannot score a prefix."""
        self._calls += 1
        return list(await asyncio.gather(*(self._score(i, p, top) for i, p in enumerate(prefixes))))

    async def _score(self, index: int, prefix: tuple[int, ...], top: int) -> Continuations:
        request = GenerationRequest(
            f"{self._request_id}-{self._calls}-{index}",
            prefix,
            SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True),
            logprobs=top,
            cache_salt=self._cache_salt,
        )
        found: Continuations = ()
        async with aclosing(self._engine.submit(request)) as stream:
            async for event in stream:
                if event.error is not None:
                    raise EngineError(event.error)
                if event.logprobs:
                    found = event.logprobs[0].top
                if self.first_timings is None:
                    self.first_timings = event.timings
        return found


def check_beams(num_beams: int, num_end_ids: int, prompt_tokens: int, context_length: int) -> None:
    """BadInputError when a search of so many beams cannot be served."""
    most = MAX_LOGPROBS - num_end_ids
    if not 1 <= num_beams <= most:
        raise BadInputError(f"the number of beams must be from 1 to {most} for this model, not {num_beams}")
    if prompt_tokens >= context_length:
        raise BadInputError(
            f"the prompt has {prompt_tokens} tokens, the context holds {context_length}; shorten it or "
            "raise --ctx"
        )
