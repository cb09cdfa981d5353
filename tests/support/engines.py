"""Engines over real decoders for tests: one call from a model path to events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from edgellm.cache.kv_copies import allocate_host_storage
from edgellm.cache.kv_manager import KVManager
from edgellm.cache.kv_storage import allocate_storage, group_layouts, kv_type
from edgellm.cache.sequence_blocks import GroupLayout
from edgellm.contracts import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StepInFlight,
    StepPlan,
    StepResult,
    TokenEvent,
)
from edgellm.engine.engine import Engine
from edgellm.runner.choose_program import choose_program
from edgellm.runner.decode_graphs import DecodeGraphs, EagerReplay
from edgellm.runner.draft_model import DraftModel
from edgellm.runner.layer_drafts import LayerDrafts, RunnerDrafter
from edgellm.runner.model_runner import ModelRunner
from edgellm.speculative.speculator import Speculator
from edgellm_kernels.batch import KVStorage
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from edgellm_models.network.decoder import Decoder
from edgellm_models.network.spec import LayerSpec, ModelSpec, RopeSpec
from edgellm_models.network.sub_layers import SkippedSubLayers
from edgellm_models.tokenizer import load_tokenizer
from edgellm_models.tokenizer.base import Tokenizer
from edgellm_models.tokenizer.stream_decoder import StreamDecoder


@dataclass(frozen=True)
class LoadedEngine:
    engine: Engine
    tokenizer: Tokenizer
    storage: Sequence[KVStorage] = ()


def load_engine(
    path: Path,
    *,
    context: int | None = None,
    chunk: int = 512,
    block_size: int = 16,
    kv: str = "f32",
    num_blocks: Sequence[int] | None = None,
    max_running: int = 16,
    token_budget: int | None = None,
    prefix_cache: bool = True,
    host_blocks: int = 0,
    kernels: str = "torch",
    speculator: Speculator | None = None,
    spec_rule: str = "coupled",
    lookahead: int = 0,
    poison: bool = False,
    skipped: SkippedSubLayers | None = None,
    draft: Path | None = None,
    depth: int = 0,
    graphs: bool = False,
) -> LoadedEngine:
    """The engine of a model file or folder, with any chunk and block size. ``num_blocks``: of each layer
    group, instead of those of one whole context; ``host_blocks``: of each group, for paused requests;
    ``poison``: slots that a step has yet to write hold NaN; ``skipped``: sub-layers that drafts by layers
    leave out; ``draft``: a draft model; ``depth``: steps in flight; ``graphs``: decode steps replay in static
    buffers, which are poisoned between two."""
    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(path, checkpoint.file_format, checkpoint.metadata)
    decoder = build_decoder(checkpoint, kernels=kernels)
    spec = decoder.spec
    length = context or spec.context_length
    groups = group_layouts(spec, length, chunk, block_size, lookahead=lookahead)
    if num_blocks is not None:
        groups = tuple(replace(group, num_blocks=n) for group, n in zip(groups, num_blocks, strict=True))
    storage = allocate_storage(
        spec,
        [group.num_blocks for group in groups],
        kv_type(kv),
        block_size=block_size,
        num_rings=max_running,
    )
    program = choose_program(decoder, storage)
    if graphs:
        assert isinstance(program, Decoder), "with the torch kernels"
        most_blocks = max(pages.num_blocks for pages in storage)
        program = DecodeGraphs(program, storage, max_blocks=most_blocks, graphs=EagerReplay(), poison=True)
    drafter: RunnerDrafter | None = None if skipped is None else LayerDrafts(program, skipped)
    own_groups = len(groups)
    if draft is not None:
        small = build_decoder(open_checkpoint(draft), kernels=kernels)
        most = max(group.num_blocks for group in groups)
        groups = (*groups, *(GroupLayout(None, most) for _ in small.spec.kv_groups))
        pages = allocate_storage(
            small.spec, [most] * len(small.spec.kv_groups), kv_type(kv), block_size=block_size
        )
        storage = (*storage, *pages)
        span = range(own_groups, len(groups))
        drafter = DraftModel(choose_program(small, pages), span, spec.vocab_size)
    if draft is not None and speculator is not None:
        speculator.runner_name, speculator.runner_follows = "draft", True
    offloaded = [host_blocks] * len(groups)
    host = allocate_host_storage(storage, offloaded) if host_blocks else ()
    runner = ModelRunner(
        program,
        storage,
        vocab_size=spec.vocab_size,
        block_size=block_size,
        host_kv=host,
        spec_rule=spec_rule,
        drafter=drafter,
        num_groups=own_groups,
    )
    engine = Engine(
        PoisoningRunner(runner, storage) if poison else runner,
        tokenizer,
        KVManager(
            groups,
            block_size,
            enable_prefix_cache=prefix_cache,
            host_blocks=offloaded,
            has_tail=kv_type(kv).has_tail,
            lookahead=lookahead,
        ),
        context_length=length,
        vocab_size=spec.vocab_size,
        rope_switch_length=spec.rope_switch_length,
        make_decoder=lambda request: StreamDecoder(
            tokenizer,
            # A constraint is about the answer's whole text, its first space included.
            continues_text=request.continues_text or request.constraint is not None,
            shown_ids=request.shown_token_ids,
        ),
        prefill_chunk=chunk,
        max_running=max_running,
        token_budget=token_budget,
        speculator=speculator,
        depth=depth,
    )
    return LoadedEngine(engine, tokenizer, storage)


class PoisoningRunner:
    """Puts NaN into every slot of a step's sequences from their first new token on, before the step writes
    them: what drafts have left there is never read."""

    def __init__(self, runner: ModelRunner, storage: Sequence[KVStorage]) -> None:
        self._runner = runner
        self._storage = storage

    def execute(self, plan: StepPlan) -> StepResult:
        self._poison_all(plan)
        return self._runner.execute(plan)

    def launch(self, plan: StepPlan) -> StepInFlight:
        self._poison_all(plan)
        return self._runner.launch(plan)

    def _poison_all(self, plan: StepPlan) -> None:
        with torch.inference_mode():
            for planned in plan.sequences:
                for pages, table in zip(self._storage, planned.block_tables, strict=True):
                    self._poison(pages, table, planned.start_position)

    @staticmethod
    def _poison(pages: KVStorage, table: Sequence[int], start: int) -> None:
        scaled = pages.key_scales is not None
        parts = (pages.key_scales, pages.value_scales) if scaled else (pages.keys, pages.values)
        for index in range(start // pages.block_size, len(table)):
            first = start % pages.block_size if index == start // pages.block_size else 0
            if table[index] >= 0:
                for part in parts:
                    assert part is not None
                    part[:, table[index], first:] = float("nan")


@dataclass(frozen=True)
class Result:
    """All events of one sample, joined."""

    token_ids: list[int]
    text: str
    reason: FinishReason
    events: list[TokenEvent]


def run_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Result]:
    """Runs requests to their ends; blocks are checked after every step."""
    for request in requests:
        engine.submit(request)
    events: list[TokenEvent] = []
    while engine.has_work():
        events += engine.step()
        engine.check_integrity()
    results = []
    for request in requests:
        own = [e for e in events if e.request_id == request.request_id]
        reason = own[-1].finish_reason
        assert reason is not None
        ids = [t for e in own for t in e.token_ids]
        results.append(Result(ids, "".join(e.text for e in own), reason, own))
    return results


def run_joining(loaded: LoadedEngine, requests: Sequence[GenerationRequest], every: int) -> list[Result]:
    """A new request every few steps, while the others run."""
    events: list[TokenEvent] = []
    waiting = list(requests)
    steps = 0
    while waiting or loaded.engine.has_work():
        if waiting and steps % every == 0:
            loaded.engine.submit(waiting.pop(0))
        events += loaded.engine.step()
        loaded.engine.check_integrity()
        steps += 1
    return [joined(events, one.request_id) for one in requests]


def joined(events: Sequence[TokenEvent], request_id: str, sample: int = 0) -> Result:
    """The events of one sample as its answer."""
    own = [e for e in events if e.request_id == request_id and e.sample == sample]
    assert own[-1].finish_reason is not None
    text = "".join(e.text for e in own)
    return Result([t for e in own for t in e.token_ids], text, own[-1].finish_reason, own)


def run_one(loaded: LoadedEngine, prompt: str | Sequence[int], sampling: SamplingParams) -> Result:
    """One answer to a text or to ids."""
    ids = loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    return run_all(loaded.engine, [GenerationRequest("one", tuple(ids), sampling)])[0]


def spec_of(windows: list[int | None], kv_heads: int, head_dim: int, context: int) -> ModelSpec:
    """A llama-like spec for sizes: one layer per window."""
    return ModelSpec(
        architecture="llama",
        num_layers=len(windows),
        hidden_size=64,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=64,
        vocab_size=100,
        context_length=context,
        rms_eps=1e-5,
        activation="silu",
        layers=tuple(LayerSpec(window, 0) for window in windows),
        ropes=(RopeSpec(1e4, head_dim),),
        query_scale=1.0,
    )
