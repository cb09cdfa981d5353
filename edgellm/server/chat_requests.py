"""From a chat completion's request to what the engine is asked: prompt, constraint, tools, reasoning."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.chat.reasoning import CLOSE, OPEN, ReasoningSplitter, begins_inside, thinks
from edgellm.chat.reply import Reply
from edgellm.chat.request import build_request
from edgellm.chat.tool_calls import ToolCallParser, ToolFamily, tag_texts, tool_family
from edgellm.chat.tool_grammar import forced_call, tool_prompt
from edgellm.contracts import ChatMessage, ConstraintSpec, GenerationRequest, Notice, SamplingParams
from edgellm.engine.stop_strings import StopStrings
from edgellm.server.answer_memory import AnswerMemory
from edgellm.server.api_errors import ApiError, api_error
from edgellm.server.chat_schema import ChatRequest
from edgellm.server.model_host import ServedModel
from edgellm.server.options import Options
from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class PreparedChat:
    """A request for the engine and how to read its answers."""

    request: GenerationRequest
    make_reply: Callable[[], Reply]
    kv_policy: str
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True)
class _Tools:
    """What a request's tools mean for this model."""

    parser: ToolFamily | None = None
    """None: nothing in the answer is a call."""
    constraint: ConstraintSpec | None = None
    for_template: tuple[Mapping[str, Any], ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    notices: tuple[Notice, ...] = ()


def prepare_chat(
    model: ServedModel, chat: ChatRequest, memory: AnswerMemory, timeout_s: float | None
) -> PreparedChat:
    """Renders, tokenizes and checks. Work for a thread: a long conversation takes its time.

    ApiError 400, with both numbers where the context is too small.
    """
    options = chat.options
    try:
        encoder = model.encoder()
        tools = _prepare_tools(model, chat)
        template = encoder.templates.templates[encoder.templates.choose(bool(tools.for_template))]
        splits = chat.split_reasoning and options.constraint is None and thinks(template)
        sampling, stop = options.sampling, options.sampling.stop
        if splits and stop:  # they are about the content; the engine sees reasoning too
            sampling = _without_stop(sampling)
        policy = options.kv_policy or model.kv_policy
        shown = [*(tag_texts(tools.parser) if tools.parser is not None else ())]
        shown += [OPEN, CLOSE] if splits else []
        built = build_request(
            encoder,
            tools.messages,
            sampling,
            context_length=model.info.context_length,
            tools=tools.for_template,
            remembered=memory.find(options.cache_salt, tools.messages),
            template_variables=chat.template_variables,
            conversation_id=options.conversation_id,
            request_id=uuid.uuid4().hex,
            kv_policy=policy,
            constraint=tools.constraint or options.constraint,
            shown_token_ids=control_ids(model.tokenizer, shown),
            **engine_fields(options, model.tokenizer, timeout_s),
        )
        model.engine.validate(built.request)
    except BadInputError as error:
        raise _blamed(error, options, chat) from None
    inside = splits and begins_inside(built.prompt_text)
    names = [tool["function"]["name"] for tool in chat.tools]

    def make_reply() -> Reply:
        return Reply(
            splitter=ReasoningSplitter(inside=inside) if splits else None,
            stop=StopStrings(stop) if splits and stop else None,
            tools=ToolCallParser(tools.parser, names) if tools.parser is not None else None,
            parallel_calls=chat.parallel_tool_calls,
        )

    return PreparedChat(built.request, make_reply, policy, (*tools.notices, *built.notices))


def engine_fields(options: Options, tokenizer: Tokenizer, timeout_s: float | None) -> dict[str, Any]:
    """Fields of GenerationRequest that every endpoint fills alike."""
    prediction = tokenizer.encode(options.prediction, add_special=False) if options.prediction else []
    return {
        "num_samples": options.n,
        "logprobs": options.logprobs,
        "kv_keep": options.kv_keep,
        "cache_salt": options.cache_salt,
        "prediction_token_ids": tuple(prediction),
        "speculate": options.speculate,
        "max_draft": options.max_draft,
        "deadline": None if timeout_s is None else time.monotonic() + timeout_s,
    }


def control_ids(tokenizer: Tokenizer, texts: list[str]) -> tuple[int, ...]:
    """The ids of those texts that are entries of the vocabulary."""
    found = (tokenizer.token_id(text) for text in texts)
    return tuple(token_id for token_id in found if token_id is not None)


def _prepare_tools(model: ServedModel, chat: ChatRequest) -> _Tools:
    encoder = model.encoder()
    if not chat.tools:
        return _Tools(messages=chat.messages)
    template = encoder.templates.templates[encoder.templates.choose(True)]
    takes_tools = "tools" in template
    if chat.tool_choice.kind == "none":
        # The model still sees them, as it did in the turns before; what it writes is text.
        return _Tools(for_template=chat.tools if takes_tools else (), messages=chat.messages)
    family = tool_family(template) if takes_tools else ToolFamily.HERMES
    constraint = None
    if chat.tool_choice.kind == "required":
        constraint, family = forced_call(family, chat.tools, chat.tool_choice.name)
    if takes_tools:
        return _Tools(family, constraint, chat.tools, chat.messages)
    notice = Notice(
        "tools_prompted",
        f"{model.info.name} has no chat template for tools: they are described to it in a system message, "
        "and it may not call them well",
    )
    return _Tools(family, constraint, (), _with_system(chat.messages, tool_prompt(chat.tools)), (notice,))


def _with_system(messages: tuple[ChatMessage, ...], text: str) -> tuple[ChatMessage, ...]:
    """The messages with a text at the end of the system prompt; calls and their results as plain text, which
    a template without tools would leave out."""
    found: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            message = ChatMessage("user", f"<tool_response>\n{_plain(message)}\n</tool_response>")
        elif message.tool_calls:
            calls = "\n".join(_call_text(call) for call in message.tool_calls)
            message = ChatMessage("assistant", f"{_plain(message)}\n{calls}".strip())
        found.append(message)
    if found and found[0].role in ("system", "developer"):
        found[0] = ChatMessage(found[0].role, f"{_plain(found[0])}\n\n{text}")
    else:
        found.insert(0, ChatMessage("system", text))
    return tuple(found)


def _call_text(call: Mapping[str, Any]) -> str:
    import json

    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {text}}}\n</tool_call>'


def _plain(message: ChatMessage) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _without_stop(sampling: SamplingParams) -> SamplingParams:
    from dataclasses import replace

    return replace(sampling, stop=())


def _blamed(error: BadInputError, options: Options, chat: ChatRequest) -> ApiError:
    """The error with the field that it is about, as far as that can be told."""
    text = str(error)
    param = None
    for words, name in (
        (("JSON schema", "grammar", "regular expression"), "response_format"),
        (("logit_bias",), "logit_bias"),
        (("logprobs",), "logprobs"),
        (("--kv-", "kv_keep"), "kv"),
    ):
        if any(word in text for word in words):
            param = name
            break
    if param == "response_format" and chat.tool_choice.kind == "required":
        param = "tools"
    elif param == "response_format" and "grammar" in text.split(":")[0] and options.constraint is not None:
        param = "grammar" if options.constraint.kind.value != "json_schema" else param
    return api_error(error, param)
