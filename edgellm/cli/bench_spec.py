"""``edgellm bench spec``: speculation by class of prompt, and the calibration of layer skip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.options import engine_options, json_option, model_argument, option, resolve_settings
from edgellm.cli.output import Output, current_output

if TYPE_CHECKING:
    from edgellm.cli.runtime import Runtime
    from edgellm.config import ResolvedConfig
    from edgellm.speculative.skip_profile import SkipProfile
    from edgellm_models.errors import Notice

MODES = ("ngram", "skip", "auto")
"""Each against the same engine without speculation."""
CONTEXT = 2048


@click.command(
    "spec",
    cls=EdgeCommand,
    examples=(
        "edgellm bench spec",
        "edgellm bench spec --class summary,retrieval --mode auto --repeat 5",
        "edgellm bench spec -m ./model.gguf --calibrate-only",
    ),
)
@model_argument()
@option("--class", "classes", metavar="NAME,...", default=None, help="Classes of prompts.  [default: all]")
@option(
    "--mode",
    "modes",
    metavar="NAME,...",
    default=",".join(MODES),
    show_default=True,
    help="What is compared.",
)
@option(
    "--new-tokens", metavar="N", type=click.IntRange(32, 1 << 16), default=128, show_default=True,
    help="Tokens of each answer at most.",
)  # fmt: skip
@option(
    "--repeat", metavar="N", type=click.IntRange(1, 100), default=3, show_default=True,
    help="Pairs of each prompt, with and without.",
)  # fmt: skip
@option(
    "--budget", metavar="S", type=click.FloatRange(1, 3600), default=30.0, show_default=True,
    help="Seconds for the calibration, about.",
)  # fmt: skip
@option("--calibrate", is_flag=True, help="Calibrate again though there is a profile.")
@option("--calibrate-only", is_flag=True, help="Make the profile and measure nothing else.")
@engine_options
@json_option
def command(
    model_name: str | None,
    classes: str | None,
    modes: str,
    new_tokens: int,
    repeat: int,
    budget: float,
    calibrate: bool,
    calibrate_only: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure speculation on natural prompts: chat, second turn, summary, code edit, JSON, retrieval.

    Greedy answers in alternating pairs with and without; the ratio of a class is the median over its prompts.
    The first run also calibrates layer skip and keeps the profile, which --spec auto and skip go by from then
    on.
    """
    from edgellm.bench.spec_prompts import prompts
    from edgellm.cli.model_access import local_model, named_by
    from edgellm_models.errors import UsageError

    output = current_output()
    texts = prompts()
    wanted = _names(classes, tuple(texts), "--class")
    compared = _names(modes, MODES, "--mode")
    if settings.get("spec") is not None:
        raise UsageError("bench spec compares what --spec chooses from: use --mode")
    if settings.get("draft") is not None:
        compared = tuple(mode for mode in compared if mode == "auto")
        if not compared:
            raise UsageError("--draft goes with --mode auto")
    resolved = resolve_settings(settings, model=model_name)
    with named_by(resolved):
        model, path = local_model(resolved.model, output)
    if resolved.ctx is None:
        resolved = replace(resolved, ctx=CONTEXT)
    told: list[Notice] = []

    def tell(notice: Notice) -> None:
        if notice not in told:
            told.append(notice)
            if not as_json:
                output.notice(notice)

    profile = None
    if resolved.draft is None:
        profile = _profile(
            resolved, path, model.name, tell, output, budget, again=calibrate or calibrate_only
        )
    rows: list[dict[str, Any]] = []
    if not calibrate_only:
        from edgellm.cli.runtime import load_runtime

        for mode in compared:
            if mode == "skip" and profile is None:
                continue
            runtime = load_runtime(replace(resolved, spec=mode), path, model.name, tell)
            try:
                for kind in wanted:
                    rows.append(_row(runtime, mode, kind, texts[kind], new_tokens, repeat, output))
            finally:
                runtime.close()
    output.end_progress()
    report = {"model": model.name, "calibration": _as_json(profile), "classes": rows}
    if as_json:
        output.json(report | {"notices": told})
    else:
        _print(output, report)


def _names(text: str | None, known: Sequence[str], option_name: str) -> tuple[str, ...]:
    from edgellm_models.errors import UsageError

    if text is None:
        return tuple(known)
    found = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in found if name not in known]
    if wrong or not found:
        raise UsageError(f"{option_name} {text}: choose from {', '.join(known)}")
    return tuple(dict.fromkeys(found))


def _profile(
    resolved: ResolvedConfig,
    path: Path,
    name: str,
    tell: Any,
    output: Output,
    budget: float,
    *,
    again: bool,
) -> SkipProfile | None:
    """The model's profile, made and saved where there is none; None where layers cannot be skipped."""
    from edgellm.cli.layer_skip import FOLDER, finish
    from edgellm.cli.runtime import load_runtime
    from edgellm.locations import Locations
    from edgellm.speculative.skip_profile import load_profile, save_profile
    from edgellm_models.errors import BadInputError, Notice

    folder = Locations.from_environment().cache / FOLDER
    runtime = load_runtime(replace(resolved, spec="auto"), path, name, tell)
    try:
        skip = runtime.layer_skip
        assert skip is not None
        if skip.why_never:
            tell(Notice("spec_skip", f"{skip.why_never}: layer skip is left out"))
            return None
        if not again:
            try:
                found = load_profile(skip.key(), folder, skip.decoder.spec.num_layers)
            except BadInputError:
                found = None  # told already; it is made again
            if found is not None:
                return found
        output.status("calibrating layer skip")
        profile = finish(skip.calibrate(budget_s=budget))
        save_profile(profile, folder)
        return profile
    finally:
        runtime.close()


def _row(
    runtime: Runtime,
    mode: str,
    kind: str,
    prompts: Sequence[Sequence[str]],
    new_tokens: int,
    repeat: int,
    output: Output,
) -> dict[str, Any]:
    from edgellm.bench.spec_bench import greedy_answer, measure
    from edgellm.chat.request import build_request, chat_encoder
    from edgellm.contracts import ChatMessage, SamplingParams

    encoder, _ = chat_encoder(
        runtime.tokenizer, runtime.load_templates(), model_name=runtime.info.name, plain_fallback=True
    )

    def encoded(messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        built = build_request(encoder, messages, SamplingParams(), context_length=runtime.info.context_length)
        return built.request.prompt_token_ids

    ready = []
    for turns in prompts:
        messages: list[ChatMessage] = []
        for text in turns[:-1]:
            messages.append(ChatMessage("user", text))
            said, _, _ = greedy_answer(runtime.core, encoded(messages), new_tokens, speculate=False)
            messages.append(ChatMessage("assistant", runtime.tokenizer.decode(said)))
        ready.append(encoded([*messages, ChatMessage("user", turns[-1])]))
    tally = measure(
        runtime.core,
        ready,
        max_tokens=new_tokens,
        pairs=repeat,
        on_progress=lambda text: output.status(f"{mode}, {kind}: {text}"),
    )
    return {"mode": mode, "class": kind, **tally.report()}


def _as_json(profile: SkipProfile | None) -> dict[str, Any] | None:
    if profile is None:
        return None
    from edgellm.speculative.skip_profile import candidate_as_json

    found = profile.calibration
    return {
        "seconds": profile.seconds,
        "complete": found.complete,
        "sets_measured": found.num_sets,
        "pays": found.pays,
        "v4": found.costs.of_step(4),
        "v8": found.costs.of_step(8),
        "attention_cost": found.costs.attention,
        "feed_forward_cost": found.costs.feed_forward,
        "chosen": candidate_as_json(found.chosen),
        "others": [candidate_as_json(one) for one in found.others],
    }


def _print(output: Output, report: dict[str, Any]) -> None:
    """The sets of the calibration, then a row per class and mode; the costs stand beside every ratio."""
    found = report["calibration"]
    costs = ""
    if found is not None:
        chosen = found["chosen"]
        costs = f"  v(4) {found['v4']:.2f}  v(8) {found['v8']:.2f}  c {chosen['pass_cost']:.2f}"
        cut = "" if found["complete"] else ", cut short by --budget"
        output.data(
            f"layer skip: {'pays' if found['pays'] else 'does not pay, stays off'} "
            f"({found['sets_measured']} sets in {found['seconds']:.0f} s{cut})"
        )
        for one in (chosen | {"name": "chosen"}, *found["others"]):
            output.data(
                f"  {one['name']:<18} {len(one['attention']):>3} attention, {len(one['feed_forward']):>3} "
                f"feed-forward left out: match {one['match']:.3f}, c {one['pass_cost']:.2f}, predicted "
                f"{one['gain']:.2f} times plain"
            )
    for row in report["classes"]:
        if row["ratio"] is None:
            output.data(f"{row['mode']:<6} {row['class']:<12} every answer repeats itself or is too short")
            continue
        wrong = f"  {row['different']} TEXTS DIFFER" if row["different"] else ""
        output.data(
            f"{row['mode']:<6} {row['class']:<12} {row['ratio']:.2f} times plain "
            f"({row['plain_tokens_per_s']:.1f} tokens/s)  {row['accepted']} of {row['drafted']} kept  "
            f"{row['tokens_per_step']:.2f} tokens a step{costs}  {row['left_out']} left out{wrong}"
        )
