"""Commands on models: tokenize, show, pull, rm and doctor, as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import command_environment, run_edgellm
from tests.support.hub_server import Fault, HubState, serve_hub
from tests.support.oracles import require_oracle
from tests.support.real_models import real_model
from tests.support.tiny_models import make_tiny, tiny_gguf

MODEL = "hf:acme/tiny:tiny.gguf"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A TINY-llama as a folder and as F16 GGUF."""
    place = tmp_path_factory.mktemp("tiny")
    folder = make_tiny("llama", place / "tiny", generation_config={"temperature": 0.6, "top_p": 0.9})
    return folder, tiny_gguf(folder, place / "tiny.gguf", "f16")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: tuple[Path, Path]) -> Iterator[HubState]:
    state = HubState(repos={"acme/tiny": {"tiny.gguf": tiny[1].read_bytes()}})
    with serve_hub(state) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield state


# --- tokenize ----------------------------------------------------------------------------------------------


def test_tokenize_equals_transformers(tiny: tuple[Path, Path]) -> None:
    transformers = require_oracle("transformers")
    text = "Hello world! Café 123"
    expected = transformers.AutoTokenizer.from_pretrained(tiny[0])(text)["input_ids"]
    for path in tiny:
        record = json.loads(run_edgellm("tokenize", str(path), text, "--json").stdout)
        assert record["token_ids"] == expected
        assert len(record["pieces"]) == len(expected)
    lines = run_edgellm("tokenize", str(tiny[1]), stdin=text).stdout.splitlines()
    assert [int(line.split("\t")[0]) for line in lines] == expected


def test_no_special_keeps_control_strings_as_text(tiny: tuple[Path, Path]) -> None:
    """A08: an option that is taken and ignored."""
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(tiny[1])
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.file_format, checkpoint.metadata)
    assert tokenizer.bos_id is not None
    control = tokenizer.token_text(tokenizer.bos_id)
    checkpoint.close()
    with_special = json.loads(run_edgellm("tokenize", str(tiny[1]), control + "hi", "--json").stdout)
    without = json.loads(
        run_edgellm("tokenize", str(tiny[1]), control + "hi", "--json", "--no-special").stdout
    )
    assert with_special["token_ids"].count(tokenizer.bos_id) == 1
    assert tokenizer.bos_id not in without["token_ids"] and len(without["token_ids"]) > 2


@pytest.mark.parametrize("data", [b"\xff", "a\ud83d".encode("utf-8", "surrogatepass")])
def test_text_that_is_not_utf8_is_one_line(tiny: tuple[Path, Path], data: bytes) -> None:
    """A15: half a surrogate pair, or any other invalid text, is the user's mistake and not a fault."""
    shown = subprocess.run(
        [sys.executable, "-m", "edgellm", "tokenize", str(tiny[1])],
        input=data,
        capture_output=True,
        env=command_environment(),
        check=False,
    )
    assert shown.returncode == 65 and b"not UTF-8" in shown.stderr and shown.stdout == b""
    command = [sys.executable.encode(), b"-m", b"edgellm", b"tokenize", os.fsencode(tiny[1]), data]
    as_argument = subprocess.run(command, capture_output=True, env=command_environment(), check=False)
    assert as_argument.returncode == 65 and b"not valid UTF-8" in as_argument.stderr


@pytest.mark.real_model
def test_tokenize_of_the_default_model_needs_no_torch() -> None:
    path = real_model("smollm2-135m")
    script = (
        "import sys\nfrom edgellm.cli.main import run\n"
        "code = run(['tokenize', sys.argv[1], '<|im_start|>Hello', '--json'])\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'torch was imported'\nsys.exit(code)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env=command_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(shown.stdout)["token_ids"] == [1, 19556]


# --- show --------------------------------------------------------------------------------------------------


def test_show_counts_true_bits(tiny: tuple[Path, Path]) -> None:
    record = json.loads(run_edgellm("show", str(tiny[1]), "--json").stdout)
    types = record["types"]
    assert types["F16"]["bits_per_weight"] == 16 and types["F32"]["bits_per_weight"] == 32
    total_bits = sum(row["bytes"] for row in types.values()) * 8
    assert record["bits_per_weight"] == pytest.approx(total_bits / record["parameters"], abs=1e-3)
    assert record["memory"]["weights_f32_bytes"] == 4 * record["parameters"]
    config = json.loads((tiny[0] / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 4
    assert record["memory"]["kv_bytes_per_token_f32"] == per_token


def test_show_of_a_folder_has_the_models_sampling(tiny: tuple[Path, Path]) -> None:
    record = json.loads(run_edgellm("show", str(tiny[0]), "--json").stdout)
    assert record["sampling"] == {"temperature": 0.6, "top_p": 0.9}
    assert record["sampling_origin"] == "model" and record["has_chat_template"] is True
    text = run_edgellm("show", str(tiny[0])).stdout
    assert "temperature 0.6, top_p 0.9 (model)" in text and "bits per weight" in text


def test_show_keeps_bulk_out_of_the_metadata(tiny: tuple[Path, Path]) -> None:
    shown = run_edgellm("show", str(tiny[1]), "--metadata")
    assert "tokenizer.ggml.tokens = (" in shown.stdout and len(shown.stdout) < 20_000


def test_show_of_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    shown = run_edgellm("show", str(tmp_path / "bad.gguf"))
    assert shown.returncode == 65 and shown.stderr.count("\n") == 1 and shown.stdout == ""


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("name", "types"),
    [("smollm2-135m", {"Q4_1", "Q8_0", "F32"}), ("gemma3-270m", {"Q5_0", "Q4_K", "Q6_K", "Q8_0", "F32"})],
)
def test_the_catalog_says_of_the_real_models_what_the_files_say(name: str, types: set[str]) -> None:
    from edgellm_models.catalog import load_catalog

    entry = load_catalog()[name]
    record = json.loads(run_edgellm("show", str(real_model(name)), "--json").stdout)
    assert record["memory"]["file_bytes"] == entry.bytes
    assert record["parameters"] == entry.parameters and record["context_length"] == entry.context
    assert record["memory"]["kv_bytes_per_token_f32"] == entry.kv_bytes_per_token(4)
    assert record["has_chat_template"] is entry.chat and set(record["types"]) == types


# --- pull and rm -------------------------------------------------------------------------------------------


def test_pull_list_show_and_rm(hub: HubState, isolated_home: Path) -> None:
    pulled = run_edgellm("pull", MODEL, "--json")
    record = json.loads(pulled.stdout)
    assert record["fetched"] is True and Path(record["path"]).is_relative_to(isolated_home)
    assert "pulling hf:acme/tiny:tiny.gguf" in pulled.stderr and "apache-2.0" in pulled.stderr
    assert "\r" not in pulled.stderr and "%" not in pulled.stderr, "progress is for terminals"
    assert record["licence"] == "apache-2.0"
    assert json.loads(run_edgellm("pull", MODEL, "--json").stdout)["fetched"] is False
    listed = json.loads(run_edgellm("list", "--json").stdout)["models"]
    assert [model["name"] for model in listed if model["pulled"]] == [MODEL]
    assert json.loads(run_edgellm("show", MODEL, "--json").stdout)["file_format"] == "gguf"
    removed = json.loads(run_edgellm("rm", "-y", MODEL, "--json").stdout)
    assert removed["freed_bytes"] >= record["bytes"]
    assert not Path(record["path"]).exists()


def test_a_model_that_is_used_first_is_pulled_first(hub: HubState) -> None:
    shown = run_edgellm("tokenize", MODEL, "hi", "--json")
    assert shown.returncode == 0 and json.loads(shown.stdout)["token_ids"]
    assert "pulling" in shown.stderr
    again = run_edgellm("-q", "tokenize", MODEL, "hi", "--json")
    assert again.stderr == ""


def test_quiet_pulls_say_nothing(hub: HubState) -> None:
    shown = run_edgellm("pull", "-q", MODEL)
    assert shown.returncode == 0 and shown.stderr == ""


@pytest.mark.parametrize(
    ("name", "code"), [("hf:acme/tiny:no.gguf", 66), ("hf:acme/none", 77), ("hf:acme/tiny:x/../y.gguf", 65)]
)
def test_exit_codes_of_a_pull(hub: HubState, name: str, code: int) -> None:
    shown = run_edgellm("pull", name)
    assert shown.returncode == code and shown.stdout == ""
    assert "Traceback" not in shown.stderr


def test_a_stall_is_74_and_says_how_to_go_on(hub: HubState) -> None:
    hub.faults.append(Fault("stall", 8192))
    shown = run_edgellm("pull", MODEL, environ={"EDGELLM_STALL_TIMEOUT": "1.5"})
    assert shown.returncode == 74 and "run the same command to resume" in shown.stderr
    assert run_edgellm("pull", MODEL).returncode == 0


def test_a_wrong_stall_timeout_is_78(hub: HubState) -> None:
    shown = run_edgellm("pull", MODEL, environ={"EDGELLM_STALL_TIMEOUT": "soon"})
    assert shown.returncode == 78 and "EDGELLM_STALL_TIMEOUT" in shown.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_pull_ends_at_once_and_resumes(
    hub: HubState, isolated_home: Path, number: int, code: int
) -> None:
    hub.faults.append(Fault("stall", 100_000))
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm", "pull", MODEL],
        env=command_environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(isolated_home.rglob("*.part")):
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(number)
    out, err = process.communicate(timeout=25)  # the hub is silent for 30 s
    assert process.returncode == code and out == "" and "Traceback" not in err
    assert run_edgellm("pull", MODEL).returncode == 0
    assert hub.ranges()[-1] is not None, "the second pull went on where the first was stopped"


def test_progress_and_the_question_of_rm_on_a_terminal(hub: HubState) -> None:
    pexpect = require_oracle("pexpect")
    hub.pace_s = 0.01
    command = [sys.executable, ["-m", "edgellm", "pull", MODEL]]
    child = pexpect.spawn(*command, env=command_environment(), encoding="utf-8", timeout=60)
    child.expect("apache-2.0")
    child.expect(r"fetching   \[#* *\] +\d+%  [\d.]+ of \d")
    child.expect("is here: ")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    command = [sys.executable, ["-m", "edgellm", "rm", MODEL]]
    for answer, words in [("n", "nothing was deleted"), ("y", "deleted hf:acme/tiny")]:
        child = pexpect.spawn(*command, env=command_environment(), encoding="utf-8", timeout=60)
        child.expect(r"Delete hf:acme/tiny:tiny.gguf \(.*\)\? \[y/N\]")
        child.sendline(answer)
        child.expect(words)
        child.expect(pexpect.EOF)
        child.close()


def test_a_dumb_terminal_gets_no_redrawn_line(hub: HubState) -> None:
    """H13: TERM=dumb gives plain lines."""
    pexpect = require_oracle("pexpect")
    environ = command_environment({"TERM": "dumb"})
    command = [sys.executable, ["-m", "edgellm", "pull", MODEL]]
    child = pexpect.spawn(*command, env=environ, encoding="utf-8", timeout=60)
    child.expect(pexpect.EOF)
    assert "is here" in child.before and "%" not in child.before
    assert "\r" not in child.before.replace("\r\n", "\n") and "\x1b" not in child.before


# --- doctor ------------------------------------------------------------------------------------------------


def test_doctor_examines_and_names_what_nothing_reads(isolated_home: Path) -> None:
    shown = run_edgellm("doctor", "--json", environ={"EDGELLM_KV_DTPYE": "f32", "EDGELLM_CTX": "64"})
    record = json.loads(shown.stdout)
    by_name = {finding["name"]: finding for finding in record["findings"]}
    assert by_name["torch"]["status"] == "ok" and "kernel linear" in by_name
    assert "EDGELLM_KV_DTPYE" in by_name["environment"]["detail"]
    assert "ctx (EDGELLM_CTX)" in by_name["settings"]["detail"]
    assert "qwen3-4b" in by_name["untried"]["detail"]
    assert record["ok"] is (shown.returncode == 0)
    assert list(isolated_home.iterdir()) == [], "looking makes nothing"


def test_doctor_finds_what_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    shown = run_edgellm("doctor", environ={"EDGELLM_HOME": str(tmp_path / "home")})
    assert shown.returncode == 1 and "PROBLEM" in shown.stdout
    wrong = run_edgellm("doctor", environ={"EDGELLM_CTX": "x"})
    assert wrong.returncode == 1 and "EDGELLM_CTX must be an integer" in wrong.stdout
