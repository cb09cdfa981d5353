"""Linear ops, prepare and the registry: every weight form gives the product with its decoded weights."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from edgellm_kernels import linear_torch
from edgellm_kernels.operands import HeadShape, Prepared
from edgellm_kernels.ops import KernelUnavailableError, explain, load_kernels
from edgellm_kernels.registry import OPS, available, choose
from edgellm_kernels.weights import (
    BlockLayout,
    BlockQuantWeight,
    DenseWeight,
    LinearWeight,
    StackedWeight,
    dense_bytes,
    prepare,
)

KERNELS = load_kernels("cpu", preferred="torch")
K = 64


def quantized(
    rows: int, layout: BlockLayout = BlockLayout.Q4_1, seed: int = 0
) -> tuple[BlockQuantWeight, torch.Tensor]:
    """A block weight and what gguf decodes it to."""
    values = np.random.default_rng(seed).standard_normal((rows, K), dtype=np.float32)
    kind = gguf.GGMLQuantizationType[layout.value]
    data = gguf.quants.quantize(values, kind)
    decoded = gguf.quants.dequantize(data, kind).astype(np.float32)
    return BlockQuantWeight(torch.from_numpy(data), layout, K), torch.from_numpy(decoded)


def run(weight: LinearWeight, x: torch.Tensor) -> torch.Tensor:
    return KERNELS.linear(Prepared(x), weight)


@pytest.mark.parametrize("hold", ["dense", "blocks"])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_every_form(
    hold: str, tokens: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D13: f32, f16, bf16 and block weights, whole or decoded in small parts, compute in f32 on the CPU."""
    monkeypatch.setattr(linear_torch, "_CHUNK_ELEMENTS", 3 * K)
    x = torch.randn((tokens, K))
    bias = torch.randn(10) if biased else None
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        data = torch.randn((10, K)).to(dtype)
        weight = prepare(DenseWeight(data, bias), "cpu", "linear", hold)
        expected = functional.linear(x, data.float(), bias)
        torch.testing.assert_close(run(weight, x), expected, rtol=1e-5, atol=1e-5)
    for layout in (BlockLayout.Q4_0, BlockLayout.Q4_1, BlockLayout.Q5_0, BlockLayout.Q5_1, BlockLayout.Q8_0):
        block, decoded = quantized(10, layout)
        weight = prepare(BlockQuantWeight(block.data, layout, K, bias), "cpu", "linear", hold)
        expected = functional.linear(x, decoded, bias)
        torch.testing.assert_close(run(weight, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hold", ["dense", "blocks"])
def test_stacked_parts_of_different_forms_and_some_biases(hold: str) -> None:
    """D15: any subset of the parts may have a bias, each part may have another type."""
    block, decoded = quantized(6)
    other, other_decoded = quantized(4, BlockLayout.Q8_0, seed=1)
    half = torch.randn((8, K)).to(torch.bfloat16)
    bias = torch.randn(4)
    weight = prepare(
        StackedWeight((block, DenseWeight(half), BlockQuantWeight(other.data, other.layout, K, bias))),
        "cpu",
        "linear",
        hold,
    )
    x = torch.randn((3, K))
    expected = torch.cat(
        (x @ decoded.T, x @ half.float().T, functional.linear(x, other_decoded, bias)), dim=1
    )
    torch.testing.assert_close(run(weight, x), expected, rtol=1e-5, atol=1e-5)
    assert weight.shape == (18, K)
    assert isinstance(weight, DenseWeight if hold == "dense" else StackedWeight)


def test_prepared_weights_decode_to_the_same_bits() -> None:
    block, decoded = quantized(12)
    weight = prepare(block)
    assert isinstance(weight, DenseWeight) and torch.equal(weight.data, decoded)
    stacked = prepare(StackedWeight((block, block)))
    assert isinstance(stacked, DenseWeight) and torch.equal(stacked.data, torch.cat((decoded, decoded)))
    assert weight.nbytes <= dense_bytes(block)


def test_prepare_copies_nothing_that_has_its_form() -> None:
    """An f32 matrix and a block matrix that is kept stay views of the mapped file."""
    data = torch.randn((4, K))
    dense = prepare(DenseWeight(data))
    assert isinstance(dense, DenseWeight) and dense.data.data_ptr() == data.data_ptr()
    block, _ = quantized(4)
    for kept in (prepare(block, hold="blocks"), prepare(block, op="embed")):
        assert isinstance(kept, BlockQuantWeight) and kept.data.data_ptr() == block.data.data_ptr()


def test_prepare_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="share in_features"):
        prepare(StackedWeight((DenseWeight(torch.zeros(2, 4)), DenseWeight(torch.zeros(2, 8)))))
    with pytest.raises(ValueError, match="hold"):
        prepare(DenseWeight(torch.zeros(2, 4)), hold="magic")
    with pytest.raises(ValueError, match="op"):
        prepare(DenseWeight(torch.zeros(2, 4)), op="magic")


def test_embedding_rows() -> None:
    """Only the looked-up rows are decoded, from any form."""
    ids = torch.tensor([3, 0, 3, 9])
    block, decoded = quantized(10, BlockLayout.Q8_0)
    torch.testing.assert_close(KERNELS.embed(ids, block, 2.0), decoded[ids] * 2.0, rtol=0, atol=0)
    half = torch.randn((10, K)).to(torch.float16)
    rows = KERNELS.embed(ids, DenseWeight(half))
    assert rows.dtype == torch.float32 and torch.equal(rows, half[ids].float())


@pytest.mark.parametrize("hold", ["dense", "blocks"])
@pytest.mark.parametrize(
    ("name", "function"),
    [("silu", functional.silu), ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh"))],
)
def test_gate_up(hold: str, name: str, function: object) -> None:
    gate, up = torch.randn((8, K)), torch.randn((8, K))
    x = torch.randn((3, K))
    weight = prepare(StackedWeight((DenseWeight(gate), DenseWeight(up))), "cpu", "gate_up", hold)
    out = KERNELS.gate_up(Prepared(x), weight, name).values
    expected = function(x.double() @ gate.double().T) * (x.double() @ up.double().T)  # type: ignore[operator]
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="relu"):
        KERNELS.gate_up(Prepared(x), weight, "relu")


def test_lm_head_caps() -> None:
    """D12: the final cap holds logits of any size, without NaN."""
    x = torch.randn((2, K)) * 1e20
    weight = DenseWeight(torch.randn((5, K)) * 1e10)
    logits = KERNELS.lm_head(Prepared(x), weight, 30.0)
    torch.testing.assert_close(logits.abs(), torch.full_like(logits, 30.0))
    small = KERNELS.lm_head(Prepared(x / 1e20), DenseWeight(weight.data / 1e10), 30.0)
    expected = 30 * torch.tanh(x / 1e20 @ weight.data.T / 1e10 / 30)
    torch.testing.assert_close(small, expected, rtol=1e-5, atol=1e-6)


def test_add_rms_norm() -> None:
    """E19: the residual stream passes f16's largest number without harm."""
    x, residual = torch.randn((3, K)), torch.randn((3, K)) * 1e6
    gain, post = torch.rand(K) + 0.5, torch.rand(K) + 0.5
    norm = torch.nn.RMSNorm(K, eps=1e-6)

    def by_torch(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norm.weight.data = weight
        return norm(value).detach()

    prepared, after = KERNELS.add_rms_norm(x, residual, gain, 1e-6, post)
    torch.testing.assert_close(after, residual + by_torch(x, post))
    torch.testing.assert_close(prepared.values, by_torch(after, gain), rtol=1e-5, atol=1e-6)
    prepared, after = KERNELS.add_rms_norm(None, residual, gain, 1e-6)
    assert after is residual
    prepared, after = KERNELS.add_rms_norm(x, residual, gain, 1e-6)
    torch.testing.assert_close(after, residual + x)


def test_linear_adds() -> None:
    x, data, extra = torch.randn((3, K)), torch.randn((5, K)), torch.randn((3, 5))
    kept = extra.clone()
    out = KERNELS.linear(Prepared(x), DenseWeight(data), add=extra)
    torch.testing.assert_close(out, x @ data.T + extra)
    assert torch.equal(extra, kept)


def test_head_shape() -> None:
    shape = HeadShape(num_heads=4, num_kv_heads=2, k_dim=16, v_dim=8)
    assert (shape.q_width, shape.k_width, shape.v_width, shape.qkv_width) == (64, 32, 16, 112)


def test_registry() -> None:
    """Everything has a torch implementation; a wish that cannot be met is an error, never another backend."""
    for op in OPS:
        assert [i.backend for i in available(op, "cpu") if i.backend != "native"] == ["torch"]
        assert choose(op, "cpu", preferred="torch").backend == "torch"
        assert callable(choose(op, "cpu").load())
    assert set(load_kernels("cpu", preferred="torch").chosen.values()) == {"torch"}
    with pytest.raises(KernelUnavailableError, match=r"no triton kernels for embed on cpu.*: .*torch"):
        load_kernels("cpu", preferred="triton")
    with pytest.raises(KernelUnavailableError, match="magic"):
        load_kernels("cpu", preferred="magic")
    with pytest.raises(KernelUnavailableError, match="float16"):
        load_kernels("cpu", torch.float16)
    table = explain("cpu", preferred="torch")
    assert set(table) == set(OPS) and all(text.startswith("torch") for text in table.values())
    assert "no triton kernels" in explain("cpu", preferred="triton")["linear"]


def test_a_native_back_end_that_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_NATIVE_BACKEND", "sse9")
    for preferred in ("auto", "native"):
        with pytest.raises(KernelUnavailableError, match="EDGELLM_NATIVE_BACKEND is 'sse9'"):
            choose("linear", "cpu", preferred=preferred)
    assert choose("linear", "cpu", preferred="torch").backend == "torch"
