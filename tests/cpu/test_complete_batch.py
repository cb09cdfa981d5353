"""``edgellm complete --input``: order, broken lines, settings of a line, going on after a kill, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edgellm.cli.main import run
from tests.support.bigram import make_bigram
from tests.support.command_line import command_environment

CHAIN = ["one", " two", " th", "ree", "."]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bigram(tmp_path_factory.mktemp("m") / "m", CHAIN)


def write(path: Path, *lines: object) -> Path:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def results(path: Path) -> list[dict[str, Any]]:
    data = path.read_text(encoding="utf-8")
    assert not data or data.endswith("\n")
    return [json.loads(line) for line in data.splitlines()]


def batch(model: Path, source: Path, target: Path, *options: object) -> int:
    return run(["complete", str(model), "--input", str(source), "--output", str(target), *map(str, options)])


def test_results_keep_the_order_and_broken_lines_fail_alone(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[object] = [{"prompt": "x" * i, "id": {"n": i}, "max_tokens": 1 + i % 5} for i in range(1, 80)]
    broken = {
        5: b"not json",
        9: b'["a list"]',
        13: b'{"prompt": "a", "temprature": 1}',
        17: b'{"prompt": 5}',
        21: b'{"prompt": "a", "temperature": -1}',
        25: b'{"prompt": "a", "prompt_token_ids": [1]}',
        29: b'{"prompt_token_ids": [1, 999999]}',
        33: b'{"prompt": "\\ud800"}',
        37: b'{"prompt": "a", "top_k": "many"}',
        41: b"\xff\xfe",
        45: b"[" * 100_000,
    }
    for number, line in broken.items():
        lines[number - 1] = line
    target = tmp_path / "out.jsonl"
    assert batch(model, write(tmp_path / "in.jsonl", *lines), target) == 65
    assert "79 lines done, 11 of them" in capsys.readouterr().err
    found = results(target)
    assert [one["line"] for one in found] == list(range(1, 80))
    for one in found:
        number = one["line"]
        if number in broken:
            assert one["error"] and "text" not in one
            continue
        assert one["id"] == {"n": number} and "error" not in one
        count = 1 + number % 5
        assert one["text"] == "".join(CHAIN[:count]) and len(one["token_ids"]) == count
        assert one["usage"]["completion_tokens"] == count


def test_settings_hold_for_all_and_a_line_has_its_own(tmp_path: Path, model: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        {"prompt": "a"},
        {"prompt": "a", "stop": " th"},
        {"prompt": "a", "stop": [" two", "x"], "max_tokens": None},
        {"prompt_token_ids": [97]},
        b"",
        b"   ",
        {"prompt": "a", "seed": 7},
    )
    target = tmp_path / "out.jsonl"
    assert batch(model, source, target, "--max-tokens", 4, "--logprobs", 1) == 0
    found = results(target)
    assert [one["text"] for one in found] == [
        "one two three",
        "one two",
        "one",
        "one two three",
        "one two three",
    ]
    assert [one["line"] for one in found] == [1, 2, 3, 4, 7] and found[-1]["seed"] == 7
    assert all(len(one["logprobs"]) == len(one["token_ids"]) for one in found)


def test_whole_results_are_kept_and_half_a_line_is_done_again(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", *({"prompt": "a", "id": i} for i in range(6)))
    target = tmp_path / "out.jsonl"
    kept = b'{"line": 1, "text": "kept"}\n{"line": 2, "error": "kept too"}\n'
    target.write_bytes(kept + b'{"line": 3, "te')
    assert batch(model, source, target) == 0
    assert "2 results already" in capsys.readouterr().err
    assert target.read_bytes().startswith(kept)
    assert [one["line"] for one in results(target)] == [1, 2, 3, 4, 5, 6]
    before = target.read_bytes()
    assert batch(model, source, target) == 0 and target.read_bytes() == before


@pytest.mark.parametrize("content", [b"my diary\n", b'{"text": "no line"}\n', b'{"line": 2}\n{"line": 1}\n'])
def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, model: Path, content: bytes) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(content)
    assert batch(model, write(tmp_path / "in.jsonl", {"prompt": "a"}), target) == 65
    assert target.read_bytes() == content


def test_what_does_not_go_together(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write(tmp_path / "in.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"
    assert run(["complete", str(model), "--input", str(source)]) == 2
    assert run(["complete", str(model), "--output", str(target)]) == 2
    assert batch(model, source, target, "a prompt") == 2
    assert batch(model, source, target, "--json") == 2
    assert batch(model, source, target, "--beams", 2) == 2
    assert batch(model, source, source) == 2
    assert batch(model, tmp_path / "none.jsonl", target) == 66
    assert batch(model, source, tmp_path / "no" / "out.jsonl") == 73
    assert all(line.startswith("edgellm: ") for line in capsys.readouterr().err.splitlines())
    assert not target.exists() and results(source) == [{"prompt": "a"}]


def test_it_goes_on_after_a_kill(tmp_path: Path) -> None:
    slow = make_bigram(tmp_path / "m", ["a", "b", "c"], loop=True, dead_layers=20, context=100_000)
    source = write(tmp_path / "in.jsonl", *({"prompt": "x", "max_tokens": 3 + 5 * i} for i in range(40)))
    target = tmp_path / "out.jsonl"
    words = ["complete", str(slow), "--ctx", "4096", "--input", str(source), "--output", str(target)]
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm", *words], env=command_environment(), stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not target.exists() or target.read_bytes().count(b"\n") < 3):
        time.sleep(0.01)
    process.kill()
    process.wait()
    before = target.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert 3 <= whole.count(b"\n") < 40
    assert run(words) == 0
    assert target.read_bytes().startswith(whole)
    assert [len(one["token_ids"]) for one in results(target)] == [3 + 5 * i for i in range(40)]
