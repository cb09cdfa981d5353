"""Lossy eviction over real decoders against transformers with an explicit mask over all KV."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from edgellm.cache.kv_storage import kv_type
from edgellm.contracts import GenerationRequest, SamplingParams, TokenEvent
from edgellm.llm import LLM
from edgellm_kernels.batch import GroupTables
from edgellm_kernels.kv_store_torch import store_kv
from edgellm_kernels.ops import block_scores
from edgellm_models.errors import BadInputError
from tests.support.engines import LoadedEngine, load_engine, run_all, spec_of
from tests.support.paged import poisoned_storage
from tests.support.tiny_models import make_tiny
from tests.support.transformers_oracle import transformers_model

BLOCK = 4
TIE = 1e-3
COUNT = 14


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma's layers see windows, but for one that sees everything."""
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny") / request.param)


def prompt(loaded: LoadedEngine, length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, loaded.engine.vocab_size) for _ in range(length))


def asked(
    name: str, ids: Sequence[int], count: int, policy: str, keep: int, **fields: Any
) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    return GenerationRequest(name, tuple(ids), sampling, kv_policy=policy, kv_keep=keep, **fields)


# --- the oracle: all KV, a mask, and the rules as docs/ and the command line state them ---


def masked_logprobs(model: Any, ids: Sequence[int], policy: str, keep: int, protected: int) -> torch.Tensor:
    """Log-softmax [len(ids), vocab] f64 of a model whose full-attention layers do not see evicted blocks."""
    length = len(ids)
    head = -(-max(4, protected) // BLOCK)
    cap = keep // BLOCK
    stride = max(1, min(8, cap // 8))
    recent = max(1, min(1024 // BLOCK, cap // 4))
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    seen = causal.clone()
    gone: set[int] = set()
    for border in range(0, length, stride * BLOCK):
        full = border // BLOCK
        if policy == "window":
            gone |= set(range(head, (border - keep + 1) // BLOCK))
        else:
            scores: list[float] | None = None
            while full - len(gone) + stride > cap:
                if scores is None:
                    scores = norm_ratios(model, ids[:border], seen[:border, :border], causal)
                lot = [i for i in range(head, full - recent) if i not in gone]
                gone.add(min(lot, key=lambda i, of=scores: of[i]))  # type: ignore[misc]
        for block in gone:
            seen[border:, block * BLOCK : (block + 1) * BLOCK] = False
    assert gone, "nothing goes"
    return torch.log_softmax(forward(model, ids, seen, causal).logits[0].double(), -1)


def forward(model: Any, ids: Sequence[int], seen: torch.Tensor, causal: torch.Tensor) -> Any:
    def additive(mask: torch.Tensor) -> torch.Tensor:
        return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]

    mask: Any = additive(seen)
    if getattr(model.config, "sliding_window", None) and hasattr(model.config, "layer_types"):
        size = len(ids)
        near = causal[:size, :size] & ~causal[:size, :size].tril(-model.config.sliding_window)
        mask = {"full_attention": mask, "sliding_attention": additive(near)}
    with torch.no_grad():
        return model(torch.tensor([list(ids)]), attention_mask=mask, use_cache=True)


def norm_ratios(model: Any, ids: Sequence[int], seen: torch.Tensor, causal: torch.Tensor) -> list[float]:
    """Per block the mean of norm(v) / norm(k) over positions, heads and the layers that see everything."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    layers = forward(model, ids, seen, causal).past_key_values.layers
    ratios = torch.stack(
        [
            (layer.values[0].norm(dim=-1) / layer.keys[0].norm(dim=-1)).mean(0)  # [positions]
            for layer, kind in zip(layers, kinds, strict=True)
            if kind == "full_attention"
        ]
    ).mean(0)
    return ratios[: len(ids) // BLOCK * BLOCK].view(-1, BLOCK).mean(1).tolist()


def told_logprobs(events: Sequence[TokenEvent]) -> list[float]:
    """Of the prompt's tokens from the second on, then of the answer's."""
    scored = [p.logprob for e in events for p in e.prompt_logprobs]
    return scored + [p.logprob for e in events for p in e.logprobs]


@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize(("policy", "keep", "protected"), [("window", 36, 9), ("budget", 64, 9)])
def test_what_is_evicted_is_what_a_mask_over_all_kv_hides(
    folder: Path, chunk: int, policy: str, keep: int, protected: int
) -> None:
    """F05: positions stay what they were, so nothing has to be rotated again. Prompt and answer alike."""
    loaded = load_engine(folder, context=256, chunk=chunk, block_size=BLOCK)
    ids = prompt(loaded, 110)
    request = asked("r", ids, 50, policy, keep, protected_tokens=protected, logprobs=0, prompt_logprobs=0)
    [result] = run_all(loaded.engine, [request])
    everything = [*ids, *result.token_ids]
    expected = masked_logprobs(transformers_model(folder), everything, policy, keep, protected)
    rows = [float(expected[i, token]) for i, token in enumerate(everything[1:])]
    assert told_logprobs(result.events) == pytest.approx(rows, abs=2e-3)
    [unmasked] = run_all(loaded.engine, [asked("s", everything, 1, "stop", 1, prompt_logprobs=0)])
    assert told_logprobs(unmasked.events) != pytest.approx(rows, abs=2e-3), "the mask hides nothing"


# --- company, chunks, little memory ---


def certain_answers(
    folder: Path, prompts: Sequence[Sequence[int]], policy: str, **options: Any
) -> list[list[int]]:
    """Each alone, up to where rounding could decide."""
    loaded = load_engine(folder, prefix_cache=False, max_running=1, block_size=BLOCK, **options)
    answers = []
    for ids in prompts:
        [result] = run_all(loaded.engine, [asked("r", ids, COUNT, policy, 64, logprobs=2)])
        margins = [p.top[0][1] - p.top[1][1] for e in result.events for p in e.logprobs]
        certain = next((i for i, margin in enumerate(margins) if margin < TIE), COUNT)
        answers.append(result.token_ids[:certain])
    assert sum(map(len, answers)) > 0.7 * COUNT * len(prompts), "too many ties to tell anything"
    return answers


@pytest.mark.parametrize("policy", ["window", "budget"])
def test_any_company_chunks_and_preemption_give_the_ids_of_each_alone(folder: Path, policy: str) -> None:
    """F10: also in a pool of one and a half budgets, where KV is computed again after a preemption."""
    sizes = load_engine(folder, context=256)
    prompts = [prompt(sizes, length, seed) for seed, length in enumerate((100, 62))]
    expected = certain_answers(folder, prompts, policy, context=256)
    # Room for one and a half sequences; layers with windows (in the first group) have enough.
    little = [120, 24] if "gemma" in folder.name else [24]
    for chunk, blocks in ((5, None), (24, little)):
        loaded = load_engine(folder, context=256, chunk=chunk, block_size=BLOCK, num_blocks=blocks)
        results = run_all(
            loaded.engine, [asked(f"r{i}", ids, COUNT, policy, 64) for i, ids in enumerate(prompts)]
        )
        for result, ids in zip(results, expected, strict=True):
            assert result.token_ids[: len(ids)] == ids
        kinds = {e.notice.kind for r in results for e in r.events if e.notice is not None}
        assert "kv_evicted" in kinds and (blocks is None or "preempted" in kinds)


@pytest.mark.parametrize(("kv", "policy"), [("int8", "window"), ("fp8", "budget"), ("int4", "budget")])
def test_quantized_kv_is_evicted_alike(tmp_path: Path, kv: str, policy: str) -> None:
    """int4 too, whose recent rows lie in rings outside of the blocks: what is evicted goes from both."""
    path = make_tiny("llama", tmp_path / "m", quantizable=True)
    loaded = load_engine(path, context=512, block_size=16, kv=kv)
    ids = prompt(loaded, 190)
    found = []
    for chunk in (512, 23):
        loaded = load_engine(path, context=512, block_size=16, kv=kv, chunk=chunk, prefix_cache=False)
        requests = [
            asked(name, ids, 4, policy, 96, logprobs=0, prompt_logprobs=0)
            for name in "ab"[: 1 + (chunk < 99)]
        ]
        result = run_all(loaded.engine, requests)[0]
        found.append(told_logprobs(result.events))
        dropped = [e.notice.detail for e in result.events if e.notice and e.notice.kind == "kv_evicted"]
        assert dropped and dropped[-1].split()[0] in ("96", "80", "64", "112")
        assert loaded.engine.stats.evicted_tokens == {policy: int(dropped[-1].split()[0]) * len(requests)}
    assert found[0] == pytest.approx(found[1], abs=0.05)


def test_samples_share_the_prompt_and_each_drops_its_own(folder: Path) -> None:
    loaded = load_engine(folder, context=256, block_size=BLOCK)
    ids = prompt(loaded, 70)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=20, ignore_eos=True, seed=3)
    many = GenerationRequest("n", ids, sampling, num_samples=2, kv_policy="budget", kv_keep=64)
    loaded.engine.submit(many)
    together: dict[int, list[int]] = {0: [], 1: []}
    while loaded.engine.has_work():
        for event in loaded.engine.step():
            together[event.sample] += event.token_ids
        loaded.engine.check_integrity()
    alone = load_engine(folder, context=256, block_size=BLOCK, prefix_cache=False, max_running=1)
    alone.engine.submit(many)
    apart: dict[int, list[int]] = {0: [], 1: []}
    while alone.engine.has_work():
        for event in alone.engine.step():
            apart[event.sample] += event.token_ids
    same = sum(a == b for i in together for a, b in zip(together[i], apart[i], strict=True))
    assert same > 0.9 * 40  # a draw within rounding of another may part them


def test_a_follow_up_turn_is_what_a_fresh_engine_says(folder: Path) -> None:
    """I11: the KV that followed an eviction is not reused by the next turn, which computes it again."""
    loaded = load_engine(folder, context=300, block_size=BLOCK)
    ids = prompt(loaded, 100)
    [first] = run_all(loaded.engine, [asked("1", ids, 8, "budget", 64, conversation_id="c")])
    longer = (*ids, *first.token_ids, *prompt(loaded, 20, 5))
    second = asked("2", longer, 5, "budget", 64, conversation_id="c", logprobs=0)
    [again] = run_all(loaded.engine, [second])
    fresh = load_engine(folder, context=300, block_size=BLOCK)
    [expected] = run_all(fresh.engine, [second])
    usage = again.events[-1].usage
    assert usage is not None and 0 < usage.cached_tokens < 64
    assert told_logprobs(again.events) == pytest.approx(told_logprobs(expected.events), abs=2e-3)
    [exact] = run_all(loaded.engine, [asked("3", longer, 5, "stop", 1, logprobs=0)])
    [true] = run_all(fresh.engine, [asked("3", longer, 5, "stop", 1, logprobs=0)])
    assert told_logprobs(exact.events) == pytest.approx(told_logprobs(true.events), abs=2e-3)


# --- what cannot be ---


def test_a_policy_that_cannot_work_is_refused_with_values_and_a_way_out(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "m")
    loaded = load_engine(path, context=512, num_blocks=[20])
    ids = prompt(loaded, 400)
    for policy, keep, protected, words in (
        ("budget", 448, 0, ["--kv-budget 448", "320"]),
        ("window", 200, 200, ["--kv-window 200", "208", "320"]),
        ("budget", 256, 250, ["--kv-budget 256", "256", "or more"]),
    ):
        with pytest.raises(BadInputError) as caught:
            loaded.engine.submit(asked("r", ids, 20, policy, keep, protected_tokens=protected))
        assert all(word in str(caught.value) for word in words), str(caught.value)
    [result] = run_all(loaded.engine, [asked("r", ids, 4, "budget", 320)])
    assert len(result.token_ids) == 4  # which no exact request of its length can in this cache
    windowed = make_tiny("mistral", tmp_path / "w", sliding_window=32)
    loaded = load_engine(windowed, context=128)
    with pytest.raises(BadInputError, match="every layer of this model sees a window"):
        loaded.engine.submit(asked("r", prompt(loaded, 20), 4, "window", 32))


# --- the op ---


@pytest.mark.parametrize("kv", ["f32", "bf16", "fp8", "int8", "int4"])
def test_a_score_is_the_mean_of_value_norms_over_key_norms(kv: str) -> None:
    spec = spec_of([None, None], 2, 64, 256)
    [storage] = poisoned_storage(spec, 6, kv, 16)
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(2, 32, 2, 64, generator=generator)
    v = torch.randn(2, 32, 2, 64, generator=generator) * torch.linspace(0.5, 2, 32)[None, :, None, None]
    slots = torch.cat((torch.arange(64, 80), torch.arange(16, 32)))  # blocks 4 and 1
    tables = GroupTables(torch.zeros(1, 2), torch.zeros(1, 2), slots, torch.tensor([32]))
    for layer in range(2):
        store_kv(k[layer], v[layer], storage, layer, tables)
    ratios = (v.norm(dim=-1) / k.norm(dim=-1)).view(2, 2, 16, 2).mean((0, 2, 3))
    tolerance = {"f32": 1e-6, "bf16": 1e-2, "fp8": 1e-2, "int8": 1e-2, "int4": 6e-2}[kv]
    both = block_scores(storage, [4, 1])
    assert both == pytest.approx(ratios.tolist(), rel=tolerance)
    assert [block_scores(storage, [block])[0] for block in (4, 1)] == both  # bit for bit
    assert kv_type(kv).name == kv and block_scores(storage, [0]) == [0.0]  # NaN bytes


# --- from the settings to the notices ---


def test_settings_reach_requests_and_what_went_is_told(tmp_path: Path) -> None:
    """F04: nothing goes silently, and a context of 512 tokens takes the KV memory of its budget."""
    path = make_tiny("llama", tmp_path / "m")
    sampling = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
    with LLM(path, kv_policy="budget", kv_budget=128, ctx=512) as llm:
        assert llm.info.context_length == 512
        assert sum(llm.stats.kv_blocks[name] for name in ("used", "cached", "free")) == 128 // 16 + 1
        [result] = llm.generate([list(range(5, 205))], sampling)
        told = [n.detail for n in result.notices if n.kind == "kv_evicted"]
        assert told and "--kv-budget 128" in told[-1] and "of 203 tokens" in told[-1]
    with pytest.raises(BadInputError, match=r"--kv-budget 48 .*64 or more"):
        LLM(path, kv_policy="budget", kv_budget=48, ctx=512)
