"""Classes of options: each has its EDGELLM_NAME variable by rule; those of settings leave it to config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from edgellm.config import Setting, parse_text
from edgellm.switches import variable_of
from edgellm_models.errors import ConfigError, UsageError

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


class SettingValue(_ParamType):
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
