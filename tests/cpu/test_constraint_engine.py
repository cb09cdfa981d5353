"""Constraints through the engine: answers that end by themselves validate, whatever the model wants."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from edgellm.cli.main import run
from edgellm.contracts import ConstraintKind, ConstraintSpec, FinishReason, GenerationRequest, SamplingParams
from edgellm.engine.answer import Answer
from edgellm_models.errors import BadInputError, EngineError
from tests.support.bigram import make_bigram
from tests.support.engines import LoadedEngine, Result, load_engine, run_all
from tests.support.fake_engine import ByteTokenizer
from tests.support.real_models import real_model
from tests.support.schemas import is_valid, schemas
from tests.support.tiny_models import make_tiny

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=60)


def regex(text: str) -> ConstraintSpec:
    return ConstraintSpec(ConstraintKind.REGEX, text)


def answer(
    loaded: LoadedEngine, spec: ConstraintSpec | None, sampling: SamplingParams = GREEDY, **fields: Any
) -> Result:
    prompt = tuple(loaded.tokenizer.encode("The quick brown fox"))
    return run_all(loaded.engine, [GenerationRequest("r", prompt, sampling, constraint=spec, **fields)])[0]


def check_schemas(loaded: LoadedEngine, texts: list[dict[str, Any]], prompt: str, limit: int) -> int:
    """Runs one request per schema, all at once, half of them greedy; returns how many ended by themselves."""
    ids = tuple(loaded.tokenizer.encode(prompt))
    requests = [
        GenerationRequest(
            str(index),
            ids,
            SamplingParams(temperature=float(index % 2), seed=index, max_new_tokens=limit),
            constraint=ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(schema)),
        )
        for index, schema in enumerate(texts)
    ]
    ended = 0
    for schema, result in zip(texts, run_all(loaded.engine, requests), strict=True):
        assert result.reason in (FinishReason.STOP, FinishReason.LENGTH), result.events[-1].error
        if result.reason is FinishReason.STOP:
            ended += 1
            assert is_valid(schema, result.text), (schema, result.text)
    return ended


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedEngine:
    return load_engine(make_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama"), context=256)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> LoadedEngine:
    """A SentencePiece vocabulary with a dummy space and byte fallback."""
    return load_engine(make_tiny("mistral", tmp_path_factory.mktemp("tiny") / "mistral"), context=256)


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma3"])
def test_answers_under_a_hundred_schemas_validate(arch: str, tmp_path: Path) -> None:
    """Random weights that know nothing of JSON."""
    loaded = load_engine(make_tiny(arch, tmp_path / arch), context=256)
    assert check_schemas(loaded, schemas(100, seed=1), "x", 150) >= 70


@pytest.mark.real_model
def test_a_real_model_answers_under_schemas() -> None:
    loaded = load_engine(real_model("smollm2-135m"), context=128)
    assert check_schemas(loaded, schemas(32, seed=3), "An example in JSON:", 48) >= 20


def test_a_script_that_fits_is_followed_and_one_that_does_not_is_bent(tmp_path: Path) -> None:
    loaded = load_engine(make_bigram(tmp_path / "m", ["yes", " and", " no"], pieces=["maybe"]))
    assert answer(loaded, None).text == "yes and no"
    for text, expected in (("yes and no", "yes and no"), ("yes|no", "yes"), ("maybe", "maybe")):
        result = answer(loaded, regex(text))
        assert (result.text, result.reason) == (expected, FinishReason.STOP)
    result = answer(loaded, regex("yes and( no)*"))
    assert result.text == "yes and no" and result.token_ids[-1] in loaded.tokenizer.eos_ids
    assert re.fullmatch("(yes){2,3}", answer(loaded, regex("(yes){2,3}")).text)


def test_a_finished_grammar_ends_the_answer_with_stop_and_no_further_token(llama: LoadedEngine) -> None:
    result = answer(llama, regex("abc"))
    assert (result.text, result.reason) == ("abc", FinishReason.STOP)
    assert not set(result.token_ids) & llama.tokenizer.eos_ids
    usage = result.events[-1].usage
    assert usage is not None and usage.completion_tokens == len(result.token_ids) <= 3


def test_an_answer_that_must_be_empty_is(llama: LoadedEngine) -> None:
    result = answer(llama, regex(""))
    assert (result.text, result.reason, result.token_ids) == ("", FinishReason.STOP, [])


def test_a_limit_may_cut_an_answer_and_says_so(llama: LoadedEngine) -> None:
    spec = ConstraintSpec(ConstraintKind.JSON_SCHEMA, '{"type": "array", "minItems": 50}')
    result = answer(llama, spec, SamplingParams(temperature=0.0, max_new_tokens=5))
    assert result.reason is FinishReason.LENGTH and len(result.token_ids) == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ignore_eos_goes_on_to_the_end_of_the_grammar(llama: LoadedEngine, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=1, max_new_tokens=60, ignore_eos=True)
    result = answer(llama, regex("a{1,20}"), sampling)
    assert (result.text, result.reason) == ("a" * 20, FinishReason.STOP)


def test_stop_strings_still_stop(llama: LoadedEngine) -> None:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=60, stop=("cd",))
    result = answer(llama, regex("abcdef"), sampling)
    assert (result.text, result.reason) == ("ab", FinishReason.STOP)


def test_penalties_and_bias_do_not_lead_out_of_the_grammar(llama: LoadedEngine) -> None:
    outside = llama.tokenizer.encode("zzz", add_special=False)[0]
    for sampling in (
        SamplingParams(temperature=0.0, max_new_tokens=60, logit_bias={outside: 99.0}),
        SamplingParams(temperature=2.0, seed=3, max_new_tokens=60, repetition_penalty=5.0, top_k=1),
        SamplingParams(temperature=0.0, max_new_tokens=60, presence_penalty=50.0, frequency_penalty=50.0),
    ):
        result = answer(llama, regex("(ab){10}"), sampling)
        assert (result.text, result.reason) == ("ab" * 10, FinishReason.STOP)


def test_a_forced_token_outside_the_grammar_is_an_error_of_its_request(llama: LoadedEngine) -> None:
    outside = llama.tokenizer.encode("zzz", add_special=False)[0]
    ids = tuple(llama.tokenizer.encode("Hello"))
    forced = SamplingParams(temperature=0.0, max_new_tokens=5, logit_bias={outside: 100.0})
    requests = [
        GenerationRequest("bad", ids, forced, constraint=regex("abc")),
        GenerationRequest("good", ids, GREEDY, constraint=regex("abc")),
    ]
    bad, good = run_all(llama.engine, requests)
    assert bad.reason is FinishReason.ERROR and "constraint" in (bad.events[-1].error or "")
    assert (good.text, good.reason) == ("abc", FinishReason.STOP)


def test_the_first_space_belongs_to_the_text(mistral: LoadedEngine) -> None:
    """A05: with a dummy space in the vocabulary the answer still is what the grammar says, to the space."""
    assert mistral.tokenizer.strips_leading_space
    for text in (" abc", "abc", "  abc"):
        assert answer(mistral, regex(text)).text == text


def test_characters_come_in_bytes_where_no_token_has_them(mistral: LoadedEngine) -> None:
    assert answer(mistral, regex("𝔘ҙ🫠")).text == "𝔘ҙ🫠"


def test_samples_of_one_request_each_keep_to_it(llama: LoadedEngine) -> None:
    sampling = SamplingParams(temperature=1.5, seed=5, max_new_tokens=60)
    ids = tuple(llama.tokenizer.encode("Hello"))
    request = GenerationRequest("r", ids, sampling, num_samples=4, constraint=regex("[a-z]{8}"))
    llama.engine.submit(request)
    events = []
    while llama.engine.has_work():
        events += llama.engine.step()
    texts = ["".join(e.text for e in events if e.sample == sample) for sample in range(4)]
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts)
    assert len(set(texts)) > 1


def test_constrained_and_free_requests_do_not_meet(llama: LoadedEngine) -> None:
    """F12: with and without a grammar in one batch, each answer is the one that it is alone."""
    ids = tuple(llama.tokenizer.encode("Once upon a time"))
    specs = [None, regex("[a-z ]{30}"), None, regex("(yes|no)"), regex("[0-9]{12}")]
    sampling = [SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=30) for i in range(5)]
    requests = [
        GenerationRequest(str(i), ids, sampling[i], constraint=spec, logprobs=2)
        for i, spec in enumerate(specs)
    ]
    together = run_all(llama.engine, requests)
    for request, result in zip(requests, together, strict=True):
        alone = run_all(llama.engine, [request])[0]
        assert result.token_ids == alone.token_ids and result.reason is alone.reason


def test_logprobs_are_those_of_the_model_not_of_the_mask(llama: LoadedEngine) -> None:
    """The best alternatives of the first token are those that an answer without a grammar reports."""
    free = answer(llama, None, logprobs=3)
    held = answer(llama, regex("[0-9]{3}"), logprobs=3)
    first_free, first_held = (
        next(e.logprobs[0] for e in result.events if e.logprobs) for result in (free, held)
    )
    assert [i for i, _ in first_held.top] == [i for i, _ in first_free.top]
    assert first_held.logprob < first_free.logprob


def test_a_constraint_that_cannot_be_used_is_refused_at_once(llama: LoadedEngine) -> None:
    request = GenerationRequest("r", (1, 2), GREEDY, constraint=regex("("))
    for work in (llama.engine.validate, llama.engine.submit):
        with pytest.raises(BadInputError, match="unclosed group"):
            work(request)
    assert not llama.engine.has_work()


def test_a_constraint_that_gives_up_ends_its_answer_with_an_error() -> None:
    """Several tokens in one step: none is kept behind the one at which it gives up."""

    class GivesUp:
        is_finished = False
        tokens = 0

        def advance(self, token_ids: Any) -> None:
            self.tokens += 1
            if self.tokens == 2:
                raise EngineError("the constraint cannot go on: too complex")

        def mask(self, *, may_end: bool = True) -> bytes:
            return b"\xff"

    class Bytes:
        def push(self, token_ids: Any) -> str:
            return bytes(token_ids).decode()

        def finish(self) -> str:
            return ""

    made = Answer(Bytes(), SamplingParams(), frozenset(), 10, ByteTokenizer.vocab_size, GivesUp())
    step = made.push(b"abc")
    assert step.finish_reason is FinishReason.ERROR and step.error is not None and "complex" in step.error
    assert step.token_ids == tuple(b"ab")


# --- the commands ---


def test_complete_takes_schemas_and_grammars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(make_bigram(tmp_path / "m", ["yes", " no"]))
    schema, grammar, gbnf = tmp_path / "s.json", tmp_path / "g.lark", tmp_path / "g.gbnf"
    document = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    schema.write_text(json.dumps(document | {"additionalProperties": False}))
    grammar.write_text('start: /[xy]/ "z"')
    gbnf.write_text('root ::= "no" | "never"')
    assert run(["complete", model, "q", "--schema", str(schema), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads(found["text"]) == {"a": 1} and found["finish_reason"] == "stop"
    assert run(["complete", model, "q", "--grammar", str(grammar)]) == 0
    assert capsys.readouterr().out in ("xz", "yz")
    assert run(["complete", model, "q", "--grammar", str(gbnf)]) == 0
    assert capsys.readouterr().out in ("no", "never")


def test_chat_takes_a_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = str(make_bigram(tmp_path / "m", ["yes", " no"], chat_template=template))
    schema = tmp_path / "s.json"
    schema.write_text('{"enum": ["no"]}')
    assert run(["chat", "-m", model, "-p", "q", "--schema", str(schema)]) == 0
    assert json.loads(capsys.readouterr().out) == "no"
