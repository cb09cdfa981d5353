"""``edgellm complete``: the text after a prompt, without a chat template."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.completion_run import Completion, json_result, make_request, run
from edgellm.cli.options import (
    check_text,
    constraint_options,
    engine_options,
    json_option,
    option,
    sampling_options,
)
from edgellm.cli.piped_text import read_stdin

if TYPE_CHECKING:
    from edgellm_models.errors import Notice

DEFAULT_MAX_TOKENS = 256
MAX_LOGPROBS = 20
"""What the engine serves at most."""


@click.command(
    "complete",
    cls=EdgeCommand,
    examples=(
        'edgellm complete "The capital of France is"',
        'edgellm complete gemma3-270m "Once upon a time" --max-tokens 64',
        "edgellm complete -m smollm2-135m --json < prompt.txt",
        "edgellm complete smollm2-135m --input prompts.jsonl --output answers.jsonl",
    ),
)
@click.argument("words", metavar="[MODEL] PROMPT", nargs=-1)
@engine_options
@sampling_options
@constraint_options
@option(
    "--beams",
    metavar="K",
    type=int,
    default=None,
    help="Search with K beams for the most likely text as a whole.",
)
@option(
    "--logit-bias",
    "logit_biases",
    metavar="ID=BIAS",
    multiple=True,
    help="Add BIAS to the logits of a token.",
)
@option(
    "--logprobs",
    metavar="N",
    type=click.IntRange(0, MAX_LOGPROBS),
    default=None,
    help="Report N alternatives per token, with --json.",
)
@option(
    "--input",
    "input_path",
    metavar="FILE",
    default=None,
    help='Answer every line of a JSONL file, {"prompt": TEXT} each; with --output.',
)
@option(
    "--output",
    "output_path",
    metavar="FILE",
    default=None,
    help="Append a line of JSON per line of --input; what is there already is kept and not run again.",
)
@option("--ignore-eos", is_flag=True, help="Go on behind the model's end tokens.")
@option("--no-special", is_flag=True, help="Take control strings in the prompt as text and add no BOS.")
@json_option
def command(
    words: tuple[str, ...],
    schema: str | None,
    grammar: str | None,
    beams: int | None,
    logit_biases: tuple[str, ...],
    logprobs: int | None,
    input_path: str | None,
    output_path: str | None,
    ignore_eos: bool,
    no_special: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Continue a text, without a chat template; only the new text is printed.

    Greedy and at most 256 tokens unless told otherwise. Without PROMPT, piped standard input is the prompt,
    without its last line feed. One word alone is the PROMPT, unless it names a model and the prompt is piped.
    With --beams the text comes as a whole at the end. With --input and --output there is no PROMPT: many
    lines run at once, results keep their order, a broken line fails alone, and a stopped run can go on.
    """
    from dataclasses import replace

    from edgellm.cli.batch import BatchSettings, batch_files, report_batch, run_batch
    from edgellm.cli.beams import refuse_with_beams, run_beams, unused_settings
    from edgellm.cli.constraint_files import read_constraint
    from edgellm.cli.model_access import local_model, named_by
    from edgellm.cli.options import resolve_settings
    from edgellm.cli.output import current_output
    from edgellm.config import FLAG
    from edgellm.contracts import SamplingParams
    from edgellm.log import log_answer, log_notice
    from edgellm_models.errors import Notice, UsageError

    context = click.get_current_context()
    by_flag = context.get_parameter_source("logprobs") is click.core.ParameterSource.COMMANDLINE
    reported = as_json or input_path is not None
    if logprobs is not None and not reported and by_flag:  # as a variable it waits for a --json
        raise UsageError("--logprobs needs --json, which is where they are reported")
    files = batch_files(input_path, output_path, words, settings, beams=beams, as_json=as_json)
    model: str | None
    prompt: str | None
    if files is not None:
        model, prompt = (words[0] if words else None), ""
    else:
        model, prompt = split_words(words, model_named=settings.get("model") is not None)
    if prompt is not None:
        check_text("PROMPT", prompt)
    if settings.get("kv_policy") == "trim":
        raise UsageError("--kv-policy trim leaves out turns of a chat; a completion has none: use stop")
    resolved = resolve_settings(settings, model=model)
    if beams is not None and resolved.kv_policy in ("window", "budget"):
        raise UsageError(
            f"--beams compares exact scores, which --kv-policy {resolved.kv_policy} does not give: use stop"
        )
    base = SamplingParams(temperature=0.0, max_new_tokens=DEFAULT_MAX_TOKENS)
    sampling = replace(
        resolved.sampling_params(base), logit_bias=parse_biases(logit_biases), ignore_eos=ignore_eos
    )
    if beams is not None:
        refuse_with_beams(
            settings, schema=schema, grammar=grammar, logit_bias=logit_biases, logprobs=logprobs
        )
    constraint = read_constraint(schema, grammar)
    if prompt is None:
        prompt = read_stdin().removesuffix("\n").removesuffix("\r")
    output = current_output()

    def show(notice: Notice) -> None:
        if not as_json:
            output.notice(notice)

    with named_by(resolved):
        found, path = local_model(resolved.model, output)
    from edgellm.cli.collector import uncollected
    from edgellm.cli.runtime import default_model_notice, load_runtime

    first = [default_model_notice(found.name)] if model is None and resolved.origins["model"] != FLAG else []
    if not prompt:
        first.append(Notice("empty_prompt", "the prompt is empty, so the text begins from nothing"))
    for notice in first:
        show(notice)
    with uncollected():
        runtime = load_runtime(resolved, path, found.name, show)
    try:
        if files is not None:
            batch = BatchSettings(sampling, logprobs, no_special, constraint)
            return report_batch(run_batch(runtime, *files, batch, output), output)
        request = make_request(runtime, prompt, sampling, logprobs, no_special, constraint)
        result = Completion(as_json)
        result.first_notices = first
        if biases := [token_id for token_id in sampling.logit_bias if token_id >= runtime.vocab_size]:
            raise UsageError(
                f"--logit-bias names token {max(biases)}, but the vocabulary has {runtime.vocab_size} tokens"
            )
        if beams is None:
            run(runtime, request, result)
        else:
            unused = unused_settings(sampling)
            result.notices += [unused] if unused is not None else []
            run_beams(runtime, request, beams, result)
        if result.reached_limit and resolved.max_tokens is None:  # who set a limit knows it
            detail = f"the answer was cut at {DEFAULT_MAX_TOKENS} tokens; --max-tokens N allows more"
            result.notices.append(Notice("max_tokens", detail))
        for notice in result.notices:
            show(notice)
            log_notice(notice)
        if (
            result.last is not None
            and result.last.finish_reason
            and result.last.usage
            and result.last.timings
        ):
            log_answer(found.name, result.last.finish_reason, result.last.usage, result.last.timings)
        if sampling.seed is None and sampling.temperature > 0 and result.token_ids and not as_json:
            assert result.last is not None
            output.note(f"note: seed {result.last.seed}")
        if as_json:
            output.json(json_result(runtime, request, result))
        return result.exit_code()
    finally:
        runtime.close()


# --- what was asked for ---


def split_words(words: tuple[str, ...], *, model_named: bool) -> tuple[str | None, str | None]:
    """MODEL and PROMPT of the command line; a PROMPT of None comes from standard input."""
    from edgellm_models.errors import UsageError

    if len(words) > 2 or (len(words) == 2 and model_named):
        raise UsageError(f"{len(words)} words were given for [MODEL] PROMPT; put the PROMPT in quotes")
    if len(words) == 2:
        return words[0], words[1]
    if len(words) == 1 and (model_named or not names_a_model(words[0])):
        return None, words[0]
    if sys.stdin is None or sys.stdin.isatty():
        named = f" {words[0]}" if words else ""
        raise UsageError(f'PROMPT is missing: edgellm complete{named} "The capital of France is"')
    return (words[0] if words else None), None


def names_a_model(word: str) -> bool:
    """Whether a single word is a model rather than a prompt: a catalog name, hf:..., a GGUF file, a model's
    folder. A .gguf that does not exist and a mistyped name count, so that a typing error never becomes a
    prompt.
    """
    from pathlib import Path

    from edgellm.cli.options import models_folder
    from edgellm_models.catalog import is_mistyped, load_catalog
    from edgellm_models.catalog.catalog import HUB_PREFIX

    if word in load_catalog() or word.startswith(HUB_PREFIX) or is_mistyped(word, models_folder()):
        return True
    try:
        path = Path(word).expanduser()
        return (path.suffix == ".gguf" and not any(map(str.isspace, word))) or (
            path / "config.json"
        ).is_file()
    except (OSError, ValueError, RuntimeError):
        return False


def parse_biases(texts: tuple[str, ...]) -> dict[int, float]:
    """``ID=BIAS`` options as a mapping. UsageError names the one that is neither."""
    from edgellm_models.errors import UsageError

    biases = {}
    for text in texts:
        token_id, separator, bias = text.partition("=")
        try:
            if not separator or int(token_id) < 0 or not math.isfinite(float(bias)):
                raise ValueError
            biases[int(token_id)] = float(bias)
        except ValueError:
            rule = "ID=BIAS, a token id and a finite number such as 42=-100"
            raise UsageError(f"--logit-bias must be {rule}, not {text[:80]!r}") from None
    return biases
