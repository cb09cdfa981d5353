"""The native step program against Decoder.forward over the single ops: the same bits, in every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from edgellm.runner.choose_program import choose_program, kv_left_to_torch
from edgellm.runner.step_program import StepProgram
from edgellm_kernels.ops import largest
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from edgellm_models.network.decoder import Decoder
from edgellm_models.network.sub_layers import SkippedSubLayers
from tests.support.native_cases import needs_native, one_thread, threads
from tests.support.paged import PagedRun, poisoned_storage, relative_error
from tests.support.tiny_models import ARCHITECTURES, make_tiny

__all__ = ["one_thread"]
pytestmark = needs_native

IDS = torch.randint(5, 200, (90,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {arch: make_tiny(arch, tmp_path_factory.mktemp(arch)) for arch in ARCHITECTURES}


def decoder_of(folder: Path, kernels: str = "native") -> Decoder:
    return build_decoder(open_checkpoint(folder), kernels=kernels)


def story(
    decoder: Decoder, kv_type: str, *, compiled: bool, cut: int = 40
) -> tuple[list[torch.Tensor], PagedRun]:
    """Logits of a prompt in two chunks beside other sequences, then of a few steps of all of them."""
    run = PagedRun(decoder, kv_type=kv_type)
    if compiled:
        run.decoder = StepProgram(decoder)  # type: ignore[assignment]
    out = run.step([("a", IDS[:cut])], last=1)
    out += run.step([("a", IDS[cut:60]), ("b", IDS[30:37])])
    for token in IDS[60:64]:
        out += run.step([("b", [token]), ("a", [token]), ("c", [token, token + 1])])
    return out, run


@pytest.mark.parametrize("kv_type", ["f32", "int8"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_program_has_the_bits_of_the_single_ops(
    arch: str, kv_type: str, folders: dict[str, Path]
) -> None:
    decoder = decoder_of(folders[arch])
    ops, by_ops = story(decoder, kv_type, compiled=False)
    program, by_program = story(decoder, kv_type, compiled=True)
    assert all(bool(logits.isfinite().all()) for logits in ops)
    for ours, theirs in zip(program, ops, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(by_program.storages, by_ops.storages, strict=True):
        for mine, other in zip(ours.pages(), theirs.pages(), strict=True):
            assert torch.equal(mine.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    with threads(3):
        again, _ = story(decoder, kv_type, compiled=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, program, strict=True))


@pytest.mark.parametrize("last", [0, 1, 3])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_rows_that_nobody_asks_for_change_nothing(arch: str, last: int, folders: dict[str, Path]) -> None:
    """The last layer leaves out what is behind the K and V of such rows: other rows and all pages stay."""
    program = StepProgram(decoder_of(folders[arch]))
    found = []
    for wanted in (None, last):
        run = PagedRun(program.decoder, kv_type="int8")
        run.decoder = program  # type: ignore[assignment]
        logits = run.step([("a", IDS[:11]), ("b", IDS[20:50]), ("c", IDS[:2])], last=wanted)
        logits += run.step([("b", IDS[50:53]), ("a", IDS[11:30])], last=wanted)
        logits += run.step([("a", IDS[30:31]), ("c", IDS[2:4])])
        found.append((logits, [part.clone() for pages in run.storages for part in pages.pages()]))
    (every, all_pages), (some, pages) = found
    for index, (whole, part) in enumerate(zip(every, some, strict=True)):
        rows = len(whole) if index >= 5 else min(last, len(whole))
        assert len(part) == rows and torch.equal(part, whole[len(whole) - rows :])
    for mine, other in zip(pages, all_pages, strict=True):
        assert torch.equal(mine.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class Skipping:
    """A decoder or program without some sub-layers."""

    def __init__(self, program: Decoder | StepProgram, skipped: SkippedSubLayers) -> None:
        self._program = program
        self._skipped = skipped

    def forward(self, batch, kv):  # type: ignore[no-untyped-def]
        return self._program.logits(self._program.run(batch, kv, self._skipped))


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_the_program_leaves_out_what_the_single_ops_leave_out(arch: str, tmp_path: Path) -> None:
    """The same bits, with norms behind the sub-layers and without; a skipped attention writes nothing."""
    decoder = decoder_of(make_tiny(arch, tmp_path / arch, num_hidden_layers=6))
    program = StepProgram(decoder)
    for skipped in (
        SkippedSubLayers.of(attention=(1, 2, 4)),
        SkippedSubLayers.of(feed_forward=(1, 3)),
        SkippedSubLayers.of(attention=(2, 3), feed_forward=(3, 4)),
    ):
        found = []
        for one in (decoder, program):
            run = PagedRun(decoder, kv_type="int8")
            run.decoder = Skipping(one, skipped)  # type: ignore[assignment]
            logits = torch.cat(run.step([("a", IDS[:40])]) + run.step([("a", IDS[40:41]), ("b", IDS[:3])]))
            found.append((logits, [part.clone() for pages in run.storages for part in pages.pages()]))
        (ops, by_ops), (compiled, by_program) = found
        assert torch.equal(ops, compiled)
        for mine, other in zip(by_ops, by_program, strict=True):
            assert torch.equal(mine.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    with pytest.raises(ValueError, match="layer 5 cannot be skipped"):
        program.run(None, [], SkippedSubLayers.of(attention=(5,)))  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_program_is_close_to_torch(arch: str, folders: dict[str, Path]) -> None:
    ours, _ = story(decoder_of(folders[arch]), "f32", compiled=True)
    theirs, _ = story(decoder_of(folders[arch], "torch"), "f32", compiled=False)
    assert max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 2e-3


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_token_has_the_same_logits_in_any_cut(arch: str, folders: dict[str, Path]) -> None:
    """One by one, in chunks of 7 and 64 and at once, int8 KV: equal bits, so equal greedy text."""
    program = StepProgram(decoder_of(folders[arch]))
    found = []
    for size in (1, 7, 64, len(IDS)):
        run = PagedRun(program.decoder, kv_type="int8")
        run.decoder = program  # type: ignore[assignment]
        parts = [run.step([("a", IDS[i : i + size])])[0] for i in range(0, len(IDS), size)]
        found.append(torch.cat(parts))
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_ropes_that_turn_by_length(tmp_path: Path) -> None:
    """Sequences on both sides of the switch length in one batch."""
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = make_tiny("llama", tmp_path, max_position_embeddings=32, rope_parameters=scaling)
    decoder = decoder_of(folder)
    made = []
    for runner in (decoder, StepProgram(decoder)):
        run = PagedRun(decoder)
        run.decoder = runner  # type: ignore[assignment]
        made.append(run.step([("long", IDS[:60]), ("short", IDS[:9])], rope_lengths=[60, 9]))
    for ours, theirs in zip(*made, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kv", ["fp8", "int4"])
def test_pages_without_native_kernels_and_torch_kernels_run_op_by_op(kv: str, tmp_path: Path) -> None:
    """And it is said where kernels were chosen that do not compute what there is."""
    folder = make_tiny("llama", tmp_path, quantizable=True)
    native, by_torch = decoder_of(folder), decoder_of(folder, "torch")
    f32, other = (poisoned_storage(native.spec, 8, name, 16) for name in ("f32", kv))
    assert isinstance(choose_program(native, f32), StepProgram)
    assert choose_program(native, other) is native
    assert choose_program(by_torch, f32) is by_torch
    ours, _ = story(native, kv, compiled=False)
    theirs, _ = story(by_torch, kv, compiled=False)
    assert max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 2e-2
    notice = kv_left_to_torch([by_torch.kernels, native.kernels], other, kv)
    assert notice is not None and notice.kind == "kv_on_torch"
    assert f"{kv} KV is computed by torch" in notice.detail and "native" in notice.detail
    assert ("--kv-dtype int8" in notice.detail) == (kv == "fp8")
    assert kv_left_to_torch([native.kernels], f32, "f32") is None
    assert kv_left_to_torch([by_torch.kernels], other, kv) is None
    on_gpu = replace(native.kernels, chosen={"paged_attention": "triton"})
    assert (kv_left_to_torch([on_gpu], other, kv) is None) == (kv == "fp8")


@pytest.mark.parametrize("n", [1, 7, 8, 50001])
def test_the_largest_logit(n: int) -> None:
    """Also among equal ones, infinities and NaN, at the ends and the borders of parts."""
    rows = torch.randn((6, n), generator=torch.Generator().manual_seed(n))
    rows[1] = float("-inf")
    rows[2, n // 2 :] = 9.0
    rows[3, n // 3] = float("nan")
    rows[4, -1] = float("inf")
    rows[5, : n // 2] = float("-inf")
    values, places = largest(rows)
    expected = rows.max(dim=-1)
    assert torch.equal(values.nan_to_num(7.5), expected.values.nan_to_num(7.5))
    assert torch.equal(places, expected.indices)
