"""A jinja2 sandbox for untrusted chat templates: the options of transformers, bounded in time, memory and
output.

Templates come with model files, so they are code of strangers. jinja2's immutable sandbox keeps them from
Python's insides; this module keeps them from running for ever and from filling memory:

- every loop asks a clock at each item, every call, filter and operator asks it once (CPU seconds of this
thread);
- every string that a call, filter, operator, ``~`` or output makes is counted against one budget per
rendering, and
  what could be huge in a single step (repeat, pad, join, replace, format, power) is computed beforehand and
  refused;
- values offer only the methods that templates use, by type (``template_methods``); there are no bytes;
- the source and its syntax tree are limited before they are compiled;
- containers are measured as if unfolded, so that ``[x, x]`` of ``[x, x]`` ... cannot hide 2**40 items in 40
lists.

The hooks are put into the syntax tree before it is compiled; the text that a template renders is not changed
by them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.sandbox

from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer.hf_files import MAX_TEMPLATE_BYTES
from edgellm_models.tokenizer.template_budget import (
    MAX_MADE_CHARS,
    MAX_SECONDS,
    Budget,
    TemplateLimitError,
    input_size,
)
from edgellm_models.tokenizer.template_hooks import instrument
from edgellm_models.tokenizer.template_methods import is_offered

MAX_NUMBER = 100_000
"""Largest width, count or precision that may be given to a function."""
MAX_BITS = 10_000
MAX_NODES = 12_000
"""Nodes of a syntax tree; compiling takes 0.3 ms for each. Real templates have under 4,000."""
MAX_PRINTED = 10_000
"""Items and characters of what ``pprint`` lays out, which takes quadratic time."""


_budget: ContextVar[Budget] = ContextVar("edgellm_template_budget")


class _TickingIterable:
    """An iterable that asks the clock at each item; its length is that of the original, as ``loop.length``
    needs."""

    def __init__(self, inner: Any, budget: Budget) -> None:
        self._inner = inner
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        for item in self._inner:
            self._budget.tick()
            yield item

    def __len__(self) -> int:
        return len(self._inner)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's part for training; rendering only needs its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """``namespace()`` without underscore names, as transformers has it."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a namespace cannot hold {name!r}: it begins with an underscore"
            )


class _DictType:
    """``dict(...)`` and ``dict.fromkeys`` and nothing else of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    """The time of rendering, local, as transformers has it."""
    if len(pattern) > 1000 or re.search(r"%[^A-Za-z%]*\d{3,}", pattern):
        raise TemplateLimitError("a date format is too long")
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a prompt: characters stay themselves, keys keep their order (jinja2's own filter escapes for
    HTML)."""
    size = _budget.get().unfolded(value)
    step = indent if isinstance(indent, int) else len(indent or "")
    if step * size > MAX_MADE_CHARS:
        raise TemplateLimitError("a JSON indent is too wide")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _check_numbers(values: Any) -> None:
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_NUMBER:
            raise TemplateLimitError(f"it asks for a width or count of {value}; at most {MAX_NUMBER}")


def _check_format(pattern: str, arguments: Sequence[Any]) -> None:
    """Refuses widths in ``%`` and ``str.format`` patterns that make a huge string in one step."""
    if re.search(r"\d{5,}", pattern):
        raise TemplateLimitError("a format asks for a width of five digits or more")
    if "*" in pattern or re.search(r"\{[^}]*\{", pattern):
        _check_numbers(arguments)
    budget = _budget.get()
    per_field = sum(budget.unfolded(argument) for argument in arguments)
    fields = 1 + pattern.count("{") + pattern.count("%")
    budget.spend(len(pattern) + (per_field * fields if "{" in pattern else per_field))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


def _replace_size(text: Any, old: Any, new: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """See the module. One environment serves any number of renderings and threads."""

    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.globals.pop("lipsum", None)  # random text has no place in a prompt
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            namespace=_Namespace,
            dict=_DictType(),
        )
        self.filters["tojson"] = _tojson
        for name, function in list(self.filters.items()):
            self.filters[name] = _limited_filter(name, function)

    # --- hooks that the compiled template calls
    # --------------------------------------------------------------

    def limited_loop(self, items: Any) -> Any:
        return _TickingIterable(items, _budget.get())

    def limited_output(self, value: Any) -> Any:
        """Counts what a ``{{ }}`` is about to print."""
        budget = _budget.get()
        budget.emit(len(value) if isinstance(value, str) else budget.unfolded(value))
        return value

    def limited_text(self, chars: int) -> str:
        """Counts the literal text beside it."""
        _budget.get().emit(chars)
        return ""

    def limited_concat(self, *values: Any) -> str:
        budget = _budget.get()
        budget.spend(sum(len(v) if isinstance(v, str) else budget.unfolded(v) for v in values))
        return "".join(str(v) for v in values)

    def limited_container(self, value: Any) -> Any:
        _budget.get().unfolded(value)
        return value

    # --- jinja2's own hooks
    # ----------------------------------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_TEMPLATE_BYTES:
            raise TemplateLimitError(
                f"it has {len(source)} characters; at most {MAX_TEMPLATE_BYTES} are read"
            )
        if source.count("{{") + source.count("{%") > MAX_NODES:
            raise TemplateLimitError(f"it has more than {MAX_NODES} tags")
        tree = super()._parse(source, name, filename)
        for count, _ in enumerate(tree.find_all(nodes.Node), start=1):
            if count > MAX_NODES:
                raise TemplateLimitError(f"its syntax tree has more than {MAX_NODES} nodes")
        return instrument(tree)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Only what is listed as offered, and of that nothing that jinja2 calls unsafe."""
        if isinstance(obj, _DictType):
            return attr == "fromkeys"
        return is_offered(obj, attr) and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.tick()
        # jinja2 wraps str.format, so that the string it belongs to is one step further away.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if getattr(owner, "__class__", None) is LimitedEnvironment and owner is self:
            return function(*args)  # ours; jinja2's own _loop_vars are of no use to it
        if isinstance(owner, str):
            if getattr(function, "__name__", "") == "join" and args:
                args = (_joinable(args[0]), *args[1:])
            _check_string_method(owner, getattr(function, "__name__", ""), [*args, *kwargs.values()])
        result = super().call(context, function, *args, **kwargs)
        return _counted(result, budget)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        _check_operator(operator, left, right, budget)
        return _counted(super().call_binop(context, operator, left, right), budget, operator in "+*")


def _counted(result: Any, budget: Budget, deep: bool = False) -> Any:
    if isinstance(result, str):
        budget.spend(len(result))
    elif isinstance(result, list | tuple | dict):
        if deep:
            budget.unfolded(result)
        else:
            budget.spend(len(result))
    return result


def _check_operator(operator: str, left: Any, right: Any, budget: Budget) -> None:
    for value in (left, right):
        if isinstance(value, bytes | bytearray | memoryview):
            raise TemplateLimitError("it computes with bytes, which templates do not have")
    numbers = isinstance(left, int) and isinstance(right, int)
    if operator == "**" and numbers and abs(right) * left.bit_length() > MAX_BITS:
        raise TemplateLimitError("it computes a number that is too large")
    if operator == "*":
        if numbers and left.bit_length() + right.bit_length() > MAX_BITS:
            raise TemplateLimitError("it computes a number that is too large")
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                budget.spend(len(sequence) * max(0, count))
                if not isinstance(sequence, str):
                    budget.make_items(len(sequence) * max(0, count))
    elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        budget.spend(len(left) + len(right))
        if not isinstance(left, str):
            budget.make_items(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, list(right) if isinstance(right, tuple) else [right])


def _check_string_method(text: str, name: str, arguments: list[Any]) -> None:
    """Sizes of results that one call on a string could blow up."""
    budget = _budget.get()
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        _check_numbers(arguments)
        if name == "expandtabs":
            width = next((a for a in arguments if isinstance(a, int)), 8)
            budget.spend(len(text) + text.count("\t") * width)
    elif name == "replace" and len(arguments) >= 2:
        budget.spend(_replace_size(text, arguments[0], arguments[1]))
    elif name == "join" and arguments:
        _check_join(arguments[0], text)
    elif name in ("format", "format_map"):
        _check_format(text, arguments)
    elif name in ("split", "rsplit", "splitlines"):
        separator = next((a for a in arguments if isinstance(a, str)), "")
        # Without a separator at most every second character is a word.
        budget.make_items(text.count(separator) + 1 if separator else len(text) // 2 + 1)


def _joinable(items: Any) -> Any:
    """Items whose sizes can be added up before they are joined: a generator becomes a list."""
    if isinstance(items, str | list | tuple | Mapping) or not isinstance(items, Iterable):
        return items
    return list(_TickingIterable(items, _budget.get()))


def _check_join(items: Any, separator: str) -> None:
    if isinstance(items, str | list | tuple | Mapping):
        budget = _budget.get()
        budget.spend(sum(map(_length, items)) + len(separator) * len(items))


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks its arguments before and its result after."""
    skip = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.tick()
        if name == "join" and len(args) > skip:
            args = (*args[:skip], _joinable(args[skip]), *args[skip + 1 :])
        value, rest = args[skip] if len(args) > skip else None, [*args[skip + 1 :], *kwargs.values()]
        if name not in ("default", "d", "tojson", "format", "replace"):
            _check_numbers(rest)
        if name == "sum":
            start = kwargs.get("start", args[skip + 2] if len(args) > skip + 2 else 0)
            # Lists and strings would be copied at every item.
            if not isinstance(start, int | float):
                raise TemplateLimitError(f"sum adds numbers, not {type(start).__name__}")
        elif name == "pprint":
            if budget.unfolded(value) > MAX_PRINTED:
                raise TemplateLimitError(f"pprint is given more than {MAX_PRINTED} items")
        elif name == "list" and isinstance(value, str):
            budget.make_items(len(value))
        if name == "format":
            _check_format(str(value), rest)
        elif name == "replace" and len(rest) >= 2:
            budget.spend(_replace_size(value, rest[0], rest[1]))
        elif name in (
            "join",
            "string",
            "list",
            "urlencode",
            "xmlattr",
            "escape",
            "e",
            "forceescape",
        ):
            separator = str(rest[0]) if name == "join" and rest else ""
            if isinstance(value, list | tuple | Mapping):
                budget.spend(budget.unfolded(value) + len(separator) * len(value))
        elif name in ("indent", "wordwrap", "urlize", "striptags") and isinstance(value, str):
            widths = [len(a) if isinstance(a, str) else a for a in rest if isinstance(a, str | int)]
            if name == "wordwrap":
                widths = [len(a) for a in rest if isinstance(a, str)] or [1]
            # A wrapped text may break at every character, an indented one grows at every line.
            lines = len(value) if name == "wordwrap" else value.count("\n") + 1
            budget.spend(len(value) + lines * max(widths, default=4))
            if name == "urlize" and len(value) > MAX_NUMBER:
                raise TemplateLimitError("a text is too long for urlize")
        return _counted(function(*args, **kwargs), budget)

    return limited


def compile_template(environment: LimitedEnvironment, source: str) -> jinja2.Template:
    """Compiles under the same limits, since jinja2 computes constant expressions then."""
    token = _budget.set(Budget())
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise BadInputError(f"the chat template is wrong in line {error.lineno}: {error.message}") from error
    except (TemplateLimitError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
        raise BadInputError(f"the chat template cannot be compiled: {_reason(error)}") from error
    finally:
        _budget.reset(token)


class TemplateRefusal(BadInputError):
    """The template itself says no (``raise_exception``): its message, such as that it has no system role."""


def render_template(
    template: jinja2.Template, variables: Mapping[str, Any], *, seconds: float = MAX_SECONDS
) -> str:
    """The rendered text. BadInputError for whatever goes wrong in the template, with its reason in one
    line."""
    token = _budget.set(Budget(seconds, input_size(variables)))
    try:
        return "".join(template.generate(variables))
    except jinja2.exceptions.SecurityError as error:
        raise BadInputError(f"the chat template does something forbidden: {error}") from error
    except jinja2.exceptions.UndefinedError as error:
        raise BadInputError(f"the chat template failed: {error}") from error
    except jinja2.exceptions.TemplateError as error:
        raise TemplateRefusal(f"the chat template refuses these messages: {error}") from error
    except Exception as error:
        raise BadInputError(f"the chat template failed: {_reason(error)}") from error
    finally:
        _budget.reset(token)


def _reason(error: Exception) -> str:
    if isinstance(error, TemplateLimitError):
        return str(error)
    if isinstance(error, RecursionError):
        return "it calls itself too deeply"
    return f"{type(error).__name__}: {error}".splitlines()[0]
