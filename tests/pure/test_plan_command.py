"""``edgellm plan`` as a user types it: no weights needed, sizes in any unit, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgellm.cli.plan import parse_size
from edgellm_models.errors import UsageError
from tests.support import published_shapes as published
from tests.support.command_line import run_edgellm


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "llama-3-8b" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(published.LLAMA3_8B))
    return path


def test_a_config_is_enough(config: Path) -> None:
    machine = ("--memory", "24GiB", "--bandwidth", "1008", "--flops", "165")
    done = run_edgellm("plan", str(config), "--ctx", "8192", "--kv-dtype", "f16", *machine, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["kv_bytes_per_token"] == 131_072
    assert plan["kv_bytes"] == 8_192 * 131_072
    assert plan["is_estimate"] is True
    assert plan["memory_bytes"] == int(24 * 2**30 * 0.9)
    assert plan["fits"] is True
    assert plan["decode_ceiling"] == pytest.approx(
        1008e9 / (plan["step_weight_bytes"] + plan["step_kv_bytes"])
    )
    assert "no weights" in done.stderr


def test_eviction_kernels_and_drafts_are_planned(config: Path) -> None:
    """What `--kv-policy`, `--kernels` and `--spec` change, and the program itself, named apart."""
    asked = (
        "plan",
        str(config),
        "--ctx",
        "8192",
        "--kv-dtype",
        "f16",
        "--memory",
        "24GiB",
        "--bandwidth",
        "9",
    )
    whole = json.loads(run_edgellm(*asked, "--json").stdout)
    evicting = run_edgellm(*asked, "--kv-policy", "window", "--kv-window", "1024", "--json")
    assert evicting.returncode == 0, evicting.stderr
    assert json.loads(evicting.stdout)["kv_bytes"] < whole["kv_bytes"] // 2
    plain = json.loads(run_edgellm(*asked, "--spec", "off", "--json").stdout)
    assert whole["workspace_bytes"] - plain["workspace_bytes"] == 16 * 4 * 128_256
    as_floats = json.loads(run_edgellm(*asked, "--kernels", "torch", "--json").stdout)
    assert as_floats["weight_bytes"] > 1.9 * whole["weight_bytes"]
    shown = run_edgellm(*asked).stdout
    assert "the program itself" in shown and "in the host's memory" in shown


def test_the_folder_of_a_config_is_the_same(config: Path) -> None:
    asked = ("--bandwidth", "1", "--memory", "9GB")
    by_folder = run_edgellm("plan", str(config.parent), *asked)
    by_file = run_edgellm("plan", str(config), *asked)
    assert by_folder.returncode == by_file.returncode == 0, by_folder.stderr
    assert by_folder.stdout.splitlines()[1:] == by_file.stdout.splitlines()[1:]
    assert "does not fit" in by_file.stdout
    assert "the weights alone do not fit" in by_file.stdout


def test_a_catalog_name_before_its_pull() -> None:
    done = run_edgellm("plan", "qwen3-4b", "--memory", "8GiB", "--bandwidth", "360", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["is_estimate"] is True
    assert "from the catalog" in done.stderr


def test_bad_input_is_one_line(tmp_path: Path, config: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    cases = [
        (("plan", str(broken)), 65),
        (("plan", str(tmp_path / "none" / "config.json")), 66),
        (("plan", str(config), "--memory", "lots"), 2),
        (("plan", str(config), "--acceptance", "1.5"), 2),
        (("plan", str(config), "--bandwidth", "0"), 2),
    ]
    for arguments, code in cases:
        done = run_edgellm(*arguments)
        assert done.returncode == code, (arguments, done.stderr)
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GiB", 24 * 2**30), ("16GB", 16 * 10**9), ("512m", 512 * 10**6), ("1.5 TiB", 3 * 2**39), ("77", 77)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "1e9", "5 apples", "12XB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)
