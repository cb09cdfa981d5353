"""The files of --schema and --grammar, checked before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm.contracts import ConstraintSpec


def read_constraint(schema: str | None, grammar: str | None) -> ConstraintSpec | None:
    """The constraint that a command's options name, or None.

    UsageError when both are given, NotFoundError when the file is absent, BadInputError when it is no text of
    its kind or no answer could keep to it.
    """
    from edgellm.constraint.compiler import check_constraint
    from edgellm.constraint.grammar import grammar_kind
    from edgellm.contracts import ConstraintKind, ConstraintSpec
    from edgellm_models.errors import BadInputError, UsageError

    if schema and grammar:
        raise UsageError("--schema and --grammar were both given; an answer keeps to one of them")
    if not schema and not grammar:
        return None
    option, name = ("--schema", schema) if schema else ("--grammar", grammar)
    assert name is not None
    text = _read(option, name)
    kind = ConstraintKind.JSON_SCHEMA if schema else grammar_kind(text)
    spec = ConstraintSpec(kind, text)
    try:
        check_constraint(spec)
    except BadInputError as error:
        raise BadInputError(f"{option} {name}: {error}") from None
    return spec


def _read(option: str, name: str) -> str:
    from edgellm.constraint.grammar import MAX_TEXT_BYTES
    from edgellm_models.errors import BadInputError, NotFoundError, PermissionDeniedError

    try:
        with Path(name).expanduser().open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{option} {name}: there is no such file") from None
    except PermissionError:
        raise PermissionDeniedError(f"{option} {name}: this file may not be read") from None
    except (OSError, ValueError, RuntimeError) as error:  # a folder, a name that is none
        raise BadInputError(f"{option} {name}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_TEXT_BYTES:
        raise BadInputError(f"{option} {name}: over {MAX_TEXT_BYTES:,} bytes; at most that many are read")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{option} {name}: not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        ) from None
