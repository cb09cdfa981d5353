"""Options that commands share; each has its EDGELLM_NAME variable by rule."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.output import current_output
from edgellm.config import BY_NAME, EngineConfig, Problems, ResolvedConfig, Setting, parse_text, resolve
from edgellm.log import log_notice
from edgellm.switches import PREFIX, SWITCHES, variable_of
from edgellm_models.errors import BadInputError, ConfigError, Notice, UsageError

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


if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # not generic before Click 8.2


class EdgeOption(click.Option):
    """An option whose environment variable follows from its long name; a wrong variable is exit 78, not 2."""

    def __init__(self, param_decls: Sequence[str] | None = None, **attrs: Any) -> None:
        long = [d.split("/")[0] for d in param_decls or () if d.startswith("--")]
        if long:
            attrs.setdefault("envvar", variable_of(long[0]))
        super().__init__(param_decls, **attrs)

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        try:
            return super().handle_parse_result(ctx, opts, args)
        except click.BadParameter as error:
            source = ctx.get_parameter_source(self.name or "")
            if source is click.core.ParameterSource.ENVIRONMENT:
                raise ConfigError(f"{self.envvar}: {error.message}") from None
            raise


class SettingOption(EdgeOption):
    """The option of a setting. Its variable and files are left to ``config.resolve``, which keeps origins."""

    def __init__(self, param_decls: Sequence[str] | None = None, *, setting: Setting, **attrs: Any) -> None:
        self.setting = setting
        super().__init__(param_decls, **attrs)

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        return None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        if self.setting.name == "model":
            return complete_models(ctx, self, incomplete)
        return [CompletionItem(choice) for choice in self.setting.choices if choice.startswith(incomplete)]


class _SettingValue(_ParamType):
    """Text, integer or number as the setting says; ranges and choices are checked by ``config.resolve``."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.name = setting.kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.setting.kind not in ("integer", "number") or not isinstance(value, str):
            return value
        try:
            return parse_text(self.setting, value)
        except ValueError:
            word = "an integer" if self.setting.kind == "integer" else "a number"
            raise UsageError(f"{self.setting.option} must be {word}, not {value!r}") from None

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        if self.setting.choices:
            return "|".join(self.setting.choices)
        return {"integer": "N", "number": "X", "choice": "VALUE"}.get(self.setting.kind, "TEXT")


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


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Names of the catalog and of pulled models, then files; without torch and without a word on errors."""
    from click.shell_completion import CompletionItem

    try:
        from edgellm.locations import Locations
        from edgellm_models.catalog import known_names

        names = known_names(Locations.from_environment().models)
    except Exception:  # a shell's Tab key is no place for error messages
        names = []
    items = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return items or [CompletionItem(incomplete, type="file")]


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
        type=_SettingValue(setting),
        multiple=setting.kind == "texts",
        default=None,
        # Options of the published interface that only say "not in this version" need no place in the help.
        hidden=not setting.choices and setting.kind == "choice",
        help=help_text,
    )
