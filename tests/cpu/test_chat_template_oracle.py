"""Rendering and tokenizing of chats against transformers, byte for byte and id for id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgellm_models.tokenizer import load_chat_templates, load_tokenizer
from edgellm_models.tokenizer.chat_encoding import ChatEncoder
from edgellm_models.tokenizer.chat_template import ChatTemplates
from tests.support.chat_samples import CONVERSATIONS, TEMPLATES, TOOL_TALK, TOOLS
from tests.support.oracles import require_oracle
from tests.support.tiny_tokenizers import STYLES, make_tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
NO_SYSTEM = ("gemma2",)

PAIRS = [
    (template, talk)
    for template in TEMPLATES
    for talk in CONVERSATIONS
    if (template, talk) != ("gemma2", "system")
]
TOOL_PAIRS = ["llama31", "mistral", "qwen25", "qwen3", "features"]


def theirs(
    source: str, messages: list[dict[str, Any]], tools: Any, generation: bool, **variables: Any
) -> str:
    require_oracle("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=source,
        add_generation_prompt=generation,
        **SPECIAL,
        **variables,
    )
    return rendered[0]


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize(("template", "talk"), PAIRS)
def test_rendering_equals_transformers(template: str, talk: str, generation: bool) -> None:
    """B09 B12: block trimming, trailing newlines, tojson, namespaces, slices, macros, loop controls,
    generation tag."""
    assert len(PAIRS) >= 30
    source = TEMPLATES[template]
    messages = CONVERSATIONS[talk]
    ours = ChatTemplates({"default": source}, SPECIAL).render(messages, None, generation)
    assert ours == theirs(source, messages, None, generation)


@pytest.mark.parametrize("template", TOOL_PAIRS)
def test_tools_and_tool_calls_equal_transformers(template: str) -> None:
    """B06 B12: schemas and arguments as JSON with their key order, non-ASCII kept."""
    source = TEMPLATES[template]
    ours = ChatTemplates({"default": source}, SPECIAL).render(TOOL_TALK, TOOLS)
    assert ours == theirs(source, TOOL_TALK, TOOLS, True)


@pytest.mark.parametrize("template", ["llama31", "features", "qwen3"])
def test_variables_reach_the_template(template: str) -> None:
    variables = {"date_string": "01 Jan 2030", "enable_thinking": False}
    ours = ChatTemplates({"default": TEMPLATES[template]}, SPECIAL).render(CONVERSATIONS["one"], **variables)
    assert ours == theirs(TEMPLATES[template], CONVERSATIONS["one"], None, True, **variables)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("talk", sorted(CONVERSATIONS))
def test_ids_equal_transformers(tmp_path: Path, style: str, talk: str) -> None:
    """A09: without special tokens in what people wrote the ids are transformers' own, with exactly one
    BOS."""
    transformers = require_oracle("transformers")
    tiny = make_tokenizer(style)
    tiny.write(tmp_path)
    templates = load_chat_templates(tmp_path, "safetensors", {})
    messages = CONVERSATIONS[talk]
    if templates is None:
        assert style == "gpt2"
        return
    if talk == "system" and not templates.traits("default").system_role:
        messages = messages[1:]
    ours = load_tokenizer(tmp_path, "safetensors", {})
    got = ChatEncoder(ours, templates).encode(messages)
    judge = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = judge.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert list(got.token_ids) == list(expected)
    if ours.add_bos:
        assert got.token_ids.count(ours.bos_id) == 1
    assert got.text == judge.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("style", STYLES)
def test_tokenizer_equals_transformers(tmp_path: Path, style: str) -> None:
    """A17, and the decode of special tokens (A06) as transformers does it."""
    transformers = require_oracle("transformers")
    from tests.support.corpus import corpus_blocks, corpus_lines

    make_tokenizer(style).write(tmp_path)
    ours = load_tokenizer(tmp_path, "safetensors", {})
    judge = transformers.AutoTokenizer.from_pretrained(tmp_path)
    wrong = [
        text for text in (*corpus_lines(), *corpus_blocks()) if ours.encode(text) != judge(text)["input_ids"]
    ]
    assert not wrong, f"{len(wrong)} differ, first {wrong[0]!r}"
    specials = [ours.token_text(i) for i in sorted(judge.all_special_ids)]
    text = " tail ".join(["", *specials, " two  spaces "])
    ids = judge(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, add_special=False) == ids
    assert ours.decode(ids, show_special=True) == judge.decode(ids, skip_special_tokens=False)
    assert ours.decode(ids) == judge.decode(ids, skip_special_tokens=True)
