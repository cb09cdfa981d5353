"""``edgellm eval`` through the engine: against llama-perplexity, whole logits, and its own cache."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from edgellm.cli.evaluate_text import Evaluation, Report, read_text, run_evaluation
from edgellm.config import EngineConfig
from edgellm.contracts import Notice
from edgellm.evaluate.reference_cache import CacheKey, ReferenceCache
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.errors import BadInputError, NotFoundError, UsageError
from edgellm_models.network.build import build_decoder
from edgellm_models.tokenizer import load_tokenizer
from tests.support.command_line import ROOT, run_edgellm
from tests.support.paged import run_whole
from tests.support.real_models import real_model
from tests.support.tiny_models import make_tiny

RECORDED = json.loads((ROOT / "tests" / "data" / "llama_perplexity.json").read_text(encoding="utf-8"))
TEXT = "The quick brown fox jumps over the lazy dog, again and again, until nobody looks up any more.\n" * 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("gemma3", tmp_path_factory.mktemp("m") / "m")


def run(path: Path, cache: Path, tell: list[Notice] | None = None, **job: Any) -> Report:
    settings = {"device": "cpu", "ctx": 64, **job.pop("settings", {})}
    resolved = EngineConfig(**settings).resolve(environ={})
    notices = [] if tell is None else tell
    job = {"text": TEXT, **job}
    return run_evaluation(
        Evaluation(job.pop("text"), path, "m", resolved, cache_folder=cache, **job), notices.append
    )


@pytest.mark.real_model
@pytest.mark.parametrize(("name", "windows"), [("smollm2-135m", 2), ("gemma3-270m", 1)])
def test_perplexity_is_that_of_llama_perplexity(name: str, windows: int, tmp_path: Path) -> None:
    """The first windows against figures recorded for files of the same weights as F32 and F16; closer to the
    F32 file's, where no weight was rounded."""
    text = read_text(str(ROOT / RECORDED["text"]))
    assert hashlib.sha256((ROOT / RECORDED["text"]).read_bytes()).hexdigest() == RECORDED["text_sha256"]
    peer = RECORDED["perplexity_after_windows"][name]
    report = run(
        real_model(name),
        tmp_path,
        text=text,
        windows=windows,
        settings={"ctx": RECORDED["ctx"], "kernels": "torch", "kv_dtype": "f32", "activations": "exact"},
    )
    found = report.result.perplexity
    assert report.result.tokens == windows * 127
    assert found == pytest.approx(peer["F16"][windows - 1], rel=1e-3)
    assert found == pytest.approx(peer["F32"][windows - 1], rel=2e-4)


@pytest.mark.parametrize(("chunk", "first"), [(None, 32), (16, 32), (5, 32), (1, 32), (16, 0)])
def test_rows_are_those_of_whole_windows(tiny: Path, tmp_path: Path, chunk: int | None, first: int) -> None:
    """Windows of a model with sliding windows, in chunks of any size, against one forward pass each: their
    second halves, or all of them."""
    checkpoint = open_checkpoint(tiny)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.file_format, checkpoint.metadata)
    decoder = build_decoder(checkpoint)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.bos_id is not None and tokenizer.add_bos
    total = 0.0
    for start in range(0, 3 * 64, 64):
        window = [tokenizer.bos_id, *ids[start + 1 : start + 64]]
        log_p = run_whole(decoder, window).double().log_softmax(-1)
        total -= float(log_p[torch.arange(first, 63), torch.tensor(window[first + 1 :])].sum())
    settings = {"kv_dtype": "f32"}
    report = run(tiny, tmp_path, chunk=chunk, windows=3, scores_all=first == 0, settings=settings)
    scored = 3 * (63 - first)
    assert report.result.tokens == scored and report.plan.num_windows == 3
    assert report.result.perplexity == pytest.approx(math.exp(total / scored), rel=1e-5)


def test_every_kv_type_can_be_scored(tiny: Path, tmp_path: Path) -> None:
    """Against f32 KV of the same weights: more bits are closer, and nothing is exact but f32 itself."""
    found = {}
    for kv in ("f32", "bf16", "int8", "fp8"):
        settings = {"kv_dtype": kv, "kernels": "torch"}
        report = run(tiny, tmp_path, reference=tiny, settings=settings, chunk=16, windows=2)
        assert report.result.divergence is not None
        found[kv] = report.result.divergence.mean_kld
    print(found)
    assert found["f32"] < 1e-7 < min(found["bf16"], found["int8"]) and found["int8"] < found["fp8"] < 0.5


def test_the_reference_is_kept_checked_and_used_again(tiny: Path, tmp_path: Path) -> None:
    job: dict[str, Any] = {"reference": tiny, "settings": {"kv_dtype": "int8"}, "chunk": 16, "windows": 2}
    first = run(tiny, tmp_path, **job)
    assert not first.reference_was_cached and first.result.divergence is not None
    assert 1e-8 < first.result.divergence.mean_kld < 0.1
    again = run(tiny, tmp_path, **job)
    assert again.reference_was_cached and again.result == first.result
    other_chunk = run(tiny, tmp_path, **job | {"chunk": None})
    assert other_chunk.reference_was_cached
    [file] = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    told: list[Notice] = []
    damaged = run(tiny, tmp_path, told, **job)
    assert "reference_cache_damaged" in {notice.kind for notice in told}
    assert not damaged.reference_was_cached and damaged.result == first.result
    file.write_bytes(file.read_bytes()[:-1])
    told.clear()
    assert run(tiny, tmp_path, told, **job).result == first.result
    assert "reference_cache_damaged" in {notice.kind for notice in told}


def test_equal_models_have_no_divergence_and_another_text_is_another_file(tiny: Path, tmp_path: Path) -> None:
    same = run(
        tiny, tmp_path, reference=tiny, windows=3, settings={"kv_dtype": "f32", "kernels": "torch"}
    ).result.divergence
    assert same is not None and abs(same.mean_kld) < 1e-6 and same.top1_agreement == 1.0
    run(tiny, tmp_path, reference=tiny, text=TEXT.replace("fox", "cat"))
    run(tiny, tmp_path, reference=tiny, windows=2)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_reference_of_another_vocabulary_is_refused(tiny: Path, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "other")
    with pytest.raises(BadInputError, match="KL divergence compares models of one"):
        run(tiny, tmp_path / "cache", reference=other)


def test_the_cache_keeps_within_its_bound_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    import numpy as np

    from edgellm.evaluate.measures import ReferenceRows

    keys = [CacheKey({"text": str(i)}, 10, 50) for i in range(3)]
    cache = ReferenceCache(tmp_path, max_bytes=2 * keys[0].total_bytes + 10)
    rows = ReferenceRows(np.arange(10, dtype=np.int32), np.arange(500, dtype=np.uint16).reshape(10, 50))
    for age, key in enumerate(keys):
        writer, notice = cache.writer(key)
        assert writer is not None and notice is None
        with writer:
            writer.append(rows)
            writer.commit()
        os.utime(tmp_path / key.file_name, (age, age))
    assert {p.name for p in tmp_path.iterdir()} == {keys[1].file_name, keys[2].file_name}
    kept, _ = cache.open(keys[2])
    assert kept is not None
    assert (kept.read(4).codes == rows.codes[:4]).all() and (kept.read(6).best == rows.best[4:]).all()
    kept.close()
    writer, notice = cache.writer(CacheKey({}, 1000, 50))
    assert writer is None and notice is not None and notice.kind == "reference_not_cached"
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    writer, notice = cache.writer(keys[0])
    assert writer is None and notice is not None and "of the disk are free" in notice.detail


def test_an_interrupted_run_leaves_no_file(tiny: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int, perplexity: float) -> None:
        raise KeyboardInterrupt

    resolved = EngineConfig(device="cpu", ctx=64).resolve(environ={})
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(
            Evaluation(TEXT, tiny, "m", resolved, tiny, cache_folder=tmp_path), lambda notice: None, stop
        )
    assert list(tmp_path.iterdir()) == []


def test_texts_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no such file"):
        read_text(str(tmp_path / "none.txt"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(BadInputError, match=r"not UTF-8 \(byte 3\)"):
        read_text(str(tmp_path / "latin.txt"))
    (tmp_path / "empty.txt").write_text(" \n\n")
    with pytest.raises(BadInputError, match="is empty"):
        read_text(str(tmp_path / "empty.txt"))
    (tmp_path / "end.txt").write_text("a\n\n")
    assert read_text(str(tmp_path / "end.txt")) == "a\n"


def test_trim_is_for_chats(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--kv-policy trim"):
        run(tiny, tmp_path, settings={"kv_policy": "trim"})


def test_the_command_prints_one_object(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT)
    shown = run_edgellm(
        "eval", str(tiny), "--text", "t.txt", "--ctx", "64", "--reference", str(tiny), "--json",
        folder=tmp_path, environ={"EDGELLM_HOME": str(tmp_path / "home"), "EDGELLM_KV_DTYPE": "int8"},
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert {"perplexity", "perplexity_stderr", "tokens", "mean_kld", "median_kld", "p99_kld"} <= set(found)
    assert 0 < found["top1_agreement"] <= 1 and found["tokens"] == 31 * found["windows"]
    assert "text_tail" in {notice["kind"] for notice in found["notices"]} and shown.stderr == ""
    assert (tmp_path / "home" / "cache" / "reference-logits").is_dir()
