"""Puts a loaded model together: checkpoint, tokenizer, decoder, KV cache, runner, engine. The composition
root.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.contracts import ModelInfo
from edgellm.log import log_notice
from edgellm_models.errors import BadInputError, Notice, ResourceError

if TYPE_CHECKING:
    from edgellm.cache.kv_storage import KVType
    from edgellm.cli.layer_skip import LayerSkip
    from edgellm.client.local_client import LocalClient
    from edgellm.config import ResolvedConfig
    from edgellm.engine.async_engine import AsyncEngine
    from edgellm.engine.engine import Engine
    from edgellm.engine.saved_kv import KVIdentity
    from edgellm.runner.model_runner import ModelRunner
    from edgellm_models.checkpoint.reader import Checkpoint
    from edgellm_models.network.decoder import Decoder
    from edgellm_models.network.spec import ModelSpec
    from edgellm_models.tokenizer.base import Tokenizer
    from edgellm_models.tokenizer.chat_template import ChatTemplates

_LOG = logging.getLogger("edgellm.load")

OnNotice = Callable[[Notice], None]


@dataclass(frozen=True)
class LoadTimes:
    """Seconds from the command to a model that is ready."""

    import_s: float
    """Importing torch and what computes."""
    load_s: float
    """Reading the files, preparing weights, tokenizer and cache."""


@dataclass
class Runtime:
    """A loaded model and everything that serves it."""

    info: ModelInfo
    tokenizer: Tokenizer
    sampling_defaults: Mapping[str, float | int]
    """What the model's own generation_config recommends, by field of SamplingParams."""
    core: Engine
    times: LoadTimes
    notices: tuple[Notice, ...]
    load_templates: Callable[[], ChatTemplates | None]
    """Reads the model's chat templates; a raw completion never does, so a broken one cannot stop it."""
    vocab_size: int = 0
    kv_policy: str = "stop"
    """What requests that are no chat ask for: stop, window or budget."""
    runner: ModelRunner | None = field(default=None, repr=False)
    """What computes, for those who read whole rows of logits (edgellm/evaluate)."""
    kv_read_bytes: Callable[[int], int] = field(default=lambda tokens: 0, repr=False)
    """Bytes of K and V that a decode step reads of a sequence of so many tokens, windows counted."""
    num_threads: int = 1
    """Threads that compute."""
    layer_skip: LayerSkip | None = field(default=None, repr=False)
    """Drafting by layers, under ``--spec auto`` and ``skip``."""
    idle_work: Generator[None, None, None] | None = field(default=None, repr=False)
    """What the engine's thread does while nobody asks for anything."""
    _service: AsyncEngine | None = field(default=None, repr=False)

    @property
    def engine(self) -> AsyncEngine:
        """The engine in its thread, started on first use."""
        if self._service is None:
            from edgellm.engine.async_engine import AsyncEngine

            self._service = AsyncEngine(self.core, idle_work=self.idle_work)
        return self._service

    def client(self, *, plain_fallback: bool = False, kv_policy: str = "stop") -> LocalClient:
        """A conversation partner over this model's engine; ``kv_policy`` as in LocalClient.

        BadInputError for a base model without a chat template, unless ``plain_fallback``.
        """
        from edgellm.client.local_client import LocalClient

        templates = self.load_templates()
        info = replace(self.info, has_chat_template=templates is not None)
        return LocalClient(
            self.engine, self.tokenizer, templates, info, plain_fallback=plain_fallback, kv_policy=kv_policy
        )

    def close(self) -> None:
        """Stops the engine thread; what is open is cancelled."""
        if self._service is not None:
            self._service.close()


def load_runtime(
    resolved: ResolvedConfig,
    path: Path,
    name: str,
    on_notice: OnNotice | None = None,
    *,
    prefill_chunk: int | None = None,
    kv: KVType | None = None,
    full_contexts: int = 1,
    max_running: int | None = None,
) -> Runtime:
    """Loads a model for the settings given. ``on_notice`` hears what was chosen or changed, as it happens.

    ``prefill_chunk`` limits the prompt tokens of a step; ``kv`` goes before ``--kv-dtype``, for measurements
    of keys and values of different types; the KV cache has room for ``full_contexts`` sequences of the whole
    context, which are not part of the check against free memory. ``max_running``: requests that run at once.

    Raises what the readers raise for damaged files, ResourceError when device or memory do not suffice.
    """
    begin = time.monotonic()
    _keep_threads_from_spinning()
    import torch

    from edgellm.cache.eviction import WINDOW, longest_step, most_positions
    from edgellm.cache.kv_copies import allocate_host_storage
    from edgellm.cache.kv_manager import KVManager
    from edgellm.cache.kv_storage import (
        BLOCK_SIZE,
        allocate_storage,
        choose_kv_type,
        group_layouts,
    )
    from edgellm.cache.prefix_index import cache_key
    from edgellm.cli.draft_model import load_draft
    from edgellm.cli.gpu_split import allocate_split, build_split, shared_room, split_for
    from edgellm.cli.idle_calibration import calibrate_in_idle
    from edgellm.cli.kv_room import check_contexts, choose_context, host_blocks_for, sequences_at_once
    from edgellm.cli.layer_skip import FOLDER as SKIP_FOLDER
    from edgellm.cli.layer_skip import LayerSkip
    from edgellm.engine.engine import MAX_RUNNING, PREFILL_CHUNK, Engine
    from edgellm.engine.stats import StatsRecorder
    from edgellm.locations import Locations
    from edgellm.runner.choose_program import choose_program, kv_left_to_torch
    from edgellm.runner.model_runner import ModelRunner
    from edgellm.runner.step_program import StepProgram
    from edgellm.speculative.speculator import make_speculator
    from edgellm_kernels.native_threads import num_threads, set_threads
    from edgellm_kernels.registry import explain
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.network import read_spec
    from edgellm_models.network.build import build_decoder
    from edgellm_models.network.split_decoder import SplitDecoder
    from edgellm_models.tokenizer import load_chat_templates, load_sampling_defaults, load_tokenizer
    from edgellm_models.tokenizer.stream_decoder import StreamDecoder

    imported = time.monotonic()
    notices: list[Notice] = []

    def tell(notice: Notice) -> None:
        notices.append(notice)
        log_notice(notice)
        if on_notice is not None:
            on_notice(notice)

    if resolved.threads is not None:
        torch.set_num_threads(resolved.threads)
        set_threads(resolved.threads)
    device = _device(resolved.device)
    if device == "cuda":
        from edgellm.cli.kernel_cache import use_kernel_cache

        cache_notice = use_kernel_cache(Locations.from_environment().cache)
        if cache_notice is not None:
            tell(cache_notice)
    checkpoint = open_checkpoint(path)
    _LOG.info(
        "opened %s: %s, %s, %d tensors, %d bytes",
        path,
        checkpoint.file_format,
        checkpoint.architecture,
        len(checkpoint.tensors()),
        checkpoint.file_bytes,
    )
    # Beside the weights: a large vocabulary takes as long as packing them, which leaves the interpreter free.
    reading = ThreadPoolExecutor(1, "tokenizer")
    read_tokenizer = reading.submit(load_tokenizer, path, checkpoint.file_format, checkpoint.metadata)
    reading.shutdown(wait=False)
    on_cpu, split_notice = split_for(
        checkpoint,
        resolved.gpu_layers,
        resolved.ctx,
        device,
        _free_memory(device) if device == "cuda" else None,
    )
    decoder: Decoder | SplitDecoder
    if split_notice is not None:
        tell(split_notice)
        num_layers = read_spec(checkpoint.file_format, checkpoint.metadata, checkpoint.tensors()).num_layers
        if on_cpu == num_layers:
            device, on_cpu = "cpu", 0
    if on_cpu:
        decoder = build_split(checkpoint, on_cpu, num_layers, kernels=("auto", resolved.kernels))
    else:
        # On a GPU products of several rows take 16-bit operands, with f32 sums; torch stays the reference.
        in_16_bits = device == "cuda" and resolved.kernels != "torch"
        decoder = build_decoder(
            checkpoint,
            device=device,
            dtype=torch.bfloat16 if in_16_bits else torch.float32,
            kernels=resolved.kernels,
            activations=resolved.activations,
        )
    tokenizer = read_tokenizer.result()
    for notice in (*getattr(tokenizer, "notices", ()), *decoder.notices):
        tell(notice)
    spec = decoder.spec
    free_bytes = _free_memory(device)
    if on_cpu:
        free_bytes = shared_room(free_bytes, _free_memory("cpu"), on_cpu, num_layers)
    keep = resolved.kv_window if resolved.kv_policy == WINDOW else resolved.kv_budget
    chunk = longest_step(resolved.kv_policy, keep, BLOCK_SIZE, prefill_chunk or PREFILL_CHUNK)
    kept = most_positions(resolved.kv_policy, keep, BLOCK_SIZE)
    if kv is None:
        exact = decoder.kernels.activations == "exact"
        kv, step_down = choose_kv_type(
            resolved.kv_dtype, spec, resolved.ctx, chunk, free_bytes, device, kept, exact=exact
        )
        if step_down is not None:
            tell(step_down)
    most = max_running or MAX_RUNNING
    context, notice = choose_context(spec, resolved.ctx, kv, chunk, free_bytes, kept, most)
    tell(notice)
    at_once = sequences_at_once(spec, context, kv, chunk, free_bytes, kept, most)
    speculator = make_speculator(resolved.spec)
    lookahead = 0 if speculator is None else speculator.lookahead
    sequences = max(at_once, full_contexts)
    groups = group_layouts(spec, context, chunk, BLOCK_SIZE, kept, sequences, lookahead, full_contexts)
    if full_contexts > 1:
        check_contexts(spec, [group.num_blocks for group in groups], kv, context, free_bytes, full_contexts)
    sizes = [group.num_blocks for group in groups]
    program: Decoder | StepProgram | SplitDecoder
    if isinstance(decoder, SplitDecoder):
        storage = allocate_split(spec, sizes, kv, on_cpu)
        program = decoder
    else:
        storage = allocate_storage(spec, sizes, kv, device, num_rings=at_once)
        program = choose_program(decoder, storage)
    parts = decoder.parts if isinstance(decoder, SplitDecoder) else (decoder,)
    on_torch = kv_left_to_torch([part.kernels for part in parts], storage, kv.name)
    if on_torch is not None:
        tell(on_torch)
    draft = None
    if resolved.draft is not None:
        if isinstance(decoder, SplitDecoder):
            raise BadInputError(
                "--draft needs the whole model on one device: run without it, or with --gpu-layers 0"
            )
        draft = load_draft(resolved, tokenizer, decoder, kv, speculator, device)
        own = draft.layouts(groups, full_contexts * context, chunk, lookahead)
        groups = (*groups, *own)
        storage = (*storage, *draft.allocate(own, kv, device, free_bytes))
        tell(draft.notice(storage[-len(own) :]))
    host_blocks = host_blocks_for(storage, device) if not on_cpu else (0,) * len(storage)
    host_storage = allocate_host_storage(storage, host_blocks) if any(host_blocks) else ()
    key = cache_key(model_id=str(path), rope=repr(spec.ropes), kv_dtypes=[kv.name] * len(groups))
    if isinstance(program, StepProgram):
        torch.set_num_threads(1)  # the native threads do the work: two pools would fight over the cores
    runner = ModelRunner(
        program,
        storage,
        vocab_size=spec.vocab_size,
        block_size=BLOCK_SIZE,
        device=device,
        host_kv=host_storage,
        spec_rule=resolved.spec_rule,
        num_groups=len(spec.kv_groups),
    )
    if device == "cuda":  # on the CPU nothing is compiled at run time
        from edgellm.engine.warm_up import warm_up

        steps = warm_up(
            runner,
            tokenizer,
            KVManager(groups, BLOCK_SIZE, enable_prefix_cache=False, has_tail=kv.has_tail),
            vocab_size=spec.vocab_size,
            context_length=context if kept is None else min(context, kept),
            prefill_chunk=chunk,
            heads_per_kv_head=spec.num_heads // spec.num_kv_heads,
            max_running=at_once,
        )
        _LOG.info("kernels were compiled and warmed up in %d steps", steps)
    if draft is not None:
        runner.drafter = draft.drafter(storage, len(spec.kv_groups), spec.vocab_size, device)
    core = Engine(
        runner,
        tokenizer,
        KVManager(
            groups,
            BLOCK_SIZE,
            cache_key=key,
            lookahead=lookahead,
            host_blocks=host_blocks,
            has_tail=kv.has_tail,
        ),
        context_length=context,
        vocab_size=spec.vocab_size,
        rope_switch_length=spec.rope_switch_length,
        # With a draft model pages hold more than the model's own, and not all of it at every moment.
        kv_identity=None if draft is not None else cache(partial(_kv_identity, path, spec, kv)),
        model_name=name,
        kv_window=resolved.kv_window,
        kv_budget=resolved.kv_budget,
        prefill_chunk=chunk,
        max_running=min(at_once, max_running or at_once) if kv.has_tail else max_running or MAX_RUNNING,
        speculator=speculator,
        # The CPU's kernels are done when they return: nothing would be in flight.
        depth=int(device == "cuda" and not on_cpu and speculator is None),
        make_decoder=lambda request: StreamDecoder(
            tokenizer,
            # A constraint is about the answer's whole text, its first space included.
            continues_text=request.continues_text or request.constraint is not None,
            shown_ids=request.shown_token_ids,
        ),
        recorder=StatsRecorder(
            weight_bytes=decoder.weight_bytes,
            kv_bytes=sum(pages.nbytes for pages in storage),
            device=device,
            kernel_backend=decoder.kernels.chosen["linear"],
        ),
        stats_interval_s=0.05,
    )
    threads = num_threads() if isinstance(program, StepProgram) else torch.get_num_threads()
    layer_skip = idle_work = None
    can_skip = draft is None and not isinstance(program, SplitDecoder)
    if speculator is not None and resolved.spec in ("auto", "skip") and can_skip:
        assert not isinstance(program, SplitDecoder)
        layer_skip = LayerSkip(
            program, kv, tokenizer, path, threads, device, runner, speculator, resolved.spec == "skip"
        )
        profiles = Locations.from_environment().cache / SKIP_FOLDER
        notice_of_skip = layer_skip.load(profiles)
        core.refresh_stats()
        if notice_of_skip is not None:
            tell(notice_of_skip)
        if layer_skip.wants_profile:
            free = partial(_free_memory, device)
            idle_work = calibrate_in_idle(layer_skip, profiles, free, core.refresh_stats)
    elif resolved.spec == "skip":
        why = "--gpu-layers splits the layers" if draft is None else "--draft names a model that drafts"
        tell(Notice("spec_skip_off", f"--spec skip drafts by lookup only here: {why}"))
    info = describe(checkpoint, spec, name, context)
    sampling_defaults = load_sampling_defaults(path, checkpoint.file_format, checkpoint.metadata)
    times = LoadTimes(imported - begin, time.monotonic() - imported)
    _LOG.info(
        "device %s, %d threads, KV cache %s, context %d; kernels: %s",
        device,
        threads,
        kv.name,
        context,
        ", ".join(f"{op} {backend}" for op, backend in explain(device, preferred=resolved.kernels).items()),
    )
    _LOG.info("imports took %.2f s, loading %.2f s", times.import_s, times.load_s)
    load_templates = partial(load_chat_templates, path, checkpoint.file_format, checkpoint.metadata)
    return Runtime(
        info,
        tokenizer,
        sampling_defaults,
        core,
        times,
        tuple(notices),
        load_templates,
        spec.vocab_size,
        kv_policy="stop" if kept is None else resolved.kv_policy,
        runner=runner,
        kv_read_bytes=partial(_kv_read_bytes, spec, kv),
        num_threads=threads,
        layer_skip=layer_skip,
        idle_work=idle_work,
    )


def _kv_read_bytes(spec: ModelSpec, kv: KVType, tokens: int) -> int:
    from edgellm.cache.kv_storage import kv_bytes_per_position

    return sum(
        kv_bytes_per_position(spec, len(group.layers), kv) * min(tokens, group.window or tokens)
        for group in spec.kv_groups
    )


def _kv_identity(path: Path, spec: ModelSpec, kv: KVType) -> KVIdentity:
    from edgellm.cache.kv_storage import BLOCK_SIZE
    from edgellm.engine.saved_kv import KVIdentity
    from edgellm_models.checkpoint.fingerprint import fingerprint

    rope = hashlib.blake2b(repr((spec.ropes, spec.rope_switch_length)).encode(), digest_size=8).hexdigest()
    return KVIdentity(fingerprint(path), kv.name, str(BLOCK_SIZE), rope)


def default_model_notice(name: str) -> Notice:
    """Says which model answers a prompt that came without one, so that no mistake in its name goes unseen."""
    notice = Notice("default_model", f"no model was named, so {name} answers; -m names another")
    log_notice(notice)
    return notice


def _keep_threads_from_spinning() -> None:
    """Shortens the busy waiting of GNU OpenMP's threads, which is read once, when torch is loaded.

    By default a thread that waits for the others spins for milliseconds. When another program wants the same
    core, that spinning is in the way of the very thread waited for: loading SmolLM2 beside three busy
    processes on two cores took 17 s with the default and 1.1 s like this. What the user set wins.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def describe(checkpoint: Checkpoint, spec: ModelSpec, name: str, context: int) -> ModelInfo:
    """What lists and headers show of a loaded model. The bits are those of all matrices, the type the
    commonest.
    """
    from edgellm_models.checkpoint.reader import commonest_type

    infos = list(checkpoint.tensors().values())
    matrices = [info for info in infos if len(info.shape) == 2]
    weights = sum(math.prod(info.shape) for info in matrices)
    bits = 8 * sum(info.nbytes for info in matrices) / max(1, weights)
    return ModelInfo(
        name=name,
        path=str(checkpoint.path),
        architecture=checkpoint.architecture,
        file_format=checkpoint.file_format,
        quantization=f"{commonest_type(infos) or 'unknown'} ({bits:.1f} bits)",
        parameters=sum(math.prod(info.shape) for info in infos),
        file_bytes=checkpoint.file_bytes,
        context_length=context,
        trained_context=spec.context_length,
    )


def _device(asked: str) -> str:
    """The torch device of a ``--device``. Here auto is the CPU; ResourceError when there is no such
    device.
    """
    if asked in ("auto", "cpu"):
        return "cpu"
    import torch

    if asked == "cuda":
        if not torch.cuda.is_available():
            raise ResourceError("--device cuda: torch finds no usable CUDA device here; use --device cpu")
        return "cuda"
    raise BadInputError(f"unknown device {asked!r}; choose auto, cpu or cuda")


def _free_memory(device: str) -> int | None:
    """Bytes free for the KV cache; None where the system does not say."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    from edgellm_models.network.hold import free_memory_bytes

    return free_memory_bytes()
