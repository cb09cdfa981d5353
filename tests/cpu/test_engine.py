"""The engine over real decoders: scripted models, tiny models against transformers, seeds, errors, memory."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from edgellm.cache.kv_storage import allocate_storage, group_layouts, kv_bytes, kv_type, largest_context
from edgellm.contracts import FinishReason, GenerationRequest, PlannedSequence, SamplingParams
from edgellm.runner.batch_builder import build_batch
from edgellm_models.errors import BadInputError
from tests.support.bigram import bigram_gguf, make_bigram
from tests.support.engines import LoadedEngine, Result, load_engine, run_all, run_one, spec_of
from tests.support.real_models import real_model
from tests.support.tiny_models import make_tiny
from tests.support.transformers_oracle import greedy, is_tie, transformers_logits, transformers_model

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40)
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")


def greedy_for(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count)


# --- scripted models ---

EMOJI = "😊".encode()
CHAIN = ["He", "llo", *[EMOJI[i : i + 1] for i in range(4)], " wör", "ld", "!"]


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_a_scripted_answer(tmp_path: Path, form: str) -> None:
    """A16: each completed character leaves in the step that completes it; the end id is the last id, without
    text.
    """
    folder = make_bigram(tmp_path / "m", CHAIN)
    loaded = load_engine(folder if form == "folder" else bigram_gguf(folder, tmp_path / "m.gguf"))
    result = run_one(loaded, "x", greedy_for(30))
    assert result.text == "Hello😊 wörld!" and result.reason is FinishReason.STOP
    pieces = [e.text for e in result.events if e.token_ids]
    assert pieces == ["He", "llo", "", "", "", "😊", " wör", "ld", "!", ""]
    assert result.token_ids[-1] in loaded.tokenizer.eos_ids and len(result.token_ids) == len(CHAIN) + 1
    last = result.events[-1]
    assert last.usage is not None and last.usage.completion_tokens == len(result.token_ids)
    assert result.text == loaded.tokenizer.decode(result.token_ids)


def test_ends_named_only_by_the_generation_config(tmp_path: Path) -> None:
    """D11: with ignore_eos exactly ten tokens come; without it the second ends the answer."""
    chain = ["a", "<|end|>", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k"]
    folder = make_bigram(tmp_path / "m", chain, special=["<|end|>"], generation_eos=["<|end|>"])
    loaded = load_engine(folder)
    stopped = run_one(loaded, "x", greedy_for(10))
    assert (stopped.text, len(stopped.token_ids), stopped.reason) == ("a", 2, FinishReason.STOP)
    full = run_one(loaded, "x", SamplingParams(temperature=0.0, max_new_tokens=10, ignore_eos=True))
    assert (full.text, len(full.token_ids), full.reason) == ("abcdefghi", 10, FinishReason.LENGTH)


def test_stop_strings_over_token_borders(tmp_path: Path) -> None:
    """G04: what looked like the beginning of a stop string comes before the end, by end id and by limit."""
    loaded = load_engine(make_bigram(tmp_path / "m", ["ok ", "X", "Y"]))
    stop = SamplingParams(temperature=0.0, max_new_tokens=20, stop=("XYZW",))
    by_eos = run_one(loaded, "q", stop)
    assert (by_eos.text, by_eos.reason) == ("ok XY", FinishReason.STOP)
    by_limit = run_one(loaded, "q", SamplingParams(temperature=0.0, max_new_tokens=3, stop=("XYZW",)))
    assert (by_limit.text, by_limit.reason) == ("ok XY", FinishReason.LENGTH)
    hit = run_one(loaded, "q", SamplingParams(temperature=0.0, max_new_tokens=20, stop=(" X",)))
    assert (hit.text, hit.reason) == ("ok", FinishReason.STOP)


def test_a_completion_goes_on_inside_the_text(tmp_path: Path) -> None:
    """A05: a chat's answer loses the one dummy space of its vocabulary, a raw completion keeps its first
    space.
    """
    loaded = load_engine(make_bigram(tmp_path / "m", [" leading", " x"], tokenizer="spm"))
    ids = tuple(loaded.tokenizer.encode("q"))
    plain, raw = run_all(
        loaded.engine,
        [GenerationRequest("a", ids, GREEDY), GenerationRequest("b", ids, GREEDY, continues_text=True)],
    )
    assert plain.text == "leading x" == loaded.tokenizer.decode(plain.token_ids)
    assert raw.text == " leading x"


def test_the_context_fills_to_its_last_token(tmp_path: Path) -> None:
    loaded = load_engine(make_bigram(tmp_path / "m", ["a", "b", "c"], loop=True), context=50, chunk=8)
    ids = loaded.tokenizer.encode("q" * 20)
    result = run_one(loaded, ids, SamplingParams(temperature=0.0))
    assert len(ids) + len(result.token_ids) == 50 and result.reason is FinishReason.LENGTH
    notice = result.events[-1].notice
    assert notice is not None and notice.kind == "context_full"
    with pytest.raises(BadInputError, match=r"51 tokens.* 50"):
        run_one(loaded, [1] * 51, GREEDY)


# --- against transformers ---


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_ids_are_transformers(tmp_path: Path, arch: str) -> None:
    """Chunked prefill and paged decoding over blocks and windows change nothing."""
    folder = make_tiny(arch, tmp_path / "m")
    loaded = load_engine(folder, context=256, chunk=24, block_size=8)
    vocab = loaded.tokenizer.vocab_size
    rng = random.Random(1)
    model = transformers_model(folder)
    for length in (1, 25, 90):
        ids = [rng.randrange(3, vocab) for _ in range(length)]
        expected, ties = greedy(model, ids, 40)
        sampling = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
        result = run_one(loaded, ids, sampling)
        count = ties.index(True) if True in ties else 40
        assert count > 5 and result.token_ids[:count] == expected[:count]


@pytest.mark.parametrize("kv", ["f16", "bf16"])
def test_a_cache_of_half_precision_answers_alike(tiny: Path, kv: str) -> None:
    """Where the f32 cache leaves a wide margin the ids are the same; some must be, or the cache is not read
    right.
    """
    exact = run_one(load_engine(tiny, context=128), [5, 6, 7, 8] * 9, greedy_for(20)).token_ids
    half = run_one(load_engine(tiny, context=128, kv=kv), [5, 6, 7, 8] * 9, greedy_for(20)).token_ids
    assert half[:3] == exact[:3]


# --- seeds and settings ---


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("gemma3", tmp_path_factory.mktemp("tiny") / "m")


def sample_text(loaded: LoadedEngine, **sampling: object) -> Result:
    settings = {"max_new_tokens": 30, "ignore_eos": True, **sampling}
    return run_one(loaded, [5, 6, 7, 8] * 9, SamplingParams(**settings))  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_text(tiny: Path) -> None:
    loaded = load_engine(tiny, context=256)
    first = sample_text(loaded, seed=11)
    assert sample_text(loaded, seed=11).token_ids == first.token_ids
    assert sample_text(loaded, seed=12).token_ids != first.token_ids
    unseeded = sample_text(loaded)
    again = sample_text(loaded, seed=unseeded.events[-1].seed)
    assert again.token_ids == unseeded.token_ids


def test_chunks_and_blocks_do_not_change_the_draw(tiny: Path) -> None:
    results = [
        sample_text(
            load_engine(tiny, context=256, chunk=chunk, block_size=block), seed=5, top_p=0.9
        ).token_ids
        for chunk, block in ((512, 16), (5, 16), (16, 8), (1, 32))
    ]
    assert all(ids == results[0] for ids in results)


@pytest.mark.parametrize("kv", ["f16", "bf16"])
@pytest.mark.parametrize("arch", ["gemma3", "llama", "phi3"])
def test_chunks_do_not_change_ids_in_a_half_precision_cache(tmp_path: Path, arch: str, kv: str) -> None:
    """What a query reads is rounded alike, whether its own chunk wrote it or an earlier one."""
    folder = make_tiny(arch, tmp_path / "m")
    sampling = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    whole, seven, single = (
        run_one(load_engine(folder, context=256, chunk=chunk, kv=kv), [5, 6, 7, 8] * 9, sampling).token_ids
        for chunk in (512, 7, 1)
    )
    assert len(whole) == 24 and seven == whole and single == whole


def test_samples_of_one_request_differ_and_repeat(tiny: Path) -> None:
    loaded = load_engine(tiny, context=256)

    def three() -> list[list[int]]:
        request = GenerationRequest(
            "n", (5, 6, 7), SamplingParams(max_new_tokens=12, seed=4, ignore_eos=True), num_samples=3
        )
        events = run_all(loaded.engine, [request])[0].events
        return [[t for e in events if e.sample == i for t in e.token_ids] for i in range(3)]

    first = three()
    assert len({tuple(ids) for ids in first}) == 3 and three() == first


def test_mixed_settings_each_as_alone(tiny: Path) -> None:
    """F12: temperature 0; temperature 2 with top_k 1; top_p 1e-9; a bias of +100: three greedy, one always
    that id.
    """
    loaded = load_engine(tiny, context=256)
    settings = [
        SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True),
        SamplingParams(temperature=2.0, top_k=1, max_new_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=1e-9, max_new_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.0, logit_bias={77: 100.0}, max_new_tokens=12, ignore_eos=True),
    ]
    requests = [GenerationRequest(f"r{i}", (9, 10, 11), s) for i, s in enumerate(settings)]
    results = [r.token_ids for r in run_all(loaded.engine, requests)]
    assert results[0] == results[1] == results[2] and results[3] == [77] * 12


# --- errors ---


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_nan_ends_its_request_and_leaves_the_next_one_alone(tmp_path: Path, arch: str) -> None:
    """F14: one embedding row is NaN. Its request ends with an error; a healthy one that gets the same blocks,
    whose old contents are NaN, answers as before."""
    folder = make_tiny(arch, tmp_path / "m", tie_word_embeddings=False)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][50] = float("nan")
    save_file(tensors, file)
    loaded = load_engine(folder, context=64)
    healthy = GenerationRequest("healthy", (7, 8, 9), SamplingParams(temperature=0.0, max_new_tokens=8))
    before = run_all(loaded.engine, [healthy])[0].token_ids
    bad, after = run_all(loaded.engine, [GenerationRequest("bad", (3, 50, *range(4, 40)), GREEDY), healthy])
    assert bad.reason is FinishReason.ERROR and "NaN" in (bad.events[-1].error or "")
    assert after.token_ids == before and after.reason is not FinishReason.ERROR


@pytest.mark.parametrize("arch", ["llama", "gemma3", "phi3"])
def test_values_that_overflow_an_f16_cache_name_the_cache_and_the_way_out(tmp_path: Path, arch: str) -> None:
    """Values above 65504 become infinite in f16 pages alone; the wider types that are named do answer."""
    folder = make_tiny(arch, tmp_path / "m")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight"):
            tensor *= 1e6
        elif name.endswith("qkv_proj.weight"):  # queries, keys, then values
            tensor[-tensor.shape[0] // 4 :] *= 1e6
    save_file(tensors, file)
    results = {
        kv: run_one(load_engine(folder, context=64, kv=kv), [3, 5, 7], greedy_for(4))
        for kv in ("f32", "bf16", "f16")
    }
    assert results["f16"].reason is FinishReason.ERROR
    error = results["f16"].events[-1].error or ""
    assert "f16" in error and "--kv-dtype bf16 or f32" in error
    for kv in ("f32", "bf16"):
        assert results[kv].reason is not FinishReason.ERROR, results[kv].events[-1].error


@pytest.mark.parametrize(("kv", "is_named"), [("f32", False), ("bf16", False), ("f16", True)])
def test_only_an_f16_cache_is_suspected_of_overflow(tmp_path: Path, kv: str, is_named: bool) -> None:
    """Damaged weights in a wide cache are not blamed on it; in an f16 cache both causes are named."""
    folder = make_tiny("llama", tmp_path / "m", tie_word_embeddings=False)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][50] = float("nan")
    save_file(tensors, file)
    error = run_one(load_engine(folder, context=64, kv=kv), [3, 5], greedy_for(4)).events[-1].error or ""
    assert "damaged weights?" in error and ("--kv-dtype" in error) is is_named


def test_random_cancels_leave_all_blocks_free(tiny: Path) -> None:
    """F18: on the real runner, with full and window groups."""
    loaded = load_engine(tiny, context=128, chunk=16)
    rng = random.Random(3)
    for i in range(60):
        prompt = tuple(rng.randrange(3, 200) for _ in range(rng.randrange(1, 90)))
        loaded.engine.submit(GenerationRequest(f"r{i}", prompt, SamplingParams(max_new_tokens=30)))
        for _ in range(rng.randrange(5)):
            loaded.engine.step()
        loaded.engine.cancel(f"r{rng.randrange(i + 1)}")
        loaded.engine.check_integrity()
    while loaded.engine.has_work():
        loaded.engine.step()
    loaded.engine.check_integrity()
    assert loaded.engine.stats.kv_blocks["used"] == 0


# --- rope scalings that change with the length ---


@pytest.mark.parametrize("prompt_length", [20, 32, 33])
def test_an_answer_that_outgrows_the_short_rope_is_computed_again(tmp_path: Path, prompt_length: int) -> None:
    """longrope turns every position by other angles beyond the original context: stored K of the short kind
    must not stay. The oracle computes the whole sequence anew for every token.
    """
    rope = {"type": "longrope", "long_factor": [3.0] * 8, "short_factor": [1.0] * 8}
    folder = make_tiny(
        "phi3", tmp_path, rope_scaling=rope, original_max_position_embeddings=32, max_position_embeddings=256
    )
    loaded = load_engine(folder, chunk=8, block_size=4)
    ids = [(7 * i) % 90 + 5 for i in range(prompt_length)]
    result = run_one(loaded, ids, greedy_for(24))
    notices = [event.notice.kind for event in result.events if event.notice]
    assert notices.count("rope_scaling_switched") == (1 if prompt_length <= 32 else 0)
    model = transformers_model(folder)
    whole = list(ids)
    for token_id in result.token_ids:
        logits = transformers_logits(model, whole)[-1]
        assert is_tie(logits) or token_id == int(logits.argmax()), f"at position {len(whole)}"
        whole.append(token_id)
    assert result.events[-1].timings is not None
    assert result.events[-1].timings.prefill_tokens == prompt_length


# --- tables and sizes ---


def test_a_plan_becomes_tensors() -> None:
    sequences = [
        PlannedSequence(1, (10, 11, 12), 5, ((4, 7), (-1, 9)), True, False, total_length=30),
        PlannedSequence(2, (20,), 8, ((1, 2, 3), (-1, -1, 6)), False, True),
    ]
    batch = build_batch(sequences, 4)
    assert batch.token_ids.tolist() == [10, 11, 12, 20]
    assert batch.positions.tolist() == [5, 6, 7, 8]
    assert batch.query_starts.tolist() == [0, 3, 4] and batch.logit_rows.tolist() == [3]
    assert (batch.max_query, batch.max_key) == (3, 12)
    assert batch.rope_lengths is not None and batch.rope_lengths.tolist() == [30, 9]
    full, window = batch.groups
    assert full.block_table.tolist() == [[4, 7, -1], [1, 2, 3]]
    assert full.block_positions.tolist() == [[0, 4, 0], [0, 4, 8]]
    assert full.slot_mapping.tolist() == [29, 30, 31, 12]
    assert full.key_lengths.tolist() == [8, 9]
    assert window.block_table.tolist() == [[9], [6]] and window.block_positions.tolist() == [[4], [8]]
    assert window.slot_mapping.tolist() == [37, 38, 39, 24]


def test_cache_sizes_are_the_worked_numbers() -> None:
    """SmolLM2-135M at 8,192 in f16: 180 MiB. Gemma 3 270M at 32,768 with windows freed, whole blocks: 103.73
    MiB.
    """
    smollm = spec_of([None] * 30, 3, 64, 8192)
    assert kv_bytes(smollm, 8192, kv_type("f16"), 1) == 180 * 2**20
    gemma = spec_of([512, 512, 512, 512, 512, None] * 3, 1, 256, 32768)
    assert round(kv_bytes(gemma, 32768, kv_type("f16"), 1) / 2**20, 2) == 103.73
    assert kv_bytes(gemma, 16, kv_type("f32"), 1) == 18 * 16 * 2048


def test_storage_is_what_was_planned() -> None:
    spec = spec_of([32, None, 32], 2, 16, 1024)
    groups = group_layouts(spec, 200, 64, 16)
    storage = allocate_storage(spec, [g.num_blocks for g in groups], kv_type("f16"))
    assert sum(s.nbytes for s in storage) == kv_bytes(spec, 200, kv_type("f16"), 64)
    assert [tuple(s.keys.shape) for s in storage] == [(2, 7, 16, 2, 16), (1, 13, 16, 2, 16)]
    with pytest.raises(BadInputError, match="int3"):
        kv_type("int3")


@pytest.mark.parametrize("budget", [10_000, 123_456, 10**7, 10**9])
def test_the_largest_context_fits_and_one_more_does_not(budget: int) -> None:
    spec = spec_of([64, None, 64], 2, 16, 5000)
    context = largest_context(spec, budget, kv_type("f32"), 512)
    assert context == 0 or kv_bytes(spec, context, kv_type("f32"), 512) <= budget
    assert context == 5000 or kv_bytes(spec, context + 1, kv_type("f32"), 512) > budget


@pytest.mark.real_model
def test_a_real_model_knows_a_capital() -> None:
    loaded = load_engine(real_model("smollm2-135m"), context=512)
    result = run_one(loaded, "The capital of France is", greedy_for(4))
    assert result.text.startswith(" Paris")


def test_pages_that_are_never_written_cost_no_memory() -> None:
    """A long context that a short chat never fills must not be paid for."""
    code = (
        "from edgellm.cache.kv_storage import allocate_storage, kv_type\n"
        "from tests.support.engines import spec_of\n"
        "from edgellm.bench.peak_memory import peak_bytes\n"
        "spec = spec_of([None] * 8, 8, 64, 32768)\n"
        "before, _ = peak_bytes(False)\n"
        "storage = allocate_storage(spec, [32768 // 16], kv_type('f32'))\n"
        "print(sum(s.nbytes for s in storage), peak_bytes(False)[0] - before)\n"
    )
    root = Path(__file__).resolve().parents[2]
    roots = [str(root / part) for part in ("", "kernels", "models", "quantize", "tui")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(roots)},
    )
    allocated, grown = map(int, done.stdout.split())
    assert allocated > 900_000_000 and grown < 100_000_000
