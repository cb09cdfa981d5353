"""Tool calls and reasoning in an answer's text: every family, and any way in which the text comes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from edgellm.chat.reasoning import ReasoningSplitter, begins_inside, thinks
from edgellm.chat.reply import Reply
from edgellm.chat.tool_calls import ToolCall, ToolCallParser, ToolFamily, tool_family
from edgellm.chat.tool_grammar import forced_call, tool_prompt
from edgellm.constraint.compiler import check_constraint
from edgellm.contracts import ConstraintKind, Delta
from edgellm.engine.stop_strings import StopStrings

NAMES = ("weather", "add")
ULM = '{"city": "Ulm"}'
H, J, P, M = ToolFamily.HERMES, ToolFamily.LLAMA_JSON, ToolFamily.LLAMA_PYTHONIC, ToolFamily.MISTRAL

CASES: list[tuple[ToolFamily, str, str, list[tuple[str, str]]]] = [
    (H, f'<tool_call>\n{{"name": "weather", "arguments": {ULM}}}\n</tool_call>', "", [("weather", ULM)]),
    (H, f'ok <tool_call>{{"name": "weather", "arguments": {ULM}}}</tool_call>!', "ok!", [("weather", ULM)]),
    (
        H,
        '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>',
        "",
        [("a", "{}"), ("b", "{}")],
    ),
    (H, '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("a", '{"x": 1}')]),
    (H, "<tool_call>[1, 2]</tool_call>", "[1, 2]", []),
    (H, "<tool_call></tool_call>", "", []),
    (H, "a <tool b", "a <tool b", []),
    (H, "ends in <tool_cal", "ends in <tool_cal", []),
    (H, "  two spaces \n\n", "  two spaces \n\n", []),
    (J, f'{{"name": "weather", "parameters": {ULM}}}', "", [("weather", ULM)]),
    (J, f'<|python_tag|>{{"name": "weather", "parameters": {ULM}}}', "", [("weather", ULM)]),
    (J, '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}}', "", [("add", "{}")] * 2),
    (J, '{"type": "function", "name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (J, '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    (J, '{"answer": 42}', '{"answer": 42}', []),
    (J, '{"name": "Bob", "age": 4', '{"name": "Bob", "age": 4', []),
    (J, "plain text {", "plain text {", []),
    (
        P,
        '[weather(city="Ulm"), add(a=1, b=[2, {"c": None}])]',
        "",
        [("weather", ULM), ("add", '{"a": 1, "b": [2, {"c": null}]}')],
    ),
    (P, "[weather(__import__('os'))]", "[weather(__import__('os'))]", []),
    (P, "[weather(city=f())]", "[weather(city=f())]", []),
    (P, "[1, 2, 3]", "[1, 2, 3]", []),
    (P, "[unknown(a=1)]", "[unknown(a=1)]", []),
    (M, f'[TOOL_CALLS][{{"name": "weather", "arguments": {ULM}}}]', "", [("weather", ULM)]),
    (M, f"[TOOL_CALLS]weather[ARGS]{ULM}[TOOL_CALLS]add[ARGS]{{}}", "", [("weather", ULM), ("add", "{}")]),
    (M, f"[TOOL_CALLS]weather{ULM}", "", [("weather", ULM)]),
    (M, f'[{{"name": "weather", "arguments": {ULM}}}]', "", [("weather", ULM)]),
    (M, "Sure.[TOOL_CALLS]add[ARGS]{}", "Sure.", [("add", "{}")]),
    (M, "[see the TOOL] and [1]", "[see the TOOL] and [1]", []),
    (M, "[TOOL_CALLS]oops", "oops", []),
]  # fmt: skip


def parse(parser: ToolCallParser, parts: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    return text, [(piece.name, piece.arguments) for piece in pieces if isinstance(piece, ToolCall)]


def splits(text: str, rng: random.Random) -> list[list[str]]:
    """Whole, character by character, and some random ways."""
    found = [[text], list(text)]
    for _ in range(8):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 6))))
        found.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    return found


@pytest.mark.parametrize(("family", "text", "shown", "calls"), CASES)
def test_every_form_however_it_comes(
    family: ToolFamily, text: str, shown: str, calls: list[tuple[str, str]]
) -> None:
    """G10: the result does not depend on how the text is split, and no markup is shown."""
    rng = random.Random(1)
    for parts in splits(text, rng):
        found = parse(ToolCallParser(family, NAMES), parts)
        assert found == (shown, calls), parts


@pytest.mark.parametrize("family", list(ToolFamily))
def test_any_text_cut_anywhere_is_no_exception_and_no_half_call(family: ToolFamily) -> None:
    rng = random.Random(2)
    alphabet = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "arguments",
        "name",
    ]
    alphabet += ["parameters", "weather", "add", *'<[{}"\\:,()];\né1 ']
    for _ in range(400):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 25)))
        results = {json.dumps(parse(ToolCallParser(family, NAMES), parts)) for parts in splits(text, rng)[:4]}
        assert len(results) == 1, text
    for case_family, text, _, calls in CASES:
        if case_family is family:
            for end in range(len(text)):
                _, found = parse(ToolCallParser(family, NAMES), [text[:end]])
                assert found == calls[: len(found)], text[:end]


def test_text_without_calls_streams_and_long_ones_are_bounded() -> None:
    parser = ToolCallParser(H, NAMES)
    assert parser.push("The answer") == ["The answer"]
    assert parser.push(" is 4 < 5") == [" is 4 < 5"]
    for family in ToolFamily:
        parser = ToolCallParser(family, NAMES)
        tag = {H: "<tool_call>", J: '{"name":', P: "[add(", M: "[TOOL_CALLS]"}[family]
        shown = parse(parser, [tag, *["x" * 10_000] * 40])[0]
        assert shown.count("x") == 400_000


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ '<tool_call>' }} {{ tools }}", H),
        ("[TOOL_CALLS] {{ tools }}", M),
        ('{"name": function name, "parameters": dictionary}', J),
        ("<|python_tag|>", J),
        ("[func_name1(params_name1=params_value1), func_name2(params)]", P),
        ("{{ tools }}", H),
    ],
)
def test_families_by_template(template: str, family: ToolFamily) -> None:
    assert tool_family(template) is family


@pytest.mark.parametrize("family", list(ToolFamily))
def test_a_forced_call_is_a_grammar_that_its_parser_reads(family: ToolFamily) -> None:
    reference: dict[str, Any] = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point"}},
        "$defs": {"point": {"type": "array", "items": {"type": "number"}}},
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": reference}} for name in NAMES]
    for name in (None, "add"):
        spec, read_as = forced_call(family, tools, name)
        check_constraint(spec)
        assert ("weather" in spec.text) == (name is None)
        text = {
            H: '<tool_call>\n{"name": "add", "arguments": {"p": [1]}}\n</tool_call>',
            J: '{"name": "add", "parameters": {"p": [1]}}',
            M: '[{"name": "add", "arguments": {"p": [1]}}]',
        }[read_as]
        assert parse(ToolCallParser(read_as, NAMES), list(text)) == ("", [("add", '{"p": [1]}')])
        assert spec.kind in (ConstraintKind.LARK, ConstraintKind.JSON_SCHEMA)
    assert json.dumps(tools[0]) in tool_prompt(tools)


# --- reasoning ---


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nso\n</think>\n\nYes.", False, "so", "Yes."),
        ("  <think>so</think>Yes. <think>not</think>", False, "so", "Yes. <think>not</think>"),
        ("so\n</think>Yes.", True, "so", "Yes."),
        ("<think></think>Yes.", False, "", "Yes."),
        ("<think>cut off \n", False, "cut off", ""),
        ("<thin", False, "", "<thin"),
        ("Yes <think>", False, "", "Yes <think>"),
        ("  plain", False, "", "  plain"),
        ("<think>a </thin b</think> c", False, "a </thin b", "c"),
        ("", True, "", ""),
    ],
)
def test_reasoning_however_it_comes(text: str, inside: bool, reasoning: str, content: str) -> None:
    rng = random.Random(3)
    for parts in splits(text, rng):
        splitter = ReasoningSplitter(inside=inside)
        pairs = [splitter.push(part) for part in parts] + [splitter.finish()]
        assert ("".join(p[0] for p in pairs), "".join(p[1] for p in pairs)) == (reasoning, content), parts


def test_which_models_think() -> None:
    assert thinks("{{ '<think>' }}") and not thinks("{{ messages }}")
    assert begins_inside("<|assistant|>\n<think>\n") and not begins_inside("<think>\n</think>\n\n")


def test_a_reply_keeps_every_token_and_logprob_in_order() -> None:
    """What is held back takes its tokens along; nothing is lost at the end."""
    rng = random.Random(4)
    text = '<think>hm</think>\n\nLet me see. <tool_call>{"name": "add", "arguments": {}}</tool_call> END more'
    for parts in splits(text, rng):
        reply = Reply(
            splitter=ReasoningSplitter(),
            stop=StopStrings(["END"]),
            tools=ToolCallParser(H, NAMES),
            make_id=lambda: "id",
        )
        deltas = [
            d for number, part in enumerate(parts) for d in reply.push(Delta(text=part, token_ids=(number,)))
        ]
        stopped_at = next(i for i in range(len(parts)) if "END" in "".join(parts[: i + 1]))
        deltas += reply.finish()
        assert [t for d in deltas for t in d.token_ids] == list(range(stopped_at + 1))
        assert "".join(d.text for d in deltas).strip() == "Let me see."
        assert "".join(d.reasoning for d in deltas) == "hm"
        assert [d.tool_call["function"]["name"] for d in deltas if d.tool_call] == ["add"]
        assert reply.stopped and reply.num_calls == 1
