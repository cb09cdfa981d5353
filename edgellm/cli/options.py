"""Options that commands share; each has its EDGELLM_NAME variable by rule."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from edgellm.cli.edge_option import EdgeOption, SettingOption, SettingValue, complete_models
from edgellm.cli.output import current_output
from edgellm.config import BY_NAME, EngineConfig, Problems, ResolvedConfig, Setting, resolve
from edgellm.log import log_notice
from edgellm.switches import PREFIX, SWITCHES
from edgellm_models.errors import BadInputError, Notice, UsageError

ENGINE_SETTINGS = (
    "model",
    "device",
    "threads",
    "ctx",
    "kernels",
    "activations",
    "kv_dtype",
    "kv_policy",
    "kv_window",
    "kv_budget",
    "spec",
    "draft",
    "spec_rule",
    "gpu_layers",
    "seed",
)
SAMPLING_SETTINGS = (
    "temp",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "stop",
)
SHORT = {"model": "-m"}


def option(*declarations: str, **attributes: Any) -> Callable[[Any], Any]:
    """``click.option`` with the environment variable derived. Use it for every option of every command."""
    return click.option(*declarations, cls=EdgeOption, **attributes)


def setting_options(*names: str) -> Callable[[Any], Any]:
    """Adds the options of these settings, in this order. The command takes them as ``**settings``."""

    def decorate(function: Any) -> Any:
        for name in reversed(names):
            function = _setting_option(BY_NAME[name])(function)
        return function

    return decorate


def engine_options(function: Any) -> Any:
    """The options common to everything that runs a model."""
    return setting_options(*ENGINE_SETTINGS)(function)


def sampling_options(function: Any) -> Any:
    """The options that choose tokens."""
    return setting_options(*SAMPLING_SETTINGS)(function)


def constraint_options(function: Any) -> Any:
    """``--schema`` and ``--grammar``, as parameters of these names; constraint_files.py reads them."""
    function = option(
        "--grammar",
        metavar="FILE",
        help="Hold the answer to a Lark or GBNF grammar; a regular expression is the Lark start: /.../.",
    )(function)
    return option("--schema", metavar="FILE", help="Hold the answer to a JSON schema.")(function)


def json_option(function: Any) -> Any:
    """``--json``, as the parameter ``as_json``."""
    return option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(function)


def check_text(name: str, text: str) -> None:
    """BadInputError when a text of the command line was not UTF-8 (its bytes are then lone surrogates)."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise BadInputError(f"{name} is not valid UTF-8")


def model_argument(*, required: bool = False) -> Callable[[Any], Any]:
    """The MODEL argument, as the parameter ``model_name``; without one the setting ``model`` decides."""
    return click.argument(
        "model_name",
        metavar="MODEL" if required else "[MODEL]",
        required=required,
        shell_complete=complete_models,
    )


def resolve_settings(
    settings: Mapping[str, Any], *, model: str | None = None, problems: Problems | None = None
) -> ResolvedConfig:
    """The resolved configuration of a command from its option values; notices go to standard error.

    ``model`` is a MODEL argument: it and a different ``-m`` at once is a UsageError.
    """
    known = {f.name for f in fields(EngineConfig)}
    values = {name: value for name, value in settings.items() if name in known and value not in (None, ())}
    for text in values.get("stop") or ():
        check_text("--stop", text)
    if model is not None:
        if values.get("model") not in (None, model):
            raise UsageError(f"two models were named: {model} and -m {values['model']}; name one")
        values["model"] = model
    resolved = resolve(EngineConfig(**values), problems=problems)
    for notice in [*unknown_variables(os.environ), *resolved.notices]:
        log_notice(notice)
        current_output().notice(notice)
    return resolved


def unknown_variables(environ: Mapping[str, str]) -> list[Notice]:
    """A notice for each EDGELLM_* variable that nothing reads, with the nearest that something does."""
    known = {setting.variable for setting in BY_NAME.values()} | {switch.name for switch in SWITCHES}
    names = [name for name in environ if name.startswith(PREFIX) and not name.startswith(f"{PREFIX}TEST_")]
    if set(names) <= known:
        return []
    from edgellm.cli.reference import all_switches  # imports every command; only for such a variable

    known |= {switch.name for _, switches in all_switches() for switch in switches}
    notices = []
    for name in sorted(set(names) - known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "docs/env.md lists those that are"
        notices.append(
            Notice("unknown_variable", f"the variable {name} is not known and does nothing; {hint}")
        )
    return notices


def models_folder() -> Path:
    """Where pulled models lie."""
    from edgellm.locations import Locations

    return Locations.from_environment().models


def _setting_option(setting: Setting) -> Callable[[Any], Any]:
    declarations = [SHORT[setting.name]] if setting.name in SHORT else []
    help_text = setting.meaning
    if setting.default is not None:
        help_text += f"  [default: {setting.default}]"
    return click.option(
        *declarations,
        setting.option,
        setting.name,
        cls=SettingOption,
        setting=setting,
        type=SettingValue(setting),
        multiple=setting.kind == "texts",
        default=None,
        # Options of the published interface that only say "not in this version" need no place in the help.
        hidden=not setting.choices and setting.kind == "choice",
        help=help_text,
    )
