"""What `plan` says against what a run then takes: weights, KV, workspace, the whole process, and the speed.

Each run has a process of its own: a loaded model, prompts that fill every context of the batch, sampled
answers without speculation, whose drafts come as they like. Weights and KV are measured as the bytes of the
tensors held. The workspace is what is held at once: what resident memory grows by, at its peak and without
pages of files, once every page of the cache was touched, in a process whose malloc gives every block of 16 KB
or more back when it is freed. What malloc's heap keeps besides, as it does for users, is in the process: the
peak of its whole life, loading included, in a second run. The bandwidth behind the ceiling is read before and
behind the run, and the better one counts: on a machine with other work one reading may meet a bad moment.

EDGELLM_PLAN_CASES  names of cases with commas between (default: all); a case that needs more memory than is
                    free is left out, with a line that says so
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from acceptance.harness import ROOT, Figure
from acceptance.random_shapes import SHAPES, write_shape
from tests.support.real_models import REAL_MODELS, real_model

MOST = 1.10
"""Of what is planned over what is measured."""
HELD_ONLY = {
    "MALLOC_MMAP_THRESHOLD_": "16384",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}
"""Settings of malloc that keep no freed block of any size."""


@dataclass(frozen=True)
class Case:
    """One run: a model, how it is held, and how much of it runs."""

    model: str
    kernels: str
    kv_dtype: str = "f32"
    ctx: int = 1024
    batch: int = 1
    policy: str = "stop"
    keep: int = 512
    """Tokens of the policies window and budget."""
    speed_tokens: int = 24
    """Over which the speed is measured."""
    temperature: float = 0.8
    """Of the answers that are drawn; a large one leaves all tokens as likely."""
    top_p: float = 0.95

    @property
    def name(self) -> str:
        kept = "" if self.policy == "stop" else f", {self.policy} of {self.keep}"
        kept += "" if self.temperature == 0.8 else f", temperature {self.temperature:g}, top-p {self.top_p:g}"
        return f"{self.model} {self.kernels}, {self.batch} x {self.ctx:,} tokens of {self.kv_dtype} KV{kept}"


CASES: dict[str, Case] = {
    f"{model}-{label}": Case(model, kernels, **settings)
    for model in REAL_MODELS
    for label, kernels, settings in (
        ("f32", "native", {}),
        ("int8", "native", {"kv_dtype": "int8"}),
        ("window", "native", {"policy": "window", "ctx": 2048}),
        ("narrow", "native", {"policy": "window", "keep": 256, "ctx": 2048}),
        ("four", "native", {"batch": 4}),
        ("flat", "native", {"temperature": 1000.0}),
        ("torch", "torch", {}),
        ("torch-int8", "torch", {"kv_dtype": "int8"}),
    )
} | {
    "1b": Case("llama-1b", "native", kv_dtype="f16", ctx=640, speed_tokens=12),
    # More than one whole chunk, so that a step takes all the rows that are planned.
    "8b": Case("llama-8b", "native", kv_dtype="f16", ctx=560, speed_tokens=6),
}


def main_child(job: dict[str, Any]) -> None:
    """Runs one case and prints what it took, in bytes, and its speed."""
    import ctypes
    import gc
    import time

    from edgellm.bench.natural_text import natural_ids
    from edgellm.cli.runtime import load_runtime
    from edgellm.config import EngineConfig
    from edgellm.contracts import GenerationRequest, SamplingParams
    from edgellm.planning.machine import read_bandwidth

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    case = Case(**job["case"])
    chosen = {"kernels": case.kernels, "ctx": case.ctx, "kv_dtype": case.kv_dtype, "kv_policy": case.policy}
    if case.policy != "stop":
        chosen[f"kv_{case.policy}"] = case.keep
    settings = EngineConfig(device="cpu", spec="off", **chosen)  # type: ignore[arg-type]
    runtime = load_runtime(
        settings.resolve(environ={}), Path(job["path"]), "m", full_contexts=case.batch, max_running=case.batch
    )
    core, number = runtime.core, iter(range(1_000))

    def answer(prompts: list[tuple[int, ...]], count: int, *, plain: bool) -> float:
        """Seconds from the first token of all to the last."""
        sampling = SamplingParams(
            temperature=0.0 if plain else case.temperature,
            top_p=case.top_p,
            max_new_tokens=count,
            ignore_eos=True,
        )
        began = 0.0
        for prompt in prompts:
            core.submit(
                GenerationRequest(
                    f"r{next(number)}", prompt, sampling, kv_policy=runtime.kv_policy, speculate=not plain
                )
            )
        while core.has_work():
            for event in core.step():
                assert event.error is None, event.error
                began = began or (time.monotonic() if event.token_ids else 0.0)
        return time.monotonic() - began

    def prompt(length: int) -> tuple[int, ...]:
        if job["random_ids"]:
            at = next(number)
            return tuple((7919 * (at + i)) % 90_000 + 300 for i in range(length))
        return natural_ids(runtime.tokenizer.encode, "prose", length, next(number))

    new = 8 + case.speed_tokens
    prompts = [prompt(case.ctx - new) for _ in range(case.batch)]
    answer([prompt(12)], 12, plain=False)  # what is imported and made at the first steps
    runtime.runner._sampler._widened = None  # type: ignore[union-attr]  # but for what drawing keeps
    for pages in runtime.runner._kv.storages:  # type: ignore[union-attr]
        for part in pages.pages():
            part.zero_()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    loading = status("VmHWM")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, files = status("VmRSS"), status("RssFile")
    answer(prompts, new, plain=False)
    peak = status("VmHWM")
    # Pages of libraries come and go as the system likes, and are the process's, not the workspace's.
    files = max(0, status("RssFile") - files)
    seconds = answer([prompt(case.ctx - new)], 1 + case.speed_tokens, plain=True)
    stats = core.stats
    found = {
        "weight_bytes": stats.weight_bytes,
        "kv_bytes": stats.kv_bytes,
        "workspace_bytes": peak - before - files,
        "process_peak": max(loading, peak),
        "loading_peak": loading,
        "resident_before": before,
        "tokens_per_s": case.speed_tokens / seconds,
        "read_gb_per_s": read_bandwidth(),  # last: its buffer is large
    }
    print(json.dumps(found))


def planned(case: Case, path: Path) -> dict[str, Any]:
    """What the command says, as a user gets it."""
    command = [
        sys.executable, "-m", "edgellm", "plan", str(path), "--json", "--kernels", case.kernels,
        "--ctx", str(case.ctx), "--batch", str(case.batch), "--kv-dtype", case.kv_dtype,
        "--spec", "off",
    ]  # fmt: skip
    if case.policy != "stop":
        command += ["--kv-policy", case.policy, f"--kv-{case.policy}", str(case.keep)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(case: Case, path: Path) -> dict[str, Any]:
    job = {"case": asdict(case), "path": str(path), "random_ids": case.model in SHAPES}
    command = [sys.executable, "-m", "acceptance.plan_memory", json.dumps(job)]
    found: dict[str, dict[str, Any]] = {}
    for name, settings in (("as it is", {}), ("held only", HELD_ONLY)):
        environment = os.environ | settings
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
        if done.returncode:
            sys.exit(f"{case.name} failed: {done.stderr[-2000:]}")
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found["as it is"] | {"workspace_bytes": found["held only"]["workspace_bytes"]}


def figures(case: Case, path: Path) -> Iterator[Figure]:
    plan, found = planned(case, path), measured(case, path)
    plan["process_peak"] = plan["process_bytes"] + max(plan["loading_bytes"], plan["total_bytes"])
    parts = {
        "weights": "weight_bytes",
        "KV": "kv_bytes",
        "workspace": "workspace_bytes",
        "the whole process": "process_peak",
    }
    for title, key in parts.items():
        ratio = plan[key] / found[key]
        yield Figure(
            name=f"{case.name}: {title} planned over measured",
            value=ratio,
            unit=f"({plan[key] / 1e6:,.1f} MB over {found[key] / 1e6:,.1f} MB)",
            promise=f"from 1 to {MOST}",
            met=1.0 <= ratio <= MOST,
            detail={"planned": plan[key], "measured": found[key]},
        )
    bandwidth = max(plan["bandwidth_gb_s"], found["read_gb_per_s"])
    ceiling = plan["decode_ceiling"] / case.batch * bandwidth / plan["bandwidth_gb_s"]
    yield Figure(
        name=f"{case.name}: decode speed over the planned ceiling, one sequence",
        value=found["tokens_per_s"] / ceiling,
        unit=f"({found['tokens_per_s']:.2f} of {ceiling:.2f} tok/s at {bandwidth:.1f} GB/s)",
        promise="none; never over 1",
        met=found["tokens_per_s"] <= ceiling,
        detail={"plan": plan, "measured": found},
    )


def run() -> Iterator[Figure]:
    from edgellm.planning.machine import free_memory

    chosen = os.environ.get("EDGELLM_PLAN_CASES")
    with tempfile.TemporaryDirectory() as folder:
        for key, case in CASES.items():
            if chosen is not None and key not in chosen.split(","):
                continue
            if case.model not in SHAPES:
                yield from figures(case, real_model(case.model))
                continue
            needed, free = 1.4 * SHAPES[case.model].file_bytes, free_memory()
            if free is not None and needed > free:
                print(f"left out: {case.name} wants {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free")
                continue
            path = write_shape(SHAPES[case.model], Path(folder) / f"{case.model}.gguf")
            yield from figures(case, path)
            path.unlink()


if __name__ == "__main__":
    main_child(json.loads(sys.argv[1]))
