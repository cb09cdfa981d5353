"""Layer skip put together: a model's profile found or made, and drafting by it turned on."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from edgellm_models.errors import BadInputError, Notice

if TYPE_CHECKING:
    from edgellm.cache.kv_storage import KVType
    from edgellm.runner.model_runner import ModelRunner
    from edgellm.runner.step_program import StepProgram
    from edgellm.speculative.skip_profile import ProfileKey, SkipProfile
    from edgellm.speculative.speculator import Speculator
    from edgellm_models.network.decoder import Decoder
    from edgellm_models.tokenizer.base import Tokenizer

_T = TypeVar("_T")

BUDGET_S = 20.0
"""Seconds that a calibration takes, besides the text that it begins with."""
FOLDER = "skip"
"""Of the cache folder."""


@dataclass
class LayerSkip:
    """What drafting by layers needs of a loaded model."""

    program: Decoder | StepProgram
    kv: KVType
    tokenizer: Tokenizer
    path: Path
    threads: int
    device: str
    runner: ModelRunner
    speculator: Speculator
    always: bool
    """``--spec skip``: drafts though the profile says that they do not pay."""
    wants_profile: bool = False
    """Found none by ``load``, and could go by one."""

    @property
    def decoder(self) -> Decoder:
        from edgellm.runner.step_program import StepProgram

        return self.program.decoder if isinstance(self.program, StepProgram) else self.program

    @property
    def why_never(self) -> str:
        """Why this model cannot draft by layers; empty where it can."""
        if self.kv.has_tail:
            return "skip: not over int4 KV"
        if self.decoder.spec.num_layers < 3:
            return "skip: too few layers"
        return ""

    def key(self) -> ProfileKey:
        from edgellm import __version__
        from edgellm.speculative.skip_profile import ProfileKey
        from edgellm_models.checkpoint.fingerprint import fingerprint

        kernels = self.decoder.kernels
        chosen = ",".join(f"{op}={backend}" for op, backend in sorted(kernels.chosen.items()))
        return ProfileKey(
            fingerprint(self.path),
            f"{chosen},activations={kernels.activations}",
            self.kv.name,
            self.device,
            self.threads,
            __version__,
        )

    def load(self, folder: Path) -> Notice | None:
        """Turns drafting on where a profile says that it pays; a notice where there is something to say."""
        from edgellm.speculative.skip_profile import load_profile

        if self.why_never:
            self.speculator.runner_why_not = self.why_never
            return Notice("spec_skip", f"{self.why_never}: nothing is drafted") if self.always else None
        profile, damage = None, None
        if any(folder.glob("skip-*.json")):
            try:
                profile = load_profile(self.key(), folder, self.decoder.spec.num_layers)
            except BadInputError as error:
                damage = Notice("spec_profile", str(error))
        if profile is not None:
            return self.use(profile)
        self.wants_profile = True
        self.speculator.runner_why_not = "skip: not calibrated"
        if self.always and damage is None:
            return Notice(
                "spec_skip",
                "nothing is drafted yet: this model has no profile of its layers on this machine; it is made "
                f"when the model is first idle, or by `edgellm bench spec -m {self.path}` with the same "
                "options",
            )
        return damage

    def use(self, profile: SkipProfile) -> Notice | None:
        """Drafts by a profile from now on, if it pays. Between two steps."""
        from edgellm.runner.layer_drafts import LayerDrafts
        from edgellm.speculative.drafter import MAX_DRAFT

        found = profile.calibration
        chosen, best = found.chosen, found.chosen.prediction
        notice = None
        if not found.pays:
            self.speculator.runner_why_not = f"skip: predicted {best.gain:.2f} times plain"
            if not self.always:
                return None
            notice = Notice(
                "spec_skip",
                f"drafting by layers is predicted to make this model {best.gain:.2f} times as fast; as "
                "--spec skip asks it drafts all the same, --spec auto would not",
            )
        self.runner.drafter = LayerDrafts(
            self.program, chosen.skipped, self.device, stop_below=best.stop_below
        )
        tokens = best.draft_tokens if self.always else MAX_DRAFT
        self.speculator.expect_runner_drafts(tokens, chosen.match, chosen.pass_cost, found.costs.verify)
        return notice

    def prompts(self) -> list[list[int]]:
        """What the model answers to be looked at."""
        from edgellm.speculative.calibration_prompts import PROMPTS

        return [ids for text in PROMPTS if (ids := self.tokenizer.encode(text))]

    def calibrate(
        self, *, budget_s: float = BUDGET_S, clock: Callable[[], float] = time.monotonic
    ) -> Generator[None, None, SkipProfile]:
        """Makes a profile in parts of about a tenth of a second; it is neither saved nor used by that.

        In the thread that owns the decoder's kernels, between two steps.
        """
        from edgellm.runner.skip_probe import SkipProbe
        from edgellm.speculative.calibration import calibrate
        from edgellm.speculative.skip_profile import SkipProfile

        begin = clock()
        probe = SkipProbe(self.program, self.kv, self.prompts(), self.device)
        yield from probe.prepare()
        found = yield from calibrate(probe, budget_s=budget_s, clock=clock)
        return SkipProfile(self.key(), found, self.decoder.spec.num_layers, clock() - begin)


def finish(parts: Generator[None, None, _T]) -> _T:
    """Runs a calibration, or a measurement of one, to its end."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            found: _T = end.value
            return found
