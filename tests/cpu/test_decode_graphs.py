"""Decode steps in static buffers against the decoder's own: poisoned memory, and what is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from edgellm.contracts import GenerationRequest, SamplingParams
from edgellm.runner.decode_graphs import CudaGraphs, DecodeGraphs, EagerReplay
from edgellm.runner.step_buffers import StepBuffers, StepSize
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from edgellm_models.network.decoder import Decoder
from edgellm_models.network.sub_layers import SkippedSubLayers
from tests.support.engines import load_engine, run_all
from tests.support.paged import PagedRun, relative_error
from tests.support.tiny_models import make_tiny

IDS = torch.randint(5, 200, (90,), generator=torch.Generator().manual_seed(1)).tolist()


def story(run: PagedRun) -> list[torch.Tensor]:
    """A prompt, then steps of one to five sequences of one to three tokens, long and short ones together."""
    steps: list[list[tuple[str, list[int]]]] = [[("a", IDS[:70])]]
    for token in IDS[70:73]:
        steps.append([("a", [token])])
        steps.append([("a", [token + 1]), ("b", [token]), ("c", [token])])
    steps.append([("a", IDS[80:83]), ("b", [7]), ("c", IDS[83:85])])
    steps.append([(name, [9]) for name in "abcde"])
    steps.append([("a", [3]), ("d", IDS[:20])])
    steps.append([(name, [8]) for name in "edcba"])
    # The logits of a replayed step are good until the next one.
    return [logits.clone() for step in steps for logits in run.step(step)]


def graphs_over(run: PagedRun, decoder: Decoder, **options: Any) -> DecodeGraphs:
    made = DecodeGraphs(decoder, run.storages, max_blocks=64, poison=True, **options)
    run.decoder = made  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("kv_type", ["f32", "fp8", "int8"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_static_buffers_give_what_the_decoder_gives(arch: str, kv_type: str, tmp_path: Path) -> None:
    """Eager replay with NaN and invalid ids in all static memory before each step; the pages stay alike."""
    decoder = build_decoder(open_checkpoint(make_tiny(arch, tmp_path / arch)), kernels="torch")
    plain, ours = PagedRun(decoder, kv_type=kv_type), PagedRun(decoder, kv_type=kv_type)
    expected = story(plain)
    program = graphs_over(ours, decoder, graphs=EagerReplay())
    for got, wanted in zip(story(ours), expected, strict=True):
        assert relative_error(got, wanted) < 1e-5
    for mine, other in zip(ours.storages, plain.storages, strict=True):
        for part, twin in zip(mine.pages(), other.pages(), strict=True):
            torch.testing.assert_close(part.float(), twin.float(), rtol=1e-3, atol=1.01, equal_nan=True)
    counts = program.counts
    assert counts.eager == 2 and counts.captured + counts.replayed == 9 and counts.captured <= 6


class FakeGraph:
    def __init__(self) -> None:
        self.launches: Callable[[], None] | None = None
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        assert self.launches is not None
        self.launches()

    def pool(self) -> str:
        return "the first graph's pool"


class FakeCuda:
    """Stands for torch.cuda: a capture records the run as one launch, and runs nothing."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.pools: list[Any] = []
        self.log: list[str] = []
        self.Stream = lambda: self
        self.CUDAGraph = FakeGraph

    def current_stream(self) -> FakeCuda:
        return self

    def wait_stream(self, other: object) -> None:
        self.log.append("wait")

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.log.append("side stream")
        yield

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph, pool: Any) -> Iterator[None]:
        self.log.append("capture")
        self.graphs.append(graph)
        self.pools.append(pool)
        yield


def test_a_graph_is_captured_once_warm_and_shares_its_pool() -> None:
    """First run on a side stream, then recorded, then replayed; later graphs share the first one's memory."""
    cuda, runs = FakeCuda(), []
    graphs = CudaGraphs(cuda)
    for name in ("one", "two"):

        def launch(name: str = name) -> None:
            runs.append(name)
            if cuda.log[-1] == "capture":
                cuda.graphs[-1].launches = lambda: runs.append(f"{name} again")

        replay = graphs.capture(launch)
        replay()
    assert cuda.log[:4] == ["wait", "side stream", "wait", "capture"]
    assert runs == [*(["one"] * 2), *(["one again"] * 2), *(["two"] * 2), *(["two again"] * 2)]
    assert cuda.pools == [None, "the first graph's pool"]
    assert [graph.replays for graph in cuda.graphs] == [2, 2]


class CountingReplay(EagerReplay):
    def __init__(self) -> None:
        self.captures = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], Any]:
        self.captures += 1
        return super().capture(run)


def test_one_capture_per_size_and_the_rest_is_eager(tmp_path: Path) -> None:
    """Steps of 3 sequences replay that of 4; prefill, skipped sub-layers and other pages run eagerly."""
    decoder = build_decoder(open_checkpoint(make_tiny("llama", tmp_path / "m")), kernels="torch")
    run, graphs = PagedRun(decoder), CountingReplay()
    program = graphs_over(run, decoder, graphs=graphs)
    run.step([("a", IDS[:17])])
    for _ in range(3):
        for names in ("abc", "abcd", "a"):
            run.step([(name, [5]) for name in names])
    assert graphs.captures == program.counts.captured == 2
    assert (program.counts.replayed, program.counts.eager) == (7, 1)
    run.step([(name, [5]) for name in "abcdefghijklmnopq"])
    assert program.counts.eager == 2
    buffers = StepBuffers(StepSize(1, 1, (16,)), 4, torch.device("cpu"))
    batch = buffers.batch
    one = torch.zeros(1, dtype=torch.int64)
    object.__setattr__(batch, "logit_rows", one)
    for kv, skipped in (
        (run.storages, SkippedSubLayers.of(attention=(1,))),
        (PagedRun(decoder).storages, None),
    ):
        before = program.counts.eager
        with contextlib.suppress(ValueError, IndexError):
            program.run(batch, kv, skipped)
        assert program.counts.eager == before + 1
    table = 64 * 4
    run.step([("long", IDS[:16] * 15)])
    run.step([("long", [1])])
    replayed = program.counts.captured
    run.step([("long", [1] * 15)])
    run.step([("long", [1])])
    assert program.counts.captured >= replayed and run.lengths["long"] > table
    assert program.counts.eager >= 5, "tables wider than are captured"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_answers_alike_through_it(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole answers of several requests at once, by ids."""
    path = make_tiny("llama", tmp_path / "m")
    sampling = SamplingParams(temperature=temperature, seed=4, max_new_tokens=12, ignore_eos=True)
    requests = [GenerationRequest(f"r{n}", tuple(IDS[: 3 + 9 * n]), sampling) for n in range(5)]
    expected = [result.token_ids for result in run_all(load_engine(path).engine, requests)]
    programs = []

    def choose(decoder: Decoder, kv: Any) -> DecodeGraphs:
        programs.append(DecodeGraphs(decoder, kv, max_blocks=64, graphs=EagerReplay(), poison=True))
        return programs[-1]

    monkeypatch.setattr("tests.support.engines.choose_program", choose)
    loaded = load_engine(path)
    assert [result.token_ids for result in run_all(loaded.engine, requests)] == expected
    assert programs[0].counts.replayed > 5
