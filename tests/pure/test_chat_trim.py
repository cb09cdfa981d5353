"""Trimming a chat that is too long: whole oldest turns, never the system prompt, always said."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from edgellm.chat.request import build_request, chat_encoder
from edgellm.contracts import ChatMessage, SamplingParams
from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer import load_tokenizer
from edgellm_models.tokenizer.chat_encoding import ChatEncoder
from edgellm_models.tokenizer.chat_template import ChatTemplates
from tests.pure.test_chat_request import GREEDY
from tests.support.chat_samples import TEMPLATES
from tests.support.vocabularies import bpe_fields

SYSTEM = ChatMessage("system", "Be brief.")
CONTEXT = 300


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    tokenizer = load_tokenizer(Path("x"), "gguf", bpe_fields())
    return chat_encoder(tokenizer, ChatTemplates({"default": TEMPLATES["chatml"]}), model_name="m")[0]


def talk(turns: int, system: bool = True) -> list[ChatMessage]:
    messages = [SYSTEM] if system else []
    for i in range(turns):
        messages += [ChatMessage("user", f"question {i:02d}"), ChatMessage("assistant", f"answer {i:02d}")]
    return [*messages, ChatMessage("user", f"question {turns:02d}")]


@pytest.mark.parametrize("system", [True, False])
def test_whole_oldest_turns_go_and_the_system_prompt_stays(encoder: ChatEncoder, system: bool) -> None:
    """F04: thirty turns; after each the prompt fits, begins with the system prompt and a user's turn, and
    ends with the newest messages."""
    trimmed = 0
    prompts = []
    for turns in range(31):
        messages = talk(turns, system)
        built = build_request(encoder, messages, GREEDY, context_length=CONTEXT, kv_policy="trim")
        request = built.request
        assert len(request.prompt_token_ids) <= CONTEXT - CONTEXT // 8 and request.kv_policy == "stop"
        kept = [m.content for m in messages if str(m.content) in built.prompt_text.replace("\n", " ")]
        rest = kept[1:] if system else kept
        assert not system or kept[0] == SYSTEM.content
        assert rest == [m.content for m in messages[len(messages) - len(rest) :]]
        assert str(rest[0]).startswith("question")
        kinds = [notice.kind for notice in built.notices]
        dropped = len(messages) - len(kept)
        assert kinds == (["trimmed"] if dropped else [])
        if dropped:
            trimmed += 1
            assert f"{dropped} of {len(messages)} messages" in built.notices[0].detail
            assert str(CONTEXT) in built.notices[0].detail
        prompts.append(request.prompt_token_ids)
    assert trimmed > 10
    # What is dropped stays the same for several turns, so that the next prompt begins as this one did.
    continued = sum(later[: len(one) - 8] == one[:-8] for one, later in itertools.pairwise(prompts))
    assert continued > 15


def test_what_fits_is_not_touched_and_the_last_turn_is_never_dropped(encoder: ChatEncoder) -> None:
    messages = talk(3)
    plain = build_request(encoder, messages, GREEDY, context_length=CONTEXT)
    trim = build_request(encoder, messages, GREEDY, context_length=CONTEXT, kv_policy="trim")
    assert trim.request.prompt_token_ids == plain.request.prompt_token_ids and not trim.notices
    with pytest.raises(BadInputError, match=str(CONTEXT)):
        long = [*talk(2), ChatMessage("assistant", "a"), ChatMessage("user", "x y z " * 400)]
        build_request(encoder, long, GREEDY, context_length=CONTEXT, kv_policy="trim")


def test_without_the_policy_nothing_is_left_out(encoder: ChatEncoder) -> None:
    """F04: an API never truncates silently."""
    with pytest.raises(BadInputError, match=str(CONTEXT)):
        build_request(encoder, talk(40), SamplingParams(), context_length=CONTEXT)
