"""What the values of a chat template offer by name: what real templates use, and nothing else.

Every method that is not here is refused, so that none can be forgotten that makes much of little
(``str.encode``, ``bytes.ljust``, ``int.to_bytes``, ``str.translate`` ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2.runtime
import jinja2.utils

_TEXT = """
    capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii
    isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix
    removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip
    swapcase title upper zfill
"""
_LOOP = """
    index index0 revindex revindex0 first last length depth depth0 previtem nextitem cycle changed
"""

_OFFERED: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(_TEXT.split())),
    (Mapping, frozenset(("copy", "get", "items", "keys", "values"))),
    (list, frozenset(("copy", "count", "index"))),
    (tuple, frozenset(("count", "index", "grouper", "list"))),  # groupby makes named tuples
    (jinja2.runtime.LoopContext, frozenset(_LOOP.split())),
    (jinja2.runtime.Macro, frozenset(("name", "arguments", "catch_kwargs", "catch_varargs", "caller"))),
    (jinja2.runtime.BlockReference, frozenset(("super",))),
    (jinja2.utils.Cycler, frozenset(("current", "next", "reset"))),
)


def is_offered(value: Any, name: str) -> bool:
    """Whether a template may have the attribute ``name`` of ``value``."""
    if isinstance(value, jinja2.utils.Namespace):
        return True  # its attributes are what the template itself put there
    return any(name in names for kind, names in _OFFERED if isinstance(value, kind))
