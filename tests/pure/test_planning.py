"""Planning against numbers worked out by hand: sizes, ceilings, crossings and speculation."""

from __future__ import annotations

from typing import Any

import pytest

from edgellm.cache.kv_sizes import head_bytes, sequence_kv_bytes
from edgellm.planning import roofline, speculation
from edgellm.planning.planner import BLOCK_SIZE, Machine, Plan, Wish, make_plan
from edgellm.planning.shape import ModelShape, shape_of
from edgellm_models.network import read_spec
from tests.support import published_shapes as published

GIB = 2**30
Q4_K_M_8B = 4_912_898_048
Q4_K_M_8B_STEP = 4_617_396_224


def shape(config: dict[str, Any], bits: float = 16.0) -> ModelShape:
    return shape_of(read_spec("safetensors", config, {}), {}, bits_per_weight=bits)


def kv(config: dict[str, Any], tokens: int, kv_dtype: str = "f16", block: int | None = None) -> int:
    of = shape(config)
    return sequence_kv_bytes(of.windows, of.num_kv_heads, of.head_dim, tokens, kv_dtype, block)


def whole(config: dict[str, Any], tokens: int, kv_dtype: str = "f16") -> int:
    """Without freeing windows."""
    of = shape(config)
    return sequence_kv_bytes([None] * of.num_layers, of.num_kv_heads, of.head_dim, tokens, kv_dtype)


def test_kv_bytes_per_token_of_published_models() -> None:
    """W01, W07, W10 to W13: two for K and V, times layers, KV heads, head size and bytes; no third factor."""
    per_token = {
        "LLAMA2_7B": 524_288,
        "LLAMA2_13B": 819_200,
        "LLAMA3_70B": 327_680,
        "LLAMA3_8B": 131_072,
        "LLAMA32_1B": 32_768,
        "LLAMA32_3B": 114_688,
        "QWEN3_06B": 114_688,
        "QWEN3_8B": 147_456,
        "PHI3_MINI": 393_216,
        "MISTRAL_7B": 131_072,
        "SMOLLM2_135M": 23_040,
        "GEMMA3_270M": 18_432,
    }
    assert {name: whole(getattr(published, name), 1) for name in per_token} == per_token
    assert whole(published.SMOLLM2_135M, 1, "f32") == 46_080


@pytest.mark.parametrize(
    ("model", "sequences", "tokens", "expected"),
    [
        ("LLAMA2_7B", 1, 2_048, GIB),
        ("LLAMA2_7B", 1, 4_096, 2 * GIB),
        ("LLAMA2_7B", 1, 8_192, 4 * GIB),
        ("LLAMA2_7B", 1, 32_768, 16 * GIB),
        ("LLAMA2_13B", 4, 4_096, 13_421_772_800),
        ("LLAMA3_70B", 1, 4_096, 5 * GIB // 4),
        ("LLAMA3_70B", 1, 8_192, 5 * GIB // 2),
        ("LLAMA3_70B", 32, 8_192, 80 * GIB),
        ("LLAMA3_70B", 100, 8_192, 250 * GIB),
        ("LLAMA3_8B", 1, 4_096, 512 * 2**20),
        ("SMOLLM2_135M", 1, 8_192, 180 * 2**20),
        ("QWEN3_8B", 1, 8_192, 1_207_959_552),
    ],
)
def test_kv_bytes_of_contexts(model: str, sequences: int, tokens: int, expected: int) -> None:
    """W02 to W04, W07, W10, W11, W13, W50."""
    assert sequences * kv(getattr(published, model), tokens) == expected


def test_windows_are_counted() -> None:
    """W14 to W16: exact positions, and the bound in blocks of 16."""
    assert whole(published.GEMMA3_270M, 32_768) == 576 * 2**20
    assert kv(published.GEMMA3_270M, 32_768) == 108_527_616
    assert kv(published.GEMMA3_270M, 32_768, block=16) / 2**20 == pytest.approx(103.73, abs=0.005)
    assert kv(published.GEMMA3_1B, 32_768) / 2**20 == pytest.approx(139, abs=0.5)
    assert whole(published.GEMMA3_1B, 32_768) == 832 * 2**20
    assert kv(published.MISTRAL_7B, 32_768) == 512 * 2**20


def test_70b_with_as_many_kv_heads_as_heads() -> None:
    """W09: what a 70B model would need without grouped heads."""
    of = shape(published.LLAMA3_70B)
    without_groups = sequence_kv_bytes(of.windows, of.num_heads, of.head_dim, 4_096, "f16")
    assert without_groups == 10_737_418_240
    assert 32 * without_groups == 343_597_383_680


def test_quantized_kv() -> None:
    """W17: int8, and fp8 alike, with an f16 scale per head, int4 in groups of 32."""
    for eight_bits in ("int8", "fp8"):
        assert whole(published.LLAMA3_8B, 1, eight_bits) == 66_560
        gains = [head_bytes("f16", dim) / head_bytes(eight_bits, dim) for dim in (64, 128, 256)]
        assert gains == pytest.approx([1.939, 1.969, 1.984], abs=5e-4)
    assert head_bytes("f16", 128) / head_bytes("int4", 128) == pytest.approx(3.556, abs=5e-4)


def test_kv_against_weights_7b_and_13b() -> None:
    """W05, W06, W08: shares and crossings with 16-bit weights."""
    seven = shape(published.LLAMA2_7B)
    share = kv(published.LLAMA2_7B, 4_096) / seven.weight_bytes
    assert share == pytest.approx(0.1593, abs=5e-5)
    assert seven.weight_bytes // 524_288 == 25_705
    # Two sequences of 2,048 each: the crossing counts the positions of all.
    total = 8 * kv(published.LLAMA2_7B, 2_048)
    assert total / 1e9 == pytest.approx(8.590, abs=5e-4)
    assert (total + seven.weight_bytes) / 1e9 == pytest.approx(22.067, abs=5e-4)
    assert (total + seven.weight_bytes) / GIB == pytest.approx(20.551, abs=5e-4)
    thirteen = shape(published.LLAMA2_13B)
    one = kv(published.LLAMA2_13B, 2_048)
    assert one / (one + thirteen.weight_bytes) == pytest.approx(0.0605, abs=5e-5)
    plan = make_plan(thirteen, Wish(context=2_048), Machine())
    assert plan.kv_passes_weights_batch == 16
    assert thirteen.weight_bytes // 819_200 == 31_777


def test_decode_ceilings_of_a_70b() -> None:
    """W19 to W21."""
    fp16 = 140e9
    assert roofline.step_seconds(fp16, 3350) * 1e3 == pytest.approx(41.79, abs=5e-3)
    assert roofline.decode_ceiling(fp16, 3350) == pytest.approx(23.93, abs=5e-3)
    assert roofline.step_seconds(fp16, 3000) * 1e3 == pytest.approx(46.67, abs=5e-3)
    assert roofline.decode_ceiling(35e9, 3350) == pytest.approx(95.71, abs=5e-3)
    assert roofline.decode_ceiling(70e9 * 4.15625 / 8, 3350) == pytest.approx(92.12, abs=5e-3)
    with_kv = 35e9 + kv(published.LLAMA3_70B, 8_192)
    assert roofline.decode_ceiling(with_kv, 3350) == pytest.approx(88.90, abs=5e-3)
    low, high = (95.71 * share for share in roofline.USUAL_SHARES)
    assert (low, high) == pytest.approx((57.4, 76.6), abs=0.05)


def test_ridge_and_operations_per_byte() -> None:
    """W22, W23."""
    assert roofline.ridge(989, 3350) == pytest.approx(295.2, abs=0.05)
    assert roofline.compute_bound_batch(16, 989, 3350) == pytest.approx(295, abs=0.5)
    assert roofline.compute_bound_batch(4.15625, 989, 3350) == pytest.approx(76.7, abs=0.05)
    per_byte = [roofline.operations_per_byte(bits) for bits in (16, 8, 4.15625)]
    assert per_byte == pytest.approx([1, 2, 3.85], abs=5e-3)


def test_8b_in_q4_k_m() -> None:
    """W24: bits per weight, and ceilings of three cards when the embedding is not read."""
    of = shape(published.LLAMA3_8B)
    assert 8 * Q4_K_M_8B / of.parameters == pytest.approx(4.894, abs=5e-4)
    ceilings = [roofline.decode_ceiling(Q4_K_M_8B_STEP, speed) for speed in (360, 936, 1008)]
    assert ceilings == pytest.approx([77.97, 202.7, 218.3], abs=0.05)
    assert of.weight_bytes / Q4_K_M_8B == pytest.approx(3.27, abs=5e-3)
    assert of.step_bytes / Q4_K_M_8B_STEP == pytest.approx(3.25, abs=5e-3)


def test_ceilings_of_both_real_models() -> None:
    """W25, W26: tied heads, so the whole file is read."""
    smollm2, gemma3 = 96_576_768, 246_587_904
    assert roofline.decode_ceiling(smollm2, 10) == pytest.approx(103.5, abs=0.05)
    with_kv = smollm2 + kv(published.SMOLLM2_135M, 4_096, "f32")
    assert roofline.decode_ceiling(with_kv, 10) == pytest.approx(35.05, abs=5e-3)
    assert roofline.decode_ceiling(gemma3, 10) == pytest.approx(40.55, abs=5e-3)


def test_prefill_floors() -> None:
    """W27, W50."""
    assert roofline.prefill_seconds(70e9, 1000, 989) * 1e3 == pytest.approx(141.6, abs=0.05)
    eight = shape(published.LLAMA3_8B).parameters
    assert roofline.prefill_seconds(eight, 512, 165) * 1e3 == pytest.approx(49.8, abs=0.05)
    qwen3 = shape(published.QWEN3_8B).parameters
    assert roofline.prefill_seconds(qwen3, 8_192, 165) * 1e3 == pytest.approx(813, abs=1)
    assert roofline.step_seconds(kv(published.QWEN3_8B, 8_192), 20) * 1e3 == pytest.approx(60.4, abs=0.05)


@pytest.mark.parametrize(("batch", "gain"), [(1, 3.41), (16, 2.31), (64, 1.53), (256, 1.16)])
def test_what_four_bits_gain_by_batch(batch: int, gain: float) -> None:
    """W28: KV, which has its own type, takes the gain back as the batch grows."""
    machine = Machine(bandwidth_gb_s=1008, tflops=165)
    wish = Wish(context=2_048, batch=batch)
    # All weights, the embedding too.
    wide, narrow = (
        make_plan(_all_read(shape(published.LLAMA3_8B, bits)), wish, machine).decode_ceiling
        for bits in (16.0, 4.5)
    )
    assert wide is not None and narrow is not None
    assert narrow / wide == pytest.approx(gain, abs=5e-3)


def _all_read(of: ModelShape) -> ModelShape:
    from dataclasses import replace

    return replace(of, step_bytes=of.weight_bytes, step_parameters=of.parameters)


def test_tokens_per_round_and_speed_up() -> None:
    """W29 to W31, W33."""
    assert speculation.expected_accepted(0.8, 5) == pytest.approx(2.689, abs=5e-4)
    assert speculation.expected_tokens(0.8, 5) == pytest.approx(3.689, abs=5e-4)
    assert speculation.speed_up(0.8, 5, 0.1) == pytest.approx(2.460, abs=5e-4)
    assert speculation.speed_up(0.8, 5, 0.2) == pytest.approx(1.845, abs=5e-4)
    rounds = [speculation.expected_tokens(a, 5) for a in (0.6, 0.7, 0.9, 1.0, 0.0)]
    assert rounds == pytest.approx([2.383, 2.941, 4.686, 6, 1], abs=5e-4)
    length, gain = speculation.best_draft_tokens(0.8, 0.1)
    assert (length, gain) == (6, pytest.approx(2.470, abs=5e-4))


@pytest.mark.parametrize(
    ("k", "cost", "verify", "acceptance"),
    [(5, 0.1, 1.0, 0.334), (5, 0.2, 1.0, 0.509), (5, 0.5, 1.0, 0.777), (1, 0.77, 1.05, 0.820)],
)
def test_break_even_acceptance(k: int, cost: float, verify: float, acceptance: float) -> None:
    """W32."""
    assert speculation.break_even_acceptance(k, cost, verify) == pytest.approx(acceptance, abs=5e-4)


def test_no_acceptance_is_enough_when_drafts_cost_too_much() -> None:
    assert speculation.break_even_acceptance(2, 1.2, 1.0) is None
    assert speculation.best_draft_tokens(0.3, 0.9) == (0, 1.0)


def test_what_the_rejection_rule_accepts() -> None:
    """W35."""
    assert speculation.accepted_rejection((0.5, 0.3, 0.2), (0.2, 0.6, 0.2)) == pytest.approx(0.7)


def test_requests_that_fit() -> None:
    """W39, W40: whole requests, in 10^9 bytes and in GiB."""
    one = kv(published.LLAMA3_8B, 4_096)
    assert (int(54e9) // one, 54 * GIB // one) == (100, 108)
    large = kv(published.LLAMA3_70B, 4_096)
    assert (int(16e9) // large, 16 * GIB // large, int(20e9) // large) == (11, 12, 14)


@pytest.mark.parametrize(
    ("memory_gib", "f16", "int8", "unit"),
    [(24, 8_204, 16_156, "blocks"), (12, 42_784, 84_272, "tokens")],
)
def test_blocks_that_fit_on_a_card(memory_gib: int, f16: int, int8: int, unit: str) -> None:
    """W41, W42: nine tenths of the card less the weights and 1 GiB for workspace and context."""
    room = memory_gib * GIB * 9 // 10 - Q4_K_M_8B - GIB
    per_block = [kv(published.LLAMA3_8B, BLOCK_SIZE, kind, block=BLOCK_SIZE) for kind in ("f16", "int8")]
    blocks = [room // size for size in per_block]
    factor = 1 if unit == "blocks" else BLOCK_SIZE
    assert [count * factor for count in blocks] == [f16, int8]
    sequences = [count // (8_192 // BLOCK_SIZE) for count in blocks]
    assert sequences == ([16, 31] if memory_gib == 24 else [5, 10])


def test_one_context_is_clamped_to_the_trained_one() -> None:
    """W41: room for more is no reason to promise more than the model was trained for."""
    machine = Machine(memory_bytes=80 * GIB)
    plan = make_plan(shape(published.LLAMA3_8B, 4.894), Wish(context=8_192), machine)
    assert plan.largest_context == 131_072
    assert make_plan(shape(published.LLAMA3_8B), Wish(context=10**9), machine).context == 131_072


def test_waste_of_the_last_block() -> None:
    """W43."""

    def waste(tokens: int, slots: int) -> float:
        return 1 - tokens / slots

    def blocks(tokens: int, block: int) -> int:
        return -(-tokens // block) * block

    assert waste(200, 8_192) == pytest.approx(0.9756, abs=5e-5)
    assert waste(200, blocks(200, 16)) == pytest.approx(0.0385, abs=5e-5)
    assert waste(100, blocks(100, 16)) == pytest.approx(0.107, abs=5e-4)


def test_price() -> None:
    """W47."""
    assert roofline.cost_per_million(8, 80) == pytest.approx(27.78, abs=5e-3)


def test_the_plan_holds_together() -> None:
    machine = Machine(memory_bytes=24 * GIB, bandwidth_gb_s=1008, tflops=165)
    of = shape(published.LLAMA3_8B, 4.894)
    plan = make_plan(
        of, Wish(context=8_192, batch=2, acceptance=0.8, draft_cost=0.1, draft_tokens=5), machine
    )
    assert plan.kv_bytes == 2 * kv(published.LLAMA3_8B, 8_192)
    assert plan.total_bytes == plan.weight_bytes + plan.kv_bytes + plan.workspace_bytes
    assert plan.fits
    assert plan.largest_batch is not None
    larger = make_plan(of, Wish(context=8_192, batch=plan.largest_batch), machine)
    assert larger.fits
    assert not make_plan(of, Wish(context=8_192, batch=plan.largest_batch + 1), machine).fits
    assert plan.largest_context is not None
    assert make_plan(of, Wish(context=plan.largest_context, batch=2), machine).fits
    assert plan.speculation is not None
    assert plan.speculation.speed_up == pytest.approx(2.460, abs=5e-4)


def test_the_cache_of_a_plan_has_room_for_chunks_drafts_and_tails() -> None:
    """Beside the KV that decoding needs (the worked numbers), a window holds the chunk of a prompt and drafts
    that may be taken back, and int4 its unquantized tail."""
    of = shape(published.GEMMA3_270M)
    assert (of.windows.count(512), of.windows.count(None)) == (15, 3)
    per_block = 16 * 1024
    plan = make_plan(of, Wish(context=32_768), Machine())
    assert plan.kv_bytes_per_sequence == (3 * 2_048 + 15 * 33) * per_block
    assert plan.kv_bytes == (3 * 2_048 + 15 * 65) * per_block
    drafting = make_plan(of, Wish(context=32_768, lookahead=16), Machine())
    assert drafting.kv_bytes == (3 * 2_048 + 15 * 67) * per_block
    assert drafting.workspace_bytes - plan.workspace_bytes == 4 * 16 * of.vocab_size
    two = make_plan(of, Wish(context=32_768, batch=2), Machine())
    assert two.kv_bytes == (2 * 3 * 2_048 + 15 * (65 + 33)) * per_block
    kept = make_plan(of, Wish(context=32_768, kept=1_024), Machine())
    assert kept.kv_bytes == (3 * 64 + 15 * 65) * per_block
    assert kept.largest_batch is None
    eight = shape(published.LLAMA3_8B)
    int4 = make_plan(eight, Wish(context=1_024, batch=2, kv_dtype="int4"), Machine())
    assert int4.kv_bytes == 2 * (1_024 * 2 * 8 * 72 + 176 * 2 * 8 * 256) * 32


@pytest.mark.parametrize(
    ("model", "kernels", "kv_dtype", "context", "measured"),
    [
        ("SMOLLM2_135M", "native", "f32", 1_024, 20.3),
        ("SMOLLM2_135M", "native", "int8", 1_024, 20.3),
        ("GEMMA3_270M", "native", "f32", 1_024, 32.7),
        ("GEMMA3_270M", "native", "int8", 1_024, 33.3),
        ("SMOLLM2_135M", "native", "fp8", 1_024, 22.4),
        ("GEMMA3_270M", "native", "fp8", 1_024, 25.3),
        ("SMOLLM2_135M", "native", "int4", 1_024, 26.2),
        ("GEMMA3_270M", "native", "int4", 1_024, 29.3),
        ("SMOLLM2_135M", "torch", "f32", 1_024, 24.6),
        ("SMOLLM2_135M", "torch", "int8", 1_024, 26.2),
        ("GEMMA3_270M", "torch", "f32", 1_024, 28.1),
        ("GEMMA3_270M", "torch", "int8", 1_024, 29.9),
    ],
)
def test_the_workspace_is_that_of_measured_runs(
    model: str, kernels: str, kv_dtype: str, context: int, measured: float
) -> None:
    """Megabytes held at once (acceptance/plan_memory.py, two cores of an x86-64 machine): never more than
    planned, and a tenth less at most."""
    wish = Wish(context=context, kv_dtype=kv_dtype, kernels=kernels)
    planned = make_plan(shape(getattr(published, model)), wish, Machine()).workspace_bytes / 1e6
    assert measured <= planned <= 1.1 * measured


@pytest.mark.parametrize(("batch", "context"), [(1, 131_072), (16, 32_768)])
def test_the_results_of_tiles_grow_with_long_contexts(batch: int, context: int) -> None:
    """A tile of 128 keys leaves a result per head and sequence, 130 numbers here (attention.cpp)."""
    of = shape(published.LLAMA3_8B)
    short, long = (
        make_plan(of, Wish(context=length, batch=batch), Machine()).workspace_bytes
        for length in (1_024, context)
    )
    assert long - short == 4 * batch * 32 * 130 * context // 128 - max(1 << 19, 4 * batch * 32 * 130 * 8)


def test_what_kernels_hold_and_what_the_program_takes() -> None:
    """torch computes with f32 and keeps the file's form only of an embedding that is no head; the program
    counts where it lives in the same memory."""
    tied, untied = shape(published.SMOLLM2_135M, 4.5), shape(published.LLAMA3_8B, 4.5)
    assert tied.held_bytes("native") == tied.weight_bytes
    assert tied.held_bytes("torch") == 4 * tied.parameters
    table = 128_256 * 4_096
    assert untied.held_bytes("torch") == 4 * (untied.parameters - table) + table * 9 // 16
    room = Machine(memory_bytes=300_000_000)
    assert make_plan(tied, Wish(context=1_024), room).fits
    here = make_plan(tied, Wish(context=1_024), Machine(memory_bytes=300_000_000, holds_process=True))
    assert not here.fits and here.process_bytes > 256_000_000
    assert here.needed_bytes == here.total_bytes + here.process_bytes


def test_where_kv_passes_the_weights() -> None:
    of = shape(published.LLAMA2_7B)
    longer = _with_context(of, 65_536)
    plan = make_plan(longer, Wish(context=4_096, batch=2), Machine())
    at = plan.kv_passes_weights_context
    assert at is not None
    assert 2 * _kv_of(longer, at) > longer.step_bytes >= 2 * _kv_of(longer, at - 1)
    assert make_plan(of, Wish(context=4_096), Machine()).kv_passes_weights_context is None


def _with_context(of: ModelShape, context: int) -> ModelShape:
    from dataclasses import replace

    return replace(of, context_length=context)


def _kv_of(of: ModelShape, tokens: int) -> int:
    return sequence_kv_bytes(of.windows, of.num_kv_heads, of.head_dim, tokens, "f16", BLOCK_SIZE)


def test_the_lever_names_what_pays() -> None:
    of = _with_context(shape(published.LLAMA2_7B, 4.5), 65_536)
    room = Machine(memory_bytes=400 * GIB, bandwidth_gb_s=1008, tflops=165)

    def lever(machine: Machine = room, **wish: Any) -> str:
        plan: Plan = make_plan(of, Wish(**wish), machine)
        return plan.lever.split(":")[0]

    assert lever(context=2_048) == "weight bits, or batch"
    assert lever(context=512, batch=4) == "batch"
    assert lever(context=65_536) == "KV type"
    assert lever(context=256, batch=64) == "none of them"
    assert lever(context=2_048, acceptance=0.8, draft_cost=0.1) == "speculation"
    assert lever(Machine(memory_bytes=3 * GIB), context=512) == "weight bits"
    assert lever(Machine(memory_bytes=8 * GIB), context=32_768) == "KV type"
