"""A constraint's text as a grammar of llguidance: what may be written, how much of it, and what is wrong."""

from __future__ import annotations

import json
import re
from typing import Any

from edgellm.contracts import ConstraintKind, ConstraintSpec
from edgellm_models.errors import BadInputError

MAX_TEXT_BYTES = 256 << 10
"""Of a schema or grammar. The largest published schemas in use have about half of it."""
MAX_MESSAGE_CHARS = 400

NAMES = {
    ConstraintKind.JSON_SCHEMA: "JSON schema",
    ConstraintKind.REGEX: "regular expression",
    ConstraintKind.LARK: "Lark grammar",
    ConstraintKind.GBNF: "GBNF grammar",
}

WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
"""Between the parts of a JSON answer, as llama.cpp bounds it: a model that likes line feeds must not write
them for ever."""

_PLAIN_WORDS = {"NoExtensionBias": "nothing can come next", "NoExtension": "nothing can come next"}
"""llguidance's names of how a parser stopped, for a person."""

_LONG_WORD = re.compile(r"(\S{60})\S{20,}")
"""A stretch of the grammar itself, which messages quote up to three times."""

_GBNF_RULE = re.compile(r"(?m)^[ \t]*[A-Za-z][A-Za-z0-9_-]*[ \t]*::=")


def grammar_kind(text: str) -> ConstraintKind:
    """The language of a grammar file: GBNF defines rules with ``::=``, Lark with ``:``."""
    return ConstraintKind.GBNF if _GBNF_RULE.search(text) else ConstraintKind.LARK


def to_grammar(spec: ConstraintSpec) -> str:
    """The grammar in llguidance's own form, not yet checked. BadInputError when the text is not of its
    kind."""
    from llguidance import LLMatcher

    try:
        size = len(spec.text.encode("utf-8"))
    except UnicodeEncodeError:
        raise BadInputError(f"the {NAMES[spec.kind]} holds half a surrogate pair") from None
    if size > MAX_TEXT_BYTES:
        raise BadInputError(f"the {NAMES[spec.kind]} has {size:,} bytes; at most {MAX_TEXT_BYTES:,} are read")
    if "\0" in spec.text:
        raise BadInputError(f"the {NAMES[spec.kind]} holds a NUL character")
    if spec.kind is ConstraintKind.JSON_SCHEMA:
        schema = _read_schema(spec.text)
        try:
            # Last word: a keyword that cannot be enforced is an error, whatever the schema's x-guidance says.
            return LLMatcher.grammar_from_json_schema(
                json.dumps(schema), {"whitespace_pattern": WHITE_SPACE}, {"lenient": False}
            )
        except (ValueError, RecursionError) as error:
            raise bad_constraint(spec, str(error)) from None
    if spec.kind is ConstraintKind.REGEX:
        return LLMatcher.grammar_from_regex(spec.text)
    text = _gbnf_as_lark(spec) if spec.kind is ConstraintKind.GBNF else spec.text
    return LLMatcher.grammar_from_lark(text)


def bad_constraint(spec: ConstraintSpec, message: str) -> BadInputError:
    """The error that says in one line what the grammar's own words are."""
    return BadInputError(f"the {NAMES[spec.kind]} cannot be used: {one_line(message)}")


def one_line(message: str) -> str:
    """llguidance's words without its dump of the parser, in one line of bounded length."""
    words = " ".join(message.partition("<state>")[0].replace("<non-verbose/>", "").split())
    words = _LONG_WORD.sub(r"\1...", _PLAIN_WORDS.get(words, words))
    if len(words) <= MAX_MESSAGE_CHARS:
        return words
    # The place comes first and the cause last; between them may be the whole grammar.
    return f"{words[: MAX_MESSAGE_CHARS // 2]} ... {words[-MAX_MESSAGE_CHARS // 2 :]}"


def _read_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise BadInputError("the JSON schema is nested too deeply") from None
    except ValueError as error:
        raise BadInputError(f"the JSON schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        shown = json.dumps(schema)[:40]
        raise BadInputError(f"a JSON schema that an answer can meet is a JSON object, not {shown}")
    return schema


def _gbnf_as_lark(spec: ConstraintSpec) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(spec.text)
    except RecursionError:
        raise bad_constraint(spec, "it is nested too deeply") from None
    except Exception as error:  # the converter is plain Python and raises whatever it meets
        raise bad_constraint(spec, str(error) or type(error).__name__) from None
