"""The mixture table against what llama-quantize itself answered, the budget's choice against all choices."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from edgellm_models.errors import UsageError
from edgellm_quantize.kquant_mix import FILE_TYPE_IDS, ModelShape, choose_types, fitting_type
from edgellm_quantize.recipe import GGUF_TYPES
from edgellm_quantize.type_budget import TypeOption, choose_under_budget

DATA = Path(__file__).resolve().parent.parent / "data" / "llama_quantize_types.json"


@cache
def _recorded() -> dict[str, Any]:
    """Recorded answers: per model its tensors and per type one letter for each of them."""
    return json.loads(DATA.read_text())


def _tensors(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(model["shapes"][index]) for name, index in model["tensors"].items()}


@pytest.mark.parametrize("name", sorted(_recorded()["models"]))
def test_types_are_those_of_llama_quantize(name: str) -> None:
    """Every tensor of every type, with and without an importance matrix; the fallbacks counted (E13)."""
    model, letters = _recorded()["models"][name], _recorded()["letters"]
    shape = ModelShape(model["architecture"], model["layers"], model["heads"], model["kv_heads"])
    tensors = _tensors(model)
    kinds = {key.partition("+")[0] for key in model["types"]}
    assert kinds == set(GGUF_TYPES)
    for key, codes in model["types"].items():
        type_name, _, imatrix = key.partition("+")
        mixture = choose_types(type_name, tensors, shape, has_imatrix=bool(imatrix))
        expected = {tensor: letters[code] for tensor, code in zip(tensors, codes, strict=True)}
        # Norms of the snapshots are not listed there; all that is recorded must agree.
        assert mixture.tensors == expected, key
        if key in model["fallbacks"]:
            assert len(mixture.fallbacks) == model["fallbacks"][key], key
        assert bool(mixture.notices()) == bool(mixture.fallbacks)


def test_the_fetched_gemma_file_has_the_types_of_its_mixture() -> None:
    """Gemma 3 270M as it is published, Q4_K_M, tensor for tensor."""
    from edgellm_models.checkpoint.gguf_shards import open_shards
    from tests.support.real_models import real_model

    header = open_shards(real_model("gemma3-270m"))[0].header
    tensors = {tensor.name: tensor.shape for tensor in header.tensors}
    mixture = choose_types("Q4_K_M", tensors, ModelShape("gemma3", 18, 4, 1))
    assert mixture.tensors == {tensor.name: tensor.ggml_type.name for tensor in header.tensors}
    assert header.metadata["general.file_type"] == FILE_TYPE_IDS["Q4_K_M"]


def _layers(count: int, width: int = 256) -> dict[str, tuple[int, ...]]:
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = {f"blk.{i}.{name}.weight": (512, width) for i in range(count) for name in names}
    return {"token_embd.weight": (1000, width), "output_norm.weight": (width,), **tensors}


def test_an_override_wins_and_still_falls_back() -> None:
    """E14: an override that does not fit the rows falls back; it does not count as a layer of its class."""
    tensors = _layers(16, 96)
    mixture = choose_types("Q4_K_M", tensors, ModelShape("llama", 16, 4, 4), overrides=[("attn_q", "Q6_K")])
    assert mixture.tensors["blk.3.attn_q.weight"] == "Q8_0"
    assert len(mixture.overridden) == 16
    plain = choose_types("Q4_K_M", _layers(16), ModelShape("llama", 16, 4, 4))
    moved = choose_types(
        "Q4_K_M", _layers(16), ModelShape("llama", 16, 4, 4), overrides=[(r"blk\.0\.attn_v", "F16")]
    )
    values = [f"blk.{i}.attn_v.weight" for i in range(16)]
    assert [plain.tensors[name] for name in values[:3]] == ["Q6_K", "Q6_K", "Q4_K"]
    assert [moved.tensors[name] for name in values[:4]] == ["F16", "Q6_K", "Q6_K", "Q4_K"]


def test_rows_of_no_block_become_f16() -> None:
    """E13: divisibility is asked of the row, not of the number of weights."""
    mixture = choose_types("Q4_K_M", {"blk.0.ffn_up.weight": (256, 100)}, ModelShape("llama", 1, 1, 1))
    assert mixture.tensors == {"blk.0.ffn_up.weight": "F16"}
    assert [fitting_type(kind, 96) for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")] == [
        *("Q4_0", "Q4_0", "Q5_0", "Q5_1", "Q8_0", "Q8_0")
    ]
    assert "F16" in mixture.notices()[0].detail


def test_eight_experts_have_their_own_rules() -> None:
    """The 8-expert class (Mixtral): Q8_0 keys and values, Q5_K attention outputs."""
    mixture = choose_types("Q4_K_M", _layers(8), ModelShape("llama", 8, 32, 8, num_experts=8))
    assert mixture.tensors["blk.5.attn_k.weight"] == mixture.tensors["blk.5.attn_v.weight"] == "Q8_0"
    assert mixture.tensors["blk.5.attn_output.weight"] == "Q5_K"


def test_unknown_types_are_refused() -> None:
    with pytest.raises(UsageError, match="Q4_K_X"):
        choose_types("Q4_K_X", _layers(1), ModelShape("llama", 1, 1, 1))


def _random_options(generator: random.Random, tensors: int) -> dict[str, list[TypeOption]]:
    out = {}
    for index in range(tensors):
        size, weight = generator.randint(1, 8), generator.random()
        out[f"t{index}"] = [
            TypeOption(f"q{bits}", size * bits, weight * 4.0**-bits * generator.uniform(0.7, 1.4))
            for bits in (2, 3, 4, 5, 6, 8)
        ]
    return out


def test_the_budget_is_kept_and_nearly_the_best_choice_is_found() -> None:
    """Against every combination: never above the budget, within a tenth of the least possible error."""
    generator = random.Random(5)
    ratios = []
    for _ in range(20):
        options = _random_options(generator, 5)
        combinations = list(itertools.product(*options.values()))
        budget = generator.randint(sum(o[0].nbytes for o in options.values()) + 4, 90)
        best = min(
            sum(o.error for o in pick) for pick in combinations if sum(o.nbytes for o in pick) <= budget
        )
        found = choose_under_budget(options, budget)
        assert found.nbytes <= budget
        chosen = [next(o for o in options[name] if o.type_name == kind) for name, kind in found.types.items()]
        assert found.nbytes == sum(o.nbytes for o in chosen)
        assert found.error == pytest.approx(sum(o.error for o in chosen))
        ratios.append(found.error / best)
    assert sorted(ratios)[10] < 1.05 and max(ratios) < 1.6


def test_a_budget_below_the_smallest_types_is_refused() -> None:
    options = {"a": [TypeOption("q2", 20, 1.0), TypeOption("q4", 40, 0.1)]}
    with pytest.raises(UsageError, match="20 bytes"):
        choose_under_budget(options, 19)
    assert choose_under_budget(options, 39).types == {"a": "q2"}
    assert choose_under_budget(options, 40).types == {"a": "q4"}
