"""The OpenAPI document of the server: its paths, the fields of its requests, the forms of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm.contracts import ConstraintKind
from edgellm.server.chat_schema import ROLES
from edgellm.server.options import MAX_LOGPROBS, MAX_SAMPLES, MAX_STOP

TEXT: dict[str, Any] = {"type": "string"}
FLAG: dict[str, Any] = {"type": "boolean"}
OBJECT: dict[str, Any] = {"type": "object"}
IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def number(low: float | None = None, high: float | None = None, kind: str = "number") -> dict[str, Any]:
    found: dict[str, Any] = {"type": kind}
    if low is not None:
        found["minimum"] = low
    if high is not None:
        found["maximum"] = high
    return found


def integer(low: int | None = None, high: int | None = None) -> dict[str, Any]:
    return number(low, high, "integer")


def listed(items: Mapping[str, Any], most: int | None = None, least: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "array", "items": items}
    if most is not None:
        found["maxItems"] = most
    if least is not None:
        found["minItems"] = least
    return found


def either(*choices: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(choices)}


def words(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def fields(required: tuple[str, ...] = (), **properties: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        found["required"] = list(required)
    return found


SAMPLING: dict[str, Any] = {
    "temperature": number(0, 100),
    "top_p": {**number(0, 1), "exclusiveMinimum": 0},
    "top_k": integer(-1),
    "min_p": number(0, 1),
    "typical_p": {**number(0, 1), "exclusiveMinimum": 0},
    "repetition_penalty": number(0.001, 100),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": {"type": "object", "additionalProperties": number(-100, 100)},
    "seed": integer(),
    "stop": either(TEXT, listed(TEXT, MAX_STOP)),
    "stop_token_ids": {**IDS, "maxItems": 256},
    "ignore_eos": FLAG,
}
SHARED: dict[str, Any] = {
    **SAMPLING,
    "model": {**TEXT, "description": "The loaded model's name; empty or * is any."},
    "n": integer(1, MAX_SAMPLES),
    "stream": FLAG,
    "stream_options": fields(include_usage=FLAG),
    "max_tokens": integer(0),
    "max_completion_tokens": integer(0),
    "grammar": either(
        TEXT, fields(("text",), kind=words(*(kind.value for kind in ConstraintKind)), text=TEXT)
    ),
    "cache_prompt": FLAG,
    "cache_salt": TEXT,
    "prompt_cache_key": TEXT,
    "prediction": fields(("content",), type=words("content"), content=either(TEXT, listed(OBJECT))),
    "speculative": fields(mode=words("auto", "off"), max=integer(0, 64)),
    "kv": fields(policy=words("stop", "trim", "window", "budget"), budget=integer(1)),
    "truncation": words("auto", "disabled"),
    "conversation_id": TEXT,
    "return_progress": FLAG,
    "return_token_ids": FLAG,
    "response_format": fields(
        ("type",),
        type=words("text", "json_object", "json_schema"),
        json_schema=fields(("schema",), name=TEXT, schema=OBJECT, strict=FLAG),
    ),
    "user": TEXT,
}
PROMPTS = either(TEXT, listed(TEXT, least=1), {**IDS, "minItems": 1}, listed({**IDS, "minItems": 1}, least=1))
PART = fields(("type", "text"), type=words("text"), text=TEXT)
FUNCTION = fields(
    ("name",), name={**TEXT, "minLength": 1, "maxLength": 256}, description=TEXT, parameters=OBJECT
)
TOOL = fields(("type", "function"), type=words("function"), function=FUNCTION)
CALL = fields(
    ("function",),
    id=TEXT,
    type=words("function"),
    function=fields(("name",), name={**TEXT, "minLength": 1}, arguments=TEXT),
)
MESSAGE = fields(
    ("role", "content"),
    role=words(*ROLES),
    content=either(TEXT, listed(PART)),
    reasoning_content=TEXT,
    tool_calls=listed(CALL),
    tool_call_id=TEXT,
    name=TEXT,
)
MESSAGES = listed(MESSAGE, least=1)

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": fields(
        ("messages",),
        **SHARED,
        messages=MESSAGES,
        logprobs=FLAG,
        top_logprobs=integer(0, MAX_LOGPROBS),
        tools=listed(TOOL, 128),
        tool_choice=either(words("auto", "none", "required"), OBJECT),
        parallel_tool_calls=FLAG,
        reasoning_effort=TEXT,
        reasoning_format=words("auto", "deepseek", "none"),
        chat_template_kwargs=OBJECT,
    ),
    "/v1/completions": fields(
        ("prompt",),
        **SHARED,
        prompt=PROMPTS,
        logprobs=integer(0, MAX_LOGPROBS),
        echo=FLAG,
        best_of=integer(1, MAX_SAMPLES),
    ),
    "/v1/responses": fields(
        ("input",),
        model=TEXT,
        input=either(TEXT, listed(OBJECT)),
        instructions=TEXT,
        max_output_tokens=integer(0),
        temperature=number(0, 100),
        top_p={**number(0, 1), "exclusiveMinimum": 0},
        stream=FLAG,
        text=OBJECT,
        tools=listed(OBJECT, 128),
        tool_choice=either(words("auto", "none", "required"), OBJECT),
        parallel_tool_calls=FLAG,
        reasoning=OBJECT,
    ),
    "/v1/embeddings": fields(
        ("input",),
        model=TEXT,
        input=PROMPTS,
        encoding_format=words("float", "base64"),
        dimensions=integer(1),
        pooling=words("mean", "last"),
    ),
    "/tokenize": fields(
        content=TEXT,
        prompt=TEXT,
        messages=MESSAGES,
        tools=listed(TOOL, 128),
        add_special=FLAG,
        parse_special=FLAG,
        with_pieces=FLAG,
    ),
    "/detokenize": fields(("tokens",), tokens=IDS, show_special=FLAG),
    "/apply-template": fields(
        ("messages",), messages=MESSAGES, tools=listed(TOOL, 128), add_generation_prompt=FLAG
    ),
    "/v1/edge/cancel/{answer_id}": {"type": "object"},
}
ERROR = fields(
    ("error",),
    error=fields(
        ("message", "type", "param", "code"),
        message=TEXT,
        type=TEXT,
        param={"type": ["string", "null"]},
        code={"type": ["string", "null"]},
    ),
)
USAGE = fields(
    ("prompt_tokens", "completion_tokens", "total_tokens"),
    prompt_tokens=integer(0),
    completion_tokens=integer(0),
    total_tokens=integer(0),
)
COMPLETION = fields(
    ("id", "object", "created", "model", "choices", "usage"),
    id=TEXT,
    object=TEXT,
    created=integer(0),
    model=TEXT,
    choices=listed(fields(("index", "finish_reason"), index=integer(0), finish_reason=TEXT)),
    usage=USAGE,
    edgellm=OBJECT,
)
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": COMPLETION,
    "/v1/completions": COMPLETION,
    "/v1/embeddings": fields(("object", "data", "model", "usage"), object=TEXT, data=listed(OBJECT)),
    "/v1/models": fields(("object", "data"), object=TEXT, data=listed(fields(("id",), id=TEXT))),
    "/v1/models/{model}": fields(("id", "object", "owned_by"), id=TEXT),
    "/health": fields(("status",), status=TEXT),
    "/tokenize": fields(("tokens", "count"), count=integer(0)),
    "/detokenize": fields(("content",), content=TEXT),
    "/apply-template": fields(("prompt", "tokens"), prompt=TEXT, tokens=integer(0)),
    "/v1/edge/status": fields(("state", "stats"), state=TEXT, stats=OBJECT),
}
GETS = {
    "/health": "Whether the model answers.",
    "/metrics": "Prometheus metrics.",
    "/openapi.json": "This document.",
    "/v1/models": "The model.",
    "/v1/models/{model}": "The model.",
    "/v1/edge/status": "What the engine does.",
}
POSTS = {
    "/v1/chat/completions": "Answers a conversation.",
    "/v1/completions": "Continues a text.",
    "/v1/responses": "Answers a conversation, in the form of the responses API; nothing is stored.",
    "/v1/embeddings": "Hidden states of texts, pooled.",
    "/tokenize": "The token ids of a text or conversation.",
    "/detokenize": "The text of token ids.",
    "/apply-template": "The prompt that a conversation makes.",
    "/v1/edge/cancel/{answer_id}": "Ends an answer.",
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
REFUSALS = {
    "400": "A field is wrong.",
    "401": "No key, or none of this server's.",
    "403": "A foreign Host or Origin.",
    "404": "No such model or answer.",
    "408": "The body took too long.",
    "413": "The body is too long.",
    "415": "The body is no JSON.",
    "429": "The queue is full.",
    "500": "The engine failed in this request.",
    "503": "The model is loading.",
}


def document(model: str) -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    for path, meaning in GETS.items():
        paths.setdefault(path, {})["get"] = _operation(path, meaning, ("401", "403", "404", "503"))
    for path, meaning in POSTS.items():
        operation = _operation(path, meaning, tuple(REFUSALS))
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": REQUESTS[path]}},
        }
        paths.setdefault(path, {})["post"] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "edgellm",
            "version": "1",
            "description": f"The OpenAI-compatible interface of a server of {model}.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, meaning: str, refusals: tuple[str, ...]) -> dict[str, Any]:
    kind = "text/plain" if path == "/metrics" else "application/json"
    content: dict[str, Any] = {kind: {"schema": TEXT if path == "/metrics" else ANSWERS.get(path, OBJECT)}}
    if path in STREAMED:
        content["text/event-stream"] = {}
    responses: dict[str, Any] = {"200": {"description": meaning, "content": content}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status in refusals:
        found: Any = error
        if path == "/health":
            found = {"application/json": {"schema": OBJECT}}
        responses[status] = {"description": REFUSALS[status], "content": found}
    operation: dict[str, Any] = {"summary": meaning, "responses": responses}
    if "{" in path:
        name = path.partition("{")[2].rstrip("}")
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": TEXT}]
    return operation
