"""``--gpu-layers``: what fits, what is refused, and a model loaded in two parts, both on the CPU here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edgellm.cache.kv_storage import kv_type
from edgellm.cli.gpu_split import (
    RESERVE_BYTES,
    allocate_split,
    build_split,
    layers_on_gpu,
    parse_layers,
    shared_room,
    split_for,
)
from edgellm.cli.runtime import load_runtime
from edgellm.config import EngineConfig
from edgellm.contracts import GenerationRequest, SamplingParams, Task
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.errors import BadInputError, ResourceError
from tests.support.engines import load_engine, run_all
from tests.support.tiny_models import make_tiny


def test_auto_fills_the_card_beside_the_kv() -> None:
    """Whole layers with their KV, after embedding, head and a reserve; never more than there are."""
    gb = 10**9
    assert layers_on_gpu(32, gb // 8, gb // 2, gb // 40, 24 * gb) == 32
    some = layers_on_gpu(32, gb // 8, gb // 2, gb // 40, 4 * gb)
    assert some * (gb // 8 + gb // 40) + gb // 2 + RESERVE_BYTES <= 4 * gb
    assert (some + 1) * (gb // 8 + gb // 40) + gb // 2 + RESERVE_BYTES > 4 * gb
    assert layers_on_gpu(32, gb // 8, gb // 2, 0, gb // 2) == 0


def test_numbers_and_refusals(tmp_path: Path) -> None:
    assert (parse_layers("auto"), parse_layers("0"), parse_layers("12")) == (None, 0, 12)
    for wrong in ("-1", "all", "1.5", "99999"):
        with pytest.raises(BadInputError, match=r"--gpu-layers must be auto or a number"):
            parse_layers(wrong)
    checkpoint = open_checkpoint(make_tiny("llama", tmp_path / "m", num_hidden_layers=4))
    assert split_for(checkpoint, "auto", None, "cpu", None) == (0, None)
    assert split_for(checkpoint, "0", None, "cpu", None) == (0, None)
    with pytest.raises(ResourceError, match=r"--gpu-layers 3: the model runs on the CPU"):
        split_for(checkpoint, "3", None, "cpu", None)
    for asked, on_cpu in (("4", 0), ("7", 0), ("3", 1), ("1", 3), ("0", 4)):
        found, notice = split_for(checkpoint, asked, None, "cuda", 1 << 40)
        assert found == on_cpu and (notice is None) == (on_cpu == 0)
    assert notice is not None and "0 of 4 layers run on the GPU" in notice.detail
    assert split_for(checkpoint, "auto", None, "cuda", 1 << 40) == (0, None)
    assert split_for(checkpoint, "auto", None, "cuda", RESERVE_BYTES)[0] == 4
    with pytest.raises(BadInputError, match="int4 cannot lie on two devices"):
        allocate_split(None, [1], kv_type("int4"), 1)  # type: ignore[arg-type]


def test_the_room_for_kv_is_that_of_the_fuller_device() -> None:
    assert shared_room(1000, 10_000, 2, 8) == 1000 * 8 // 6
    assert shared_room(10_000, 1000, 2, 8) == 4000
    assert shared_room(None, None, 2, 8) is None


def test_a_runtime_in_two_parts_answers_as_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way from the setting: parts, pages and notice; int8 KV, two requests at once."""
    path = make_tiny("gemma3", tmp_path / "m")
    sampling = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    requests = [GenerationRequest(f"r{n}", tuple(range(5, 25 + n)), sampling) for n in range(2)]
    expected = [r.token_ids for r in run_all(load_engine(path, kv="int8", kernels="torch").engine, requests)]

    def two_cpus(checkpoint, on_cpu, num_layers, **given):  # type: ignore[no-untyped-def]
        return build_split(checkpoint, on_cpu, num_layers, ("cpu", "cpu"), ("torch", "torch"))

    monkeypatch.setattr(
        "edgellm.cli.gpu_split.split_for",
        lambda checkpoint, *rest: split_for(checkpoint, "1", None, "cuda", 0),
    )
    monkeypatch.setattr("edgellm.cli.gpu_split.build_split", two_cpus)
    monkeypatch.setattr(
        "edgellm.cli.gpu_split.allocate_split",
        lambda spec, sizes, kv, on_cpu: allocate_split(spec, sizes, kv, on_cpu, ("cpu", "cpu")),
    )
    resolved = EngineConfig(model=str(path), kv_dtype="int8", kernels="torch", spec="off").resolve(environ={})
    runtime = load_runtime(resolved, path, "tiny")
    assert any(notice.kind == "gpu_layers" for notice in runtime.notices)
    assert [result.token_ids for result in run_all(runtime.core, requests)] == expected
    embeds = [GenerationRequest("e", tuple(range(5, 95)), task=Task.EMBED)]
    whole = run_all(load_engine(path, kv="int8", kernels="torch").engine, embeds)[0].events[-1].embedding
    assert whole is not None and run_all(runtime.core, embeds)[0].events[-1].embedding == whole
    runtime = load_runtime(dataclasses.replace(resolved, spec="skip"), path, "tiny")
    [notice] = [notice for notice in runtime.notices if notice.kind == "spec_skip_off"]
    assert "--gpu-layers" in notice.detail
