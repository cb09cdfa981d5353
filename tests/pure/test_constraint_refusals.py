"""Schemas and grammars that cannot be used: one line, in the grammar's words, bounded, before any model."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.cli.constraint_files import read_constraint
from edgellm.cli.main import run
from edgellm.constraint.compiler import ConstraintCompiler, check_constraint
from edgellm.constraint.grammar import MAX_TEXT_BYTES, grammar_kind
from edgellm.contracts import ConstraintKind, ConstraintSpec
from edgellm_models.errors import BadInputError, NotFoundError, UsageError
from tests.support.fake_engine import ByteTokenizer

KIND = ConstraintKind


class _Bytes(ByteTokenizer):
    def encode_parts(self, parts: tuple[object, ...], *, add_bos: bool = True) -> list[int]:
        return [byte for part in parts for byte in getattr(part, "text", "").encode()]


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(_Bytes(), 258)  # type: ignore[arg-type]


BAD = [
    (KIND.JSON_SCHEMA, "", "not JSON"),
    (KIND.JSON_SCHEMA, '{"type":', "line 1 column 9"),
    (KIND.JSON_SCHEMA, "[]", "JSON object"),
    (KIND.JSON_SCHEMA, "false", "JSON object"),
    (KIND.JSON_SCHEMA, '{"type": "foo"}', "foo"),
    (KIND.JSON_SCHEMA, '{"properties": 1}', "properties"),
    (KIND.JSON_SCHEMA, '{"not": {}}', "not"),
    (KIND.JSON_SCHEMA, '{"x-guidance": {"lenient": true}, "not": {}}', "not"),
    (KIND.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    (KIND.JSON_SCHEMA, '{"type": "string", "pattern": "("}', "unclosed group"),
    (KIND.JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 1}', "minimum"),
    (KIND.JSON_SCHEMA, '{"$ref": "#/$defs/none"}', "none"),
    (KIND.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:1/x.json"}', "127.0.0.1"),
    (KIND.REGEX, "(", "unclosed group"),
    (KIND.REGEX, "(?=a)", "look-around"),
    (KIND.LARK, "", "Empty"),
    (KIND.LARK, "start: foo", "foo"),
    (KIND.LARK, 'start: "a', "lexer"),
    (KIND.GBNF, 'root ::= "a', "end of input"),
    (KIND.GBNF, "root ::= foo", "foo"),
    (KIND.LARK, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
    (KIND.GBNF, "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
    (KIND.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000, "recursion|nested"),
    (KIND.REGEX, "(" * 5000 + "a" + ")" * 5000, "nest"),
    (KIND.LARK, 'start: "' + "x" * MAX_TEXT_BYTES + '"', "262,144"),
    (KIND.REGEX, "a\0b", "NUL"),
    (KIND.REGEX, "\udc80", "surrogate"),
]


@pytest.mark.parametrize(("kind", "text", "words"), BAD, ids=lambda value: str(value)[:20])
def test_what_is_wrong_is_said_in_one_line(
    compiler: ConstraintCompiler, kind: ConstraintKind, text: str, words: str
) -> None:
    for work in (check_constraint, compiler.compile):
        with pytest.raises(BadInputError, match=words) as raised:
            work(ConstraintSpec(kind, text))
        message = str(raised.value)
        assert "\n" not in message and len(message) < 600 and "<state>" not in message


@pytest.mark.parametrize(
    ("kind", "text"),
    [(KIND.JSON_SCHEMA, '{"$ref": "#"}'), (KIND.LARK, "start: start"), (KIND.LARK, 'start: "a" start')],
)
def test_what_no_finite_answer_meets_is_refused_when_it_shows_at_once(
    compiler: ConstraintCompiler, kind: ConstraintKind, text: str
) -> None:
    if text.endswith('"a" start'):  # shows only by never ending; the token limit ends it
        assert compiler.compile(ConstraintSpec(kind, text)).mask()
        return
    with pytest.raises(BadInputError, match="no answer can meet it"):
        compiler.compile(ConstraintSpec(kind, text))


def chain(count: int, form: str, letter: str = "r") -> str:
    """Rules (in capitals: terminals) that each name the next one."""
    lines = [form.format(i, i + 1) for i in range(count)]
    return "\n".join([f"start: {letter}0", *lines, f'{letter}{count}: "a"'])


@pytest.mark.parametrize(
    "spec",
    [
        ConstraintSpec(KIND.LARK, chain(15_000, "r{}: r{}")),
        ConstraintSpec(KIND.LARK, chain(9_000, 'R{}: ("b" R{})?', "R")),
        ConstraintSpec(
            KIND.JSON_SCHEMA,
            json.dumps({
                "$ref": "#/$defs/d0",
                "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(5_000)}
                | {"d5000": {"type": "null"}},
            }),
        ),
    ],
    ids=["rules", "terminals", "references"],
)  # fmt: skip
def test_long_chains_of_rules_do_not_end_the_process(
    compiler: ConstraintCompiler, spec: ConstraintSpec
) -> None:
    """Walking them takes a stack far above the usual one; a small one ends in a segmentation fault."""
    assert len(spec.text.encode()) <= MAX_TEXT_BYTES
    try:
        check_constraint(spec)
        assert compiler.compile(spec).mask()
    except BadInputError:
        pass


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (KIND.REGEX, "((a{100}){100}){500}"),
        (KIND.REGEX, "(a|b)*a" + "(a|b)" * 2000),
        (KIND.REGEX, "(.{0,300}b){50}"),
        (KIND.LARK, "start: /(a|b)*a(a|b){500}/ /(b|a)*b(a|b){500}/"),
        (KIND.JSON_SCHEMA, json.dumps({"allOf": [{"anyOf": [
            {"properties": {f"a{i}": {"type": "string"}}}, {"properties": {f"b{i}": {"type": "null"}}},
        ]} for i in range(40)]})),
        (KIND.JSON_SCHEMA, json.dumps({"type": "array", "minItems": 10**6, "items": {"type": "array"}})),
    ],
)  # fmt: skip
def test_costly_grammars_are_bounded_in_time(
    compiler: ConstraintCompiler, kind: ConstraintKind, text: str
) -> None:
    began = time.process_time()
    with contextlib.suppress(BadInputError):
        compiler.compile(ConstraintSpec(kind, text))
    assert time.process_time() - began < 10


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(KIND),
    st.one_of(
        st.text(max_size=60),
        st.text(alphabet='start:root= "|()[]{}*+?/\\^$,.-aB1\n%', max_size=80).map(lambda t: "start: " + t),
        st.recursive(
            st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["string", "#", "a", "object"]),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["type", "properties", "items", "anyOf", "$ref", "enum", "minimum", "pattern"]
                    ),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=12,
        ).map(json.dumps),
    ),
)
def test_any_text_compiles_or_is_refused(
    compiler: ConstraintCompiler, kind: ConstraintKind, text: str
) -> None:
    try:
        constraint = compiler.compile(ConstraintSpec(kind, text))
    except BadInputError as error:
        assert "\n" not in str(error)
    else:
        assert any(constraint.mask()) or constraint.is_finished


def test_kinds_of_grammar_files() -> None:
    assert grammar_kind('root ::= "a"') is KIND.GBNF
    assert grammar_kind('# llama.cpp\nroot-1 ::=\n  "a"') is KIND.GBNF
    assert grammar_kind('start: "a ::= b"') is KIND.LARK
    assert grammar_kind("start: /x ::= y/") is KIND.LARK


# --- the files ---


def test_files_are_read_and_checked(tmp_path: Path) -> None:
    schema, grammar, bad = tmp_path / "s.json", tmp_path / "g.lark", tmp_path / "bad"
    schema.write_bytes(b'\xef\xbb\xbf{"type": "null"}')
    grammar.write_text('start: "ä"', encoding="utf-8")
    bad.write_bytes(b"start: \xff")
    assert read_constraint(None, None) is None
    assert read_constraint(str(schema), None) == ConstraintSpec(KIND.JSON_SCHEMA, '{"type": "null"}')
    assert read_constraint(None, str(grammar)) == ConstraintSpec(KIND.LARK, 'start: "ä"')
    with pytest.raises(UsageError):
        read_constraint(str(schema), str(grammar))
    with pytest.raises(NotFoundError, match="missing"):
        read_constraint(str(tmp_path / "missing"), None)
    with pytest.raises(BadInputError, match="byte 7 is 0xff"):
        read_constraint(None, str(bad))
    with pytest.raises(BadInputError, match="directory"):
        read_constraint(str(tmp_path), None)
    bad.write_bytes(b" " * (MAX_TEXT_BYTES + 1))
    with pytest.raises(BadInputError, match="262,144"):
        read_constraint(str(bad), None)


@pytest.mark.parametrize("command", [["complete", "x"], ["chat", "-p", "x"]])
def test_a_bad_file_ends_the_command_before_a_model_is_looked_for(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"type": "foo"}')
    for options, code in (
        (["--schema", str(bad)], 65),
        (["--grammar", str(bad)], 65),
        (["--schema", str(tmp_path / "none")], 66),
        (["--schema", str(bad), "--grammar", str(bad)], 2),
    ):
        assert run([*command, "-m", "hf:no/such-model", *options]) == code
        err = capsys.readouterr().err
        assert "--schema" in err or "--grammar" in err
        assert len(err.strip().splitlines()) == 1
