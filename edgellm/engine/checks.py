"""What a request must be to be served; every refusal names the field, the values and a way out."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.cache.block_pool import BlockPool
from edgellm.cache.eviction import WINDOW, EvictionPlan
from edgellm.contracts import GenerationRequest, Task
from edgellm_models.errors import BadInputError

MAX_LOGPROBS = 20
MAX_SAMPLES = 128


def check_request(request: GenerationRequest, context_length: int, vocab_size: int) -> None:
    """Raises BadInputError for what cannot be served. Reads nothing that changes: any thread may call it."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise BadInputError(
            "the prompt is empty and this model adds no beginning-of-text token; give some text"
        )
    if len(prompt) > context_length:
        raise BadInputError(
            f"the prompt has {len(prompt)} tokens, the context holds {context_length}; shorten it or "
            "raise --ctx"
        )
    outside = next((t for t in prompt if not 0 <= t < vocab_size), None)
    if outside is not None:
        raise BadInputError(
            f"the prompt holds token id {outside}, but the vocabulary has {vocab_size} tokens"
        )
    bias = request.sampling.logit_bias
    if bias and max(bias) >= vocab_size:
        raise BadInputError(f"logit_bias names token {max(bias)}, but the vocabulary has {vocab_size} tokens")
    if len(bias) >= vocab_size and all(value <= -100 for value in bias.values()):
        raise BadInputError("logit_bias removes every token of the vocabulary")
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise BadInputError(
            f"the number of samples must be from 1 to {MAX_SAMPLES}, not {request.num_samples}"
        )
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(request, name)
        if asked is not None and not 0 <= asked <= MAX_LOGPROBS:
            raise BadInputError(f"{name} must be from 0 to {MAX_LOGPROBS}, not {asked}")
    if request.task is Task.EMBED:
        _check_embedding(request)
    if request.kv_keep is not None and request.kv_keep < 1:
        raise BadInputError(f"kv_keep must be 1 or more tokens, not {request.kv_keep}")


def _check_embedding(request: GenerationRequest) -> None:
    """An embedding is of all its tokens, and one: what would change or multiply an answer is refused."""
    if request.pooling not in ("mean", "last"):
        raise BadInputError(f"pooling must be mean or last, not {request.pooling!r}")
    asked = {
        "num_samples": request.num_samples != 1,
        "logprobs": request.logprobs is not None,
        "prompt_logprobs": request.prompt_logprobs is not None,
        "constraint": request.constraint is not None,
        "kv_policy": request.kv_policy != "stop",
    }
    wrong = next((name for name, is_asked in asked.items() if is_asked), None)
    if wrong is not None:
        raise BadInputError(f"{wrong} says something about an answer, and a text that is embedded has none")


def check_eviction(
    plan: EvictionPlan, request: GenerationRequest, context_length: int, pools: Sequence[BlockPool]
) -> None:
    """Raises BadInputError where a policy has nothing to evict, or keeps more than the cache can hold."""
    full = [pool for pool in pools if pool.window is None]
    if not full:
        raise BadInputError(
            f"--kv-policy {plan.policy} has nothing to do: every layer of this model sees a window only and "
            "frees KV by itself; use --kv-policy stop"
        )
    room = context_length - len(request.prompt_token_ids)
    asked = request.sampling.max_new_tokens
    longest = len(request.prompt_token_ids) + (room if asked is None else min(asked, room))
    needed = min(plan.max_blocks, -(-longest // plan.block_size))
    smallest = min(pool.num_blocks for pool in full)
    if needed > smallest:
        raise BadInputError(
            f"--kv-{'window' if plan.policy == WINDOW else 'budget'} {plan.keep} with "
            f"{plan.protected * plan.block_size} tokens of sinks and system prompt needs "
            f"{needed * plan.block_size} tokens of KV cache, which has {smallest * plan.block_size}; use a "
            "smaller one, a shorter system prompt or a larger --ctx"
        )
