"""Settings: their table, EngineConfig as the user wrote it, ResolvedConfig with the origin of each value.

Precedence: flag > environment EDGELLM_NAME > the project's .edgellm.toml > the user's config.toml > built-in.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edgellm.contracts import SamplingParams
from edgellm.switches import Switch, variable_of
from edgellm_models.errors import ConfigError, EdgeLLMError, Notice, UsageError

PROJECT_FILE = ".edgellm.toml"
DEFAULT_MODEL = "smollm2-135m"
MAX_FILE_BYTES = 1 << 20
BUILT_IN = "built-in"
FLAG = "flag"


@dataclass(frozen=True)
class Setting:
    """One setting: option ``--NAME`` with dashes, variable EDGELLM_NAME, key NAME in both files."""

    name: str
    kind: str
    """text, integer, number, choice or texts (a list; in the environment one value)."""
    meaning: str
    default: Any = None
    """The built-in value; None is decided later, by the model or the machine, as ``meaning`` says."""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    sampling: str | None = None
    """The field of SamplingParams that this sets."""

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return variable_of(self.name)

    def as_switch(self) -> Switch:
        kind = "|".join(self.choices) if self.kind == "choice" else self.kind
        return Switch(self.variable, kind, self.meaning, "" if self.default is None else str(self.default))


SETTINGS = (
    Setting(
        "model",
        "text",
        "Catalog name, GGUF file, model folder or hf:owner/repo[:file].",
        DEFAULT_MODEL,
    ),
    Setting("device", "choice", "Where the model runs.", "auto", ("auto", "cpu", "cuda")),
    Setting("threads", "integer", "CPU threads; unset is one per physical core.", minimum=1, maximum=4096),
    Setting("ctx", "integer", "Context in tokens; unset is the trained one or what fits.", minimum=1),
    Setting("kernels", "choice", "Which kernels compute.", "auto", ("auto", "torch", "native", "triton")),
    Setting(
        "activations",
        "choice",
        "Precision of activations in linears: f32 (exact), 16-bit integers (int16; on a GPU 15 bits, of "
        "single rows) or 8-bit ones (int8, of single rows on a GPU only); auto is int16 in the native "
        "kernels, else exact.",
        "auto",
        ("auto", "exact", "int16", "int8"),
    ),
    Setting(
        "kv_dtype",
        "choice",
        "Element type of the KV cache; auto is f16 (f32 beside exact activations, bf16 on a GPU) "
        "while the context asked for fits. fp8 (e4m3) takes int8's bytes and rounds more; on a CPU torch "
        "computes it, so int8 is the choice there.",
        "auto",
        ("auto", "f32", "bf16", "f16", "fp8", "int8", "int4"),
    ),
    Setting(
        "kv_policy",
        "choice",
        "What goes when context or memory is full: nothing (stop), oldest turns of a chat (trim, for a chat "
        "that is told nothing), or KV that the model then no longer sees (window; budget is experimental).",
        "stop",
        ("stop", "trim", "window", "budget"),
    ),
    Setting(
        "kv_window",
        "integer",
        "Last tokens that --kv-policy window keeps, beside the first block and the system prompt.",
        2048,
        minimum=1,
    ),
    Setting(
        "kv_budget", "integer", "Tokens that --kv-policy budget (experimental) keeps in all.", 2048, minimum=1
    ),
    Setting(
        "spec",
        "choice",
        "Speculative decoding: tokens are looked up in what was said before and verified several at a time, "
        "always (ngram), where it pays (auto) or never (off); skip drafts by the model without some of its "
        "layers instead, auto where it pays, which is measured once when a model is first idle; the text is "
        "the same.",
        "auto",
        ("auto", "off", "ngram", "skip"),
    ),
    Setting(
        "draft",
        "text",
        "A smaller model of the same vocabulary that drafts for --spec auto, as MODEL names it.",
    ),
    Setting(
        "spec_rule",
        "choice",
        "How drafted tokens are accepted: coupled keeps the text of a seed, rejection its distribution only.",
        "coupled",
        ("coupled", "rejection"),
    ),
    Setting(
        "gpu_layers",
        "text",
        "Last layers that run on the GPU, the others run on the CPU; auto is as many as fit beside their KV.",
        "auto",
    ),
    Setting("seed", "integer", "Seed of sampling; unset draws one and shows it.", minimum=0, sampling="seed"),
    Setting("temp", "number", "Temperature; 0 is greedy.", minimum=0, sampling="temperature"),
    Setting("top_k", "integer", "Keep the K most likely tokens; 0 is off.", minimum=0, sampling="top_k"),
    Setting("top_p", "number", "Keep the smallest set of this probability; 1 is off.", sampling="top_p"),
    Setting("min_p", "number", "Keep tokens of at least this share of the best; 0 is off.", sampling="min_p"),
    Setting("typical_p", "number", "Locally typical sampling; 1 is off.", sampling="typical_p"),
    Setting(
        "repeat_penalty", "number", "Penalty on earlier tokens; 1 is off.", sampling="repetition_penalty"
    ),
    Setting(
        "presence_penalty",
        "number",
        "Subtracted from tokens of the answer.",
        sampling="presence_penalty",
    ),
    Setting(
        "frequency_penalty",
        "number",
        "Subtracted per use in the answer.",
        sampling="frequency_penalty",
    ),
    Setting("max_tokens", "integer", "Longest answer in tokens.", minimum=0, sampling="max_new_tokens"),
    Setting("stop", "texts", "Text that ends the answer; may be given several times.", sampling="stop"),
)
"""Every setting, in the order in which ``edgellm config show`` prints them."""

BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}


Problems = dict[str, EdgeLLMError]
"""By setting what is wrong with it."""


@dataclass(frozen=True)
class EngineConfig:
    """What the user wrote as flags (or a caller as arguments); None is "not said"."""

    model: str | None = None
    device: str | None = None
    threads: int | None = None
    ctx: int | None = None
    kernels: str | None = None
    activations: str | None = None
    kv_dtype: str | None = None
    kv_policy: str | None = None
    kv_window: int | None = None
    kv_budget: int | None = None
    spec: str | None = None
    draft: str | None = None
    spec_rule: str | None = None
    gpu_layers: str | None = None
    seed: int | None = None
    temp: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None

    def resolve(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
        user_file: Path | None = None,
    ) -> ResolvedConfig:
        """See ``resolve``."""
        return resolve(self, environ=environ, folder=folder, user_file=user_file)


@dataclass(frozen=True)
class ResolvedConfig:
    """Every setting with its value and origin. None is left to the model or the machine (see SETTINGS)."""

    model: str
    device: str
    threads: int | None
    ctx: int | None
    kernels: str
    activations: str
    kv_dtype: str
    kv_policy: str
    kv_window: int
    kv_budget: int
    spec: str
    draft: str | None
    spec_rule: str
    gpu_layers: str
    seed: int | None
    temp: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    max_tokens: int | None
    stop: tuple[str, ...] | None
    origins: Mapping[str, str] = field(default_factory=dict)
    """Per setting: ``flag``, the name of a variable, the path of a file, or ``built-in``."""
    notices: tuple[Notice, ...] = ()

    @property
    def sampling(self) -> dict[str, Any]:
        """What was said about sampling, by field name of SamplingParams; what was not said is absent."""
        values = {s.sampling: getattr(self, s.name) for s in SETTINGS if s.sampling}
        return {name: value for name, value in values.items() if name and value is not None}

    def sampling_params(self, base: SamplingParams) -> SamplingParams:
        """``base`` (the catalog's, the model's or the command's defaults) with what the user said on top.

        A bad value is named by option and origin.
        """
        try:
            return replace(base, **self.sampling)
        except EdgeLLMError as error:
            raise self._blame(error) from None

    def check_sampling(self, values: Mapping[str, Any]) -> None:
        """Raises what ``sampling_params`` raises when one of these is out of range."""
        try:
            SamplingParams(**values)
        except EdgeLLMError as error:
            raise self._blame(error) from None

    def _blame(self, error: EdgeLLMError) -> EdgeLLMError:
        word = str(error).split(" ", 1)[0]
        setting = next((s for s in SETTINGS if s.sampling == word), None)
        if setting is None:
            return error
        origin = self.origins.get(setting.name, BUILT_IN)
        detail = str(error).split(" ", 1)[1]
        if origin == FLAG:
            return UsageError(f"{setting.option} {detail}")
        return ConfigError(f"{_place(origin, setting)} {detail}")


def resolve(
    config: EngineConfig,
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    user_file: Path | None = None,
    problems: Problems | None = None,
) -> ResolvedConfig:
    """Joins flags, environment and both files.

    ``folder`` is where the search for the project's file begins (default: the current one); ``user_file`` is
    the user's config.toml (default: that of the locations). ConfigError (exit 78) names the file or variable
    and the key; a bad flag is a UsageError (exit 2). With ``problems`` wrong values of variables and files
    are put there instead, by setting; one that cannot be read gives way to the next layer.
    """
    environ = os.environ if environ is None else environ
    if user_file is None:
        from edgellm.locations import Locations

        user_file = Locations.from_environment(environ).config_file
    project_file = find_project_file(folder)
    layers: list[tuple[str, Mapping[str, Any]]] = [
        (FLAG, _flags(config)),
        ("environment", _from_environment(environ, problems)),
    ]
    if project_file is not None:
        layers.append((str(project_file), read_config_file(project_file, problems)))
    layers.append((str(user_file), read_config_file(user_file, problems)))

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in SETTINGS:
        values[setting.name], origins[setting.name] = setting.default, BUILT_IN
        for origin, layer in layers:
            if setting.name in layer:
                values[setting.name] = layer[setting.name]
                origins[setting.name] = setting.variable if origin == "environment" else origin
                break
    resolved = ResolvedConfig(**values, origins=origins)
    for policy in ("window", "budget"):
        if origins[f"kv_{policy}"] == FLAG and resolved.kv_policy != policy:
            raise UsageError(f"--kv-{policy} says how much --kv-policy {policy} keeps; give that too")
    for setting in SETTINGS:
        value = values[setting.name]
        if setting.sampling is not None and value is not None:
            with _collected(setting, problems if origins[setting.name] != FLAG else None):
                resolved.check_sampling({setting.sampling: value})
    return resolved


def find_project_file(folder: Path | None = None) -> Path | None:
    """The nearest .edgellm.toml from ``folder`` upwards, not past the top of a git work tree or the home."""
    start = Path(os.path.abspath(folder or Path.cwd()))
    home = Path.home()
    for place in (start, *start.parents):
        candidate = place / PROJECT_FILE
        if candidate.exists():  # what is no file is refused when it is read
            return candidate
        if place == home or (place / ".git").exists():
            return None
    return None


def read_config_file(path: Path, problems: Problems | None = None) -> dict[str, Any]:
    """The checked settings of one TOML file; an absent file is empty. ConfigError names file and key.

    ``problems`` collects wrong values of settings instead.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):  # a pipe would wait for a writer
            raise ConfigError(f"{path} is not a file; it should hold a few settings")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is over {MAX_FILE_BYTES:,} bytes; it should hold a few settings")
    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    settings = {}
    for key, value in table.items():
        setting = BY_NAME.get(key)
        if setting is None:
            raise ConfigError(f"{path}: unknown key {key!r}{_nearest(key)}")
        with _collected(setting, problems):
            settings[key] = _checked(setting, value, _place(str(path), setting), ConfigError)
    return settings


def settings_as_switches() -> Iterator[Switch]:
    """The table of settings for docs/env.md."""
    return (setting.as_switch() for setting in SETTINGS)


def parse_text(setting: Setting, text: str) -> Any:
    """A value as typed on the command line or in a variable. ValueError when it has the wrong type."""
    if setting.kind == "integer":
        return int(text)
    if setting.kind == "number":
        return float(text)
    if setting.kind == "texts":
        return (text,)
    return text


@contextlib.contextmanager
def _collected(setting: Setting, problems: Problems | None) -> Iterator[None]:
    """Puts an error into ``problems`` under the setting's name, where there is such a place."""
    try:
        yield
    except EdgeLLMError as error:
        if problems is None:
            raise
        problems.setdefault(setting.name, error)


def _flags(config: EngineConfig) -> dict[str, Any]:
    given = {f.name: getattr(config, f.name) for f in fields(config)}
    return {
        name: _checked(BY_NAME[name], value, BY_NAME[name].option, UsageError)
        for name, value in given.items()
        if value is not None
    }


def _from_environment(environ: Mapping[str, str], problems: Problems | None) -> dict[str, Any]:
    found = {}
    for setting in SETTINGS:
        text = environ.get(setting.variable, "")
        if not text:
            continue
        with _collected(setting, problems):
            try:
                value = parse_text(setting, text)
            except ValueError:
                raise ConfigError(f"{setting.variable} must be {_rule(setting)}, not {text!r}") from None
            found[setting.name] = _checked(setting, value, setting.variable, ConfigError)
    return found


def _checked(setting: Setting, value: Any, place: str, kind: type[EdgeLLMError]) -> Any:
    """The value in its final type, or an error that names the place, the rule and the value."""
    if setting.kind == "choice":
        text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else value
        if text in setting.choices:
            return text
        raise kind(f"{place} must be {_rule(setting)}, not {value!r}")
    if setting.kind in ("text", "texts") and (
        value == "" or (isinstance(value, list | tuple) and "" in value)
    ):
        raise kind(f"{place} must not be empty")
    ok: bool
    if setting.kind == "integer":
        ok = isinstance(value, int) and not isinstance(value, bool)
    elif setting.kind == "number":
        ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        value = float(value) if ok else value
    elif setting.kind == "texts":
        value = [value] if isinstance(value, str) else value
        ok = isinstance(value, list | tuple) and all(isinstance(text, str) and text for text in value)
        value = tuple(value) if ok else value
    else:
        ok = isinstance(value, str) and bool(value)
    if ok and setting.minimum is not None:
        ok = value >= setting.minimum
    if ok and setting.maximum is not None:
        ok = value <= setting.maximum
    if not ok:
        raise kind(f"{place} must be {_rule(setting)}, not {value!r}")
    return value


def _rule(setting: Setting) -> str:
    if setting.kind == "choice":
        return "one of " + ", ".join(setting.choices)
    words = {
        "text": "a text",
        "integer": "an integer",
        "number": "a finite number",
        "texts": "a text or list of texts",
    }
    rule = words[setting.kind]
    if setting.minimum is not None and setting.maximum is not None:
        rule += f" from {setting.minimum:g} to {setting.maximum:g}"
    elif setting.minimum is not None:
        rule += f" of {setting.minimum:g} or more"
    return rule


def _place(origin: str, setting: Setting) -> str:
    return origin if origin == setting.variable else f"{origin}: {setting.name}"


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key.replace("-", "_").lower(), BY_NAME, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; the keys are {', '.join(BY_NAME)}"
