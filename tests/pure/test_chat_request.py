"""Requests from messages: context check, base models, protected tokens; and events for a person."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgellm.chat.events import ChatEventMaker
from edgellm.chat.messages import message_object
from edgellm.chat.remembered import MAX_ANSWERS, remember
from edgellm.chat.request import build_request, chat_encoder, count_tokens
from edgellm.contracts import (
    ChatMessage,
    ContentPart,
    Delta,
    DraftCounts,
    Finished,
    FinishReason,
    NoticeEvent,
    Prefill,
    RequestTimings,
    SamplingParams,
    TokenEvent,
    Usage,
)
from edgellm_models.errors import BadInputError, Notice
from edgellm_models.tokenizer import load_tokenizer
from edgellm_models.tokenizer.chat_encoding import ChatEncoder
from edgellm_models.tokenizer.chat_template import ChatTemplates
from tests.support.chat_samples import TEMPLATES
from tests.support.vocabularies import bpe_fields, spm_fields

GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def encoder() -> ChatEncoder:
    tokenizer = load_tokenizer(Path("x"), "gguf", bpe_fields())
    return chat_encoder(tokenizer, ChatTemplates({"default": TEMPLATES["chatml"]}), model_name="m")[0]


def test_a_request_says_where_turns_and_the_system_prompt_are(encoder: ChatEncoder) -> None:
    talk = [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "Yo"),
        ChatMessage("user", "?"),
    ]
    built = build_request(
        encoder,
        talk,
        GREEDY,
        context_length=500,
        conversation_id="c",
        request_id="r",
        kv_policy="window",
        num_samples=2,
    )
    request = built.request
    assert (request.request_id, request.conversation_id, request.kv_policy, request.num_samples) == (
        "r",
        "c",
        "window",
        2,
    )
    assert request.sampling is GREEDY
    assert request.protected_tokens == request.turn_starts[0] > 0
    assert len(request.turn_starts) == 3
    text = encoder.tokenizer.decode(request.prompt_token_ids, show_special=True)
    assert text == built.prompt_text
    assert text.endswith("<|im_start|>assistant\n")
    assert count_tokens(encoder, talk) == len(request.prompt_token_ids)
    assert count_tokens(encoder, []) == 0


def test_a_prompt_that_fills_the_context_is_an_error_with_both_numbers(encoder: ChatEncoder) -> None:
    talk = [ChatMessage("user", "many words " * 20)]
    size = count_tokens(encoder, talk)
    assert build_request(encoder, talk, GREEDY, context_length=size + 1).request.prompt_token_ids
    for context in (size, size - 1, 1):
        with pytest.raises(BadInputError, match=rf"has {size} tokens but the context holds {context};"):
            build_request(encoder, talk, GREEDY, context_length=context)


def test_no_messages_and_empty_prompts_are_errors(encoder: ChatEncoder) -> None:
    with pytest.raises(BadInputError, match="no messages"):
        build_request(encoder, [], GREEDY, context_length=100)
    empty = ChatEncoder(encoder.tokenizer, ChatTemplates({"default": "{# nothing #}"}))
    with pytest.raises(BadInputError, match="empty prompt"):
        build_request(empty, [ChatMessage("user", "x")], GREEDY, context_length=100)


def test_a_base_model_is_refused_or_gets_a_printed_fallback() -> None:
    """B11: with BOS where the model wants it, and never another model's format."""
    tokenizer = load_tokenizer(Path("x"), "gguf", spm_fields())
    with pytest.raises(BadInputError, match=r"tiny is a base model.*edgellm complete"):
        chat_encoder(tokenizer, None, model_name="tiny")
    encoder, notices = chat_encoder(tokenizer, None, model_name="tiny", plain_fallback=True)
    assert [notice.kind for notice in notices] == ["no_chat_template"]
    built = build_request(encoder, [ChatMessage("user", "<s>Hi")], GREEDY, context_length=100)
    assert built.prompt_text == "<s>User: <s>Hi\nAssistant:"
    assert built.request.prompt_token_ids.count(1) == 1


def test_messages_in_openai_form() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = ChatMessage("assistant", None, reasoning="why", tool_calls=(call,), name="n")
    assert message_object(message) == {
        "role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [call], "name": "n",
    }  # fmt: skip
    parts = ChatMessage("user", (ContentPart("text", "a"), ContentPart("image_url")))
    assert message_object(parts)["content"][1]["type"] == "image_url"
    assert message_object(ChatMessage("tool", "r", tool_call_id="1")) == {
        "role": "tool",
        "content": "r",
        "tool_call_id": "1",
    }


def test_image_parts_are_refused_by_name(encoder: ChatEncoder) -> None:
    """B13"""
    talk = [ChatMessage("user", (ContentPart("text", "see"), ContentPart("image_url")))]
    with pytest.raises(BadInputError, match="'image_url'"):
        build_request(encoder, talk, GREEDY, context_length=100)


def test_remembering_answers() -> None:
    """F19: pure, bounded, nothing for an answer without tokens."""
    tokenizer = load_tokenizer(Path("x"), "gguf", bpe_fields())
    answers = remember((), "a", tokenizer.encode("a"), tokenizer)
    assert remember(answers, "b", [], tokenizer) == answers
    for number in range(MAX_ANSWERS + 5):
        answers = remember(answers, str(number), tokenizer.encode(str(number)), tokenizer)
    assert len(answers) == MAX_ANSWERS
    assert answers[-1].text == str(MAX_ANSWERS + 4)


@pytest.mark.parametrize("fields", [bpe_fields(), spm_fields()], ids=["bpe", "spm"])
def test_ids_that_were_not_shown_are_not_remembered(fields: dict[str, Any]) -> None:
    """What a stop string cut away and what ended the answer; the whole where it was cut inside a token."""
    tokenizer = load_tokenizer(Path("x"), "gguf", fields)
    end = max(tokenizer.eos_ids)

    def one(*texts: str) -> list[int]:
        return [i for n, text in enumerate(texts) for i in literal(text, n > 0)]

    def literal(text: str, later: bool) -> list[int]:
        ids = tokenizer.encode(("x" if later else "") + text, add_special=False, parse_special=False)
        cut = next(i for i in range(len(ids)) if tokenizer.decode(ids[:i]) == "x") if later else 0
        return ids[cut:]

    def kept(text: str, ids: list[int]) -> tuple[int, ...]:
        answers = remember((), text, ids, tokenizer)
        assert all(tokenizer.decode(answer.token_ids) == answer.text for answer in answers)
        return answers[0].token_ids if answers else ()

    shown = one("he", "llo")
    assert tokenizer.decode(shown) == "hello"
    for rest in ([], one("", "Z"), one("", "Z", "Z", "Z"), [end], [*one("", "Z"), end, end]):
        assert kept("hello", [*shown, *rest]) == tuple(shown)
    half = one("hello", "\U0001fae0")[:-1]
    assert kept("hello\ufffd", half) == tuple(half)
    assert kept("hello", [*shown, *one("", "Z" * 400)]) in ((), tuple(shown))
    assert kept("hel", one("he") + one("", "y")) == ()
    assert kept("hello!", shown) == ()
    assert kept("", [end]) == () and kept("", one("", "Z")) == ()


# --- events
# --------------------------------------------------------------------------------------------------------


def test_token_events_become_chat_events() -> None:
    usage, timings = Usage(7, 3, 2), RequestTimings(0.1, 0.2, 0.3)
    notice = Notice("context_clamped", "x")
    events = [
        TokenEvent("r", prefill_done=4),
        TokenEvent("r", prefill_done=7, usage=usage, notice=notice),
        TokenEvent("r", token_ids=(5,), text="He"),
        TokenEvent("r", sample=1, token_ids=(9,), text="other"),
        TokenEvent("r", token_ids=(6,)),
        TokenEvent("r", text="y", finish_reason=FinishReason.STOP, usage=usage, timings=timings, seed=42),
        TokenEvent("r", text="late"),
    ]
    maker = ChatEventMaker(7)
    made = [event for token_event in events for event in maker.push(token_event)]
    assert made == [
        Prefill(4, 7, 0),
        Prefill(7, 7, 3),
        NoticeEvent(notice),
        Delta(text="He", token_ids=(5,)),
        Delta(token_ids=(6,)),
        Delta(text="y"),
        Finished(FinishReason.STOP, usage, timings, DraftCounts(), 42),
    ]
    assert (maker.text, maker.token_ids, maker.finished) == ("Hey", (5, 6), True)


def test_an_engine_fault_ends_the_answer_with_its_message() -> None:
    maker = ChatEventMaker(7)
    maker.push(TokenEvent("r", token_ids=(5,), text="He"))
    (end,) = maker.push(TokenEvent("r", error="NaN logits"))
    assert isinstance(end, Finished)
    assert (end.reason, end.error, end.usage) == (FinishReason.ERROR, "NaN logits", Usage(7, 0, 1))
