"""Calibrates layer skip when a loaded model is first idle, a tenth of a second at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.log import log_notice
from edgellm_models.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.cli.layer_skip import LayerSkip
    from edgellm.speculative.skip_profile import SkipProfile

MOST_PART_S = 0.5
"""Of processor time: a request waits for the part that it finds running. Where one takes longer, a whole
calibration would take minutes too."""
SPARE = 4
"""The pages of the probe may take this part of the memory that is free."""
_LOG = logging.getLogger("edgellm.speculative")


def calibrate_in_idle(
    skip: LayerSkip,
    folder: Path,
    free_bytes: Callable[[], int | None],
    on_change: Callable[[], object],
    *,
    clock: Callable[[], float] = time.thread_time,
) -> Generator[None, None, None]:
    """Makes the profile that a model lacks, keeps it in ``folder`` and goes by it, in parts between which
    requests run. Why it cannot is said where the state of drafting is shown, of whose changes ``on_change``
    hears; nothing is raised.

    ``clock`` counts the thread's own time, so that pauses between parts cost no budget.
    """
    try:
        profile = yield from _calibrated(skip, free_bytes, on_change, clock)
        if profile is None:
            _LOG.info("%s", skip.speculator.runner_why_not)
        else:
            _use(skip, profile, folder)
    except Exception as error:  # drafting is a gain at best: answers go on without it
        _LOG.warning("layer skip could not be calibrated", exc_info=True)
        skip.speculator.runner_why_not = f"skip: calibrating failed: {type(error).__name__}"
    on_change()


def _calibrated(
    skip: LayerSkip,
    free_bytes: Callable[[], int | None],
    on_change: Callable[[], object],
    clock: Callable[[], float],
) -> Generator[None, None, SkipProfile | None]:
    from edgellm.runner.skip_probe import probe_bytes

    say = skip.speculator
    free = free_bytes()
    if free is not None and SPARE * probe_bytes(skip.decoder.spec, skip.kv, skip.prompts()) > free:
        say.runner_why_not = "skip: too little memory to calibrate"
        return None
    say.runner_why_not = "skip: calibrating"
    on_change()
    parts = skip.calibrate(clock=clock)
    while True:
        began = clock()
        try:
            next(parts)
        except StopIteration as end:
            profile: SkipProfile = end.value
            return profile
        if clock() - began > MOST_PART_S:
            parts.close()
            say.runner_why_not = "skip: too slow to calibrate beside requests; bench spec does it"
            return None
        yield


def _use(skip: LayerSkip, profile: SkipProfile, folder: Path) -> None:
    from edgellm.speculative.skip_profile import save_profile

    notice = skip.use(profile)
    gain = profile.calibration.chosen.prediction.gain
    _LOG.info("layer skip was calibrated in %.1f s: %.2f times plain", profile.seconds, gain)
    if notice is not None:
        log_notice(notice)
    try:
        save_profile(profile, folder)
    except EdgeLLMError as error:
        _LOG.warning("the profile of layer skip is not kept: %s", error)
