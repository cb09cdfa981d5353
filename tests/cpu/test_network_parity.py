"""The decoder against transformers in f32: every family, whole, in chunks, token by token, in batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from edgellm_kernels import attention_torch
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from edgellm_models.network.decoder import Decoder
from tests.support.paged import PagedRun, relative_error, run_chunked, run_whole
from tests.support.tiny_models import ARCHITECTURES, make_tiny
from tests.support.transformers_oracle import transformers_logits, transformers_model

TOLERANCE = 1e-4
LENGTH = 60
"""Tokens of a prompt: several times the fixtures' window of 16."""


def prompt(vocab: int, length: int = LENGTH, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Pair:
    """One tiny model in both implementations."""

    def __init__(self, folder: Path, **build: Any) -> None:
        self.oracle = transformers_model(folder)
        self.decoder: Decoder = build_decoder(open_checkpoint(folder), **build)

    def prompt(self, length: int = LENGTH, seed: int = 0) -> list[int]:
        return prompt(self.decoder.spec.vocab_size, length, seed)

    def check(self, length: int = LENGTH, chunked: bool = True) -> None:
        """All logits of a prompt agree, in one pass, in uneven chunks and token by token."""
        ids = self.prompt(length)
        expected = transformers_logits(self.oracle, ids)
        assert relative_error(run_whole(self.decoder, ids), expected) < TOLERANCE
        if chunked:
            assert relative_error(run_chunked(self.decoder, ids, [7, 1, 16, 5]), expected) < TOLERANCE
            assert relative_error(run_chunked(self.decoder, ids, [1]), expected) < TOLERANCE


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Models by (family, options), each made once."""
    made: dict[str, Pair] = {}

    def get(arch: str, **options: Any) -> Pair:
        key = arch + json.dumps(options, sort_keys=True)
        if key not in made:
            made[key] = Pair(make_tiny(arch, tmp_path_factory.mktemp(arch), **options))
        return made[key]

    return get


WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"sliding_window": 9},
}


@pytest.mark.parametrize("quantizable", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_logits(pair: Callable[..., Pair], arch: str, quantizable: bool) -> None:
    pair(arch, quantizable=quantizable).check()


@pytest.mark.parametrize("arch", WINDOWED)
def test_windows_shorter_than_the_prompt(pair: Callable[..., Pair], arch: str) -> None:
    """F02: also where the family has a window only when its config asks for one."""
    made = pair(arch, **WINDOWED[arch])
    assert any(group.window == 9 for group in made.decoder.spec.kv_groups)
    made.check()


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_mha_and_mqa(pair: Callable[..., Pair], arch: str, kv_heads: int) -> None:
    pair(arch, num_key_value_heads=kv_heads).check(30, chunked=False)


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != "phi3"])
def test_head_dim_unlike_hidden_by_heads(pair: Callable[..., Pair], arch: str) -> None:
    """D01: KV cache, rope and the output projection are sized by the stated head size."""
    made = pair(arch, head_dim=24)
    assert made.decoder.spec.head_dim == 24
    made.check(30, chunked=False)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_mixed_ragged_batch(pair: Callable[..., Pair], arch: str) -> None:
    """F02, F10, F15: lengths 1 to 40, prefill and decode in one step, joining midway: as when alone."""
    made = pair(arch)
    prompts = {name: made.prompt(length, seed) for seed, (name, length) in enumerate(
        {"a": 41, "b": 1, "c": 23, "d": 11, "e": 30}.items()
    )}  # fmt: skip
    run = PagedRun(made.decoder, num_blocks=128)
    got: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    plan = [
        {"a": 17, "b": 1},
        {"c": 8, "a": 1, "d": 0},
        {"d": 3, "a": 16, "c": 1},
        {"c": 14, "e": 30, "d": 8, "a": 7},
    ]
    for step in plan:
        chunks = []
        for name, count in step.items():
            start = run.lengths.get(name, 0)
            chunks.append((name, prompts[name][start : start + count]))
        for (name, _), logits in zip(chunks, run.step(chunks), strict=True):
            got[name].append(logits)
    for name, ids in prompts.items():
        expected = transformers_logits(made.oracle, ids)
        assert relative_error(torch.cat(got[name]), expected) < TOLERANCE, name


def test_results_do_not_depend_on_where_blocks_lie(pair: Callable[..., Pair]) -> None:
    made = pair("gemma3")
    ids = made.prompt()
    expected = run_whole(made.decoder, ids)
    for options in (
        {"scattered": False},
        {"block_size": 16},
        {"block_size": 1},
        {"free_dead": False},
        {"seed": 5},
    ):
        torch.testing.assert_close(run_whole(made.decoder, ids, **options), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arch", "biases"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("gemma2", {"attention_bias": True}),
        ("gemma3", {"attention_bias": True}),
    ],
)
def test_biases(pair: Callable[..., Pair], arch: str, biases: dict[str, Any]) -> None:
    """D15: no linear's bias is taken for granted, none is forgotten."""
    made = pair(arch, **biases)
    assert made.decoder.spec.required_biases
    made.check(30, chunked=False)


ROPES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"factor": 4.0}),
    ("dynamic", {"factor": 4.0}),
    (
        "llama3",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 16}),
    ("longrope", {"long_factor": [2.0] * 8, "short_factor": [1.1] * 8, "factor": 4.0}),
]


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
@pytest.mark.parametrize(("kind", "parameters"), ROPES)
def test_rope_scaling(tmp_path: Path, kind: str, parameters: dict[str, Any], spelling: str) -> None:
    """D07: a scaling changes the logits as it does in transformers, however it is spelt."""
    if spelling == "rope_parameters":
        changes: dict[str, Any] = {"rope_parameters": parameters | {"rope_type": kind, "rope_theta": 10000.0}}
    else:
        changes = {"rope_scaling": parameters | {spelling: kind}}
    # dynamic and longrope change beyond the trained context: the prompt is longer than it.
    context = 40 if kind in ("dynamic", "longrope") else 2048
    made = Pair(make_tiny("llama", tmp_path, max_position_embeddings=context, **changes))
    assert made.decoder.spec.ropes[0].scaling == kind
    made.check(LENGTH)
    made.check(30, chunked=False)


@pytest.mark.parametrize("partial", [1.0, 0.75, 0.5])
@pytest.mark.parametrize("length", [30, LENGTH])
def test_phi4_mini(tmp_path: Path, partial: float, length: int) -> None:
    """Partial rotary with longrope, below and above the original context."""
    pairs = int(16 * partial) // 2
    rope = {
        "type": "longrope",
        "long_factor": [1.0 + 0.3 * i for i in range(pairs)],
        "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
    }
    options: dict[str, Any] = {
        "partial_rotary_factor": partial,
        "rope_scaling": rope,
        "original_max_position_embeddings": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    Pair(make_tiny("phi3", tmp_path, **options)).check(length)


def test_long_and_short_sequences_in_one_longrope_batch(tmp_path: Path) -> None:
    """Each sequence turns by its own length, also when a long prompt comes in chunks."""
    rope = {"type": "longrope", "long_factor": [3.0] * 8, "short_factor": [1.0] * 8}
    folder = make_tiny(
        "phi3", tmp_path, rope_scaling=rope, original_max_position_embeddings=32, max_position_embeddings=256
    )
    made = Pair(folder)
    assert made.decoder.spec.rope_switch_length == 32
    long, short = made.prompt(50), made.prompt(20, seed=1)
    run = PagedRun(made.decoder)
    first = run.step([("long", long[:20]), ("short", short[:10])], rope_lengths=[50, 20])
    second = run.step([("short", short[10:]), ("long", long[20:])], rope_lengths=[20, 50])
    got_long, got_short = torch.cat((first[0], second[1])), torch.cat((first[1], second[0]))
    assert relative_error(got_long, transformers_logits(made.oracle, long)) < TOLERANCE
    assert relative_error(got_short, transformers_logits(made.oracle, short)) < TOLERANCE


@pytest.mark.parametrize("linear", [None, 8.0])
def test_gemma3_rope_bases(tmp_path: Path, linear: float | None) -> None:
    scaling = None if linear is None else {"rope_type": "linear", "factor": linear}
    options: dict[str, Any] = {"rope_local_base_freq": 3000.0, "rope_theta": 2e6, "rope_scaling": scaling}
    Pair(make_tiny("gemma3", tmp_path, **options)).check(chunked=False)


@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
def test_gemma_caps_with_huge_scores(tmp_path: Path, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D12: scores before the cap reach hundreds; the query scale is that of the config; finite and equal."""
    largest: list[float] = []
    original = attention_torch.soft_cap

    def recording(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
        largest.append(float(scores.abs().max()))
        return original(scores, cap)

    monkeypatch.setattr(attention_torch, "soft_cap", recording)
    folder = make_tiny(arch, tmp_path, query_pre_attn_scalar=40, attn_logit_softcapping=50.0)
    if arch == "gemma2":
        _change(folder, "q_proj.weight", lambda weight: weight * 30)
    else:
        _change(folder, "q_norm.weight", lambda gain: gain + 150)
        config = json.loads((folder / "config.json").read_text())
        config |= {"final_logit_softcapping": 5.0, "attn_logit_softcapping": None}
        (folder / "config.json").write_text(json.dumps(config))
    made = Pair(folder)
    # Steep scores magnify rounding: both sides in f32 differ by more than elsewhere.
    ids = made.prompt()
    expected = transformers_logits(made.oracle, ids)
    assert torch.isfinite(expected).all()
    assert relative_error(run_whole(made.decoder, ids), expected) < 1e-3
    by_torch = build_decoder(open_checkpoint(folder), kernels="torch")
    assert relative_error(run_whole(by_torch, ids), expected) < 1e-3
    assert max(largest) > 500


def test_gemma_residual_beyond_half_precision(tmp_path: Path) -> None:
    """E19: hidden states above 65504 stay finite, since the residual stream is f32."""
    folder = make_tiny("gemma3", tmp_path)
    _change(folder, "embed_tokens.weight", lambda weight: weight * 2e4)
    made = Pair(folder)
    embedding = made.oracle.model.embed_tokens(torch.tensor([made.prompt()]))
    assert embedding.abs().max() > 65504
    made.check(30, chunked=False)


def _change(folder: Path, ending: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    changed = [name for name in tensors if name.endswith(ending)]
    assert changed
    save_file(tensors | {name: function(tensors[name]) for name in changed}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("hold", ["dense", "blocks"])
def test_half_precision_files(tmp_path: Path, dtype: str, hold: str) -> None:
    """D13: computed in f32 on the CPU, equal to transformers on the same numbers, and said so."""
    made = Pair(make_tiny("llama", tmp_path, dtype=dtype), hold=hold)
    made.check(30, chunked=False)
    (notice,) = [n for n in made.decoder.notices if n.kind == "weight_form"]
    assert dtype.upper() in notice.detail and "f32" in notice.detail


def test_a_long_prompt_of_a_half_precision_file(tmp_path: Path) -> None:
    """D14: positions beyond 256 in a bf16 model, against f32."""
    made = Pair(make_tiny("llama", tmp_path, dtype="bf16"))
    ids = made.prompt(620)
    expected = transformers_logits(made.oracle, ids)
    run = PagedRun(made.decoder, num_blocks=64, block_size=16)
    assert relative_error(run.step([("a", ids)])[0], expected) < TOLERANCE


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
@pytest.mark.parametrize(
    ("flag", "head"),
    [(True, "absent"), (True, "present"), (None, "present"), (None, "absent"), (False, "present")],
)
def test_tied_and_untied(tmp_path: Path, arch: str, flag: bool | None, head: str) -> None:
    """D06: every combination that means something loads; memory is shared where the head is the embedding."""
    changes: dict[str, Any] = {"tie_word_embeddings": flag}
    folder = make_tiny(arch, tmp_path, head=head, **changes)
    if flag is None:
        config = json.loads((folder / "config.json").read_text())
        del config["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(config))
    decoder = build_decoder(open_checkpoint(folder))
    tied = flag is True or (flag is None and head == "absent")
    assert decoder.spec.tied_embeddings is tied
    shared = decoder.weights.head is decoder.weights.embedding
    assert shared is tied
    if tied:
        config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(config))
    ids = prompt(decoder.spec.vocab_size, 30)
    expected = transformers_logits(transformers_model(folder), ids)
    assert relative_error(run_whole(decoder, ids), expected) < TOLERANCE
