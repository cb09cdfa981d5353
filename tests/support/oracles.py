"""Independent judges of our results, and what happens where one is not installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


def require_oracle(module: str) -> Any:
    """The module; without it the test, or the file that asks at its top, is skipped with a reason, and in CI
    (CI is set) it fails.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"the oracle {module} is not installed: {error}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message, allow_module_level=True)


@dataclass(frozen=True)
class Reference:
    """A greedy answer of transformers."""

    token_ids: list[int]
    logits: Any
    """[new tokens, vocabulary] f32: the logits that each new token was taken from."""

    def tie_at(self, step: int, tolerance: float = 1e-4) -> bool:
        """Whether the best two logits are closer than ``tolerance`` of the largest."""
        best, second = self.logits[step].topk(2).values.tolist()
        return bool(best - second < tolerance * max(abs(best), 1.0))


class TransformersModel:
    """A Hugging Face folder as transformers runs it: CPU, f32, eager attention."""

    def __init__(self, folder: Path) -> None:
        transformers = require_oracle("transformers")
        import torch

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.model, self.loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        """Ids with the special tokens that the tokenizer adds."""
        return list(self.tokenizer(text)["input_ids"])

    def greedy(self, token_ids: Sequence[int], count: int) -> Reference:
        """``count`` greedy tokens; end tokens do not stop it."""
        import torch

        with torch.no_grad():
            out = self.model.generate(
                torch.tensor([list(token_ids)]),
                attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
                max_new_tokens=count,
                min_new_tokens=None,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                repetition_penalty=1.0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        return Reference(out.sequences[0][len(token_ids) :].tolist(), torch.stack(out.logits)[:, 0].float())


def assert_same_until_tie(
    expected: Reference, actual: Sequence[int], what: str, tolerance: float = 1e-4
) -> int:
    """Ids equal up to the first near-tie of the reference; the number of equal ids. A tie is printed."""
    for step, (ours, theirs) in enumerate(zip(actual, expected.token_ids, strict=True)):
        if ours != theirs:
            assert expected.tie_at(step, tolerance), (
                f"{what}: token {step} is {ours} instead of {theirs}; logits {expected.logits[step].topk(3)}"
            )
            print(f"{what}: tie at token {step}")
            return step
    return len(expected.token_ids)
