"""``edgellm complete`` over scripted models: words, streams, JSON, interrupts, pipes, terminals."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest

from edgellm.cli.complete import names_a_model, parse_biases, split_words
from edgellm.cli.main import run
from edgellm_models.errors import UsageError
from tests.support.bigram import bigram_gguf, make_bigram
from tests.support.child_output import read_exactly, start_child

ROOT = Path(__file__).resolve().parents[2]
CHAIN = ["one", " two", " th", "ree", "."]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bigram")
    return bigram_gguf(make_bigram(folder / "m", CHAIN, special=["<|tag|>"]), folder / "m.gguf")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bigram(
        tmp_path_factory.mktemp("bigram") / "m", ["a", "b", "c"], loop=True, dead_layers=20, context=100_000
    )


class Run:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture
def complete(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def call(*arguments: object, stdin: bytes | None = None) -> Run:
        data = io.TextIOWrapper(io.BytesIO(stdin or b""))
        monkeypatch.setattr(sys, "stdin", data)
        capsys.readouterr()
        code = run(["complete", *map(str, arguments)])
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return call


def environment(home: Path) -> dict[str, str]:
    paths = [ROOT, *(ROOT / name for name in ("kernels", "models", "quantize", "tui"))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "EDGELLM_HOME": str(home)}


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "edgellm", "complete", *map(str, arguments)]


# --- words ---


def test_words_are_model_and_prompt(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert split_words(("m", "a prompt"), model_named=False) == ("m", "a prompt")
    assert split_words(("a prompt",), model_named=False) == (None, "a prompt")
    assert split_words(("smollm2-135m",), model_named=True) == (None, "smollm2-135m")
    assert split_words(("smollm2-135m",), model_named=False) == ("smollm2-135m", None)
    assert split_words((str(model),), model_named=False) == (str(model), None)
    assert split_words((), model_named=False) == (None, None)
    for words, named in ((("a", "b", "c"), False), (("a", "b"), True)):
        with pytest.raises(UsageError, match="quotes"):
            split_words(words, model_named=named)
    monkeypatch.setattr(sys, "stdin", Terminal())
    for words in ((), ("smollm2-135m",)):
        with pytest.raises(UsageError, match="PROMPT is missing"):
            split_words(words, model_named=False)


def test_what_looks_like_no_model_is_a_prompt(tmp_path: Path) -> None:
    for word in ("hello", "and/or", "x" * 5000, "a\0b", "~nobody/x", str(tmp_path), __file__):
        assert not names_a_model(word)
    assert names_a_model("hf:owner/repo") and names_a_model("no/such.gguf")
    assert not names_a_model("what is a .gguf")


def test_a_missing_file_is_exit_66(complete: Any) -> None:
    result = complete("no/such.gguf", stdin=b"a prompt")
    assert result.code == 66 and "no/such.gguf" in result.err and result.out == ""


@pytest.mark.parametrize("text", ["5", "=1", "a=1", "5=", "5=x", "5=nan=1"])
def test_a_bias_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="--logit-bias"):
        parse_biases((text,))


# --- answers ---


def test_text_and_nothing_else_on_standard_output(complete: Any, model: Path) -> None:
    result = complete(model, "x")
    assert (result.code, result.out) == (0, "one two three.")
    assert "context is 4096" in result.err and "f32" in result.err
    assert complete("-q", "-m", model, "x").err == ""


def test_json_is_the_promised_object(complete: Any, model: Path) -> None:
    result = complete(model, "x", "--json", "--seed", "7", "--logprobs", "2")
    found = result.json
    assert result.code == 0 and result.out.count("\n") == 1 and result.err == ""
    assert found["text"] == "one two three." and found["finish_reason"] == "stop" and found["seed"] == 7
    assert found["usage"] == {
        "prompt_tokens": len(found["prompt_token_ids"]),
        "cached_tokens": 0,
        "completion_tokens": len(found["token_ids"]),
    }
    assert found["draft"] == {"proposed": 0, "accepted": 0, "steps": 0}
    for name in ("ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s", "import_s", "load_s"):
        assert found["timings"][name] > 0
    assert {n["kind"] for n in found["notices"]} >= {"context", "weight_form"}
    assert len(found["logprobs"]) == len(found["token_ids"]) == 6
    assert [p["token_id"] for p in found["logprobs"]] == found["token_ids"]
    assert all(len(p["top"]) == 2 and p["logprob"] > -1e-3 for p in found["logprobs"])


def test_standard_input_is_the_prompt(complete: Any, model: Path) -> None:
    expected = complete(model, "one", "--json").json
    for data in (b"one\n", b"one\r\n", b"one"):
        found = complete(model, "--json", stdin=data).json
        assert found["prompt_token_ids"] == expected["prompt_token_ids"] and found["text"] == " two three."
    assert complete("-m", model, stdin=b"one").out == " two three."
    assert len(complete(model, "--json", stdin=b"one\n\n").json["prompt_token_ids"]) == 3
    bad = complete(model, stdin=b"a\xff")
    assert bad.code == 65 and "byte 1 is 0xff" in bad.err


def test_sampling_options_reach_the_sampler(complete: Any, model: Path) -> None:
    def ids(*options: object) -> list[int]:
        found: list[int] = complete(model, "x", "--json", *options).json["token_ids"]
        return found

    full = ids()
    assert ids("--max-tokens", "2") == full[:2]
    assert complete(model, "x", "--stop", "th", "--stop", "zz").out == "one two "
    assert ids("--logit-bias", f"{full[0]}=-100")[0] != full[0]
    assert ids("--logit-bias", "65=100", "--temp", "1", "--max-tokens", "3") == [65] * 3
    hot = ("--temp", "50", "--max-tokens", "20", "--ignore-eos")
    assert ids(*hot, "--seed", "3") == ids(*hot, "--seed", "3") != ids(*hot, "--seed", "4")
    for narrow in (
        ("--top-k", "1"),
        ("--top-p", "1e-9"),
        ("--min-p", "1"),
        ("--typical-p", "1e-9", "--temp", ".1"),
    ):
        assert ids("--temp", "2", *narrow) == full
    assert (
        ids("--presence-penalty", "1000", "--logit-bias", f"{full[1]}=50", "--max-tokens", "3").count(full[1])
        == 1
    )
    assert (
        ids("--frequency-penalty", "1000", "--logit-bias", f"{full[1]}=50", "--max-tokens", "3").count(
            full[1]
        )
        == 1
    )
    assert (
        full[0]
        not in ids("--repeat-penalty", "1000", "--logit-bias", f"{full[0]}=1", "--max-tokens", "4")[1:]
    )


def test_no_special_takes_the_prompt_as_text(complete: Any, model: Path) -> None:
    """A08: control strings become ordinary ids and no BOS is added."""
    parsed = complete(model, "<|tag|>", "--json").json["prompt_token_ids"]
    literal = complete(model, "<|tag|>", "--json", "--no-special").json["prompt_token_ids"]
    assert len(parsed) == 2 and len(literal) == len("<|tag|>")
    assert parsed[0] not in literal and parsed[1] not in literal


def test_the_default_limit_is_said(complete: Any, endless: Path) -> None:
    result = complete(endless, "x", "--json")
    found = result.json
    assert found["finish_reason"] == "length" and found["usage"]["completion_tokens"] == 256
    assert any(n["kind"] == "max_tokens" and "256" in n["detail"] for n in found["notices"])
    asked = complete(endless, "x", "--json", "--max-tokens", "5").json
    assert all(n["kind"] != "max_tokens" for n in asked["notices"])


def test_empty_prompts(complete: Any, model: Path, tmp_path: Path) -> None:
    for asked in (complete(model, ""), complete("-m", model, stdin=b"")):
        assert asked.code == 0 and "note: the prompt is empty" in asked.err and asked.out == "one two three."
    found = complete(model, "", "--json").json
    assert [n["kind"] for n in found["notices"]].count("empty_prompt") == 1
    assert len(found["prompt_token_ids"]) == 1 and found["text"] == "one two three."
    refused = complete(model, "", "--no-special")
    assert refused.code == 65 and "empty" in refused.err and refused.out == ""


def test_a_prompt_beyond_the_context_names_both_numbers(complete: Any, model: Path) -> None:
    result = complete(model, "x" * 40, "--ctx", "20")
    assert result.code == 65 and "41" in result.err and "20" in result.err and result.out == ""


def test_a_full_context_is_said(complete: Any, endless: Path) -> None:
    result = complete(endless, "x", "--ctx", "30", "--max-tokens", "100", "--json")
    assert result.json["usage"]["completion_tokens"] == 28
    assert any(n["kind"] == "context_full" and "30" in n["detail"] for n in result.json["notices"])


def test_a_context_above_the_trained_one_is_clamped_and_said(complete: Any, model: Path) -> None:
    result = complete(model, "x", "--ctx", "9999")
    assert result.code == 0 and "4096" in result.err and "9999" in result.err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--top-p", "2"], 2, "top-p"),
        (["--logit-bias", "99999=1"], 2, "--logit-bias names token 99999"),
        (["--logit-bias", "5=nan"], 2, "--logit-bias"),
        (["--logit-bias", "5=-inf"], 2, "--logit-bias"),
        (["--logit-bias", "-5=1"], 2, "--logit-bias"),
        (["--logprobs", "50", "--json"], 2, "--logprobs"),
        (["--logprobs", "-1", "--json"], 2, "--logprobs"),
        (["--logprobs", "2"], 2, "--logprobs needs --json"),
        (["--stop", ""], 2, "--stop must not be empty"),
        (["--stop", "a", "--stop", ""], 2, "--stop must not be empty"),
        (["--temp", "nan"], 2, "--temp"),
        (["--seed", "-1"], 2, "--seed"),
        (["--max-tokens", "-1"], 2, "--max-tokens"),
        (["--stop", "\udcff"], 65, "--stop is not valid UTF-8"),
        (["--temp", "warm"], 2, "temp"),
        (["--kv-dtype", "fp4"], 2, "fp4"),
        (["--kv-policy", "trim"], 2, "trim"),
    ],
)
def test_a_bad_option_is_one_line(
    complete: Any, model: Path, options: list[str], code: int, words: str
) -> None:
    result = complete(model, "x", "-q", *options)
    assert (result.code, result.out, result.err.count("\n")) == (code, "", 1) and words in result.err


def test_logprobs_as_a_variable_wait_for_json(
    complete: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGELLM_LOGPROBS", "2")
    assert complete(model, "x").code == 0
    assert all(len(found["top"]) == 2 for found in complete(model, "x", "--json").json["logprobs"])
    monkeypatch.setenv("EDGELLM_LOGPROBS", "-1")
    result = complete(model, "x")
    assert result.code == 78 and "EDGELLM_LOGPROBS" in result.err


def test_an_empty_model_and_a_prompt_that_is_no_text_are_refused(complete: Any, model: Path) -> None:
    for words in (("x", "-m", ""), ("", "x")):
        result = complete(*words)
        assert result.code == 2 and "--model must not be empty" in result.err and result.err.count("\n") == 1
    result = complete(model, "caf\udce9")
    assert (result.code, result.out) == (65, "") and "PROMPT is not valid UTF-8" in result.err


def test_a_drawn_seed_is_said_and_gives_the_same_text_again(complete: Any, endless: Path) -> None:
    asked = ("--temp", "5", "--max-tokens", "12")
    drawn = complete(endless, "x", *asked)
    seed = drawn.err.partition("note: seed ")[2].split()[0]
    again = complete(endless, "x", *asked, "--seed", seed)
    assert again.out == drawn.out and "note: seed" not in again.err
    assert complete(endless, "x", "-q", *asked).err == ""
    assert "note: seed" not in complete(endless, "x", "--temp", "0", "--max-tokens", "3").err
    assert "note: seed" not in complete(endless, "x", "--json", *asked).err


def test_verbose_says_what_happens_and_the_log_holds_no_text(
    complete: Any, model: Path, isolated_home: Path
) -> None:
    result = complete("-v", model, "secret", "--ctx", "9999")
    assert result.code == 0 and result.out == "one two three."
    for words in (
        f"opened {model}: gguf, llama",
        "kernels: ",
        "loading ",
        "context_clamped",
        "answer tokens",
    ):
        assert words in result.err
    kept = (isolated_home / "state" / "logs" / "edgellm.log").read_text(encoding="utf-8")
    assert "context_clamped" in kept and kept.count("edgellm.answer: model m, stop") == 1
    assert "secret" not in kept and "three" not in kept
    assert "INFO" not in complete(model, "x").err


def test_an_engine_fault_is_exit_70_with_the_text_so_far(
    complete: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgellm.runner.model_runner import ModelRunner

    original, calls = ModelRunner.execute, []

    def failing(self: ModelRunner, plan: Any) -> Any:
        calls.append(plan)
        if len(calls) == 3:
            raise RuntimeError("no more")
        return original(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", failing)
    result = complete("-q", model, "x")
    assert result.code == 70 and result.out == "one two" and "RuntimeError: no more" in result.err


# --- as a process ---


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_keeps_the_text_and_exits_130(endless: Path, tmp_path: Path) -> None:
    arguments = command_line("-q", endless, "x", "--max-tokens", "90000")
    with start_child(arguments, env=environment(tmp_path), cwd=tmp_path) as process:
        start = read_exactly(process, 10)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        assert process.returncode == 130 and errors == b""
        text = (start + rest).decode()
        assert ("abc" * 40_000).startswith(text) and len(text) < 90_000


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_in_json_mode_prints_what_there_is(endless: Path, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from edgellm.cli import complete\n"
        "add = complete.Completion.add\n"
        "def counting(self, event):\n"
        "    add(self, event)\n"
        "    if len(self.token_ids) == 5 and not self.interrupted: os.kill(os.getpid(), signal.SIGINT)\n"
        "complete.Completion.add = counting\n"
        "from edgellm.cli.main import main\n"
        "sys.argv[1:] = ['complete', '--json', '--max-tokens', '90000', *sys.argv[1:]]\n"
        "main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(endless), "x"],
        capture_output=True,
        env=environment(tmp_path),
        cwd=tmp_path,
        timeout=60,
    )
    assert result.returncode == 130, result.stderr
    found = json.loads(result.stdout)
    assert found["finish_reason"] == "cancelled" and found["text"].startswith("abcab")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_a_reader_that_goes_away_is_quiet(endless: Path, tmp_path: Path) -> None:
    arguments = command_line("-q", endless, "x", "--max-tokens", "90000")
    with start_child(arguments, env=environment(tmp_path), cwd=tmp_path) as process:
        read_exactly(process, 5)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 141 and process.stderr.read() == b""


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_control_characters_never_reach_a_terminal(tmp_path: Path) -> None:
    chain = ["red\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "end"]
    folder = make_bigram(tmp_path / "m", chain)
    arguments = command_line("-q", folder, "x")
    raw = subprocess.run(arguments, capture_output=True, env=environment(tmp_path), cwd=tmp_path, timeout=60)
    assert raw.stdout.decode() == "".join(chain)
    child = pexpect.spawn(
        arguments[0], arguments[1:], env=environment(tmp_path), cwd=str(tmp_path), timeout=60
    )
    child.expect(pexpect.EOF)
    shown = child.before
    assert b"\x1b" not in shown and b"\x07" not in shown and "\x9b".encode() not in shown
    assert shown.decode() == "red\u241b[31m\u241b]0;title\u2407\\x9b2Jend\r\n"
