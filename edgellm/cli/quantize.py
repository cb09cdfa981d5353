"""``edgellm quantize``: a model in fewer bits, in the file formats that other tools read."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgellm.cli.command import EdgeCommand
from edgellm.cli.edge_option import complete_models
from edgellm.cli.errors import one_line
from edgellm.cli.options import json_option, option
from edgellm.cli.output import Output, current_output, megabytes
from edgellm_models.errors import BadInputError, NotFoundError, UsageError

if TYPE_CHECKING:
    from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeProgress, QuantizeReport

_WORST = 5
"""Tensors of the largest error that the summary names."""
_NEUTRAL = {"method": "auto", "effort": "default"}
"""Options of every format but hf, with the word that asks for nothing."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@click.command(
    cls=EdgeCommand,
    name="quantize",
    examples=(
        "edgellm quantize smollm2-135m smollm2-Q4_K_M.gguf",
        "edgellm quantize ./Qwen3-0.6B qwen3-gptq --format gptq --bits 4 --calibration text.txt",
        "edgellm quantize ./Qwen3-0.6B qwen3-awq --format awq --calibration self",
        "edgellm quantize model.gguf folder --format hf --dtype bf16",
        "edgellm quantize ./Qwen3-0.6B out.gguf --type Q3_K_M --dry-run",
    ),
)
@click.argument("source", metavar="SRC", shell_complete=complete_models)
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@option(
    "--format",
    "form",
    metavar="FORMAT",
    help="gguf, gptq, awq, compressed-tensors or hf (dense safetensors).  [default: gguf; gptq with --bits]",
)
@option("--type", "kind", metavar="TYPE", help="Type of a GGUF file, such as Q4_K_M.  [default: Q4_K_M]")
@option(
    "--bits", type=int, metavar="N", help="Bits of the codes: 2, 3, 4, 8 in GPTQ, 4 in AWQ.  [default: 4]"
)
@option(
    "--group-size",
    type=int,
    metavar="N",
    help="Inputs that share a scale; -1 is a whole row.  [default: 128, or what divides every row]",
)
@option("--asym", is_flag=True, help="GPTQ with zero points; AWQ always has them.")
@option("--dtype", metavar="TYPE", help="Of a dense folder: bf16, f16 or f32.  [default: bf16]")
@option(
    "--method",
    metavar="METHOD",
    help="auto, rtn, gptq or awq; auto is rtn without calibration.  [default: auto]",
)
@option("--effort", metavar="EFFORT", help="How long to search: fast, default or best.  [default: default]")
@option(
    "--calibration",
    metavar="FILE|self|none",
    help="Text that shows the linears their inputs: a file, the model's own writing (self), or none.  "
    "[default: none; self for the methods gptq and awq]",
)
@option(
    "--samples",
    type=int,
    metavar="N",
    help="Calibration sequences at most; self writes as many tokens as so many whole ones have.",
)
@option("--sequence-length", type=int, metavar="N", help="Tokens of a calibration sequence at most.")
@option("--seed", type=int, default=0, metavar="N", help="Of the calibration's draws.  [default: 0]")
@option("--imatrix", metavar="FILE", help="Read an importance matrix of llama.cpp.")
@option("--save-imatrix", metavar="FILE", help="Write what calibration saw as one, to a new file.")
@option(
    "--target-bpw",
    type=float,
    metavar="X",
    help="Choose GGUF types for this many bits per weight, in place of --type.",
)
@option(
    "--tensor-type",
    "tensor_types",
    multiple=True,
    metavar="REGEX=TYPE",
    help="Type of the GGUF tensors whose name matches; may be given again, the first that matches decides.  "
    "A REGEX that matches no tensor is an error; norms and vectors keep their type.",
)
@option(
    "--work-dir",
    metavar="FOLDER",
    help="Where a calibrated job keeps finished layers until OUT is whole; then its files there are "
    "removed.  [default: OUT.work, removed with its files]",
)
@option(
    "--resume",
    is_flag=True,
    help="Go on where an interrupted run of the same job stopped.  Without it, finished layers of an "
    "unfinished job are never thrown away: the run is refused.",
)
@option("--max-memory", metavar="BYTES", help="Memory the job may take, such as 8G.")
@option("--dry-run", is_flag=True, help="Say sizes, bits per weight, time and memory; write nothing.")
@json_option
def command(source: str, out: Path, as_json: bool, **given: Any) -> None:
    """Write SRC (a Hugging Face folder, a GGUF file or a model's name) as OUT in fewer bits.

    Nothing appears under the name OUT before it is whole and has been read back. What is there already is
    never written over.
    """
    from edgellm.cli.model_access import local_model
    from edgellm_quantize.api import quantize_model

    output = current_output()
    _refuse_empty(given)
    given = _without_idle_variables(given)
    recipe, calibration = _recipe(given), _calibration(given)
    _, path = local_model(source, output)
    job = _job(path, out, recipe, calibration, given, output)
    try:
        report = quantize_model(job)
    finally:
        output.end_progress()
    for notice in report.notices:
        output.notice(notice)
    if as_json:
        output.json(report.as_json())
        return
    for line in summary(report):
        output.data(line)


def _option(name: str) -> str:
    """A parameter as it is given: ``--tensor-type``."""
    word = {"form": "format", "kind": "type", "tensor_types": "tensor-type"}.get(name, name)
    return f"--{word.replace('_', '-')}"


def _refuse_empty(given: dict[str, Any]) -> None:
    """UsageError for a text option without text: what it was to be is not known."""
    for name, value in given.items():
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise UsageError(f"{_option(name)} is empty (an unset shell variable?): say what is meant")


def _format(given: dict[str, Any]) -> str:
    return given["form"] or ("gguf" if given["bits"] is None else "gptq")


def _calibration_text(given: dict[str, Any]) -> str:
    """A file's name, ``self`` or ``none``; these two are read in either case, as formats and types are."""
    method = (given["method"] or "auto").lower()
    text: str = given["calibration"] or ("self" if method in ("gptq", "awq") else "none")
    return text.lower() if text.lower() in ("self", "none") else text


def _from_variable(name: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is ParameterSource.ENVIRONMENT


def _without_idle_variables(given: dict[str, Any]) -> dict[str, Any]:
    """The options less those of EDGELLM_ variables that this run has no use for.

    A variable holds for every run, so that it is no mistake as an option of the command line is, which wins
    where the two say different things.
    """
    idle = set(_NEUTRAL) if _format(given).lower() == "hf" else set()
    sizes = {name for name in ("kind", "target_bpw") if given[name] is not None and _from_variable(name)}
    if len(sizes) == 1 and None not in (given["kind"], given["target_bpw"]):
        idle |= sizes
    given = {name: None if name in idle and _from_variable(name) else value for name, value in given.items()}
    if _calibration_text(given) == "none":
        idle = {"samples", "sequence_length", "work_dir"}
    return {name: None if name in idle and _from_variable(name) else value for name, value in given.items()}


def _is_given(name: str, value: Any) -> bool:
    """Whether an option asks for something. Not by equality alone: 0 is a value."""
    if value is None or value is False or value == ():
        return False
    return name not in _NEUTRAL or str(value).lower() != _NEUTRAL[name]


def _recipe(given: dict[str, Any]) -> Any:
    """Options to a QuantizeRecipe; UsageError names an option that the format has no use for."""
    from edgellm_quantize.recipe import QuantizeRecipe

    form = _format(given)
    uses = {
        "gguf": {"kind", "target_bpw", "tensor_types", "imatrix"},
        "hf": {"dtype"},
        "gptq": {"bits", "group_size", "asym", "imatrix"},
        "awq": {"bits", "group_size", "asym", "imatrix"},
        "compressed-tensors": {"bits", "group_size", "asym", "imatrix"},
    }
    for key in uses.keys() - {"hf"}:
        uses[key] |= _NEUTRAL.keys()  # a dense folder rounds nothing
    owners = {
        name: [key for key, names in uses.items() if name in names]
        for names in uses.values()
        for name in names
    }
    for name, forms in owners.items():
        if _is_given(name, given[name]) and form in uses and form not in forms:
            raise UsageError(f"{_option(name)} goes with --format {' or '.join(forms)}, not {form}")
    if given["target_bpw"] is not None and given["kind"] is not None:
        raise UsageError("--target-bpw and --type both say how large the file is to be: give one of them")
    values = {
        "format": form,
        "type": given["kind"] and given["kind"].upper(),
        "dtype": given["dtype"] and given["dtype"].lower(),
        "bits": given["bits"],
        "method": given["method"],
        "effort": given["effort"],
        "group_size": given["group_size"],
        "target_bpw": given["target_bpw"],
    }
    pairs = [_tensor_type(text) for text in given["tensor_types"]]
    return QuantizeRecipe(
        **{name: value for name, value in values.items() if value is not None},
        symmetric=not given["asym"] and form != "awq",
        tensor_types=tuple(pairs),
    )


def _tensor_type(text: str) -> tuple[str, str]:
    pattern, separator, kind = text.rpartition("=")
    if not separator or not pattern:
        raise UsageError(f"--tensor-type needs REGEX=TYPE, not {text!r}")
    return pattern, kind.upper()


def _calibration(given: dict[str, Any]) -> CalibrationSpec:
    from edgellm_quantize.recipe import CalibrationSpec

    text = _calibration_text(given)
    sizes = {"samples": given["samples"], "sequence_length": given["sequence_length"]}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    if text == "none":
        for name in (*sizes, *_named_seed()):
            raise UsageError(f"{_option(name)} goes with --calibration FILE or self")
    if text in ("self", "none"):
        return CalibrationSpec(source=text, seed=given["seed"], **sizes)
    path = Path(text)
    if not os.path.lexists(path):
        raise NotFoundError(
            f"--calibration {text}: there is no such file (self and none are the other choices)"
        )
    if not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "no regular file"
        raise BadInputError(f"--calibration {text}: this is {what}, a file of text is needed")
    return CalibrationSpec(source="file", path=path, seed=given["seed"], **sizes)


def _named_seed() -> tuple[str, ...]:
    """("seed",) where the command line has one. The variable EDGELLM_SEED is for other commands too."""
    context = click.get_current_context(silent=True)
    if context is None or context.get_parameter_source("seed") is not ParameterSource.COMMANDLINE:
        return ()
    return ("seed",)


def _job(
    path: Path,
    out: Path,
    recipe: Any,
    calibration: CalibrationSpec,
    given: dict[str, Any],
    output: Output,
) -> QuantizeJob:
    from edgellm_quantize.recipe import QuantizeJob

    def optional(name: str) -> Path | None:
        return None if given[name] is None else Path(given[name])

    generate = None
    if calibration.source == "self" and not given["dry_run"]:
        generate = own_writing(path)
    return QuantizeJob(
        source=path,
        out=out,
        recipe=recipe,
        calibration=calibration,
        imatrix=optional("imatrix"),
        save_imatrix=optional("save_imatrix"),
        work_dir=optional("work_dir"),
        resume=given["resume"],
        max_memory=_bytes(given["max_memory"]),
        dry_run=given["dry_run"],
        on_progress=_Progress(output) if output.shows_progress else None,
        generate=generate,
    )


def _bytes(text: str | None) -> int | None:
    """``8G``, ``500M``, ``1000000``: powers of two."""
    if text is None:
        return None
    word = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = word[-1:] if word[-1:] in _UNITS and not word[-1:].isdigit() else ""
    try:
        number = float(word.removesuffix(unit) if unit else word)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e18:
        raise UsageError(f"--max-memory needs bytes, such as 8G or 500M, not {text!r}")
    return int(number * _UNITS[unit])


def own_writing(path: Path) -> Callable[[Sequence[Sequence[int]], int, int], list[list[int]]]:
    """Continues prompts with the model itself: loaded when asked, sampled at temperature 1, let go after."""

    def generate(prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> list[list[int]]:
        from edgellm.contracts import SamplingParams
        from edgellm.llm import LLM

        draw = random.Random(seed)  # one seed for all would give equal prompts equal texts
        settings = [
            SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens, seed=draw.getrandbits(32))
            for _ in prompts
        ]
        with LLM(path) as llm:
            results = llm.generate([list(prompt) for prompt in prompts], settings)
        return [list(result.answers[0].token_ids) for result in results]

    return generate


class _Progress:
    """One line with the share that is done and the time that is left."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self.started = time.monotonic()

    def __call__(self, progress: QuantizeProgress) -> None:
        elapsed = time.monotonic() - self.started
        left = ""
        if progress.done > 0.02 and elapsed > 1.0:
            left = f"  {_duration(elapsed * (1 - progress.done) / progress.done)} left"
        bar = "#" * int(24 * progress.done)
        detail = f"  {one_line(progress.detail)}" if progress.detail else ""  # it may name a tensor
        self.output.status(f"{progress.phase:<11} [{bar:<24}] {progress.done:4.0%}{left}{detail}")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _percent(share: float) -> str:
    """With three digits that say something, however small: ``1.23%``, ``0.000123%``."""
    percent = 100 * share
    if not 0 < percent < 100:
        return f"{percent:.0f}%"
    return f"{percent:.{2 - math.floor(math.log10(percent))}f}%"


def summary(report: QuantizeReport) -> list[str]:
    """What a person wants to know of a report; no line holds a control character of a name."""
    verb = "would be" if report.dry_run else "is"
    kinds: dict[str, tuple[int, int]] = {}
    for tensor in report.tensors:
        count, size = kinds.get(tensor.type_name, (0, 0))
        kinds[tensor.type_name] = count + 1, size + tensor.nbytes
    lines = [
        f"{report.out} {verb} {report.format} {report.type_name}: {megabytes(report.nbytes)}, "
        f"{report.bits_per_weight:.2f} bits per weight over all {report.num_weights / 1e6:.1f} M weights "
        f"(scales, zero points and wider tensors included)",
    ]
    for name, (count, size) in sorted(kinds.items(), key=lambda pair: -pair[1][1]):
        word = "tensor " if count == 1 else "tensors"
        lines.append(f"  {name:<12} {count:>4} {word}  {megabytes(size)}")
    took = "about " if report.dry_run else ""
    memory = f", memory {took}{megabytes(report.peak_bytes)}" if report.peak_bytes else ""
    lines.append(f"method {report.method}, time {took}{_duration(report.seconds)}{memory}")
    if report.calibration_tokens:
        lines.append(f"calibrated with {report.calibration_tokens:,} tokens")
    for measure in ("outputs", "weights"):
        rounded = [tensor for tensor in report.tensors if tensor.error_measure == measure]
        if rounded:
            worst = sorted(rounded, key=lambda tensor: -(tensor.relative_error or 0.0))[:_WORST]
            named = ", ".join(f"{tensor.name} {_percent(tensor.relative_error or 0.0)}" for tensor in worst)
            lines.append(f"largest relative squared errors of {measure}: {named}")
    return [" " * (len(line) - len(line.lstrip(" "))) + one_line(line) for line in lines]
