"""The native kernels against llama.cpp on the same file and cores: decoding, prompts, context, slots, rows.

Run as ``python -m acceptance.cpu_speed [--cases decode-q4_1 ...] [--threads N ...] [--pairs N]
[--processor-time] [--backend avx2]``; ``--list`` names the cases. Processor time is that of both processes,
for one thread on a machine that is busy with other work: there the clock says nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from acceptance.engines import tokens
from acceptance.harness import Figure, record, version
from acceptance.llama_cpp_server import Answered, LlamaCppServer
from acceptance.llama_cpp_tools import requantize
from edgellm.bench.workload import run_together
from edgellm.cli.runtime import Runtime, load_runtime
from edgellm.config import EngineConfig
from edgellm.planning.machine import read_bandwidth
from edgellm_kernels import native_threads
from edgellm_kernels.batch import ForwardBatch, GroupTables
from edgellm_kernels.native.build import backends
from edgellm_kernels.native_library import BACKEND_VARIABLE, load_library
from tests.support.real_models import real_model

PAIRS = 5
BANDWIDTH_SHARE = 0.80
"""Of what the cores read: enough in place of a ratio, where the memory is the limit."""
ONE_THREAD = 1.2
"""With one thread no ratio may be below."""


@dataclass(frozen=True)
class Case:
    """A comparison with llama.cpp. ``least``: the ratio promised with two threads."""

    model: str
    file_type: str
    least: float
    prompt: int = 32
    new: int = 48
    together: int = 1
    measures: str = "decode"
    """decode, prefill, or all: the whole of several requests at once."""
    kv: str = "auto"
    """Our --kv-dtype; llama.cpp's is its default, f16."""


@dataclass(frozen=True)
class RowsCase:
    """A step of a sequence's next ``rows`` tokens, as verification runs them, over one of one token."""

    model: str
    rows: int
    most: float


@dataclass(frozen=True)
class GridCase:
    """The linears of a step on a GPTQ folder made from the model's file, over those on the file itself."""

    model: str
    bits: int
    group: int
    most: float


SMOL, GEMMA = "smollm2-135m", "gemma3-270m"
CASES: dict[str, Case | RowsCase | GridCase] = {
    "decode-q4_1": Case(SMOL, "Q4_1", 1.5),
    "decode-q4_0": Case(SMOL, "Q4_0", 1.3),
    "decode-q4_k_m": Case(SMOL, "Q4_K_M", 1.3),
    "decode-q8_0": Case(SMOL, "Q8_0", 1.3),
    "decode-gemma": Case(GEMMA, "Q4_K_M", 1.3),
    "prefill-q4_1": Case(SMOL, "Q4_1", 1.5, prompt=512, new=1, measures="prefill"),
    "prefill-q4_0": Case(SMOL, "Q4_0", 1.0, prompt=512, new=1, measures="prefill"),
    "prefill-q4_k_m": Case(SMOL, "Q4_K_M", 1.0, prompt=512, new=1, measures="prefill"),
    "prefill-q8_0": Case(SMOL, "Q8_0", 1.0, prompt=512, new=1, measures="prefill"),
    "prefill-gemma": Case(GEMMA, "Q4_K_M", 1.0, prompt=512, new=1, measures="prefill"),
    "context-4096": Case(SMOL, "Q4_1", 1.2, prompt=4096, new=32),
    "context-4096-f16": Case(SMOL, "Q4_1", 1.2, prompt=4096, new=32, kv="f16"),
    "eight-at-once": Case(SMOL, "Q4_1", 1.3, new=48, together=8, measures="all"),
    "sixteen-at-once": Case(SMOL, "Q4_1", 1.2, new=48, together=16, measures="all"),
    "rows-4": RowsCase(SMOL, 4, 2.2),
    "rows-8": RowsCase(SMOL, 8, 3.8),
    "rows-4-gemma": RowsCase(GEMMA, 4, 1.5),
    "rows-8-gemma": RowsCase(GEMMA, 8, 2.2),
    "gptq-4": GridCase(SMOL, 4, 64, 1.1),
}
OWN_TYPE = {SMOL: "Q4_1", GEMMA: "Q4_K_M"}
"""The type of the catalog's file; others are made from it, alike for both sides."""


def model_file(model: str, file_type: str, folder: Path) -> Path:
    source = real_model(model)
    if file_type == OWN_TYPE[model]:
        return source
    made = folder / f"{model}-{file_type}.gguf"
    if not made.exists():
        requantize(source, made, file_type)
    return made


class Ours:
    """The engine with its native kernels and default activations, without speculation, as its peer."""

    def __init__(self, path: Path, context: int, threads: int, kv: str = "auto") -> None:
        settings = EngineConfig(
            kernels="native", device="cpu", ctx=context, threads=threads, spec="off", kv_dtype=kv
        )
        resolved = settings.resolve(environ={})
        self.runtime: Runtime = load_runtime(resolved, path, path.stem)
        self._turn = 0

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Answered:
        self._turn += 1
        wall, processor = time.monotonic(), time.process_time()
        lines = run_together(self.runtime.core, prompts, new_tokens, name=f"turn{self._turn}")
        processor, wall = time.process_time() - processor, time.monotonic() - wall
        first = lines[0]
        return Answered(first.ttft_s, sum(first.gaps), processor, wall)


def on_backend() -> str:
    """What a figure's name says where the back end was asked for."""
    library = load_library()
    return f", {library.backend}" if library is not None and os.environ.get(BACKEND_VARIABLE) else ""


def per_token(run: Callable[[int], Answered], case: Case, processor_time: bool) -> float:
    """Seconds per token of what a case measures, ``run`` being given the number of new tokens."""
    if case.measures == "prefill":
        done = run(1)
        return (done.processor_s if processor_time else done.prefill_s) / case.prompt
    done = run(case.new)
    if case.measures == "all":
        return (done.processor_s if processor_time else done.wall_s) / (case.together * case.new)
    if not processor_time:
        return done.decode_s / (case.new - 1)
    return (done.processor_s - run(1).processor_s) / (case.new - 1)


def compare(name: str, case: Case, threads: int, pairs: int, processor_time: bool, folder: Path) -> Figure:
    path = model_file(case.model, case.file_type, folder)
    context = case.prompt + case.new + 64
    # A long prompt is read once and kept by both; a short one is new each time, so that nothing is kept.
    reuse = case.prompt > 1024
    with ExitStack() as stack:
        peer = stack.enter_context(
            LlamaCppServer(path, context=context, threads=threads, slots=case.together)
        )
        ours = Ours(path, context * case.together if case.together > 1 else context, threads, case.kv)
        stack.callback(ours.runtime.close)
        bytes_read = (ours.runtime.core.stats.weight_bytes or 0) + ours.runtime.kv_read_bytes(case.prompt)
        bandwidth = read_bandwidth()
        turns = iter(range(1000))

        def prompts() -> list[tuple[int, ...]]:
            turn = 0 if reuse else next(turns)
            first = turn * case.together
            return [tokens(ours.runtime, case.prompt, 37 * (first + i)) for i in range(case.together)]

        def mine(new: int) -> Answered:
            return ours.run(prompts(), new)

        def theirs(new: int) -> Answered:
            return peer.run(prompts(), new, reuse=reuse)

        mine(2), theirs(2)
        a: list[float] = []
        b: list[float] = []
        for pair in range(pairs):
            for side in (0, 1) if pair % 2 == 0 else (1, 0):
                run, into = ((mine, a), (theirs, b))[side]
                into.append(per_token(run, case, processor_time))
        description = peer.description
    middle = min if processor_time else statistics.median
    us, them = middle(a), middle(b)
    ratio = them / us
    share = bytes_read / us / 1e9 / bandwidth if case.measures == "decode" else None
    least = min(case.least, ONE_THREAD) if threads == 1 and case.measures == "decode" else case.least
    met = ratio >= least or (share is not None and not processor_time and share >= BANDWIDTH_SHARE)
    reads = "" if share is None else f", {share:.2f} of the {bandwidth:.1f} GB/s that all cores read"
    return Figure(
        name=f"{name}: {case.model} {case.file_type}, {threads} thread{'s' * (threads > 1)}{on_backend()}",
        value=ratio,
        unit=f"times llama.cpp, by {'processor time' if processor_time else 'the clock'}{reads}",
        promise=f"at least {least}"
        + (f" or {BANDWIDTH_SHARE} of the bandwidth" if share is not None else ""),
        met=met,
        peer=f"xllamacpp {version('xllamacpp')}: {1 / them:.1f} tok/s; edgellm: {1 / us:.1f} tok/s",
        detail={"ours": a, "theirs": b, "read_gb_per_s": bandwidth, "share": share, "llama_cpp": description},
    )


def rows_batch(groups: int, rows: int, position: int, block_size: int) -> ForwardBatch:
    """The next ``rows`` tokens of one sequence of ``position`` tokens, the logits of all wanted."""
    table = torch.arange((position + rows - 1) // block_size + 1, dtype=torch.int32)[None]
    places = torch.arange(position, position + rows)
    group = GroupTables(table, table * block_size, places, torch.tensor([position + rows], dtype=torch.int32))
    starts = torch.tensor([0, rows], dtype=torch.int32)
    return ForwardBatch(
        torch.arange(5, 5 + rows), places, starts, torch.arange(rows), rows, table.numel() * block_size,
        (group,) * groups,
    )  # fmt: skip


def compare_rows(name: str, case: RowsCase, threads: int, pairs: int, processor_time: bool) -> Figure:
    from edgellm.cache.kv_storage import BLOCK_SIZE, allocate_storage, kv_type
    from edgellm.runner.choose_program import choose_program
    from edgellm.runner.step_program import StepProgram
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.network.build import build_decoder

    native_threads.set_threads(threads)
    torch.set_num_threads(1)
    decoder = build_decoder(open_checkpoint(real_model(case.model)), kernels="native")
    kv = allocate_storage(decoder.spec, [32] * len(decoder.spec.kv_groups), kv_type("f32"))
    program = choose_program(decoder, kv)
    assert isinstance(program, StepProgram)
    clock = time.process_time if processor_time else time.perf_counter
    found: dict[int, list[float]] = {1: [], case.rows: []}
    with torch.inference_mode():
        for _ in range(pairs * 4):
            for rows, times in found.items():
                batch = rows_batch(len(kv), rows, 128, BLOCK_SIZE)
                program.forward(batch, kv)
                begin = clock()
                for _ in range(3):
                    program.forward(batch, kv)
                times.append((clock() - begin) / 3)
    middle = min if processor_time else statistics.median
    one, many = middle(found[1]), middle(found[case.rows])
    return Figure(
        name=f"{name}: a step with {case.rows} rows of {case.model}, {threads} thread{'s' * (threads > 1)}"
        + on_backend(),
        value=many / one,
        unit=f"times that with one, by {'processor time' if processor_time else 'the clock'}",
        promise=f"at most {case.most}",
        met=many / one <= case.most,
        peer=f"one row: {one * 1e3:.2f} ms; {case.rows} rows: {many * 1e3:.2f} ms",
        detail={"seconds": {str(rows): times for rows, times in found.items()}},
    )


def compare_grid(name: str, case: GridCase, threads: int, pairs: int, folder: Path) -> Figure:
    """By the step program's own times, minima of alternating steps; the head, dense there, apart."""
    from edgellm.cache.kv_storage import BLOCK_SIZE, allocate_storage, kv_type
    from edgellm.runner.choose_program import choose_program
    from edgellm.runner.step_program import StepProgram
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.network.build import build_decoder

    source, made = real_model(case.model), folder / f"{case.model}-gptq-{case.bits}-{case.group}"
    if not made.exists():
        chosen = ["--format", "gptq", "--method", "rtn", "--bits", str(case.bits)]
        chosen += ["--group-size", str(case.group), "--quiet"]
        command = [sys.executable, "-m", "edgellm", "quantize", str(source), str(made), *chosen]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    native_threads.set_threads(threads)
    torch.set_num_threads(1)
    programs: list[StepProgram] = []
    for path in (made, source):
        decoder = build_decoder(open_checkpoint(path), kernels="native")
        kv = allocate_storage(decoder.spec, [32] * len(decoder.spec.kv_groups), kv_type("f16"))
        program = choose_program(decoder, kv)
        assert isinstance(program, StepProgram)
        programs.append(program)
    linears = ("qkv", "attn_output", "gate_up", "down")
    found: list[list[float]] = [[], []]
    with torch.inference_mode():
        for _ in range(pairs * 12):
            for program, times in zip(programs, found, strict=True):
                batch = rows_batch(len(kv), 1, 128, BLOCK_SIZE)
                program.native.take_seconds()
                program.forward(batch, kv)
                seconds = program.native.take_seconds()
                times.append(sum(seconds[op] for op in linears))
    ours, file_s = (min(times) for times in found)
    layers = [program.decoder.weights.layers for program in programs]
    held, file_bytes = (
        sum(w.nbytes for layer in side for w in (layer.qkv, layer.attn_output, layer.gate_up, layer.down))
        for side in layers
    )
    return Figure(
        name=f"{name}: linears of a step, {case.model} as GPTQ of {case.bits} bits in groups of "
        f"{case.group}, {threads} thread{'s' * (threads > 1)}{on_backend()}",
        value=ours / file_s,
        unit=f"times those of its {OWN_TYPE[case.model]} file",
        promise=f"at most {case.most}",
        met=ours / file_s <= case.most,
        peer=f"GPTQ: {ours * 1e3:.2f} ms, {held / 1e6:.1f} MB; "
        f"the file: {file_s * 1e3:.2f} ms, {file_bytes / 1e6:.1f} MB",
        detail={"seconds": {"gptq": found[0], "file": found[1]}},
    )


def measure(
    names: Sequence[str], threads: Sequence[int], pairs: int = PAIRS, processor_time: bool = False
) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            case = CASES[name]
            for count in threads:
                if isinstance(case, GridCase):
                    yield compare_grid(name, case, count, pairs, Path(folder))
                elif isinstance(case, RowsCase):
                    yield compare_rows(name, case, count, pairs, processor_time)
                else:
                    yield compare(name, case, count, pairs, processor_time, Path(folder))


def run() -> Iterator[Figure]:
    yield from measure(list(CASES), [1, min(2, native_threads.available_cores())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="names the cases")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--processor-time", action="store_true", help="one thread only")
    parser.add_argument("--backend", choices=list(backends()), help="the native build, not the fastest")
    parser.add_argument("--no-record", action="store_true", help="prints, writes nothing")
    chosen = parser.parse_args()
    if chosen.list:
        print("\n".join(CASES))
        return 0
    if chosen.backend is not None:
        os.environ[BACKEND_VARIABLE] = chosen.backend  # before anything loads the library
    if chosen.processor_time and chosen.threads != [1]:
        sys.exit("--processor-time needs --threads 1: waiting threads of llama.cpp spin")
    figures = measure(chosen.cases, chosen.threads, chosen.pairs, chosen.processor_time)
    return 0 if record("cpu_speed", figures, keep=not chosen.no_record) else 1


if __name__ == "__main__":
    sys.exit(main())
