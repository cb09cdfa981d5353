"""Folding leaves the function alone; the plain layer runner computes what the decoder computes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import LayerLoader, build_decoder
from edgellm_models.network.plain_block import PlainBatch, PlainBlocks
from edgellm_quantize import capture
from edgellm_quantize.awq import search_scales
from edgellm_quantize.capture import STAGES, collect, open_stream
from edgellm_quantize.folding import fold_all, fold_width
from edgellm_quantize.grids import IntegerGrid
from edgellm_quantize.overlay import OverlayCheckpoint
from tests.support.dense_twin import twin_tensors
from tests.support.paged import PagedRun, relative_error
from tests.support.tiny_models import ARCHITECTURES, make_tiny

FORMS = list(itertools.product(ARCHITECTURES, (False, True), (2, 4)))


@pytest.mark.parametrize(("arch", "tied", "kv_heads"), FORMS)
def test_folding_alone_changes_no_logit(arch: str, tied: bool, kv_heads: int, tmp_path: Path) -> None:
    """Seven families, tied and untied, MHA and GQA: all four folds with factors from 1/4 to 4, biases too."""
    overrides = {"attention_bias": True, "mlp_bias": True} if arch == "llama" else {}
    checkpoint = open_checkpoint(
        make_tiny(
            arch,
            tmp_path / "model",
            tie_word_embeddings=tied,
            num_key_value_heads=kv_heads,
            num_hidden_layers=2,
            **overrides,
        )
    )
    decoder = build_decoder(checkpoint)
    spec = decoder.spec
    draw = torch.Generator().manual_seed(1)
    overlay = OverlayCheckpoint(checkpoint)
    for layer in range(spec.num_layers):
        factors = {
            stage: torch.exp2(4 * torch.rand(fold_width(spec, stage), generator=draw) - 2) for stage in STAGES
        }
        changed = fold_all(checkpoint, spec, layer, factors)
        overlay.replaced |= changed
        # Every linear and both norms before linears have changed.
        linears = 4 if arch == "phi3" else 7
        assert sum(name.endswith("weight") for name in changed) == linears + 2
    ids = torch.randint(0, spec.vocab_size, (40,), generator=draw).tolist()
    wanted = PagedRun(decoder).step([("a", ids)])[0]
    found = PagedRun(build_decoder(overlay)).step([("a", ids)])[0]
    assert relative_error(found, wanted) < 1e-5


def test_a_dense_twin_is_the_same_function_with_other_weights(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny("gemma3", tmp_path / "model", num_hidden_layers=2))
    changed = twin_tensors(checkpoint)
    twin = OverlayCheckpoint(checkpoint, changed)
    assert {name for name in checkpoint.tensors() if ".ffn_" in name and "norm" not in name} <= set(changed)
    down = checkpoint.weight("blk.0.ffn_down.weight").data
    ratio = changed["blk.0.ffn_down.weight"] / down
    assert 0.79 < float(ratio.min()) < 0.82 and 1.22 < float(ratio.max()) < 1.26
    ids = list(range(40, 80))
    wanted, found = (PagedRun(build_decoder(model)).step([("a", ids)])[0] for model in (checkpoint, twin))
    assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_plain_layers_are_the_decoders(arch: str, tmp_path: Path) -> None:
    """Windows, soft caps, norms of q and k, biases: padded sequences against paged attention."""
    checkpoint = open_checkpoint(make_tiny(arch, tmp_path / "model"))
    decoder, loader = build_decoder(checkpoint), LayerLoader(checkpoint)
    ids = torch.randint(0, decoder.spec.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    wanted = torch.cat(PagedRun(decoder).step([("a", ids[0].tolist()), ("b", ids[1, :30].tolist())]))
    blocks, batch = PlainBlocks(loader.spec, loader.kernels), PlainBatch((40, 30), 40)
    hidden = loader.kernels.embed(ids.flatten(), loader.embedding(), loader.spec.embedding_scale)
    for index in range(loader.spec.num_layers):
        hidden = blocks.forward(hidden, loader.layer(index), index, batch)
    rows = hidden[batch.real_rows()]
    prepared, _ = loader.kernels.add_rms_norm(None, rows, loader.output_norm(), loader.spec.rms_eps)
    found = loader.kernels.lm_head(prepared, loader.head(), loader.spec.final_softcap)
    assert relative_error(found, wanted) < 1e-5


def test_what_is_collected_is_the_sum_over_real_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of different lengths in parts of any size, stage by stage, against one sequence at a time;

    padding is in no sum, q, k and v share one input, and what is mirrored is what the strips leave out.
    """
    monkeypatch.setattr(capture, "_LEAST_STRIP", 8)
    checkpoint = open_checkpoint(make_tiny("qwen3", tmp_path / "model"))
    loader = LayerLoader(checkpoint)
    draw = torch.Generator().manual_seed(2)
    sequences = [torch.randint(0, 200, (length,), generator=draw).tolist() for length in (9, 40, 23, 31)]
    whole = open_stream(loader, sequences, 80)
    singles = [open_stream(loader, [sequence], 1) for sequence in sequences]
    assert whole.num_tokens == sum(len(sequence) for sequence in sequences)
    for index in range(2):
        layer = loader.layer(index)
        for stage in STAGES:
            found = collect(stage, index, whole, layer).input
            rows = torch.cat([next(single.inputs(stage, layer, index)) for single in singles])
            assert found.tokens == len(rows) == 103
            assert found.hessian is not None
            assert torch.allclose(found.hessian, rows.t() @ rows, rtol=1e-4, atol=1e-3)
            assert torch.allclose(found.imatrix, rows.square().mean(0), rtol=1e-4, atol=1e-6)
            assert torch.allclose(found.hessian.diagonal() / 103, found.imatrix, rtol=1e-4, atol=1e-5)
        for stream in (whole, *singles):
            stream.finish(layer)


def test_the_cross_term_is_that_of_the_two_streams(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny("llama", tmp_path / "model"))
    loader = LayerLoader(checkpoint)
    draw = torch.Generator().manual_seed(3)
    weight = checkpoint.weight("blk.0.attn_v.weight").data
    other = OverlayCheckpoint(checkpoint, {"blk.0.attn_v.weight": weight + 0.05})
    changed = LayerLoader(other).layer(0)
    sequences = [torch.randint(0, 200, (20,), generator=draw).tolist() for _ in range(5)]
    stream = open_stream(loader, sequences, 40)
    original = stream.copy()
    rows = [stream.copy(), stream.copy()]
    first = collect("qkv", 0, stream, changed, (original, loader.layer(0)))
    assert first.cross is not None and float(first.cross.abs().max()) == 0
    found = collect("attn_output", 0, stream, changed, (original, loader.layer(0)))
    xq = torch.cat(list(rows[0].inputs("attn_output", changed, 0)))
    x = torch.cat(list(rows[1].inputs("attn_output", loader.layer(0), 0)))
    assert found.cross is not None and float(found.cross.abs().max()) > 0
    assert torch.allclose(found.cross, (x - xq).t() @ xq, rtol=1e-4, atol=1e-4)


def test_awq_factors_lower_the_error_or_are_the_identity() -> None:
    """Channels of very different size are helped; where nothing helps the factors are exactly 1 (which AWQ's
    own grid never tries); groups of zeros and dead channels stay finite (E09).
    """
    draw = torch.Generator().manual_seed(0)
    sizes = torch.exp(1.5 * torch.randn(128, generator=draw))
    inputs = torch.randn(500, 128, generator=draw) * sizes
    weight = torch.randn(64, 128, generator=draw)
    grid = IntegerGrid(4, 32, symmetric=False, min_zero=0)
    found = search_scales([weight[:40], weight[40:]], inputs.t() @ inputs, grid)
    assert found.error < 0.8 * found.identity_error
    # Every weight is representable: nothing can be better than no rescaling.
    exact = torch.randint(0, 16, (32, 128), generator=draw).float()
    exact[:, ::32], exact[:, 1::32] = 0, 15
    same = search_scales([exact], torch.eye(128), grid)
    assert torch.equal(same.scales, torch.ones(128)) and same.error == same.identity_error
    inputs[:, 3] = 0
    weight[:, 64:96] = 0
    hard = search_scales([weight], inputs.t() @ inputs, grid)
    assert torch.isfinite(hard.scales).all() and bool((hard.scales > 0).all())


def test_awq_factors_of_shared_value_heads_are_shared() -> None:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(300, 128, generator=draw) * torch.exp(torch.randn(128, generator=draw))
    weight = torch.randn(48, 128, generator=draw)
    grid = IntegerGrid(4, 32, symmetric=False, min_zero=0)
    found = search_scales([weight], inputs.t() @ inputs, grid, share=(8, 2))
    assert found.scales.shape == (32,)
