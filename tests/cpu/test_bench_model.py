"""``edgellm bench``: the report of a real run against its schema, the peer beside it, the trace's ranges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from edgellm.bench.llama_cpp_peer import LlamaCppPeer
from edgellm.bench.peak_memory import peak_bytes, reset_peak
from edgellm_models.errors import EngineError, UsageError
from tests.support.command_line import ROOT
from tests.support.llama_cpp import require_llama_cpp
from tests.support.tiny_models import make_tiny, tiny_gguf

SCHEMA = json.loads((ROOT / "docs" / "bench.schema.json").read_text(encoding="utf-8"))


def check(report: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(report, SCHEMA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m")
    tiny_gguf(make_tiny("llama", path / "tiny", max_position_embeddings=512), path / "tiny.gguf")
    return path


def test_a_report_with_everything_is_what_the_schema_says(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches, target, price, profile and the peer at once, through plain ``edgellm bench``."""
    require_llama_cpp()
    from edgellm.cli.main import run

    monkeypatch.chdir(folder)
    monkeypatch.setattr("edgellm.planning.machine.read_bandwidth", lambda num_bytes: 12.5)
    code = run([
        "bench", "tiny.gguf", "--prompt-tokens", "40,20", "--new-tokens", "6", "--repeat", "2",
        "--batch", "1,3", "--slo", "ttft=60,tps=0.01", "--price-per-hour", "2", "--profile", "trace.json",
        "--against", "llama.cpp", "--kv-dtype", "f16", "--json",
    ])  # fmt: skip
    shown = capsys.readouterr()
    assert code == 0 and shown.err == ""
    report = json.loads(shown.out)
    check(report)
    assert report["prompt_tokens"] == [20, 40] and [row["batch"] for row in report["batches"]] == [1, 3]
    assert report["slo"]["smooth_up_to"] == 3
    assert report["decode_tokens_per_s"] == report["prompts"][0]["decode_tokens_per_s"]
    found = report["prompts"][0]
    assert report["read_share"] == pytest.approx(report["achieved_gb_per_s"] / report["read_gb_per_s"])
    kv = report["step_bytes"] - report["weight_bytes"]
    assert kv > 0 and kv % (20 + 3) == 0  # f16: bytes per position times the middle of the answer
    assert found["achieved_gb_per_s"] == pytest.approx(
        found["step_bytes"] * found["decode_tokens_per_s"] / 1e9
    )
    for row in report["batches"]:
        assert row["cost_per_million_tokens"] == pytest.approx(2 / row["total_tokens_per_s"] / 3600 * 1e6)
        assert 0 < row["inter_token_s"]["p50"] <= row["inter_token_s"]["p95"] <= row["inter_token_s"]["p99"]
    against = report["against"]
    assert [peer["new_tokens"] for peer in against["runs"]] == [6, 6]
    assert [peer["prompt_tokens"] for peer in against["runs"]] == [20, 20]
    ratio = report["decode_tokens_per_s"] / against["decode_tokens_per_s"]
    assert against["decode_ratio"] == pytest.approx(ratio)
    names = {event["name"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]}
    assert {"queue", "prefill", "decode", "attention", "linears", "sampling"} <= names


def test_the_trace_shows_drafts_and_their_verification(folder: Path) -> None:
    """An answer that is handed in as its own prediction is drafted for certain."""
    from edgellm.bench.profile_ranges import profiled
    from edgellm.cli.bench_model import ranges
    from edgellm.cli.runtime import load_runtime
    from edgellm.config import EngineConfig
    from edgellm.contracts import GenerationRequest, SamplingParams

    settings = EngineConfig(device="cpu", kernels="torch", spec="ngram", ctx=64).resolve(environ={})
    runtime = load_runtime(settings, folder / "tiny.gguf", "tiny")
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)

    def answer(name: str, prediction: tuple[int, ...]) -> tuple[int, ...]:
        prompt = (5, 6, 7, 8)
        runtime.core.submit(GenerationRequest(name, prompt, sampling, prediction_token_ids=prediction))
        found: list[int] = []
        while runtime.core.has_work():
            found += [token_id for event in runtime.core.step() for token_id in event.token_ids]
        return tuple(found)

    first = answer("plain", ())
    with profiled(folder / "drafts.json", ranges(runtime)):
        assert answer("predicted", first) == first
    events = json.loads((folder / "drafts.json").read_text())["traceEvents"]
    assert {"draft", "verify", "sampling", "linears", "attention"} <= {event["name"] for event in events}
    runtime.close()


def test_the_tables_for_people_and_bench_model_by_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgellm.cli.main import run

    monkeypatch.chdir(folder)
    monkeypatch.setattr("edgellm.planning.machine.read_bandwidth", lambda num_bytes: 12.5)
    options = [
        "--prompt-tokens",
        "16",
        "--new-tokens",
        "4",
        "--repeat",
        "1",
        "--batch",
        "1,2",
        "--slo",
        "tps=1e9",
    ]
    assert run(["bench", "model", "tiny.gguf", *options]) == 0
    shown = capsys.readouterr().out
    assert "<- knee" in shown and "not smooth (1e+09 tokens per second" in shown
    assert "of the 12.5 GB/s that all cores read here" in shown and "peak memory" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert [row[0] for row in rows if len(row) > 8 and row[0].isdigit()] == ["16", "1", "2"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--batch", "2000"], 2, "--batch takes numbers from 1 to 1,024"),
        (["--slo", "fast"], 2, "--slo takes ttft=SECONDS"),
        (["--prompt-tokens", "4000"], 2, "and the context holds 512"),
        (["--kv-policy", "trim"], 2, "--kv-policy trim"),
        (["--prompt-tokens", "16", "--profile", "none/t.json"], 73, "cannot write the profile"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_one_line(
    folder: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from edgellm.cli.main import run

    monkeypatch.chdir(folder)
    monkeypatch.setattr("edgellm.planning.machine.read_bandwidth", lambda num_bytes: 1.0)
    assert run(["bench", "tiny.gguf", "--new-tokens", "4", *arguments]) == code
    shown = capsys.readouterr()
    assert words in shown.err and "Traceback" not in shown.err


def test_the_peer_reads_gguf_files_and_says_why_it_cannot(folder: Path, tmp_path: Path) -> None:
    require_llama_cpp()
    with pytest.raises(UsageError, match="needs a GGUF file"):
        LlamaCppPeer(folder / "tiny", context=64, threads=1)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(EngineError, match=r"llama\.cpp ended with status"):
        LlamaCppPeer(tmp_path / "bad.gguf", context=64, threads=1)


def test_peak_memory_counts_what_was_held_and_let_go() -> None:
    was_reset = reset_peak()
    before, source = peak_bytes(was_reset)
    held = bytearray(b"x") * (64 << 20)
    del held
    after, _ = peak_bytes(was_reset)
    assert source and before > 0
    assert after - before > 32 << 20 or not was_reset
