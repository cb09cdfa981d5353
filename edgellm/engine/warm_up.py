"""Runs requests of every shape before an engine is ready, so that no later one waits for kernels."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.cache.kv_manager import KVManager
from edgellm.contracts import GenerationRequest, Runner, SamplingParams, StepPlan, StepResult
from edgellm.engine.engine import Engine
from edgellm_models.tokenizer.base import Tokenizer
from edgellm_models.tokenizer.stream_decoder import StreamDecoder

ROWS = (1, 2, 15, 16, 17, 32, 33, 256, 300)
"""Rows of a step: the fewest and the most of each way in which the linears run (1, to 16, to 32, to 256,
more); between them they are only cut into more or fewer programs."""
BATCHES = (2, 4, 8, 16)
"""Of short prompts: what later steps of as many rows are recorded for, where steps are recorded."""
_NEW_TOKENS = 2
_SAMPLINGS = (
    SamplingParams(temperature=0.0, max_new_tokens=_NEW_TOKENS, ignore_eos=True),
    SamplingParams(temperature=1.0, max_new_tokens=_NEW_TOKENS, ignore_eos=True, seed=0),
    SamplingParams(
        temperature=1.0,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        max_new_tokens=_NEW_TOKENS,
        ignore_eos=True,
        seed=0,
    ),
)


def prompt_lengths(heads_per_kv_head: int, chunk: int, context: int) -> tuple[int, ...]:
    """Lengths of prompts that between them meet every tile of the attention and every way of the linears.

    Attention goes by rows of a KV head (queries times the heads that share it): up to 16, up to 32, more;
    over few keys, and over those of an earlier ``chunk`` too. Lengths that the context has no room for are
    left out: they cannot be asked for.
    """
    middle = 16 // heads_per_kv_head + 1  # the fewest queries of more than 16 rows
    many = 32 // heads_per_kv_head + 1
    alone = {*ROWS, middle, many}
    behind_a_chunk = {chunk + rows for rows in (1, middle, many, *ROWS)}
    return tuple(sorted(n for n in alone | behind_a_chunk if n + _NEW_TOKENS <= context))


class _Watched:
    """A runner that is told of every sequence's end, also of those that ended with the last step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._open: set[int] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        self._open -= set(plan.ended)
        self._open |= {start.sequence_id for start in plan.started}
        return self._runner.execute(plan)

    def end_all(self) -> None:
        self._runner.execute(StepPlan(0, (), ended=tuple(sorted(self._open))))


def warm_up(
    runner: Runner,
    tokenizer: Tokenizer,
    kv: KVManager,
    *,
    vocab_size: int,
    context_length: int,
    prefill_chunk: int,
    heads_per_kv_head: int,
    max_running: int,
) -> int:
    """Runs prompts of all ``prompt_lengths`` alone and some in a batch, greedy and drawn; the steps it took.

    ``kv`` is a manager of its own, without a prefix cache, over the pages that the runner writes: nothing of
    these requests is found later, and no statistics count them. What they answer is of no interest; what a
    kernel raises is raised.
    """
    watched = _Watched(runner)
    engine = Engine(
        watched,
        tokenizer,
        kv,
        context_length=context_length,
        vocab_size=vocab_size,
        make_decoder=lambda request: StreamDecoder(tokenizer),
        prefill_chunk=prefill_chunk,
        mixed_chunk=prefill_chunk,
        max_running=max_running,
    )
    steps = 0
    lengths = prompt_lengths(heads_per_kv_head, prefill_chunk, context_length)
    rounds: list[Sequence[int]] = [(length,) for length in lengths]
    rounds += [(length,) * min(5, max_running) for length in lengths if length <= 17]
    rounds += [(15,) * many for many in BATCHES if many <= max_running and 15 in lengths]
    for number, batch in enumerate(rounds):
        # A chunk's last rows are scored too: the head then has as many rows as any linear.
        scored = 0 if len(batch) == 1 else None
        for index, length in enumerate(batch):
            sampling = _SAMPLINGS[(number + index) % len(_SAMPLINGS)]
            ids = tuple((7 * i + index) % vocab_size for i in range(length))
            request = GenerationRequest(
                f"warm-up {number} {index}",
                ids,
                sampling,
                speculate=False,
                prompt_logprobs=scored,
                score_from=max(1, length - prefill_chunk),
            )
            engine.submit(request)
        while engine.has_work():
            engine.step()
            steps += 1
    watched.end_all()
    return steps
