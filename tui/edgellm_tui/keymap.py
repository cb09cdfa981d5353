"""Other keys for the commands of the chat, from a file of the user."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path

from textual.keys import Keys

from edgellm_models.errors import ConfigError
from edgellm_tui.commands import COMMANDS

MAX_KEYMAP_BYTES = 1 << 16
MODIFIERS = {"ctrl", "shift", "alt", "super", "hyper", "meta"}
NAMED = {key.value for key in Keys}


def read_keymap(path: Path) -> dict[str, str]:
    """Keys (as in ``regenerate = "f5"``) by the names in the table of commands; an absent file has none.

    ConfigError names the file, the line's name and what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEYMAP_BYTES + 1)
        if len(data) > MAX_KEYMAP_BYTES:
            raise ConfigError(f"{path} is over {MAX_KEYMAP_BYTES:,} bytes; it should hold a few keys")
        table = tomllib.loads(data.decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    keymap = {name: _keys(path, name, value) for name, value in table.items()}
    _check_clashes(path, keymap)
    return keymap


def _keys(path: Path, name: str, value: object) -> str:
    names = [command.name for command in COMMANDS if command.bindable]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        raise ConfigError(f"{path}: {name} is no command with a key; {hint}")
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f'{path}: {name} takes a key, such as "f5" or "ctrl+b", not {value!r}')
    keys = [key.strip() for key in value.split(",")]
    for key in keys:
        *modifiers, base = key.split("+") if key != "+" else ["plus"]
        if not (MODIFIERS.issuperset(modifiers) and (base in NAMED or len(base) == 1)):
            raise ConfigError(
                f'{path}: {name} = {value!r}: {key!r} is no key; keys are such as "f5", "ctrl+b"'
            )
        if not modifiers and len(base) == 1:
            raise ConfigError(
                f"{path}: {name} = {value!r}: {key!r} alone is for writing; put ctrl+ before it"
            )
    return ",".join(keys)


def _check_clashes(path: Path, keymap: dict[str, str]) -> None:
    taken: dict[str, str] = {}
    for command in COMMANDS:
        for key in filter(None, keymap.get(command.name, command.keys).split(",")):
            if key in taken and (command.name in keymap or taken[key] in keymap):
                raise ConfigError(f"{path}: {key} would be both {taken[key]} and {command.name}")
            taken[key] = command.name
