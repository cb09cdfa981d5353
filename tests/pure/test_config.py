"""Settings: precedence and origin, refusals by name, and files and variables that are wrong."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from edgellm.config import (
    SETTINGS,
    EngineConfig,
    ResolvedConfig,
    find_project_file,
    read_config_file,
    resolve,
)
from edgellm.contracts import SamplingParams
from edgellm_models.errors import ConfigError, UsageError


def settle(
    tmp_path: Path, config: EngineConfig | None = None, *, env: dict[str, str] | None = None, **texts: str
) -> ResolvedConfig:
    """Resolves with ``project=`` and ``user=`` as the texts of the two files."""
    folder = tmp_path / "work"
    folder.mkdir(exist_ok=True)
    (folder / ".git").mkdir(exist_ok=True)
    if "project" in texts:
        (folder / ".edgellm.toml").write_text(texts["project"])
    user = tmp_path / "config.toml"
    if "user" in texts:
        user.write_text(texts["user"])
    return resolve(config or EngineConfig(), environ=env or {}, folder=folder, user_file=user)


def test_the_table_the_dataclasses_and_the_sampling_fields_agree() -> None:
    names = [setting.name for setting in SETTINGS]
    assert [f.name for f in fields(EngineConfig)] == [f.name for f in fields(ResolvedConfig)][:-2]
    assert sorted(names) == sorted(f.name for f in fields(EngineConfig))
    sampling = {f.name for f in fields(SamplingParams)}
    assert {s.sampling for s in SETTINGS if s.sampling} <= sampling


def test_each_layer_wins_over_the_next_and_says_where_it_comes_from(tmp_path: Path) -> None:
    texts = {"project": "ctx = 3\ntemp = 0.3\nseed = 3", "user": "ctx = 4\ntemp = 0.4\nseed = 4\ntop_k = 4"}
    env = {"EDGELLM_CTX": "2", "EDGELLM_TEMP": "0.2"}
    resolved = settle(tmp_path, EngineConfig(ctx=1), env=env, **texts)
    assert (resolved.ctx, resolved.temp, resolved.seed, resolved.top_k) == (1, 0.2, 3, 4)
    assert resolved.device == "auto"
    origins = [resolved.origins[name] for name in ("ctx", "temp", "seed", "top_k", "device")]
    assert origins == [
        "flag",
        "EDGELLM_TEMP",
        str(tmp_path / "work" / ".edgellm.toml"),
        str(tmp_path / "config.toml"),
        "built-in",
    ]


def test_an_empty_variable_is_unset(tmp_path: Path) -> None:
    assert settle(tmp_path, env={"EDGELLM_CTX": "", "EDGELLM_MODEL": ""}).ctx is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ctxx = 5", ["config.toml", "unknown key 'ctxx'", "did you mean 'ctx'"]),
        ("kv-dtype = 'f32'", ["unknown key 'kv-dtype'", "did you mean 'kv_dtype'"]),
        ("ctx = 'many'", ["config.toml: ctx must be an integer of 1 or more", "'many'"]),
        ("ctx = 0", ["ctx must be an integer of 1 or more, not 0"]),
        ("ctx = true", ["ctx must be an integer"]),
        ("temp = 'hot'", ["temp must be a finite number"]),
        ("temp = nan", ["temp must be a finite number"]),
        ("stop = [1]", ["stop must be a text or list of texts"]),
        ("device = 'tpu'", ["device must be one of auto, cpu, cuda", "'tpu'"]),
        ("kernels = 'magic'", ["kernels must be one of auto, torch, native, triton", "'magic'"]),
        ("kv_window = 0", ["kv_window must be an integer of 1 or more, not 0"]),
        ("model = ''", ["model must not be empty"]),
        ("ctx = ", ["config.toml is not valid TOML"]),
        ("[a]\nb = 1", ["unknown key 'a'"]),
        ("top_p = 1.5", ["config.toml: top_p must be above 0 and at most 1"]),
    ],
)
def test_a_wrong_file_names_file_and_key(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        settle(tmp_path, user=text)
    message = str(caught.value)
    assert "\n" not in message and caught.value.exit_code == 78
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("EDGELLM_CTX", "5k", "EDGELLM_CTX must be an integer"),
        ("EDGELLM_TEMP", "inf", "EDGELLM_TEMP must be a finite number"),
        ("EDGELLM_KV_DTYPE", "fp4", "EDGELLM_KV_DTYPE must be one of auto, f32, bf16, f16, fp8, int8, int4"),
        ("EDGELLM_KV_POLICY", "h2o", "EDGELLM_KV_POLICY must be one of stop, trim, window, budget"),
        ("EDGELLM_SPEC", "fast", "EDGELLM_SPEC must be one of auto, off, ngram, skip, not 'fast'"),
        ("EDGELLM_TOP_P", "0", "EDGELLM_TOP_P must be above 0"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, name: str, value: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        settle(tmp_path, env={name: value})


def test_a_wrong_flag_is_a_usage_error(tmp_path: Path) -> None:
    for config, word in [
        (EngineConfig(ctx=0), "--ctx must be"),
        (EngineConfig(kv_dtype="fp4"), "--kv-dtype must be one of auto, f32, .*, not 'fp4'"),
        (EngineConfig(kv_budget=900), "--kv-budget says how much --kv-policy budget keeps"),
        (EngineConfig(kv_policy="budget", kv_window=900), "--kv-window says how much"),
        (EngineConfig(min_p=2.0), "--min-p must be from 0"),
        (EngineConfig(temp=-1.0), "--temp must be"),
    ]:
        with pytest.raises(UsageError, match=word):
            settle(tmp_path, config)


def test_every_value_of_the_published_interface_is_taken(tmp_path: Path) -> None:
    """interface.md section 3: nothing that is named there may be ignored."""
    published = {
        "device": "auto cpu cuda",
        "kernels": "auto torch triton native",
        "activations": "auto exact int16 int8",
        "kv_dtype": "auto f32 bf16 f16 fp8 int8 int4",
        "kv_policy": "stop trim window budget",
        "spec": "auto off ngram skip",
        "spec_rule": "coupled rejection",
        "gpu_layers": "auto 12",
        "draft": "smollm2-135m",
    }
    for name, values in published.items():
        for value in values.split():
            assert getattr(settle(tmp_path, EngineConfig(**{name: value})), name) == value


def test_sampling_goes_over_the_defaults(tmp_path: Path) -> None:
    resolved = settle(
        tmp_path, EngineConfig(temp=0.5, stop=("END",), max_tokens=7), env={"EDGELLM_SEED": "9"}
    )
    params = resolved.sampling_params(SamplingParams(temperature=0.0, top_k=20))
    assert params == SamplingParams(temperature=0.5, top_k=20, stop=("END",), max_new_tokens=7, seed=9)


def test_the_project_file_is_the_nearest_one_inside_the_work_tree(tmp_path: Path) -> None:
    inner = tmp_path / "repo" / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / ".edgellm.toml").write_text("ctx = 1")
    (tmp_path / "repo" / ".git").mkdir()
    assert find_project_file(inner) is None
    (tmp_path / "repo" / ".edgellm.toml").write_text("ctx = 2")
    assert find_project_file(inner) == tmp_path / "repo" / ".edgellm.toml"


def test_a_file_that_is_too_large_or_unreadable_is_an_error(tmp_path: Path) -> None:
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match=r"large.toml is over"):
        read_config_file(large)
    with pytest.raises(ConfigError, match=r"is not a file"):
        read_config_file(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"not valid TOML"):
        read_config_file(binary)
    assert read_config_file(tmp_path / "absent.toml") == {}


def test_the_stop_texts_of_a_file_and_a_variable(tmp_path: Path) -> None:
    assert settle(tmp_path, user='stop = "a"').stop == ("a",)
    assert settle(tmp_path, user='stop = ["a", "b"]').stop == ("a", "b")
    assert settle(tmp_path, env={"EDGELLM_STOP": "x y"}).stop == ("x y",)
