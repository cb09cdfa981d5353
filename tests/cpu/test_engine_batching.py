"""Many requests at once over real decoders: every answer is the one that its request gets alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from edgellm.contracts import FinishReason, GenerationRequest, SamplingParams, TokenEvent
from tests.support.engines import LoadedEngine, Result, joined, load_engine, run_all, run_joining
from tests.support.real_models import real_model
from tests.support.tiny_models import ARCHITECTURES, make_tiny

LENGTHS = (1, 40, 3, 17, 70, 16, 33, 8)
TIE = 1e-3
"""Log-probabilities closer than this may change places by rounding."""


def request(name: str, ids: Sequence[int], count: int, **fields: object) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    return GenerationRequest(name, tuple(ids), sampling, **fields)  # type: ignore[arg-type]


def prompts_for(loaded: LoadedEngine, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    vocab = loaded.engine.vocab_size
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]


def alone(path: Path, prompts: Sequence[Sequence[int]], count: int, **options: object) -> list[list[int]]:
    """Each prompt by itself, nothing reused, up to where rounding could decide."""
    loaded = load_engine(path, prefix_cache=False, max_running=1, **options)  # type: ignore[arg-type]
    answers = []
    for index, ids in enumerate(prompts):
        result = run_all(loaded.engine, [replace(request(f"r{index}", ids, count), logprobs=2)])[0]
        margins = [p.top[0][1] - p.top[1][1] for e in result.events for p in e.logprobs]
        certain = next((i for i, margin in enumerate(margins) if margin < TIE), count)
        answers.append(result.token_ids[:certain])
    assert sum(map(len, answers)) > 0.7 * count * len(prompts), "too many ties to tell anything"
    return answers


def assert_same(results: Sequence[Result], expected: Sequence[Sequence[int]]) -> None:
    for index, (result, ids) in enumerate(zip(results, expected, strict=True)):
        assert result.token_ids[: len(ids)] == list(ids), f"request {index}"


def cached(result: Result) -> int:
    usage = result.events[-1].usage
    assert usage is not None
    return usage.cached_tokens


# --- the same ids in any company ---


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_any_batch_and_any_chunks_give_the_ids_of_each_alone(tmp_path: Path, arch: str) -> None:
    """F10: together, joining one after another, in small chunks and with a budget that cuts them anywhere."""
    folder = make_tiny(arch, tmp_path / "m")
    options: dict[str, object] = {"context": 128, "block_size": 8}
    room = 8 * 16
    expected: list[list[int]] = []
    for chunk, budget, every in ((64, None, 1), (5, 12, 3), (24, 9, 7)):
        groups = 2 if arch.startswith("gemma") else 1
        loaded = load_engine(
            folder, chunk=chunk, token_budget=budget, max_running=8, num_blocks=[room] * groups, **options
        )  # type: ignore[arg-type]
        prompts = prompts_for(loaded)
        expected = expected or alone(folder, prompts, 12, **options)
        requests = [request(f"r{i}", ids, 12) for i, ids in enumerate(prompts)]
        results = run_all(loaded.engine, requests) if every == 1 else run_joining(loaded, requests, every)
        assert_same(results, expected)


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_models_answer_together_as_alone(name: str) -> None:
    path = real_model(name)
    loaded = load_engine(path, context=512, chunk=16)
    texts = (
        "The capital of France is",
        "def fibonacci(n):",
        "One, two, three,",
        "Water boils at a temperature",
    )
    prompts = [loaded.tokenizer.encode(text) for text in texts]
    requests = [request(f"r{i}", ids, 8) for i, ids in enumerate(prompts)]
    assert_same(run_all(loaded.engine, requests), alone(path, prompts, 8, context=512))


def test_a_window_of_four_and_lengths_one_and_forty(tmp_path: Path) -> None:
    """F15: no row of a batch is masked to nothing; each answer is that of its request alone."""
    folder = make_tiny("mistral", tmp_path / "m", sliding_window=4)
    loaded = load_engine(folder, context=128, block_size=4, num_blocks=[40])
    prompts = prompts_for(loaded, (1, 40), seed=1)
    results = run_all(loaded.engine, [request(f"r{i}", ids, 20) for i, ids in enumerate(prompts)])
    assert_same(results, alone(folder, prompts, 20, context=128, block_size=4))
    assert all(result.reason is FinishReason.LENGTH for result in results)


def test_samples_of_a_prompt_are_as_with_a_prompt_of_their_own(tmp_path: Path) -> None:
    """They share the prompt's blocks, its last partial one until they write to it."""
    folder = make_tiny("gemma3", tmp_path / "m")
    sampling = SamplingParams(max_new_tokens=10, seed=4, ignore_eos=True)
    loaded = load_engine(folder, context=256, block_size=8, chunk=16)
    [prompt] = prompts_for(loaded, (45,))
    loaded.engine.submit(GenerationRequest("n", tuple(prompt), sampling, num_samples=4))
    events: list[TokenEvent] = []
    shared = 0
    while loaded.engine.has_work():
        events += loaded.engine.step()
        shared = max(shared, loaded.engine.stats.kv_blocks["shared"])
        loaded.engine.check_integrity()
    together = [joined(events, "n", sample) for sample in range(4)]
    assert shared >= 5 and [cached(result) for result in together] == [0, 44, 44, 44]
    apart = load_engine(folder, context=256, block_size=8, prefix_cache=False, max_running=1)
    apart.engine.submit(GenerationRequest("n", tuple(prompt), sampling, num_samples=4))
    alone_events: list[TokenEvent] = []
    while apart.engine.has_work():
        alone_events += apart.engine.step()
    for sample, result in enumerate(together):
        assert result.token_ids == joined(alone_events, "n", sample).token_ids
    assert len({tuple(result.token_ids) for result in together}) == 4


# --- prefixes ---


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_prefix_from_the_cache_is_as_one_computed(tmp_path: Path, arch: str) -> None:
    """A chat's next turn reuses prompt and answer; what is reused is counted; the answer is that of a cold
    start."""
    folder = make_tiny(arch, tmp_path / "m")
    loaded = load_engine(folder, context=256, block_size=8, chunk=32)
    prompt, addition = prompts_for(loaded, (50, 21))
    first = run_all(loaded.engine, [request("a", prompt, 20)])[0]
    assert cached(first) == 0
    turn = [*prompt, *first.token_ids, *addition]
    second = run_all(loaded.engine, [request("b", turn, 12)])[0]
    # The answer's last token has no KV, and only whole blocks are shared.
    assert cached(second) == (50 + 20 - 1) // 8 * 8
    assert second.events[-1].timings is not None
    assert second.events[-1].timings.prefill_tokens == len(turn) - cached(second)
    assert_same([second], alone(folder, [turn], 12, context=256, block_size=8))
    assert loaded.engine.stats.prefix_hit_rate == pytest.approx(cached(second) / (len(turn) + 50))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_a_turn_taken_out_is_computed_again(tmp_path: Path, rope: dict[str, object]) -> None:
    """F05: keys are never moved to other positions; what follows the gap runs again, under any scaling."""
    folder = make_tiny("llama", tmp_path / "m", rope_scaling=rope)
    loaded = load_engine(folder, context=256, block_size=8, chunk=32)
    system, old, recent = prompts_for(loaded, (24, 16, 30))
    run_all(loaded.engine, [request("a", [*system, *old, *recent], 4, conversation_id="c")])
    kept = [*system, *recent]
    result = run_all(loaded.engine, [request("b", kept, 12, conversation_id="c")])[0]
    assert cached(result) == 24
    notices = [e.notice for e in result.events if e.notice]
    assert [n.kind for n in notices] == ["prefix_lost"] and "30 tokens" in notices[0].detail
    assert_same([result], alone(folder, [kept], 12, context=256, block_size=8))


# --- short of memory, and of time ---


@pytest.mark.parametrize(("arch", "host_blocks"), [("llama", 0), ("llama", 20), ("gemma3", 200)])
def test_a_tenth_of_the_memory_serves_all_with_the_same_ids(
    tmp_path: Path, arch: str, host_blocks: int
) -> None:
    folder = make_tiny(arch, tmp_path / "m")
    demand = sum(-(-(length + 24) // 4) for length in LENGTHS * 2)
    loaded = load_engine(
        folder,
        context=128,
        block_size=4,
        chunk=16,
        num_blocks=[max(demand // 10, 24)] * (2 if arch == "gemma3" else 1),
        host_blocks=host_blocks,
    )
    prompts = prompts_for(loaded, LENGTHS * 2)
    results = run_all(loaded.engine, [request(f"r{i}", ids, 24) for i, ids in enumerate(prompts)])
    assert_same(results, alone(folder, prompts, 24, context=128, block_size=4))
    kinds = {e.notice.kind for result in results for e in result.events if e.notice}
    assert {"preempted", "resumed"} <= kinds
    details = [e.notice.detail for result in results for e in result.events if e.notice]
    assert any("moved to host memory" in detail for detail in details) == (host_blocks > 0)


def test_short_requests_end_before_a_long_one_that_came_earlier(tmp_path: Path) -> None:
    loaded = load_engine(make_tiny("llama", tmp_path / "m"), context=512, chunk=32)
    long, *short = prompts_for(loaded, (300, 5, 5, 5))
    loaded.engine.submit(request("long", long, 30))
    ended = []
    for _ in range(2):
        loaded.engine.step()
    for i, ids in enumerate(short):
        loaded.engine.submit(request(f"short{i}", ids, 5))
    while loaded.engine.has_work():
        ended += [e.request_id for e in loaded.engine.step() if e.finish_reason]
    assert ended[-1] == "long" and len(ended) == 4


# --- one bad request ---


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_nan_stays_with_its_request(tmp_path: Path, arch: str) -> None:
    """F14: beside it in the same steps, and in the blocks that it leaves behind."""
    folder = make_tiny(arch, tmp_path / "m", tie_word_embeddings=False)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][50] = float("nan")
    save_file(tensors, file)
    options: dict[str, object] = {"context": 96, "block_size": 4}
    loaded = load_engine(folder, chunk=16, num_blocks=[60] * (2 if arch == "gemma3" else 1), **options)  # type: ignore[arg-type]
    prompts = [[t if t != 50 else 51 for t in ids] for ids in prompts_for(loaded, (9, 30, 21))]
    expected = alone(folder, prompts, 10, **options)
    for round_ in range(4):  # the pool is small enough for every block to change hands
        bad = [request(f"bad{i}", [i + 3 + round_, 50, *range(60, 90)], 10) for i in range(3)]
        good = [request(f"good{round_}-{i}", ids, 10) for i, ids in enumerate(prompts)]
        results = run_all(loaded.engine, [r for pair in zip(bad, good, strict=True) for r in pair])
        assert all(result.reason is FinishReason.ERROR for result in results[::2])
        assert all("NaN" in (result.events[-1].error or "") for result in results[::2])
        assert_same(results[1::2], expected)
