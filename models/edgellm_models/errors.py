"""What reaches a user beside the answer: errors with exit codes, notices of what was changed, progress of a
pull."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Notice:
    """Something that was done differently from what was asked or expected: shown, returned and logged, never
    silent."""

    kind: str
    """A stable snake_case word that programs may match on, such as ``context_clamped``."""
    detail: str
    """One sentence for a person, with the numbers in it."""


@dataclass(frozen=True)
class PullProgress:
    """Fetching one model. The total is fixed before the first byte and never changes; 0 while it is not
    known."""

    done_bytes: int
    total_bytes: int
    source: str
    phase: str
    """connecting, waiting, fetching, unpacking, verifying or done."""


class EdgeLLMError(Exception):
    """Base of every error that a user is meant to read: one line that says what is wrong and what to do.

    ``exit_code`` is the status of the command; anything that is not an EdgeLLMError is a fault of ours
    (exit 1).
    """

    exit_code: ClassVar[int] = 1


class UsageError(EdgeLLMError):
    """The command line or a call's arguments make no sense."""

    exit_code = 2


class BadInputError(EdgeLLMError, ValueError):
    """An input file, schema or value is damaged, unsupported or out of range."""

    exit_code = 65


class NotFoundError(EdgeLLMError):
    """A model or file that was named does not exist."""

    exit_code = 66


class UnavailableError(EdgeLLMError):
    """An address or socket is in use, or a server cannot be reached."""

    exit_code = 69


class EngineError(EdgeLLMError):
    """The engine failed while computing (a kernel error, NaN logits)."""

    exit_code = 70


class ResourceError(EdgeLLMError):
    """No usable device, or not enough memory: says needed against free and a way out."""

    exit_code = 71


class OutputError(EdgeLLMError):
    """An output file cannot be written; nothing was left under its final name."""

    exit_code = 73


class TransferError(EdgeLLMError):
    """Reading, writing or the network failed while fetching; what was fetched is kept for a resume."""

    exit_code = 74


class PermissionDeniedError(EdgeLLMError):
    """The user or key is not permitted to do this."""

    exit_code = 77


class ConfigError(EdgeLLMError):
    """A configuration file or environment variable is wrong: names the file and the key."""

    exit_code = 78
