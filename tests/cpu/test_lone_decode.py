"""Steps of one row in buffers that stay bring what the runner finds for any plan, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edgellm.cli.runtime import Runtime, load_runtime
from edgellm.config import EngineConfig
from edgellm.contracts import GenerationRequest, SamplingParams, TokenEvent
from edgellm.runner import lone_decode
from edgellm.runner.lone_decode import LoneDecode
from edgellm.speculative.speculator import Speculator
from edgellm_models.network.sub_layers import SkippedSubLayers
from tests.support.drafters import OracleDrafter
from tests.support.engines import load_engine, run_all
from tests.support.native_cases import needs_native, one_thread
from tests.support.tiny_models import make_tiny

__all__ = ["one_thread"]
pytestmark = needs_native

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_new_tokens=40, ignore_eos=True)
PENALIZED = SamplingParams(
    temperature=0.0, repetition_penalty=1.3, logit_bias={7: 2.0}, max_new_tokens=40, ignore_eos=True
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for arch in ("llama", "gemma3", "gemma2"):
        made[arch] = make_tiny(arch, tmp_path_factory.mktemp(arch))
        deeper = make_tiny(arch, tmp_path_factory.mktemp(f"{arch}6"), num_hidden_layers=6)
        made[f"{arch} of six layers"] = deeper
    return made


def loaded(folder: Path, **settings: object) -> Runtime:
    chosen = {"kernels": "native", "device": "cpu", "ctx": 256, "threads": 1, "spec": "off", **settings}
    return load_runtime(EngineConfig(**chosen).resolve(environ={}), folder, "m")  # type: ignore[arg-type]


def told(runtime: Runtime, requests: list[GenerationRequest]) -> list[tuple[object, ...]]:
    """What all events say, the requests one after another, and every page of the cache at the end."""
    core, found = runtime.core, []
    for request in requests:
        core.submit(request)
        while core.has_work():
            for e in core.step():
                found.append(_facts(e))
        core.check_integrity()
    assert runtime.runner is not None
    for group in runtime.runner._kv.storages:
        found += [(bytes(part.contiguous().view(torch.uint8).numpy()),) for part in group.pages()]
    return found


def _facts(event: TokenEvent) -> tuple[object, ...]:
    said = (event.token_ids, event.text, event.logprobs, event.prompt_logprobs)
    return (event.request_id, event.sample, *said, event.finish_reason, event.usage, event.error)


def requests() -> list[GenerationRequest]:
    prompt = tuple(range(5, 28))
    return [
        GenerationRequest("greedy", prompt, GREEDY),
        GenerationRequest("again", prompt, GREEDY),
        GenerationRequest("drawn", prompt, DRAWN),
        GenerationRequest("penalized", prompt, PENALIZED),
        GenerationRequest("told", prompt, GREEDY, logprobs=3, prompt_logprobs=1),
        GenerationRequest("window", tuple(range(5, 90)), GREEDY, kv_policy="window", kv_keep=64),
        GenerationRequest("two", prompt, DRAWN, num_samples=2),
    ]


@pytest.mark.parametrize(
    ("arch", "kv_dtype"), [("llama", "f32"), ("llama", "int8"), ("gemma3", "f16"), ("gemma2", "f32")]
)
def test_what_is_told_and_stored_is_what_any_plan_brings(
    arch: str, kv_dtype: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The llama's embedding is no head, gemma3 has windows, and gemma2 caps the logits."""
    steps: list[bool] = []
    look = LoneDecode.sequence

    def counted(self, plan):  # type: ignore[no-untyped-def]
        found = look(self, plan)
        steps.append(found is not None)
        return found

    quick = loaded(folders[arch], kv_dtype=kv_dtype)
    monkeypatch.setattr(LoneDecode, "sequence", counted)
    ours = told(quick, requests())
    assert steps.count(True) > 150, "the short way was hardly taken"
    whole = loaded(folders[arch], kv_dtype=kv_dtype)
    assert whole.runner is not None
    monkeypatch.setattr(whole.runner, "_lone", None)
    assert ours == told(whole, requests())


@pytest.mark.parametrize("kv", ["f32", "int8"])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "gemma2"])
@pytest.mark.parametrize("by_layers", [False, True])
def test_drafts_of_a_lone_answer_are_verified_as_any_are(
    by_layers: bool, arch: str, kv: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proposed or drafted by fewer layers, kept or not: the same events and the same pages, bit for bit."""
    path = folders[f"{arch} of six layers"]
    plain = load_engine(path, context=256, kernels="native", kv=kv).engine
    answers = {requests()[0].prompt_token_ids: run_all(plain, requests()[:1])[0].token_ids}
    drafted: list[int] = []
    draw = LoneDecode.draw

    def counted(self, sequence, sampler):  # type: ignore[no-untyped-def]
        drafted.append(len(sequence.draft_token_ids))
        return draw(self, sequence, sampler)

    def run(*, short: bool) -> list[tuple[object, ...]]:
        ahead = 5
        loaded = load_engine(
            path,
            context=256,
            block_size=8,
            kernels="native",
            kv=kv,
            speculator=Speculator(None if by_layers else OracleDrafter(answers, 7), runner_tokens=ahead),
            lookahead=ahead,
            skipped=SkippedSubLayers.of((1,), (2,)) if by_layers else None,
        )
        if not short:
            monkeypatch.setattr(loaded.engine._runner, "_lone", None)
            drafter = loaded.engine._runner.drafter  # type: ignore[attr-defined]
            if drafter is not None:
                monkeypatch.setattr(drafter, "_row", lambda kv: None)
        found: list[tuple[object, ...]] = []
        for request in requests():
            loaded.engine.submit(request)
            while loaded.engine.has_work():
                found += [(*_facts(e), e.draft) for e in loaded.engine.step()]
            loaded.engine.check_integrity()
        pages = [part for group in loaded.storage for part in group.pages()]
        return [*found, *((bytes(part.contiguous().view(torch.uint8).numpy()),) for part in pages)]

    monkeypatch.setattr(LoneDecode, "draw", counted)
    ours = run(short=True)
    assert sum(count > 0 for count in drafted) > 50, "the short way was hardly taken"
    assert ours == run(short=False)


def test_unusable_logits_are_an_error_of_the_answer_on_the_short_way_too(folders: dict[str, Path]) -> None:
    runtime = loaded(folders["llama"])
    assert runtime.runner is not None and runtime.runner._lone is not None
    runtime.core.submit(GenerationRequest("a", tuple(range(5, 12)), GREEDY))
    for _ in range(5):
        runtime.core.step()
    for group in runtime.runner._kv.storages:  # f16 KV that ran over
        group.keys.fill_(float("nan"))
    events = [event for _ in range(3) for event in runtime.core.step()]
    assert not runtime.core.has_work()
    assert "NaN" in str(events[-1].error) and "position 12" in str(events[-1].error)


def test_the_torch_kernels_have_no_short_way(tmp_path: Path) -> None:
    assert lone_decode.lone_decode(object(), ()) is None
    runtime = loaded(make_tiny("llama", tmp_path / "m"), kernels="torch")
    assert runtime.runner is not None and runtime.runner._lone is None
