"""Speculative decoding over real decoders: the tokens are those of plain decoding, whatever drafts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.cli.runtime import load_runtime
from edgellm.config import EngineConfig
from edgellm.contracts import (
    EngineStats,
    GenerationRequest,
    SamplingParams,
)
from edgellm.speculative.controller import Controller
from edgellm.speculative.drafter import Drafter
from edgellm.speculative.ngram import NgramDrafter
from edgellm.speculative.speculator import Speculator
from tests.support.drafters import OracleDrafter, RandomDrafter
from tests.support.engines import LoadedEngine, Result, load_engine, run_all
from tests.support.native_cases import needs_native
from tests.support.real_models import real_model
from tests.support.speculation import (
    BLOCK,
    KINDS,
    REPEATS,
    check_rounds,
    mixed_requests,
    outcomes,
    proposed,
)
from tests.support.tiny_models import make_tiny

LOOKAHEAD = 6
REPEATED = "Repeat: the cat sat on the mat and the dog sat on the log. The cat sat on the mat and the"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {arch: make_tiny(arch, tmp_path_factory.mktemp(arch)) for arch in ("llama", "gemma3")}


def drafters(vocab: int, answers: dict[tuple[int, ...], list[int]]) -> dict[str, Callable[[], Drafter]]:
    return {
        "ngram": NgramDrafter,
        "random": lambda: RandomDrafter(vocab, 5),
        "oracle": lambda: OracleDrafter(answers),
        "adversarial": lambda: OracleDrafter(answers, wrong_every=4),
    }


def predicted(one: GenerationRequest, answers: dict[tuple[int, ...], list[int]]) -> GenerationRequest:
    """Every other request with a prediction, right at the start and in the middle."""
    answer = answers.get(one.prompt_token_ids)
    if answer is None or int(one.request_id[1:]) % 2:
        return one
    return replace(one, prediction_token_ids=(*answer[:5], 9, *answer[6:]))


def check_all_drafters(path: Path, kernels: str, kv: str, **options: object) -> None:
    """Every drafter, all requests at once: the answers are those of plain decoding; uncommitted slots hold
    NaN throughout."""

    def load(speculator: Speculator | None, lookahead: int) -> LoadedEngine:
        return load_engine(
            path,
            context=256,
            chunk=16,
            block_size=BLOCK,
            kv=kv,
            kernels=kernels,
            speculator=speculator,
            lookahead=lookahead,
            poison=True,
            **options,  # type: ignore[arg-type]
        )

    plain = load(None, 0)
    requests = mixed_requests(plain)
    expected = run_all(plain.engine, requests)
    answers = {requests[i].prompt_token_ids: expected[i].token_ids for i in (0, 1)}
    for name, make in drafters(plain.engine.vocab_size, answers).items():
        loaded = load(Speculator(make(), max_draft=LOOKAHEAD), LOOKAHEAD)
        results = run_all(loaded.engine, [predicted(one, answers) for one in requests])
        assert outcomes(results) == outcomes(expected), name
        drafted, kept = proposed(results)
        assert drafted > 15, name
        assert kept > 0 or name == "random", name
        assert loaded.engine.stats.draft.proposed == drafted


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_tokens_are_those_of_plain_decoding_on_torch(arch: str, folders: dict[str, Path]) -> None:
    check_all_drafters(folders[arch], "torch", "f32")


@needs_native
@pytest.mark.parametrize("kv", ["f32", "int8"])
def test_tokens_are_those_of_plain_decoding_on_native_kernels(kv: str, folders: dict[str, Path]) -> None:
    check_all_drafters(folders["gemma3"], "native", kv)


def test_few_blocks_change_nothing(folders: dict[str, Path]) -> None:
    """Preemptions, drafts without room, and steps whose budget has rows for some of the drafts only."""
    check_all_drafters(folders["llama"], "torch", "f32", num_blocks=[36], token_budget=24, max_running=6)


@pytest.mark.parametrize(("kernels", "kv"), KINDS)
@pytest.mark.parametrize(("policy", "keep"), [("window", 40), ("budget", 64)])
def test_drafts_do_not_cross_the_borders_of_evictions(
    policy: str, keep: int, kernels: str, kv: str, folders: dict[str, Path]
) -> None:
    def run(speculator: Speculator | None) -> list[Result]:
        loaded = load_engine(
            folders["llama"],
            context=512,
            chunk=32,
            block_size=BLOCK,
            kernels=kernels,
            kv=kv,
            speculator=speculator,
            lookahead=0 if speculator is None else 16,
            poison=True,
        )
        ids = tuple(loaded.tokenizer.encode(REPEATS)) * 2
        sampling = SamplingParams(temperature=0.7, seed=4, max_new_tokens=80, ignore_eos=True)
        one = GenerationRequest("a", ids, sampling, kv_policy=policy, kv_keep=keep)
        greedy = replace(sampling, temperature=0.0)
        return run_all(loaded.engine, [one, replace(one, request_id="b", sampling=greedy)])

    expected = run(None)
    assert any(e.notice and "evicted" in e.notice.kind for e in expected[0].events)
    answers = {_prompt(folders["llama"]): expected[1].token_ids}
    for wrong_every in (0, 9):
        results = run(Speculator(OracleDrafter(answers, wrong_every)))
        assert outcomes(results) == outcomes(expected)
        assert proposed(results)[1] > 60
    assert outcomes(run(Speculator(RandomDrafter(300)))) == outcomes(expected)


def _prompt(folder: Path) -> tuple[int, ...]:
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(folder)
    return tuple(load_tokenizer(folder, checkpoint.file_format, checkpoint.metadata).encode(REPEATS)) * 2


@pytest.mark.parametrize(("kernels", "kv"), KINDS)
def test_an_answer_ends_inside_an_accepted_run(kernels: str, kv: str, folders: dict[str, Path]) -> None:
    """Stop strings, end ids and the token limit cut what a draft brought, and the cache holds nothing behind
    the cut."""

    def load(speculator: Speculator | None) -> LoadedEngine:
        lookahead = 0 if speculator is None else LOOKAHEAD
        return load_engine(
            folders["llama"],
            context=128,
            kernels=kernels,
            kv=kv,
            speculator=speculator,
            lookahead=lookahead,
        )

    plain = load(None)
    ids = tuple(plain.tokenizer.encode(REPEATS))
    free = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
    whole = run_all(plain.engine, [GenerationRequest("w", ids, free)])[0]
    answers = {ids: whole.token_ids}
    middle = plain.tokenizer.decode(whole.token_ids[8:10])
    cases = [
        replace(free, stop=(middle,)),
        replace(free, stop_token_ids=(whole.token_ids[9],)),
        replace(free, max_new_tokens=9),
    ]
    for sampling in cases:
        expected = run_all(load(None).engine, [GenerationRequest("x", ids, sampling)])
        loaded = load(Speculator(OracleDrafter(answers), max_draft=LOOKAHEAD))
        results = run_all(loaded.engine, [GenerationRequest("x", ids, sampling, conversation_id="c")])
        assert outcomes(results) == outcomes(expected)
        assert proposed(results)[1] > 3
        usage, draft = results[0].events[-1].usage, results[0].events[-1].draft
        assert usage is not None and draft is not None
        assert draft.accepted <= usage.completion_tokens == len(results[0].token_ids)
        # The next turn begins as this one did: no word of a lost prefix.
        turn = (*ids, *results[0].token_ids, 9, 9)
        again = run_all(loaded.engine, [GenerationRequest("y", turn, sampling, conversation_id="c")])[0]
        assert not [e.notice for e in again.events if e.notice and "prefix" in e.notice.kind]


@pytest.mark.parametrize(("kernels", "kv"), KINDS)
def test_committed_kv_is_that_of_a_fresh_prefill(kernels: str, kv: str, folders: dict[str, Path]) -> None:
    """After every round, all layers: drafts that were rejected leave nothing."""
    adversary = Speculator(OracleDrafter({}, wrong_every=0), max_draft=LOOKAHEAD)

    def load(speculator: Speculator | None = None) -> LoadedEngine:
        lookahead = 0 if speculator is None else LOOKAHEAD
        return load_engine(
            folders["gemma3"],
            context=128,
            block_size=BLOCK,
            kernels=kernels,
            kv=kv,
            speculator=speculator,
            lookahead=lookahead,
        )

    loaded = load(adversary)
    ids = tuple(loaded.tokenizer.encode(REPEATS))
    sampling = SamplingParams(temperature=0.8, seed=2, max_new_tokens=16, ignore_eos=True)
    answer = run_all(load().engine, [GenerationRequest("p", ids, sampling)])[0].token_ids
    loaded.engine.submit(GenerationRequest("a", ids, sampling))
    adversary._drafter = OracleDrafter({ids: answer}, wrong_every=3)
    adversary._drafter.begin(0, ids)
    assert check_rounds(loaded, load, exact=kernels == "native") >= 5


@pytest.mark.parametrize("kv", ["fp8", "int4"])
def test_quantized_kv_on_torch_stays_near_plain_decoding(kv: str, tmp_path: Path) -> None:
    """What a query reads of such KV follows from positions alone, so only rounding tells runs apart."""
    path = make_tiny("llama", tmp_path / "q", quantizable=True)

    def run(speculator: Speculator | None) -> Result:
        lookahead = 0 if speculator is None else LOOKAHEAD
        loaded = load_engine(path, context=256, kv=kv, speculator=speculator, lookahead=lookahead)
        ids = tuple(loaded.tokenizer.encode(REPEATS))
        sampling = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
        return run_all(loaded.engine, [GenerationRequest("a", ids, sampling, logprobs=1)])[0]

    expected, found = run(None), run(Speculator(NgramDrafter()))
    before = [p.logprob for e in expected.events for p in e.logprobs]
    after = [p.logprob for e in found.events for p in e.logprobs]
    same = next((i for i in range(40) if expected.token_ids[i] != found.token_ids[i]), 40)
    assert same >= 20
    assert max(abs(a - b) for a, b in zip(before[:same], after[:same], strict=True)) < 0.05


@pytest.mark.parametrize("spec", ["ngram", "auto"])
def test_the_setting_reaches_the_engine(spec: str, folders: dict[str, Path]) -> None:
    """Drafts from the caller's prediction, counted for the answer and the engine; off is off."""

    def run(value: str, prediction: tuple[int, ...] = ()) -> tuple[Result, EngineStats]:
        resolved = EngineConfig(spec=value, ctx=256, kernels="torch").resolve(environ={})
        runtime = load_runtime(resolved, folders["llama"], "tiny")
        ticks = itertools.count()
        runtime.core._clock = lambda: 0.01 * next(ticks)  # every step takes as long: drafts pay
        ids = tuple(runtime.tokenizer.encode(REPEATS))
        sampling = SamplingParams(temperature=0.9, seed=5, max_new_tokens=60, ignore_eos=True)
        request = GenerationRequest("a", ids, sampling, prediction_token_ids=prediction)
        return run_all(runtime.core, [request])[0], runtime.core.stats

    expected, off = run("off")
    assert off.draft.proposed == 0 and off.draft_state == "off"
    found, stats = run(spec, tuple(expected.token_ids))
    assert found.token_ids == expected.token_ids
    draft = found.events[-1].draft
    assert draft is not None and draft == stats.draft and stats.draft_state.startswith("ngram")
    assert draft.accepted > 10 and draft.steps < draft.accepted


@pytest.mark.real_model
@needs_native  # others round, and rounding decides close calls
@pytest.mark.parametrize("kv", ["f32", "int8"])
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_a_real_model_says_the_same_with_and_without_drafts(model: str, kv: str) -> None:
    def run(speculator: Speculator | None) -> list[Result]:
        loaded = load_engine(
            real_model(model),
            context=256,
            kernels="native",
            kv=kv,
            speculator=speculator,
            lookahead=0 if speculator is None else 8,
        )
        ids = tuple(loaded.tokenizer.encode(REPEATED))
        greedy = SamplingParams(temperature=0.0, max_new_tokens=24)
        one = GenerationRequest("a", ids, greedy)
        warm = SamplingParams(temperature=0.7, seed=1, max_new_tokens=24)
        return run_all(loaded.engine, [one, replace(one, request_id="b", sampling=warm)])

    expected = run(None)
    for speculator in (Speculator(NgramDrafter()), Speculator(NgramDrafter(), Controller())):
        results = run(speculator)
        assert outcomes(results) == outcomes(expected)
        assert proposed(results)[1] > 3


@pytest.mark.real_model
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_a_real_model_says_the_same_on_torch_but_for_ties(model: str) -> None:
    """The torch kernels sum one row in another order than several: where texts part, the two best tokens of
    plain decoding lie that close."""

    loaded = load_engine(
        real_model(model),
        context=256,
        prefix_cache=False,
        speculator=Speculator(NgramDrafter()),
        lookahead=8,
    )
    ids = tuple(loaded.tokenizer.encode(REPEATED))
    sampling = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
    plain = GenerationRequest("a", ids, sampling, logprobs=2, speculate=False)
    expected, found = (run_all(loaded.engine, [replace(plain, speculate=s)])[0] for s in (False, True))
    assert proposed([expected])[0] == 0 and proposed([found])[1] > 3
    tops = [one.top for event in expected.events for one in event.logprobs]
    for ours, theirs, top in zip(found.token_ids, expected.token_ids, tops, strict=True):
        if ours != theirs:
            assert abs(top[0][1] - top[1][1]) < 1e-3
            break
