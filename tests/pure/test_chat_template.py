"""Chat templates: found, chosen, and given messages in the form they take."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer import load_chat_templates
from edgellm_models.tokenizer.chat_template import ChatTemplates
from tests.support.chat_samples import TEMPLATES, TOOL_TALK, TOOLS

STRINGS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text | trim }};"
    "{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }};{% endfor %}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + STRINGS
)
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def one(source: str) -> ChatTemplates:
    return ChatTemplates({"default": source}, {"bos_token": "", "eos_token": ""})


def write(folder: Path, name: str, value: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


# --- which one
# ----------------------------------------------------------------------------------------------------


def test_the_jinja_file_wins(tmp_path: Path) -> None:
    """B08: over tokenizer_config.json and chat_template.json."""
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config", "bos_token": {"content": "<s>"}})
    assert load_chat_templates(tmp_path, "safetensors", {}).render([user("x")]) == "config"  # type: ignore[union-attr]
    write(tmp_path, "chat_template.json", {"chat_template": "json"})
    write(tmp_path, "chat_template.jinja", "file {{ bos_token }}")
    templates = load_chat_templates(tmp_path, "safetensors", {})
    assert templates is not None
    assert templates.render([user("x")]) == "file <s>"


def test_default_by_name_and_tool_use_only_with_tools(tmp_path: Path) -> None:
    """B08: not the first of the list."""
    named = [{"name": "tool_use", "template": "with tools"}, {"name": "default", "template": "plain"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    templates = load_chat_templates(tmp_path, "safetensors", {})
    assert templates is not None
    assert templates.render([user("x")]) == "plain"
    assert templates.render([user("x")], []) == "plain"
    assert templates.render([user("x")], TOOLS) == "with tools"
    assert templates.templates == {"tool_use": "with tools", "default": "plain"}
    write(tmp_path, "chat_template.jinja", "file")
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "file with tools")
    templates = load_chat_templates(tmp_path, "safetensors", {})
    assert templates is not None
    assert (templates.render([user("x")]), templates.render([user("x")], TOOLS)) == (
        "file",
        "file with tools",
    )


def test_templates_of_a_gguf() -> None:
    """B08: tokenizer.chat_template and .chat_template.NAME, with the strings of its special ids."""
    fields = {
        "tokenizer.chat_template": "plain {{ bos_token }}{{ eos_token }}",
        "tokenizer.chat_template.tool_use": "with tools",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    templates = load_chat_templates(Path("x"), "gguf", fields)
    assert templates is not None
    assert templates.render([user("x")]) == "plain <s></s>"
    assert templates.render([user("x")], TOOLS) == "with tools"


def test_no_template_is_none(tmp_path: Path) -> None:
    """B11: a base model never gets another model's format."""
    assert load_chat_templates(tmp_path, "safetensors", {}) is None
    assert load_chat_templates(Path("x"), "gguf", {"tokenizer.ggml.model": "gpt2"}) is None


def test_several_without_a_default_are_an_error() -> None:
    with pytest.raises(BadInputError, match="none is called default: a, b"):
        ChatTemplates({"a": "1", "b": "2"}).choose()
    assert ChatTemplates({"rag": "1"}).choose() == "rag"


@pytest.mark.parametrize(
    "value", [[{"template": "x"}], [{"name": "default", "template": 3}], [{"name": "default"}]]
)
def test_damaged_template_lists(tmp_path: Path, value: Any) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": value})
    with pytest.raises(BadInputError, match=r"tokenizer_config\.json"):
        load_chat_templates(tmp_path, "safetensors", {})


def test_huge_templates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="at most"):
        ChatTemplates({"default": "x" * 2_000_000})
    write(tmp_path, "chat_template.jinja", "x" * 2_000_000)
    with pytest.raises(BadInputError, match="at most"):
        load_chat_templates(tmp_path, "safetensors", {})


# --- what templates may use
# -----------------------------------------------------------------------------------------


def test_time_is_that_of_the_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """B01: any format, and a server started yesterday shows today's date."""
    from edgellm_models.tokenizer import template_sandbox

    templates = one("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}|{{ strftime_now('%d %b %Y') }}")

    def at(moment: datetime.datetime) -> str:
        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return moment

        monkeypatch.setattr(template_sandbox, "datetime", Clock)
        return templates.render([user("x")])

    assert at(datetime.datetime(2024, 2, 29, 23, 59, 58)) == "2024-02-29 23:59:58|29 Feb 2024"
    assert at(datetime.datetime(2024, 3, 1, 0, 0, 1)) == "2024-03-01 00:00:01|01 Mar 2024"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ('x' | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('x') }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{% extends 'x' %}",
        "{{ dict.__class__.__mro__ }}",
        "{{ environment.filters }}",
        "{{ nothing.here }}",
        "{{ lipsum() }}",
    ],
)
def test_templates_cannot_reach_python(source: str) -> None:
    messages = [user("x")]
    with pytest.raises(BadInputError, match="chat template") as caught:
        one(source).render(messages)
    assert "\n" not in str(caught.value)
    assert messages == [user("x")]


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% for %}", "{% nothing %}", "{{ 'a' | nofilter }}"])
def test_syntax_errors_name_the_line(source: str) -> None:
    with pytest.raises(BadInputError, match=r"wrong in line 2"):
        one("\n" + source).render([user("x")])


def test_the_caller_s_messages_are_untouched() -> None:
    before = json.dumps(TOOL_TALK)
    one(TEMPLATES["qwen25"]).render(TOOL_TALK, TOOLS)
    assert json.dumps(TOOL_TALK) == before


# --- system prompts
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [NO_SYSTEM, DROPS_SYSTEM, TEMPLATES["gemma2"]])
def test_a_refused_or_dropped_system_prompt_goes_into_the_user_turn(source: str) -> None:
    """B03: folded with a Notice, never an error, never silently dropped."""
    templates = one(source)
    chat = templates.prepare([{"role": "system", "content": "Be brief."}, user("Hi")])
    assert [notice.kind for notice in chat.notices] == ["system_folded"]
    assert "Be brief.\n\nHi" in templates.render_prepared(chat)
    assert [message["role"] for message in chat.messages] == ["user"]
    assert templates.prepare([user("Hi")]).notices == ()


def test_folding_with_parts_several_and_none() -> None:
    from edgellm_models.tokenizer.template_messages import fold_system

    system = {"role": "system", "content": "S"}
    assert fold_system([system]) == [user("S")]
    assert fold_system([system, {**system, "content": "T"}, user("u")]) == [user("S\n\nT\n\nu")]
    answer = {"role": "assistant", "content": "a"}
    assert fold_system([user("u"), answer, system, user("v")]) == [user("u"), answer, user("S\n\nv")]
    parts = user([{"type": "text", "text": "u"}])
    assert fold_system([system, parts])[0]["content"] == [
        {"type": "text", "text": "S"},
        {"type": "text", "text": "u"},
    ]


def test_a_supported_system_prompt_stays() -> None:
    for name in ("chatml", "llama2", "llama31", "mistral", "qwen25", "gemma3", "phi3"):
        chat = one(TEMPLATES[name]).prepare([{"role": "system", "content": "Be brief."}, user("Hi")])
        assert chat.notices == (), name
        assert chat.messages[0]["role"] == "system", name


def test_developer_is_system() -> None:
    talk = [{"role": "developer", "content": "D"}, user("x")]
    assert one(STRINGS).render(talk) == "[system]D[user]x"
    assert one(STRINGS + "{# developer #}").render(talk) == "[developer]D[user]x"


def test_the_template_s_own_refusal_is_the_message() -> None:
    """B03: an error that reaches the user names what the template said."""
    with pytest.raises(BadInputError, match="must alternate"):
        one(TEMPLATES["mistral"]).render([user("a"), user("b")])


# --- content and tool calls
# --------------------------------------------------------------------------------------------


def test_content_parts_by_what_the_template_takes() -> None:
    """B13: joined with a line feed for strings, passed as parts, a plain string made one part."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert one(STRINGS).render([user(parts)]) == "[user]a\nb"
    assert one(PARTS).render([user(parts)]) == "[user]a;b;"
    assert one(PARTS).render([user("a")]) == "[user]a;"
    assert one(BOTH).render([user(parts)]) == "[user]a;b;"
    assert one(BOTH).render([user("a")]) == "[user]a"
    assert (
        one(TEMPLATES["gemma3"]).render([user(parts)])
        == "<start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", None, 7])
@pytest.mark.parametrize("source", [STRINGS, PARTS, TEMPLATES["gemma3"]])
def test_other_parts_are_refused_by_name(kind: Any, source: str) -> None:
    """B13: a text model says which part it cannot take."""
    with pytest.raises(BadInputError, match=f"type {kind!r}.*supported is 'text'"):
        one(source).render(
            [user([{"type": "text", "text": "see"}, {"type": kind, "image_url": {"url": "x"}}])]
        )


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": 7}, "content of a user message"),
        ({"role": "user", "content": [{"type": "text", "text": 7}]}, "string as its text"),
        ({"role": 7, "content": "x"}, "object with a role"),
        ("hello", "object with a role"),
        ({"role": "assistant", "content": "", "tool_calls": "f()"}, "tool_calls must be a list"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": "f"}]}, "object with a function"),
    ],
)
def test_malformed_messages(message: Any, text: str) -> None:
    with pytest.raises(BadInputError, match=text):
        one(STRINGS).render([message])


def test_null_content_is_an_empty_string() -> None:
    """B06: legal with tool calls; templates split and strip it."""
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1].strip() }}{% endfor %}"
    talk = [user("x"), {"role": "assistant", "content": None, "tool_calls": TOOL_TALK[1]["tool_calls"]}]
    assert one(source).render(talk) == "[user]x[assistant]"
    assert one(source).render([user("x"), {"role": "assistant"}]) == "[user]x[assistant]"


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama31", "mistral"])
def test_arguments_as_text_or_object_give_the_same_prompt(name: str) -> None:
    """B06: an object once, never JSON inside JSON."""
    text = json.loads(json.dumps(TOOL_TALK))
    function = text[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    rendered = one(TEMPLATES[name]).render(text, TOOLS)
    assert rendered == one(TEMPLATES[name]).render(TOOL_TALK, TOOLS)
    assert '{"city": "Zürich", "n": 1}' in rendered
    assert '\\"city' not in rendered


def test_arguments_as_items_and_as_text() -> None:
    """B06: the form that the template expects."""
    frame = (
        "{{% for m in messages %}}{{{{ m.content }}}}{{% for t in m.tool_calls or [] %}}{}"
        "{{% endfor %}}{{% endfor %}}"
    )
    items = frame.format("{% for k, v in t.function.arguments | items %}{{ k }}={{ v }};{% endfor %}")
    glued = frame.format("{{ '<' + t.function.arguments + '>' }}")
    for arguments in ({"city": "Rom"}, '{"city": "Rom"}'):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        talk = [user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
        assert one(items).render(talk) == "xcity=Rom;"
        assert one(glued).render(talk) == 'x<{"city": "Rom"}>'
    call["function"]["arguments"] = "not json"  # type: ignore[index]
    assert one(glued).render(talk) == "x<not json>"


def test_reasoning_is_known_by_every_name() -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }};{% endfor %}"
    for key in ("reasoning", "thinking", "reasoning_content"):
        assert one(source).render([{"role": "assistant", "content": "", key: "why"}]) == "why/why;"


def test_importing_needs_no_template_engine() -> None:
    """jinja2, tokenizers and sentencepiece are imported when they are used, torch never."""
    code = (
        "import sys; import edgellm_models.tokenizer.chat_encoding, edgellm_models.tokenizer.stream_decoder;"
        "print([m for m in ('torch', 'jinja2', 'tokenizers', 'sentencepiece') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(root / "models")},
    )
    assert re.fullmatch(r"\[\]\s*", found.stdout), found.stdout
