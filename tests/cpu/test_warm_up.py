"""What runs before a GPU engine is ready: every kernel that a request can meet, and where they are kept."""

# ruff: noqa: E402 (what is imported below needs the oracle)
from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.oracles import require_oracle

require_oracle("triton")

from edgellm.cache.kv_manager import KVManager
from edgellm.cache.kv_storage import allocate_storage, group_layouts, kv_type
from edgellm.cli.kernel_cache import VARIABLE, use_kernel_cache
from edgellm.contracts import GenerationRequest, SamplingParams, StepPlan, StepResult
from edgellm.engine.engine import Engine
from edgellm.engine.warm_up import prompt_lengths, warm_up
from edgellm.runner.model_runner import ModelRunner
from edgellm_kernels import registry
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from edgellm_models.network.decoder import Decoder
from edgellm_models.tokenizer import load_tokenizer
from edgellm_models.tokenizer.stream_decoder import StreamDecoder
from edgellm_quantize.writers import write_quantized_gguf
from tests.support.kernel_keys import count_kernels
from tests.support.tiny_models import make_tiny

CHUNK, CONTEXT, BLOCK = 512, 1200, 16


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = tuple(
        replace(i, devices=("cpu", "cuda")) if i.backend == "triton" else i for i in registry.IMPLEMENTATIONS
    )
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", everywhere)


class Parts:
    """A runner over a model, and engines over it."""

    def __init__(self, path: Path, kv: str, dtype: torch.dtype) -> None:
        checkpoint = open_checkpoint(path)
        self.tokenizer = load_tokenizer(path, checkpoint.file_format, checkpoint.metadata)
        self.decoder: Decoder = build_decoder(checkpoint, kernels="triton", dtype=dtype)
        self.spec = self.decoder.spec
        self.groups = group_layouts(self.spec, CONTEXT, CHUNK, BLOCK)
        sizes = [group.num_blocks for group in self.groups]
        self.storage = allocate_storage(self.spec, sizes, kv_type(kv), block_size=BLOCK)
        self.runner = ModelRunner(
            self.decoder, self.storage, vocab_size=self.spec.vocab_size, block_size=BLOCK
        )
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return self.runner.execute(plan)

    def warm_up(self) -> int:
        return warm_up(
            self,
            self.tokenizer,
            KVManager(self.groups, BLOCK, enable_prefix_cache=False),
            vocab_size=self.spec.vocab_size,
            context_length=CONTEXT,
            prefill_chunk=CHUNK,
            heads_per_kv_head=self.spec.num_heads // self.spec.num_kv_heads,
            max_running=16,
        )

    def engine(self) -> Engine:
        return Engine(
            self,
            self.tokenizer,
            KVManager(self.groups, BLOCK),
            context_length=CONTEXT,
            vocab_size=self.spec.vocab_size,
            make_decoder=lambda request: StreamDecoder(self.tokenizer),
            prefill_chunk=CHUNK,
            mixed_chunk=100,
        )


def requests(vocab_size: int, seed: int) -> list[GenerationRequest]:
    """Those of the report (F16), and others of any length, drawn and greedy, scored and not."""
    random_ = random.Random(seed)
    lengths = [1, 15, 16, 17, 300] + [random_.randrange(1, 700) for _ in range(4)]
    lengths += [random_.randrange(1, 40) for _ in range(5)]
    random_.shuffle(lengths)
    made = []
    for index, length in enumerate(lengths):
        ids = tuple(random_.randrange(vocab_size) for _ in range(length))
        top_p = random_.choice((1.0, 0.9))
        sampling = SamplingParams(
            temperature=index % 2, top_p=top_p, max_new_tokens=random_.randrange(1, 6), ignore_eos=True
        )
        scored = random_.choice((None, None, 0))
        made.append(GenerationRequest(f"r{index}", ids, sampling, prompt_logprobs=scored))
    return made


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(
    ("arch", "kv", "dtype", "type_name"),
    [("gemma3", "bf16", torch.float32, "Q4_K_M"), ("llama", "int8", torch.bfloat16, "Q4_0")],
)
def test_no_request_meets_a_kernel_that_the_warm_up_did_not(
    arch: str,
    kv: str,
    dtype: torch.dtype,
    type_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F16: by what every launch would be compiled for. K is long enough to be split among programs."""
    sizes = {"intermediate_size": 4096, "num_hidden_layers": 2, "max_position_embeddings": CONTEXT}
    folder = make_tiny(arch, tmp_path / "model", quantizable=True, **sizes)
    write_quantized_gguf(folder, tmp_path / "q.gguf", type_name)
    keys = count_kernels(monkeypatch)
    parts = Parts(tmp_path / "q.gguf", kv, dtype)
    assert parts.warm_up() > 20
    met = set(keys)
    assert len({key[0] for key in met}) >= 8, "kernels of every kind"
    engine = parts.engine()
    waiting = requests(parts.spec.vocab_size, 0)
    while waiting or engine.has_work():
        for request in waiting[:3]:  # some alone, some in a batch
            engine.submit(request)
        del waiting[:3]
        for _ in range(2):
            if engine.has_work():
                engine.step()
    assert keys - met == set()
    with_one = set(keys)
    parts.decoder.kernels.gate_up(
        replace(parts.decoder.kernels.add_rms_norm(None, torch.zeros(1, 4096), torch.zeros(4096), 1e-6)[0]),
        parts.decoder.weights.layers[0].down,
        "silu",
    )
    assert keys - with_one, "a launch of another kind is a new key"


@pytest.mark.usefixtures("on_the_cpu")
def test_the_warm_up_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence that it began has ended for the runner, and an engine made later has counted nothing."""
    folder = make_tiny("llama", tmp_path / "model")
    count_kernels(monkeypatch)
    parts = Parts(folder, "bf16", torch.float32)
    parts.warm_up()
    started = {start.sequence_id for plan in parts.plans for start in plan.started}
    ended = [sequence_id for plan in parts.plans for sequence_id in plan.ended]
    assert started == set(ended) and len(ended) == len(set(ended)) > 20
    engine = parts.engine()
    assert engine.stats.running == engine.stats.waiting == 0 and engine.stats.prefix_hit_rate == 0
    ids = tuple(range(300))
    engine.submit(GenerationRequest("r", ids, SamplingParams(temperature=0.0, max_new_tokens=1)))
    events = engine.step()
    while engine.has_work():
        events += engine.step()
    usage = next(event.usage for event in reversed(events) if event.usage is not None)
    assert usage.cached_tokens == 0


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 32])
def test_the_lengths_meet_every_tile(group: int) -> None:
    lengths = prompt_lengths(group, CHUNK, CONTEXT)
    for first in (0, CHUNK):
        rows = [(n - first) * group for n in lengths if first < n <= first + CHUNK]
        possible = [n * group for n in range(1, CHUNK)]
        for low, high in ((1, 16), (17, 32), (33, 512 * 32)):
            assert any(low <= r <= high for r in rows) or not any(low <= r <= high for r in possible)
    assert max(prompt_lengths(group, CHUNK, 100)) <= 98


def test_a_cache_folder_that_can_be_written_is_used(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    assert use_kernel_cache(tmp_path, environ) is None
    assert environ == {VARIABLE: str(tmp_path / "kernels")} and not list((tmp_path / "kernels").iterdir())
    chosen = {VARIABLE: str(tmp_path / "mine")}
    assert use_kernel_cache(tmp_path, chosen) is None and chosen[VARIABLE] == str(tmp_path / "mine")


def test_one_that_cannot_be_written_is_a_notice(tmp_path: Path) -> None:
    """F16: not a crash; the kernels go to a temporary folder."""
    (tmp_path / "file").write_text("no folder")
    environ = {VARIABLE: str(tmp_path / "file" / "kernels")}
    notice = use_kernel_cache(tmp_path, environ)
    assert notice is not None and notice.kind == "kernel_cache"
    assert str(tmp_path / "file" / "kernels") in notice.detail and environ[VARIABLE] in notice.detail
    folder = Path(environ[VARIABLE])
    assert folder.is_dir() and "edgellm-kernels-" in folder.name
    (folder / "kernel").write_text("kept")
