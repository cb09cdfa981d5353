"""The two real models against transformers with the same decoded weights: greedy ids and logits."""

from __future__ import annotations

import pytest

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from edgellm_models.network.decoder import Decoder
from edgellm_models.tokenizer import load_tokenizer
from tests.support.paged import PagedRun, relative_error
from tests.support.real_models import real_model
from tests.support.transformers_oracle import greedy, transformers_logits, transformers_model

pytestmark = pytest.mark.real_model

PARAGRAPH = (
    "The lighthouse keeper wrote every evening in a ledger bound in green cloth: the hour at which the lamp "
    "was lit, the colour of the sea, the ships that passed and the weather that drove them. On 14 May 1907 "
    "he counted 17 sails and one steamer. In the margin he drew a gull, and below it 17 + 1 = 18. "
)
PROMPTS = (
    "What is the capital of France?",
    "def fibonacci(n: int) -> int:\n    ",
    PARAGRAPH * 3,
)


def greedy_ids(decoder: Decoder, ids: list[int], count: int) -> list[int]:
    run = PagedRun(decoder, num_blocks=160, block_size=16)
    logits = run.step([("a", ids)], last=1)[0]
    out: list[int] = []
    for _ in range(count):
        out.append(int(logits[-1].argmax()))
        logits = run.step([("a", out[-1:])])[0]
    return out


def assert_equal_up_to_a_tie(got: list[int], expected: list[int], ties: list[bool]) -> None:
    """Equal ids; after a tie both continuations are right, so the comparison ends there (and says so)."""
    for index, (ours, theirs, tie) in enumerate(zip(got, expected, ties, strict=True)):
        if tie:
            print(f"tie at token {index} of {len(got)}")
        if ours != theirs:
            assert tie, f"token {index}: {ours}, transformers says {theirs}"
            return


def test_smollm2() -> None:
    path = real_model("smollm2-135m")
    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(path, "gguf", checkpoint.metadata)
    decoder = build_decoder(checkpoint, hold="dense")
    oracle = transformers_model(path)
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        assert_equal_up_to_a_tie(greedy_ids(decoder, ids, 16), *greedy(oracle, ids, 16))
    ids = tokenizer.encode(PARAGRAPH)
    expected = transformers_logits(oracle, ids)
    whole = PagedRun(decoder).step([("a", ids)])[0]
    assert relative_error(whole, expected) < 1e-4
    blocks = build_decoder(checkpoint, hold="blocks")
    assert blocks.weight_bytes < 0.2 * decoder.weight_bytes
    assert relative_error(PagedRun(blocks).step([("a", ids)])[0], expected) < 1e-4


def test_gemma3_beyond_three_windows() -> None:
    """Sliding window 512: over 1,500 prompt tokens in chunks, then decoding; dead blocks are given back."""
    path = real_model("gemma3-270m")
    checkpoint = open_checkpoint(path)
    decoder = build_decoder(checkpoint, hold="dense")
    assert {group.window for group in decoder.spec.kv_groups} == {512, None}
    ids = load_tokenizer(path, "gguf", checkpoint.metadata).encode(PARAGRAPH * 19)
    assert len(ids) > 1500
    oracle = transformers_model(path)
    expected, ties = greedy(oracle, ids, 8)
    run = PagedRun(decoder, num_blocks=160, block_size=16)
    for start in range(0, len(ids), 700):
        logits = run.step([("a", ids[start : start + 700])], last=1)[0]
    assert len(run.tables["a"][0]) < len(ids) // 16  # the window group holds less than the whole prompt
    got: list[int] = []
    for _ in range(8):
        got.append(int(logits[-1].argmax()))
        logits = run.step([("a", got[-1:])])[0]
    assert_equal_up_to_a_tie(got, expected, ties)
