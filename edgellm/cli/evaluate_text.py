"""``edgellm eval``: perplexity of a text, and how far a model is from a reference, through the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.options import engine_options, json_option, model_argument, option, resolve_settings
from edgellm.cli.output import Output, counted, current_output

if TYPE_CHECKING:
    from edgellm.cache.kv_storage import KVType
    from edgellm.cli.runtime import Runtime
    from edgellm.config import ResolvedConfig
    from edgellm.evaluate.evaluation import EvaluationResult
    from edgellm.evaluate.windows import WindowPlan
    from edgellm_models.errors import Notice

DEFAULT_CTX = 512
MAX_CHUNK = 512
"""Tokens per step: more are no faster, and their rows of logits have to be in memory at once."""
MAX_TEXT_BYTES = 64 << 20


@click.command(
    "eval",
    cls=EdgeCommand,
    examples=(
        "edgellm eval smollm2-135m --text book.txt",
        "edgellm eval small.gguf --text book.txt --reference original.gguf --json",
        "edgellm eval smollm2-135m --text book.txt --chunk 16 --kv-dtype int8 --reference smollm2-135m",
    ),
)
@model_argument()
@option("--text", "text_path", metavar="FILE", required=True, help="The text to score (UTF-8); - is piped.")
@option("--reference", metavar="MODEL2", default=None, help="Also report the KL divergence from this model.")
@option(
    "--chunk",
    metavar="N",
    type=click.IntRange(1, MAX_CHUNK),
    default=None,
    help="Run N tokens per step at most, so that stored keys and values are read back.",
)
@option(
    "--windows", metavar="N", type=click.IntRange(1), default=None, help="Score only the first N windows."
)
@engine_options
@json_option
def command(
    model_name: str | None,
    text_path: str,
    reference: str | None,
    chunk: int | None,
    windows: int | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Score a text: the perplexity of the second half of each window of --ctx tokens (512), as
    llama-perplexity has it. Special tokens that the text spells out count as such.

    With --reference also the KL divergence of MODEL from MODEL2 and how often both have the same best token.
    The reference runs on the torch kernels with exact activations and an f32 KV cache, whatever MODEL runs
    with; its logits are kept in the cache folder, up to 4 GB.
    """
    from edgellm.cli.model_access import local_model, named_by

    output = current_output()
    resolved = resolve_settings(settings, model=model_name)
    text = read_text(text_path)
    with named_by(resolved):
        model, path = local_model(resolved.model, output)
    second = None if reference is None else local_model(reference, output)[1]
    told: list[Notice] = []

    def tell(notice: Notice) -> None:
        told.append(notice)
        if not as_json:
            output.notice(notice)

    report = run_evaluation(
        Evaluation(text, path, model.name, resolved, second, chunk, windows), tell, progress_line(output)
    )
    output.end_progress()
    if as_json:
        output.json(report.as_json() | {"notices": told})
    else:
        print_report(output, report)


def read_text(path: str) -> str:
    """The text of a file or of standard input, without one line feed at its end, as llama.cpp reads it.

    NotFoundError, BadInputError for what is too large, empty or not UTF-8.
    """
    from edgellm_models.errors import BadInputError, NotFoundError

    name = "the piped text" if path == "-" else path
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
        else:
            with Path(path).open("rb") as stream:
                data = stream.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"--text {path}: there is no such file") from None
    except OSError as error:
        raise BadInputError(f"--text {path}: {error.strerror}") from None
    if len(data) > MAX_TEXT_BYTES:
        raise BadInputError(f"{name} is larger than {MAX_TEXT_BYTES >> 20} MiB; give a part of it")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{name} is not UTF-8 (byte {error.start}); convert it first") from None
    text = text.removesuffix("\n")
    if not text.strip():
        raise BadInputError(f"{name} is empty")
    return text


@dataclass(frozen=True)
class Evaluation:
    """What is to be measured."""

    text: str
    path: Path
    name: str
    resolved: ResolvedConfig
    reference: Path | None = None
    chunk: int | None = None
    windows: int | None = None
    kv: KVType | None = None
    """Types of K and V apart, for measurements; None is what ``resolved`` says."""
    cache_folder: Path | None = None
    """Where reference logits are kept; None is the user's cache folder."""
    scores_all: bool = False
    """Whole windows count, not their second halves, for measurements."""


@dataclass(frozen=True)
class Report:
    """What was measured and how."""

    result: EvaluationResult
    plan: WindowPlan
    model: str
    quantization: str
    reference: str | None
    reference_was_cached: bool
    chunk: int
    settings: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """One flat object, as docs and scripts name its fields."""
        result = self.result
        found: dict[str, Any] = {
            "perplexity": result.perplexity,
            "perplexity_stderr": result.perplexity_stderr,
            "tokens": result.tokens,
        }
        if result.divergence is not None:
            found |= asdict(result.divergence)
            found |= {"reference": self.reference, "reference_was_cached": self.reference_was_cached}
        return found | {
            "windows": result.windows,
            "ctx": self.plan.ctx,
            "chunk": self.chunk,
            "text_tokens": len(self.plan.token_ids),
            "model": self.model,
            "quantization": self.quantization,
            **self.settings,
        }


def run_evaluation(
    job: Evaluation,
    tell: Callable[[Notice], None],
    on_progress: Callable[[int, int, float], None] = lambda done, total, perplexity: None,
) -> Report:
    """Loads what is needed, scores, and keeps the reference's rows. Raises what loading and scoring raise."""
    from contextlib import ExitStack

    import torch

    from edgellm.cli.runtime import load_runtime
    from edgellm.evaluate.evaluation import evaluate
    from edgellm.evaluate.rows import EngineRows
    from edgellm.evaluate.windows import plan_windows
    from edgellm_models.errors import Notice, UsageError

    # Of the reference, which torch computes: a model on native kernels takes all but one thread from torch.
    torch_threads = job.resolved.threads or torch.get_num_threads()
    if job.resolved.kv_policy == "trim":
        raise UsageError("--kv-policy trim leaves out turns of a chat; a text has none: use stop")
    settings = replace(job.resolved, ctx=job.resolved.ctx or DEFAULT_CTX)
    with ExitStack() as stack:
        # Half a window, at most a step's chunk: of what is not scored no logits are computed.
        chunk = job.chunk or max(1, min((settings.ctx or DEFAULT_CTX) // 2, MAX_CHUNK))
        runtime = load_runtime(settings, job.path, job.name, tell, prefill_chunk=chunk, kv=job.kv)
        stack.callback(runtime.close)
        ids = runtime.tokenizer.encode(job.text)
        bos = runtime.tokenizer.bos_id if runtime.tokenizer.add_bos else None
        plan = plan_windows(ids, runtime.info.context_length, bos, job.windows, job.scores_all)
        if plan.unscored_tail and job.windows is None:
            tell(
                Notice(
                    "text_tail",
                    f"the last {counted(plan.unscored_tail, 'token')} of {len(ids):,} do not fill a window "
                    f"of {plan.ctx} and are not scored",
                )
            )
        reference, cached = None, False
        if job.reference is not None:
            reference, cached, commit = _reference(
                job, replace(settings, threads=torch_threads), runtime, plan, chunk, tell, stack
            )
        assert runtime.runner is not None
        model = EngineRows(runtime.core, runtime.runner, kv_policy=settings.kv_policy, on_notice=tell)
        result = evaluate(model, plan, reference, on_progress)
        if job.reference is not None:
            commit()
        stats = runtime.core.stats
        return Report(
            result,
            plan,
            runtime.info.name,
            runtime.info.quantization,
            None if job.reference is None else str(job.reference),
            cached,
            chunk,
            {
                "kv_dtype": job.kv.name if job.kv is not None else settings.kv_dtype,
                "kv_policy": settings.kv_policy,
                "kernels": settings.kernels,
                "kernel_backend": stats.kernel_backend,
                "activations": settings.activations,
                "device": stats.device,
            },
        )


def _reference(
    job: Evaluation,
    settings: ResolvedConfig,
    runtime: Runtime,
    plan: WindowPlan,
    chunk: int,
    tell: Callable[[Notice], None],
    stack: Any,
) -> tuple[Any, bool, Callable[[], None]]:
    """The reference, whether its rows were kept, and what is to be done when all rows were read."""
    import hashlib

    import torch

    import edgellm
    from edgellm.cli.runtime import load_runtime
    from edgellm.evaluate.evaluation import KeptReference, RunningReference, check_same_vocabulary
    from edgellm.evaluate.reference_cache import CacheKey, ReferenceCache, fingerprint
    from edgellm.evaluate.rows import EngineRows
    from edgellm.locations import Locations
    from edgellm_models.errors import Notice

    assert job.reference is not None
    exact = replace(
        settings, kernels="torch", activations="exact", kv_dtype="f32", kv_policy="stop", spec="off"
    )
    ids = b"".join(i.to_bytes(4, "little") for w in range(plan.num_windows) for i in plan.window(w))
    facts = {
        "model": fingerprint(job.reference),
        "tokens": hashlib.sha256(ids).hexdigest(),
        "ctx": plan.ctx,
        "windows": plan.num_windows,
        "first_row": plan.first_row,
        "settings": f"{exact.kernels} {exact.activations} {exact.kv_dtype} {exact.device}",
        "versions": f"edgellm {edgellm.__version__} torch {torch.__version__}",
    }
    key = CacheKey(facts, plan.num_scored, runtime.vocab_size)
    folder = job.cache_folder or Locations.from_environment().cache / "reference-logits"
    cache = ReferenceCache(folder)
    kept, notice = cache.open(key)
    if notice is not None:
        tell(notice)
    if kept is not None:
        stack.callback(kept.close)
        return KeptReference(kept), True, lambda: None
    other = load_runtime(exact, job.reference, job.reference.name, prefill_chunk=chunk)
    stack.callback(other.close)
    check_same_vocabulary(
        (runtime.vocab_size, list(plan.token_ids)),
        (other.vocab_size, other.tokenizer.encode(job.text)),
        (job.name, job.reference.name),
    )
    writer, notice = cache.writer(key)
    if notice is not None:
        tell(notice)
    if writer is not None:
        stack.enter_context(writer)

    def commit() -> None:
        if writer is not None:
            writer.commit()
            if writer.failure is not None:
                tell(
                    Notice("reference_not_cached", f"the reference's logits were not kept: {writer.failure}")
                )

    assert other.runner is not None
    return RunningReference(EngineRows(other.core, other.runner), writer), False, commit


def progress_line(output: Output) -> Callable[[int, int, float], None]:
    """Shows windows done and the perplexity so far, where a terminal can."""

    def show(done: int, total: int, perplexity: float) -> None:
        output.status(f"window {done} of {total}, perplexity {perplexity:.4f}")

    return show


def print_report(output: Output, report: Report) -> None:
    result, plan = report.result, report.plan
    output.data(
        f"perplexity {result.perplexity:.4f} +/- {result.perplexity_stderr:.4f} over "
        f"{counted(result.tokens, 'token')} in {counted(result.windows, 'window')} of {plan.ctx}"
    )
    found = result.divergence
    if found is not None:
        output.data(
            f"KL divergence from {report.reference}: mean {found.mean_kld:.6f} +/- "
            f"{found.mean_kld_stderr:.6f}, median {found.median_kld:.6f}, p99 {found.p99_kld:.6f}, "
            f"largest {found.max_kld:.4f} nats"
        )
        output.data(f"same best token: {found.top1_agreement:.2%}")
