"""Beam search against transformers' on the fixture families, on tables of probabilities, as a command."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from edgellm.cli.main import run
from edgellm.engine.async_engine import AsyncEngine
from edgellm.engine.beam_search import Beam, Continuations, EngineExpander, beam_search, check_beams
from edgellm_models.errors import BadInputError, EngineError
from tests.support.bigram import make_bigram
from tests.support.engines import load_engine
from tests.support.tiny_models import make_tiny
from tests.support.transformers_oracle import transformers_model

PROMPTS = ("The quick brown fox", "Hello", "1 + 2 =")
TOKENS = 20


class Family:
    """A fixture model in both engines."""

    def __init__(self, folder: Path) -> None:
        self.loaded = load_engine(folder, context=128)
        self.oracle = transformers_model(folder)

    def ours(self, prompt: Sequence[int], num_beams: int, end_ids: Sequence[int] = ()) -> list[Beam]:
        async def search() -> list[Beam]:
            expander = EngineExpander(service, "beams")
            return await beam_search(
                expander, prompt, num_beams=num_beams, max_new_tokens=TOKENS, end_ids=end_ids
            )

        service = AsyncEngine(self.loaded.engine)
        try:
            return asyncio.run(search())
        finally:
            service.close()

    def theirs(
        self, prompt: Sequence[int], num_beams: int, end_ids: Sequence[int] = ()
    ) -> list[tuple[tuple[int, ...], float]]:
        """Every finished beam with its score, the best first."""
        found = self.oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=TOKENS,
            do_sample=False,
            length_penalty=1.0,
            early_stopping=False,
            eos_token_id=list(end_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        answers = []
        for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
            ids = row[len(prompt) :]
            ends = [i for i, token_id in enumerate(ids) if token_id in end_ids]
            answers.append((tuple(ids[: ends[0] + 1] if ends else ids), score))
        return answers


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2", "gemma3", "phi3"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(make_tiny(request.param, tmp_path_factory.mktemp("beams") / request.param))


@pytest.mark.parametrize("num_beams", [1, 2, 3, 4])
def test_answers_are_those_of_transformers(family: Family, num_beams: int) -> None:
    for text in PROMPTS:
        prompt = family.loaded.tokenizer.encode(text)
        ours = family.ours(prompt, num_beams)
        if num_beams == 1:  # transformers calls that greedy search
            assert [len(beam.token_ids) for beam in ours] == [TOKENS]
            continue
        theirs = family.theirs(prompt, num_beams)
        assert [beam.token_ids for beam in ours] == [ids for ids, _ in theirs]
        assert [beam.score for beam in ours] == pytest.approx([score for _, score in theirs], abs=1e-4)


@pytest.mark.parametrize("num_beams", [2, 3, 4])
def test_end_ids_finish_beams_as_in_transformers(family: Family, num_beams: int) -> None:
    """End ids that beams meet on their way: some finish early, and the search may stop before its limit."""
    lengths = set()
    for text in PROMPTS:
        prompt = family.loaded.tokenizer.encode(text)
        free = family.ours(prompt, num_beams)
        for places in ((2,), (4, 7), (0, 6, 12)):
            end_ids = sorted({free[-1].token_ids[place] for place in places})
            ours, theirs = family.ours(prompt, num_beams, end_ids), family.theirs(prompt, num_beams, end_ids)
            assert [beam.token_ids for beam in ours] == [ids for ids, _ in theirs][: len(ours)]
            assert [b.score for b in ours] == pytest.approx([s for _, s in theirs][: len(ours)], abs=1e-4)
            lengths |= {len(beam.token_ids) for beam in ours}
    assert len(lengths) > 2


# --- the search alone ---


class Table:
    """Next-token probabilities by the last token; counts what it is asked."""

    def __init__(self, rows: dict[int, dict[int, float]]) -> None:
        self.rows = rows
        self.calls: list[list[tuple[int, ...]]] = []

    async def expand(self, prefixes: Sequence[tuple[int, ...]], top: int) -> list[Continuations]:
        self.calls.append(list(prefixes))
        found = []
        for prefix in prefixes:
            row = sorted(self.rows[prefix[-1]].items(), key=lambda item: -item[1])
            found.append([(token_id, math.log(p)) for token_id, p in row[:top]])
        return found


def search(table: Table, **settings: Any) -> list[Beam]:
    return asyncio.run(beam_search(table, [0], **settings))


def test_a_wider_beam_finds_what_greedy_misses() -> None:
    table = Table({0: {1: 0.6, 2: 0.4}, 1: {3: 0.5, 4: 0.5}, 2: {3: 1.0}, 3: {3: 1.0}, 4: {4: 1.0}})
    assert search(table, num_beams=1, max_new_tokens=2)[0].token_ids == (1, 3)
    best = search(table, num_beams=2, max_new_tokens=2)[0]
    assert best.token_ids == (2, 3) and best.score == pytest.approx(math.log(0.4) / 2)


def test_wide_beams_find_the_best_of_all_texts() -> None:
    """With as many beams as there are texts the answer is that of trying them all."""
    generator = torch.Generator().manual_seed(1)
    rows = {
        i: dict(enumerate(torch.softmax(2 * torch.randn(3, generator=generator), 0).tolist()))
        for i in range(3)
    }

    def score(ids: tuple[int, ...]) -> float:
        return sum(math.log(rows[a][b]) for a, b in itertools.pairwise((0, *ids))) / len(ids)

    texts = sorted(itertools.product(range(3), repeat=4), key=score, reverse=True)
    found = search(Table(rows), num_beams=81, max_new_tokens=4)
    assert {beam.token_ids for beam in found} == set(texts)
    assert [beam.score for beam in found] == pytest.approx([score(ids) for ids in texts])


def test_it_asks_only_for_running_beams_each_one_token_longer() -> None:
    table = Table({0: {1: 0.5, 2: 0.5}, 1: {1: 0.9, 2: 0.1}, 2: {2: 0.9, 1: 0.1}})
    search(table, num_beams=2, max_new_tokens=5)
    assert [len(call) for call in table.calls] == [1, 2, 2, 2, 2]
    assert [{len(prefix) for prefix in call} for call in table.calls] == [{1}, {2}, {3}, {4}, {5}]


def test_it_stops_when_nothing_better_can_come() -> None:
    table = Table({0: {9: 0.8, 8: 0.15, 1: 0.05}, 1: {1: 0.5, 9: 0.3, 8: 0.2}})
    found = search(table, num_beams=2, max_new_tokens=50, end_ids={8, 9})
    assert [beam.token_ids for beam in found] == [(9,), (8,)]
    assert len(table.calls) == 1  # the running beam stands at log 0.05, the worst finished one at log 0.15


def test_no_tokens_and_no_continuations() -> None:
    table = Table({0: {}})
    assert search(table, num_beams=2, max_new_tokens=0) == []
    assert search(table, num_beams=2, max_new_tokens=3) == []


def test_what_cannot_be_served_is_refused() -> None:
    check_beams(4, 2, 10, 11)
    for arguments, words in (((0, 2, 10, 100), "1 to 18"), ((19, 2, 10, 100), "not 19")):
        with pytest.raises(BadInputError, match=words):
            check_beams(*arguments)
    with pytest.raises(BadInputError, match="holds 10"):
        check_beams(2, 1, 10, 10)


def test_an_engine_fault_reaches_the_caller(family: Family) -> None:
    class Failing(EngineExpander):
        async def expand(self, prefixes: Sequence[tuple[int, ...]], top: int) -> list[Continuations]:
            service.close()
            return await super().expand(prefixes, top)

    async def main() -> None:
        await beam_search(Failing(service, "x"), [1, 2], num_beams=2, max_new_tokens=3)

    service = AsyncEngine(family.loaded.engine)
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(main())


# --- the command ---


def test_complete_with_beams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(make_bigram(tmp_path / "m", ["one", " two", " three"]))
    assert run(["complete", model, "x", "--beams", "2"]) == 0
    assert capsys.readouterr().out == "one two three"
    assert run(["complete", model, "x", "--beams", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == "one two three" and found["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == len(found["token_ids"]) == 4
    assert found["score"] == pytest.approx(0, abs=1e-2) and found["timings"]["ttft_s"] > 0
    assert run(["complete", model, "x", "--beams", "2", "--max-tokens", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == "one two" and found["finish_reason"] == "length"
    assert run(["complete", model, "x", "--beams", "2", "--max-tokens", "0"]) == 0
    assert capsys.readouterr().out == ""


def test_beams_refuse_what_they_cannot_honour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(make_bigram(tmp_path / "m", ["one"]))
    schema = tmp_path / "s.json"
    schema.write_text("{}")
    for options in (["--temp", "1"], ["--stop", "x"], ["--schema", str(schema)], ["--logprobs", "2"]):
        assert run(["complete", model, "x", "--beams", "2", *options]) == 2
        assert options[0] in capsys.readouterr().err
    assert run(["complete", model, "x", "--beams", "0"]) == 65
    assert "not 0" in capsys.readouterr().err
    assert run(["complete", model, "x", "--beams", "100"]) == 65


def test_beams_say_that_configured_sampling_has_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(make_bigram(tmp_path / "m", ["one"]))
    monkeypatch.setenv("EDGELLM_TEMP", "0.9")
    assert run(["complete", model, "x", "--beams", "2", "--json"]) == 0
    assert "beams" in [notice["kind"] for notice in json.loads(capsys.readouterr().out)["notices"]]
