"""Logprobs of prompt tokens against transformers, over chunks, samples and shared prefixes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from edgellm.contracts import GenerationRequest, PlannedSequence, SamplingParams, TokenEvent, TokenLogprob
from edgellm.runner import model_runner
from edgellm_models.errors import BadInputError, EngineError
from edgellm_models.network.decoder import Decoder, LastRows
from tests.support.engines import LoadedEngine, load_engine
from tests.support.tiny_models import make_tiny
from tests.support.transformers_oracle import transformers_logits, transformers_model

SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=2)


def scores(
    loaded: LoadedEngine, ids: tuple[int, ...], top: int, **fields: int
) -> tuple[list[TokenLogprob], list[TokenEvent]]:
    loaded.engine.submit(GenerationRequest("r", ids, SAMPLING, prompt_logprobs=top, **fields))
    events: list[TokenEvent] = []
    while loaded.engine.has_work():
        events += loaded.engine.step()
    return [logprob for event in events for logprob in event.prompt_logprobs], events


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny") / request.param)


@pytest.mark.parametrize("chunk", [512, 7, 1])
def test_they_are_transformers_log_softmax(folder: Path, chunk: int) -> None:
    loaded = load_engine(folder, context=128, chunk=chunk)
    ids = tuple(loaded.tokenizer.encode("The quick brown fox jumps over the lazy dog."))
    found, events = scores(loaded, ids, 3)
    logits = transformers_logits(transformers_model(folder), ids).to(torch.float64)
    expected = torch.log_softmax(logits, -1)
    assert [f.token_id for f in found] == list(ids[1:])
    for row, logprob in enumerate(found):
        assert logprob.logprob == pytest.approx(float(expected[row, ids[row + 1]]), abs=2e-3)
        best = torch.topk(expected[row], 3)
        assert [v for _, v in logprob.top] == pytest.approx(best.values.tolist(), abs=2e-3)
    assert sum(len(event.token_ids) for event in events) == 2  # the answer comes all the same


def test_they_come_once_whatever_else_was_asked_or_cached(folder: Path) -> None:
    loaded = load_engine(folder, context=256, block_size=4)
    ids = tuple(loaded.tokenizer.encode("The quick brown fox jumps over the lazy dog."))
    first, _ = scores(loaded, ids, 1)
    again, _ = scores(loaded, ids, 1)  # the prefix is cached by now, but its logits are not
    several, events = scores(loaded, ids, 1, num_samples=3)
    assert len(first) == len(again) == len(several) == len(ids) - 1
    for other in (again, several):
        assert [f.token_id for f in other] == [f.token_id for f in first]
        assert [f.logprob for f in other] == pytest.approx([f.logprob for f in first], abs=1e-4)
    assert {event.sample for event in events if event.prompt_logprobs} == {0}
    plain = GenerationRequest("p", ids, SAMPLING)
    loaded.engine.submit(plain)
    while loaded.engine.has_work():
        assert all(not event.prompt_logprobs for event in loaded.engine.step())


def test_a_prompt_of_one_token_has_none(folder: Path) -> None:
    loaded = load_engine(folder, context=64)
    assert scores(loaded, (5,), 2)[0] == []
    with pytest.raises(BadInputError, match="prompt_logprobs"):
        loaded.engine.submit(GenerationRequest("r", (5,), SAMPLING, prompt_logprobs=21))


@pytest.mark.parametrize("rows_at_once", [1, 5])
def test_logits_are_made_in_parts_where_many_are_wanted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    """Two scored prompts and a plain one in the same steps: as with all logits at once, never more rows."""

    def run() -> tuple[list[list[TokenLogprob]], list[list[int]]]:
        loaded = load_engine(folder, context=128, chunk=24)
        texts = ("The quick brown fox jumps", "over the lazy dog, again and again.", "Once")
        for index, text in enumerate(texts):
            ids = tuple(loaded.tokenizer.encode(text))
            asked = None if index == 2 else 2
            loaded.engine.submit(GenerationRequest(str(index), ids, SAMPLING, prompt_logprobs=asked))
        events: list[TokenEvent] = []
        while loaded.engine.has_work():
            events += loaded.engine.step()
        own = [[e for e in events if e.request_id == str(i)] for i in range(3)]
        return (
            [[p for e in mine for p in e.prompt_logprobs] for mine in own],
            [[t for e in mine for t in e.token_ids] for mine in own],
        )

    scores_at_once, answers_at_once = run()
    sizes = []
    logits = Decoder.logits

    def counted(self: Decoder, rows: LastRows) -> torch.Tensor:
        sizes.append(len(rows))
        return logits(self, rows)

    monkeypatch.setattr(Decoder, "logits", counted)
    vocab = load_engine(folder, context=16).engine.vocab_size
    monkeypatch.setattr(model_runner, "MAX_LOGIT_BYTES", 4 * vocab * rows_at_once)
    scores_in_parts, answers_in_parts = run()
    assert max(sizes) == rows_at_once and sum(sizes) > 20
    assert answers_in_parts == answers_at_once
    assert [len(found) for found in scores_in_parts] == [len(found) for found in scores_at_once]
    for mine, theirs in zip(scores_in_parts, scores_at_once, strict=True):
        assert [p.token_id for p in mine] == [p.token_id for p in theirs]
        assert [p.logprob for p in mine] == pytest.approx([p.logprob for p in theirs], abs=1e-4)


def test_a_mask_for_each_row_or_an_error() -> None:
    """No row is drawn without the mask that was made for it."""
    planned = PlannedSequence(3, (1,), 0, ((0,),), False, True, token_masks=(b"\x01", b"\x02"))
    with pytest.raises(EngineError, match="sequence 3 draws from 1 rows, but 2 masks"):
        model_runner._row_masks(planned)
    drafted = replace(planned, draft_limit=1, draft_token_ids=(5,))
    assert model_runner._row_masks(drafted) == (b"\x01", b"\x02")
    assert model_runner._row_masks(replace(drafted, token_masks=())) == (None, None)
