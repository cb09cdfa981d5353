"""``edgellm chat`` through pipes: what is asked, what is printed where, and the exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgellm.cli.chat import can_show_screen, split_words
from edgellm_models.errors import NotFoundError, UsageError
from tests.support.child_output import read_exactly, start_child
from tests.support.real_models import real_model

ROOT = Path(__file__).resolve().parents[2]
SOURCES = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "models", "quantize", "tui"))


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SOURCES, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", **extra}


def chat(
    *arguments: str, stdin: bytes | None = None, module: str = "tests.support.fake_chat", **extra: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", module, "chat", *arguments],
        input=stdin if stdin is not None else b"",
        capture_output=True,
        cwd=ROOT,
        env=environment(**extra),
        timeout=120,
    )


def asked(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_answer_is_all_there_is_on_standard_output() -> None:
    done = chat("What is the capital of France?")
    assert done.returncode == 0
    assert done.stdout == b"The capital of France is Paris.\n"
    assert b"the context is 8192 tokens" in done.stderr


def test_no_torch_and_no_textual_before_the_work_begins() -> None:
    code = (
        "import sys; from tests.support import fake_chat; sys.argv = ['edgellm', 'chat', 'Hi']\n"
        "try: fake_chat.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'textual', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=b"", capture_output=True, cwd=ROOT, env=environment(), timeout=120
    )
    assert done.stdout.splitlines()[-1] == b"[]", done.stderr


@pytest.mark.parametrize(
    ("arguments", "stdin", "content"),
    [
        (("Hi", "there"), b"", "Hi there"),
        (("smollm2-135m", "Hi", "there"), b"", "Hi there"),
        (("-p", "smollm2-135m"), b"", "smollm2-135m"),
        (("-m", "smollm2-135m", "gemma3-270m", "is", "what?"), b"", "gemma3-270m is what?"),
        ((), b"piped\n", "piped"),
        (("Summarize"), b"line one\nline two\r\n", "line one\nline two\n\nSummarize"),
        (("-p", "-x is what?"), b"", "-x is what?"),
        (("Grüße 你好 😊",), b"", "Grüße 你好 😊"),
    ],
)
def test_model_prompt_and_piped_text(tmp_path: Path, arguments: Any, stdin: bytes, content: str) -> None:
    arguments = (arguments,) if isinstance(arguments, str) else arguments
    record = tmp_path / "asked"
    done = chat(*arguments, stdin=stdin, FAKE_RECORD=str(record))
    assert done.returncode == 0, done.stderr
    assert asked(record)[0]["messages"] == [["user", content]]


def test_prompt_from_the_environment_survives_quotes_dollars_and_newlines(tmp_path: Path) -> None:
    record = tmp_path / "asked"
    prompt = 'it\'s $HOME; "x"\n`y`'
    assert chat(FAKE_RECORD=str(record), EDGELLM_PROMPT=prompt).returncode == 0
    assert asked(record)[0]["messages"] == [["user", prompt]]
    # An empty one counts as none, words win over it.
    assert chat(stdin=b"piped", FAKE_RECORD=str(record), EDGELLM_PROMPT="").returncode == 0
    assert chat("word", FAKE_RECORD=str(record), EDGELLM_PROMPT="variable").returncode == 0
    assert [a["messages"][0][1] for a in asked(record)[1:]] == ["piped", "word"]


def test_system_prompt_and_sampling_options(tmp_path: Path) -> None:
    record = tmp_path / "asked"
    options = ["--system", "Be brief.", "--temp", "0.5", "--seed", "7", "--stop", "END", "--max-tokens", "5"]
    assert chat("Hi", *options, FAKE_RECORD=str(record)).returncode == 0
    first = asked(record)[0]
    assert first["messages"] == [["system", "Be brief."], ["user", "Hi"]]
    assert (first["temperature"], first["seed"]) == (0.5, 7)
    assert (first["stop"], first["max_new_tokens"]) == (["END"], 5)


def test_sampling_comes_from_the_catalog_then_the_model_then_the_fallback(tmp_path: Path) -> None:
    record, model = tmp_path / "asked", tmp_path / "own.gguf"
    model.write_bytes(b"GGUF")
    assert chat("Hi", FAKE_RECORD=str(record), FAKE_DEFAULTS='{"temperature": 0.9}').returncode == 0
    assert (
        chat(str(model), "Hi", FAKE_RECORD=str(record), FAKE_DEFAULTS='{"temperature": 0.9}').returncode == 0
    )
    assert chat(str(model), "Hi", FAKE_RECORD=str(record)).returncode == 0
    catalog, own, fallback = asked(record)
    assert catalog["temperature"] == 0
    assert (own["temperature"], own["top_p"]) == (0.9, 1.0)
    assert (fallback["temperature"], fallback["top_p"], fallback["min_p"]) == (0.7, 0.95, 0.05)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, ("no prompt", "edgellm chat")),
        (("--json",), 2, ("prompt",)),
        (("./missing.gguf", "Hi"), 66, ("missing.gguf",)),
        (("-m", "smollm2-135n", "Hi"), 66, ("smollm2-135m",)),
        (("Hi", "-p", "Ho"), 2, ("two prompts",)),
        (("smollm2-135m", "-m", "gemma3-270m", "-p", "Hi"), 2, ("two prompts",)),
        (("Hi", "--temp", "-1"), 2, ("--temp",)),
        (("Hi", "--top-p", "7"), 2, ("--top-p",)),
        (("Hi", "--nonsense"), 2, ("--nonsense",)),
        (("Hi", "--url", "x"), 65, ("'x' is no address of a server", "http://HOST:PORT")),
        (("Hi", "--url", "http://127.0.0.1:9"), 69, ("http://127.0.0.1:9 cannot be reached",)),
        (("Hi", "--api-key-file", "x"), 2, ("--api-key-file", "--url")),
        (("Hi", "--continue"), 66, ("no saved chat to go on with",)),
        (("--continue", "abcdef12", "Hi"), 66, ("no chat whose id begins with abcdef12",)),
        (("--continue=xyz", "Hi"), 66, ("'xyz' is no id of a chat",)),
        (("Hi", "--kv-dtype", "fp4"), 2, ("--kv-dtype", "fp4", "fp8")),
        (("Hi", "-m", ""), 2, ("--model must not be empty",)),
        (("Hi", "--stop", ""), 2, ("--stop must not be empty",)),
        (("caf\udce9",), 65, ("PROMPT is not valid UTF-8",)),
        (("-p", "\udce9"), 65, ("--prompt is not valid UTF-8",)),
        (("Hi", "--system", "\udce9"), 65, ("--system is not valid UTF-8",)),
        (("Hi", "--stop", "\udce9"), 65, ("--stop is not valid UTF-8",)),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    done = chat(*arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout == b""
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1 and lines[0].startswith("edgellm: ")
    for word in words:
        assert word in lines[0]


def test_piped_bytes_that_are_no_text_are_refused() -> None:
    done = chat(stdin=b"\xff\xfe\x00")
    assert done.returncode == 65
    assert b"not UTF-8" in done.stderr


def test_a_base_model_names_the_other_command() -> None:
    done = chat("Hi", FAKE_BASE_MODEL="1")
    assert done.returncode == 65
    assert b"edgellm complete" in done.stderr
    assert done.stdout == b""


def test_an_engine_fault_keeps_the_text_and_is_70() -> None:
    done = chat("Hi", FAKE_SCRIPTS='[{"pieces": ["half "], "error": "NaN logits"}]')
    assert done.returncode == 70
    assert done.stdout == b"half \n"
    assert b"NaN logits" in done.stderr and b"Traceback" not in done.stderr


def test_notices_and_a_cut_answer_are_said_on_standard_error() -> None:
    script = {"pieces": ["cut"], "notices": [["context_trimmed", "dropped 6 turns"]], "reason": "length"}
    done = chat("Hi", FAKE_SCRIPTS=json.dumps([script]))
    assert done.stdout == b"cut\n"
    assert b"dropped 6 turns" in done.stderr
    assert b"cut: the context is full" in done.stderr


@pytest.mark.parametrize(
    ("options", "notices", "words"),
    [
        (("--max-tokens", "1"), [], b"cut at 1 token; --max-tokens"),
        (("--max-tokens", "50"), [], b"cut: the context is full; --ctx"),
        ((), [], b"cut: the context is full; --ctx"),
        (
            ("--max-tokens", "50"),
            [["context_full", "the context of 9 tokens is full"]],
            b"context of 9 tokens",
        ),
    ],
)
def test_one_note_names_what_cut_the_answer(options: Any, notices: Any, words: bytes) -> None:
    script = {"pieces": ["cut"], "notices": notices, "reason": "length"}
    err = chat("Hi", *options, FAKE_SCRIPTS=json.dumps([script])).stderr
    assert words in err
    assert err.count(b"cut") + err.count(b"is full") - err.count(b"cut: the context is full") == 1


def test_a_drawn_seed_is_said() -> None:
    assert b"note: seed 1234\n" in chat("Hi", "--temp", "0.5").stderr
    for options in (("--temp", "0"), ("--temp", "0.5", "--seed", "5"), ("--temp", "0.5", "--json")):
        assert b"note: seed" not in chat("Hi", *options).stderr
    assert chat("Hi", "-q", "--temp", "0.5").stderr == b""


def test_the_help_names_the_options_of_a_chat() -> None:
    shown = chat("--help").stdout
    for option in (b"--url", b"--continue", b"--no-save", b"--draft"):
        assert option in shown


def test_json_is_lines_of_events_and_the_last_has_everything() -> None:
    script = {"pieces": ["需要 ", "😊\x1b[31m"], "notices": [["k", "d"]], "queued": [2]}
    done = chat("Hi", "--json", "--seed", "5", FAKE_SCRIPTS=json.dumps([script]))
    assert done.returncode == 0
    lines = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert [line["type"] for line in lines] == ["queued", "prefill", "notice", "delta", "delta", "finished"]
    last = lines[-1]
    assert last["text"] == "需要 😊\x1b[31m" == "".join(x["text"] for x in lines if x["type"] == "delta")
    assert last["finish_reason"] == "stop"
    assert last["seed"] == 5
    assert last["usage"] == {"prompt_tokens": 30, "cached_tokens": 0, "completion_tokens": 2}
    assert {"ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s"} <= set(last["timings"])
    assert [n["kind"] for n in last["notices"]] == ["default_model", "context", "k"]
    assert done.stderr == b""


def test_json_of_a_fault_has_the_error_and_the_code() -> None:
    done = chat("Hi", "--json", FAKE_SCRIPTS='[{"pieces": [], "error": "NaN logits"}]')
    assert done.returncode == 70
    last = json.loads(done.stdout.decode().splitlines()[-1])
    assert (last["finish_reason"], last["error"]) == ("error", "NaN logits")


def test_raw_bytes_go_into_a_pipe() -> None:
    done = chat("Hi", FAKE_SCRIPTS=json.dumps([{"pieces": ["\x1b[31mred\x07"]}]))
    assert done.stdout == b"\x1b[31mred\x07\n"


def test_interrupt_keeps_the_partial_text_and_is_130() -> None:
    process = start_child(
        [sys.executable, "-m", "tests.support.fake_chat", "chat", "Hi"],
        cwd=ROOT,
        env=environment(FAKE_SCRIPTS='[{"pieces": ["one ", "two "], "hold_after": 2}]'),
    )
    assert read_exactly(process, 8) == b"one two "
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=30)
    assert rest == b"\n"
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_a_closed_pipe_is_no_fault() -> None:
    process = start_child(
        [sys.executable, "-m", "tests.support.fake_chat", "chat", "Hi"],
        cwd=ROOT,
        env=environment(FAKE_SCRIPTS=json.dumps([{"pieces": ["x" * 4096], "repeat": 200}])),
    )
    assert process.stdout is not None and process.stderr is not None
    read_exactly(process, 1)
    process.stdout.close()
    errors = process.stderr.read()
    process.wait(timeout=30)
    assert b"Traceback" not in errors and b"Exception" not in errors and b"fault" not in errors
    assert process.returncode in (0, 141)


def test_first_word_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    assert split_words((), None, model_named=False) == (None, None)
    assert split_words(("gemma3-270m",), None, model_named=False) == ("gemma3-270m", None)
    assert split_words(("hf:a/b", "x", "y"), None, model_named=False) == ("hf:a/b", "x y")
    assert split_words(("local", "x"), None, model_named=False) == ("local", "x")
    assert split_words(("What is 1/2 of it?",), None, model_named=False) == (None, "What is 1/2 of it?")
    assert split_words(("gemma3-270m", "x"), None, model_named=True) == (None, "gemma3-270m x")
    with pytest.raises(NotFoundError):
        split_words(("some/where", "x"), None, model_named=False)
    with pytest.raises(UsageError):
        split_words(("x",), "y", model_named=True)


def test_terminals_that_can_and_cannot_show_the_screen() -> None:
    """H13: unknown and dumb terminals are told from real ones."""
    for term in ("xterm", "xterm-256color", "screen.xterm-256color", "tmux-256color", "linux", "xterm-kitty"):
        assert can_show_screen(term)
    for term in ("", "dumb", "unknown", "xyz", "a/b", "\x1b[0m"):
        assert not can_show_screen(term)


def test_a_python_without_curses_knows_the_usual_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "curses", None)
    assert can_show_screen("xterm-256color")
    assert not can_show_screen("some-old-terminal")


@pytest.mark.real_model
def test_the_real_model_answers() -> None:
    path = real_model("smollm2-135m")
    done = chat(str(path), "--temp", "0", "What is the capital of France?", module="edgellm")
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"The capital of France is Paris.\n"


@pytest.mark.real_model
def test_the_real_base_model_is_refused_with_the_way_out() -> None:
    done = chat(str(real_model("gemma3-270m")), "Hi", module="edgellm")
    assert done.returncode == 65
    assert b"edgellm complete" in done.stderr
    assert done.stdout == b""


def test_the_model_that_answers_unnamed_is_said() -> None:
    note = b"smollm2-135m answers"
    assert note in chat("Hi").stderr
    assert note not in chat("-q", "Hi").stderr
    for named in (("smollm2-135m", "Hi"), ("-m", "smollm2-135m", "Hi")):
        assert note not in chat(*named).stderr
    last = json.loads(chat("Hi", "--json").stdout.splitlines()[-1])
    assert [n["kind"] for n in last["notices"]].count("default_model") == 1
