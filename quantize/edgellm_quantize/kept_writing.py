"""What a model wrote for its own calibration, kept in the work folder for a resumed job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgellm_quantize.provenance import digest
from edgellm_quantize.recipe import Generate
from edgellm_quantize.work_folder import forget, keep, kept_path, read_kept, refuse_another_job, whole

_NAME = "calibration"


class KeptWriting:
    """A ``recipe.Generate`` whose answers are kept round by round, and read where they are there."""

    def __init__(self, generate: Generate, folder: Path, depends: Mapping[str, Any], *, resume: bool) -> None:
        """``depends``: what answers follow from; BadInputError where kept ones follow from others."""
        self._generate = generate
        self._folder = folder
        self._depends = dict(depends)
        self._turn = 0
        found = read_kept(folder, _NAME, self._depends) if resume else None
        with whole(kept_path(folder, _NAME)):
            rounds = [] if found is None else found["rounds"]
            self._rounds = [(str(known["asked"]), list(known["answers"])) for known in rounds]

    def __call__(self, prompts: Sequence[Sequence[int]], most: int, seed: int) -> Sequence[Sequence[int]]:
        turn, self._turn = self._turn, self._turn + 1
        asked = digest([[int(token) for token in prompt] for prompt in prompts] + [most, seed])
        if turn < len(self._rounds):
            known, kept = self._rounds[turn]
            refuse_another_job(self._folder, {"prompts": known}, {"prompts": asked})
            return kept
        answers = [[int(token) for token in answer] for answer in self._generate(prompts, most, seed)]
        self._rounds.append((asked, answers))
        rounds = [{"asked": asked, "answers": answers} for asked, answers in self._rounds]
        keep(self._folder, _NAME, self._depends, {"rounds": rounds})
        return answers

    def forget(self) -> None:
        """The answers were of no use."""
        forget(self._folder, _NAME)
