"""A model in two parts gives what it gives whole, through the engine too; both parts on the CPU here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edgellm.cache.kv_storage import allocate_storage, kv_type
from edgellm.contracts import GenerationRequest, SamplingParams
from edgellm_kernels.batch import split_storage
from edgellm_kernels.ops import block_scores
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder, build_part
from edgellm_models.network.split_decoder import SplitDecoder
from edgellm_models.network.sub_layers import SkippedSubLayers
from tests.support.engines import load_engine, run_all
from tests.support.paged import PagedRun
from tests.support.tiny_models import ARCHITECTURES, make_tiny

IDS = torch.randint(5, 200, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def split(path: Path, first: int) -> SplitDecoder:
    checkpoint = open_checkpoint(path)
    layers = build_decoder(checkpoint, kernels="torch").spec.num_layers
    parts = [build_part(checkpoint, part, kernels="torch") for part in (range(first), range(first, layers))]
    return SplitDecoder(*parts)


def in_parts(run: PagedRun, decoder: SplitDecoder, kv: str) -> None:
    """The run over pages that lie with the decoder's layers."""
    blocks = [pages.num_blocks for pages in run.storages]
    by_part = [
        allocate_storage(decoder.spec, blocks, kv_type(kv), block_size=run.block_size, layers=layers)
        for layers in (
            range(decoder.parts[1].first_layer),
            range(decoder.parts[1].first_layer, decoder.spec.num_layers),
        )
    ]
    run.storages = [split_storage(parts) for parts in zip(*by_part, strict=True)]
    run.decoder = decoder  # type: ignore[assignment]


@pytest.mark.parametrize(("arch", "kv"), [*((arch, "int8") for arch in ARCHITECTURES), ("llama", "fp8")])
def test_two_parts_have_the_bits_of_the_whole(arch: str, kv: str, tmp_path: Path) -> None:
    """Wherever the model is cut: norms behind sub-layers, windows, tied heads, biases."""
    path = make_tiny(arch, tmp_path / arch, num_hidden_layers=3)
    whole = build_decoder(open_checkpoint(path), kernels="torch")
    steps = [[("a", IDS[:20])], [("a", IDS[20:21]), ("b", IDS[:5])]]
    plain = PagedRun(whole, kv_type=kv)
    expected = [logits for step in steps for logits in plain.step(step)]
    for first in (1, 2):
        decoder = split(path, first)
        run = PagedRun(whole, kv_type=kv)
        in_parts(run, decoder, kv)
        got = [logits for step in steps for logits in run.step(step)]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
        for ours, theirs in zip(run.storages, plain.storages, strict=True):
            assert sum(part.keys.shape[0] for part in ours.parts) == theirs.keys.shape[0]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="all of its sub-layers"):
        decoder.run(None, [], SkippedSubLayers.of(attention=(1,)))  # type: ignore[arg-type]


def test_scores_of_blocks_count_all_layers() -> None:
    """Those of a split group are the mean over the layers of both parts."""
    spec = build_spec()
    whole = allocate_storage(spec, [4], kv_type("f32"), block_size=4)[0]
    whole.keys.copy_(torch.randn(whole.keys.shape))
    whole.values.copy_(torch.randn(whole.values.shape))
    parts = tuple(
        allocate_storage(spec, [4], kv_type("f32"), block_size=4, layers=layers)[0]
        for layers in (range(1), range(1, 3))
    )
    for part, layers in zip(parts, (slice(0, 1), slice(1, 3)), strict=True):
        part.keys.copy_(whole.keys[layers])
        part.values.copy_(whole.values[layers])
    ours = block_scores(split_storage(parts), [2, 0])
    assert ours == pytest.approx(block_scores(whole, [2, 0]), rel=1e-12)


def build_spec():  # type: ignore[no-untyped-def]
    from tests.support.engines import spec_of

    return spec_of([None, None, None], 2, 16, 64)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_an_engine_gives_the_same_tokens(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix reuse, forks and copies of blocks included: two samples of each prompt, several at once."""
    path = make_tiny(arch, tmp_path / arch)
    sampling = SamplingParams(temperature=0.8, seed=4, max_new_tokens=10, ignore_eos=True)
    requests = [GenerationRequest(f"r{n}", tuple(IDS[: 21 + n]), sampling, num_samples=2) for n in range(3)]
    expected = [result.token_ids for result in run_all(load_engine(path).engine, requests)]
    decoder = split(path, 1)
    ranges = range(1), range(1, decoder.spec.num_layers)

    def allocate(spec, num_blocks, kv, **options):  # type: ignore[no-untyped-def]
        made = [allocate_storage(spec, num_blocks, kv, layers=layers, **options) for layers in ranges]
        return tuple(split_storage(parts) for parts in zip(*made, strict=True))

    monkeypatch.setattr("tests.support.engines.allocate_storage", allocate)
    monkeypatch.setattr("tests.support.engines.choose_program", lambda whole, kv: decoder)
    assert [result.token_ids for result in run_all(load_engine(path).engine, requests)] == expected
