"""Templates that loop for ever, multiply text or build huge values are stopped, quickly and with little
memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer.chat_template import ChatTemplates
from edgellm_models.tokenizer.template_sandbox import LimitedEnvironment, compile_template, render_template
from tests.support.chat_samples import TEMPLATES

MESSAGES = [{"role": "user", "content": "x" * 100}]

DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = BODY %}{% endfor %}"
GROWING_LIST = "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = BODY %}{% endfor %}"

NASTY = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested lists": "{% set l = range(9999) | list %}" + "{% for a in l %}" * 6 + "{% endfor %}" * 6,
    "huge range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "nested strings": "{% set s = 'a' * 50000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "filtered loop": "{% set s = 'a' * 50000 %}{% for a in s %}{% for b in s if b == 'c' %}{% endfor %}{%"
    " endfor %}",
    "recursion": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "branching recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro"
    " %}{{ m(60) }}",
    "recursive loop": "{% for a in [[[]]] recursive %}{{ loop([[1], [1]]) }}{% endfor %}",
    "repeat": "{{ 'abcdefgh' * 10000000000 }}",
    "repeat left": "{{ 10000000000 * 'abcdefgh' }}",
    "repeat list": "{{ ([0] * 10000000000) | length }}",
    "constant repeat": "{{ ('a' * 100000 * 100000) | length }}",
    "double by +": DOUBLING.replace("BODY", "ns.x + ns.x") + "{{ ns.x | length }}",
    "double by ~": DOUBLING.replace("BODY", "ns.x ~ ns.x") + "{{ ns.x | length }}",
    "double by join": DOUBLING.replace("BODY", "[ns.x, ns.x] | join"),
    "double by join method": DOUBLING.replace("BODY", "''.join([ns.x, ns.x])"),
    "double by format": DOUBLING.replace("BODY", "'%s%s' | format(ns.x, ns.x)"),
    "double by percent": DOUBLING.replace("BODY", "'%s%s' % (ns.x, ns.x)"),
    "double by braces": DOUBLING.replace("BODY", "'{0}{0}'.format(ns.x)"),
    "double by replace": DOUBLING.replace("BODY", "ns.x.replace('a', ns.x)"),
    "double by replace filter": DOUBLING.replace("BODY", "ns.x | replace('a', ns.x)"),
    "double by macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLING.replace("BODY", "m(ns.x)"),
    "double by block": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set y %}{{ ns.x }}{{"
    " ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "double list by +": GROWING_LIST.replace("BODY", "ns.x + ns.x"),
    "double list by *": GROWING_LIST.replace("BODY", "ns.x * 2"),
    "nest lists": GROWING_LIST.replace("BODY", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "nest tuples": GROWING_LIST.replace("BODY", "(ns.x, ns.x)") + "{{ ns.x }}",
    "nest dicts": GROWING_LIST.replace("BODY", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x | tojson }}",
    "nest by dict()": GROWING_LIST.replace("BODY", "dict(a=ns.x, b=ns.x)") + "{{ ns.x | string | length }}",
    "nest by namespace": GROWING_LIST.replace("BODY", "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "compare nests": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "fromkeys": "{% set k = range(99999) | list %}{% set v = 'v' * 99999 %}{{ dict.fromkeys(k, v) | string"
    " | length }}",
    "big number": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{%"
    " endfor %}",
    "big power": "{{ 9 ** 999999999 }}",
    "nested power": "{{ (9 ** 999) ** 999 ** 999 }}",
    "center": "{{ 'x' | center(10000000000) }}",
    "center method": "{{ 'x'.center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "expandtabs": "{{ ('\t' * 99999).expandtabs(99999) | length }}",
    "indent": "{{ ('a\n' * 9999) | indent(99999) }}",
    "indent text": "{{ ('a\n' * 9999) | indent('y' * 99999) }}",
    "tojson indent": "{{ [1, 2] | tojson(indent=10000000000) }}",
    "tojson indent text": "{{ (range(9999) | list) | tojson(indent='y' * 99999) }}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10000000000, 1) }}",
    "format width": "{{ '{:10000000000}'.format(1) }}",
    "format nested width": "{{ '{:{}}'.format(1, 10000000000) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list | length }}",
    "slice": "{{ [1] | slice(10000000000) | list | length }}",
    "round": "{{ 1.5 | round(10000000000) }}",
    "wordwrap": "{{ ('a ' * 99999) | wordwrap(1, true, 'y' * 99999) }}",
    "map many": "{% set s = 'a' * 99999 %}{% set l = [s] * 30 %}{% for i in range(999) %}{% for u in l |"
    " map('upper') %}"
    "{% endfor %}{% endfor %}",
    "join many method": "{% set s = 'a' * 99999 %}{{ s.join(range(99999) | map('string')) }}",
    "join letters": "{% set s = 'a' * 99999 %}{{ s.join(s) }}",
    "join many": "{% set s = 'a' * 99999 %}{{ range(99999) | map('default') | join(s) }}",
    "literal text": "{% for i in range(99999) %}" + "literal " * 500 + "{% endfor %}",
    "literal in macro": "{% macro m() %}{% for i in range(99999) %}"
    + "text " * 999
    + "{% endfor %}{% endmacro %}{{ m() }}",
    "output many": "{% set s = 'a' * 99999 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "date": "{{ strftime_now('%1000000000d') }}",
    "long date": "{{ strftime_now('%Y' * 99999) }}",
    "translate": "{{ 'aaaa'.translate({97: 'b' * 99999}) }}",
    "encode and repeat": "{{ ('a'.encode() * 3000000000) | length }}",
    "encode and ljust": "{{ 'a'.encode().ljust(3000000000) | length }}",
    "encode by attr": "{{ ('a' | attr('encode'))() | length }}",
    "encode by map": "{% for m in ['a'] | map(attribute='encode') %}{{ m() * 3000000000 }}{% endfor %}",
    "encode by index": "{{ ('a'['encode'])() }}",
    "number to bytes": "{{ (1).to_bytes(3000000000, 'big') | length }}",
    "number from bytes": "{{ (1).from_bytes([1] * 99999, 'big') }}",
    "sum of lists": "{{ ([[1, 1, 1, 1, 1, 1, 1, 1]] * 100000) | sum(start=[]) | length }}",
    "sum of lists by position": "{{ ([[1] * 9] * 100000) | sum(none, []) | length }}",
    "sum of tuples": "{{ ([(1, 2)] * 100000) | sum(start=()) | length }}",
    "pprint": "{{ ['a b ' * 30] * 100000 | pprint }}{{ (['a b ' * 30] * 8000) | pprint | length }}",
    "pprint text": "{{ ('a b ' * 999999) | pprint | length }}",
    "split": "{{ ('a,' * 30000000).split(',') | length }}",
    "split words": "{{ ('a ' * 30000000).split() | length }}",
    "split lines": "{{ ('a\n' * 30000000).splitlines() | length }}",
    "letters": "{{ ('a' * 60000000) | list | length }}",
    "long list": "{{ ([0] * 60000000) | length }}",
    "many outputs": "{{ x }}" * 30000,
    "many tags": "{% if x %}{% endif %}" * 12000,
    "many nodes": "{{ " + "a + " * 40000 + "a }}",
    "many literals": "{{ [" + "'a', " * 40000 + "] }}",
    "long source": "text " * 60000,
    "deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "deep loops": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60 + "{{ raise_exception('end') }}",
}


def run_all() -> dict[str, tuple[str, float]]:
    """What each nasty template ends with and its CPU seconds, under a limit of 0.5 seconds each."""
    ends = {}
    for name, source in NASTY.items():
        start = time.thread_time()
        try:
            render_template(
                compile_template(LimitedEnvironment(), source), {"messages": MESSAGES}, seconds=0.5
            )
            end = "was rendered"
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
        ends[name] = (end, time.thread_time() - start)
    return ends


@pytest.fixture(scope="module")
def ends() -> dict[str, tuple[str, float]]:
    """Run in a process that may not have more than 2 GB, so that a template that gets through harms
    nobody."""
    code = (
        "import json, sys; sys.path[:0] = sys.argv[1:]\n"
        "try:\n"
        "    import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "except ImportError:\n"
        "    pass\n"
        "from tests.pure.test_chat_template_limits import run_all; print(json.dumps(run_all()))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(root), str(root / "models")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NASTY)
def test_nasty_templates_are_stopped(name: str, ends: dict[str, tuple[str, float]]) -> None:
    """In a fraction of the time and memory that they ask for, with one line that says why."""
    end, seconds = ends[name]
    assert re.match(r"(BadInputError|TemplateRefusal): the chat template ", end), end
    assert "\n" not in end and len(end) < 500
    assert "MemoryError" not in end, "only the process's own limit stopped it"
    assert seconds < 3


def test_every_rendering_has_its_own_limits() -> None:
    """One that was stopped leaves nothing behind, in this thread and in others."""
    good, bad = (
        ChatTemplates({"default": TEMPLATES["chatml"]}),
        ChatTemplates({"default": NASTY["big power"]}),
    )
    expected = good.render(MESSAGES)
    results: list[Any] = []

    def work() -> None:
        for _ in range(20):
            with pytest.raises(BadInputError):
                bad.render(MESSAGES)
            results.append(good.render(MESSAGES) == expected)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"features"}))
def test_long_conversations_are_well_inside_the_limits(name: str) -> None:
    """2,000 messages of 2,000 characters, over a million tokens' worth."""
    talk = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} " + "word " * 400}
        for i in range(2001)
    ]
    start = time.thread_time()
    text = ChatTemplates({"default": TEMPLATES[name]}, {"bos_token": "<s>", "eos_token": "</s>"}).render(talk)
    assert len(text) > 4_000_000
    assert time.thread_time() - start < 3


def test_messages_nested_without_end() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(BadInputError, match="100 deep"):
        ChatTemplates({"default": "{{ messages }}"}).render([{"role": "user", "content": "", "extra": deep}])


METHODS = """{{ 'A b'.lower().strip().split(' ')[0].upper().replace('A', 'c') }}{{ 'x'.startswith('x') }}\
{{ 'a-b'.partition('-')[2] }}{{ {'a': 1}.get('a') }}\
{{ {'a': 1}.items() | list }}{{ {'a': 1}.keys() | first }}\
{{ {'a': 1}.values() | sum }}{{ [1, 2].index(2) }}{{ (1, 1).count(1) }}\
{{ [1.5, 2] | sum }}{{ [] | sum(start=3) }}\
{{ [{'n': 2}, {'n': 3}] | sum('n') }}{{ [{'n': 2}] | sum(attribute='n', start=1) }}\
{% for key, items in [{'n': 2}] | groupby('n') %}{{ key }}{{ items | length }}{% endfor %}\
{% for g in [{'n': 2}] | groupby('n') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}\
{% set c = cycler('o', 'e') %}{{ c.next() }}{{ c.current }}{% set j = joiner() %}{{ j() }}{{ j() }}\
{% macro m(x) %}{{ x }}{{ caller() }}{% endmacro %}{% call m(1) %}y{% endcall %}{{ m.name }}\
{% block b %}z{% endblock %}{{ self.b() }}{% set ns = namespace(split=4) %}{{ ns.split }}\
{{ dict.fromkeys(['k'], 1) }}{{ {'encode': 5}.encode }}{{ {'x': {'to_bytes': 6}}.x['to_bytes'] }}\
{{ '%s' % 3 }}{{ {'a': [1, {'b': 2}]} | pprint }}"""


def test_what_templates_use_of_values_is_there() -> None:
    """The list of what values offer leaves jinja2's own results alone, and fields may have any name."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    expected = ImmutableSandboxedEnvironment().from_string(METHODS).render()
    assert ChatTemplates({"default": METHODS}).render([]) == expected


@pytest.mark.parametrize(
    "value", ["'a'", "1", "1.5", "[1]", "(1,)", "{'a': 1}", "{'a': 1}.items()", "range(3)", "none"]
)
def test_no_method_of_a_value_is_offered_unless_it_is_listed(value: str) -> None:
    """Every name that Python gives the value, asked for one by one: the others are refused."""
    from edgellm_models.tokenizer.template_methods import is_offered

    python = eval(value, {"none": None})
    for name in dir(python):
        ways = (f"({value}).{name}", f"({value})['{name}']", f"({value}) | attr('{name}')")
        if is_offered(python, name):
            assert not name.startswith("_") and name not in ("encode", "translate", "append", "update")
            continue
        for way in ways:
            assert ChatTemplates({"default": f"{{{{ {way} }}}}"}).render([]) == "", way
            with pytest.raises(BadInputError, match="forbidden"):
                ChatTemplates({"default": f"{{{{ ({way})() }}}}"}).render([])


def test_templates_are_refused_by_length_with_both_numbers() -> None:
    with pytest.raises(BadInputError, match=r"300000 characters; at most 262144"):
        ChatTemplates({"default": "x" * 300_000})
    text = "text " * 50_000
    assert ChatTemplates({"default": text}).render([]) == text
