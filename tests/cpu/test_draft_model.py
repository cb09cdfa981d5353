"""A draft model in the same cache: it changes no token, knows what it has seen, and must share all ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.cli.draft_model import check_vocabulary
from edgellm.cli.runtime import load_runtime
from edgellm.config import EngineConfig
from edgellm.contracts import GenerationRequest, SamplingParams
from edgellm.speculative.speculator import Speculator
from edgellm_models.errors import BadInputError, UsageError
from tests.support.engines import LoadedEngine, load_engine, run_all
from tests.support.native_cases import needs_native
from tests.support.speculation import BLOCK, REPEATS, mixed_requests, outcomes, proposed
from tests.support.tiny_models import make_tiny

AHEAD = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {arch: make_tiny(arch, tmp_path_factory.mktemp(arch)) for arch in ("llama", "gemma3", "qwen3")}
    made["llama of one layer"] = make_tiny("llama", tmp_path_factory.mktemp("one"), num_hidden_layers=1)
    made["gemma3 of two layers"] = make_tiny("gemma3", tmp_path_factory.mktemp("two"), num_hidden_layers=2)
    return made


def engine(
    path: Path, draft: Path | None, kernels: str = "torch", kv: str = "f32", **more: object
) -> LoadedEngine:
    return load_engine(
        path,
        context=256,
        chunk=16,
        block_size=BLOCK,
        kernels=kernels,
        kv=kv,
        speculator=None if draft is None else Speculator(None, max_draft=AHEAD, runner_tokens=AHEAD),
        lookahead=0 if draft is None else AHEAD,
        draft=draft,
        poison=True,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("llama", "llama"),
        ("llama", "llama of one layer"),
        ("gemma3", "gemma3 of two layers"),
    ],
)
def test_a_draft_model_changes_no_token(target: str, draft: str, folders: dict[str, Path]) -> None:
    """One that is the target itself keeps everything that greedy requests draft; of one that is not, nearly
    nothing is right. Uncommitted slots hold NaN, its own too."""
    plain = engine(folders[target], None)
    requests = mixed_requests(plain)
    expected = run_all(plain.engine, requests)
    results = run_all(engine(folders[target], folders[draft]).engine, requests)
    assert outcomes(results) == outcomes(expected)
    assert proposed(results)[0] > 40
    greedy = proposed(results[:2])
    assert greedy[0] == greedy[1] > 10 if target == draft else greedy[1] < greedy[0]


@needs_native
def test_a_draft_model_on_native_kernels_and_int8(folders: dict[str, Path]) -> None:
    plain = engine(folders["gemma3"], None, "native", "int8")
    requests = mixed_requests(plain)
    expected = run_all(plain.engine, requests)
    results = run_all(engine(folders["gemma3"], folders["gemma3"], "native", "int8").engine, requests)
    assert outcomes(results) == outcomes(expected)
    drafted, kept = proposed(results[:2])
    assert drafted == kept > 10


def test_few_blocks_and_preemptions_leave_the_draft_model_right(folders: dict[str, Path]) -> None:
    """Blocks change hands all the time; what it drafts stays what the target says."""
    plain = engine(folders["llama"], None)
    requests = [
        replace(one, sampling=replace(one.sampling, temperature=0.0, repetition_penalty=1.0))
        for one in mixed_requests(plain)
        if one.constraint is None and one.speculate and not one.sampling.logit_bias
    ]
    requests = [
        replace(
            one,
            sampling=SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True),
            num_samples=1,
            prompt_token_ids=(*one.prompt_token_ids, 7 + index),
        )
        for index, one in enumerate(requests)
    ]
    expected = run_all(plain.engine, requests)
    tight = engine(folders["llama"], folders["llama"], num_blocks=[24], token_budget=24, max_running=6)
    results = run_all(tight.engine, requests)
    assert outcomes(results) == outcomes(expected)
    drafted, kept = proposed(results)
    assert drafted == kept > 40


def test_a_second_turn_runs_only_what_is_new(folders: dict[str, Path]) -> None:
    """Blocks that the prefix cache brings back hold the draft model's KV too, and it knows which do."""
    loaded = engine(folders["llama"], folders["llama"])
    drafter = loaded.engine._runner._runner.drafter  # type: ignore[attr-defined]
    seen: list[int] = []
    original = drafter._run

    def counted(rows, kv, block_size):  # type: ignore[no-untyped-def]
        seen.append(sum(len(row.token_ids) for row in rows))
        return original(rows, kv, block_size)

    drafter._run = counted
    ids = tuple(loaded.tokenizer.encode(REPEATS)) * 2
    greedy = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    first = run_all(loaded.engine, [GenerationRequest("a", ids, greedy)])[0]
    assert sum(seen) >= len(ids)
    seen.clear()
    turn = (*ids, *first.token_ids, 9, 9, 9)
    again = run_all(loaded.engine, [GenerationRequest("b", turn, greedy)])[0]
    assert sum(seen) <= 3 * BLOCK + 2 * 12
    drafted, kept = proposed([again])
    assert drafted == kept > 5


def settings(draft: Path, **more: object) -> EngineConfig:
    return EngineConfig(**{"draft": str(draft), "ctx": 256, "kernels": "torch", **more})  # type: ignore[arg-type]


def test_the_option_loads_a_draft_model(folders: dict[str, Path]) -> None:
    """Memory is told, the engine's state names it, and its pages lie in the same cache."""
    runtime = load_runtime(
        settings(folders["llama of one layer"]).resolve(environ={}), folders["llama"], "tiny"
    )
    [notice] = [n for n in runtime.notices if n.kind == "draft_model"]
    assert "MB of weights" in notice.detail and "KV cache" in notice.detail
    sampling = SamplingParams(temperature=0.7, seed=3, max_new_tokens=40, ignore_eos=True)
    request = GenerationRequest("a", tuple(runtime.tokenizer.encode(REPEATS)), sampling)
    found = run_all(runtime.core, [request])[0]
    plain = load_runtime(
        EngineConfig(ctx=256, kernels="torch", spec="off").resolve(environ={}), folders["llama"], "tiny"
    )
    assert found.token_ids == run_all(plain.core, [request])[0].token_ids
    assert "draft" in runtime.core.stats.draft_state


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda f: settings(f["qwen3"]), BadInputError, r"another vocabulary: id \d+ is '.*' there and"),
        (lambda f: settings(f["llama"], spec="ngram"), UsageError, "goes with --spec auto, not with ngram"),
        (lambda f: settings(f["llama"], spec="off"), UsageError, "goes with --spec auto, not with off"),
    ],
)
def test_what_cannot_draft_is_refused(
    make: Callable[[dict[str, Path]], EngineConfig],
    error: type[Exception],
    words: str,
    folders: dict[str, Path],
) -> None:
    with pytest.raises(error, match=words) as caught:
        load_runtime(make(folders).resolve(environ={}), folders["llama"], "tiny")
    assert "\n" not in str(caught.value)


class Words:
    """Of a tokenizer, what the check asks for."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.vocab_size = words, len(words)

    def token_text(self, token_id: int) -> str:
        return self.words[token_id]


def test_the_first_differing_id_is_named() -> None:
    ours = Words(["a", "b", "c", "d"])
    check_vocabulary(ours, Words(["a", "b", "c", "d"]), "small")  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="id 2 is 'x' there and 'c' in the model"):
        check_vocabulary(ours, Words(["a", "b", "x", "y"]), "small")  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="3 ids and the model 4, so id 3 is missing"):
        check_vocabulary(ours, Words(["a", "b", "c"]), "small")  # type: ignore[arg-type]
