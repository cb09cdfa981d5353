"""The Python API over scripted models: texts and ids, samples, chats that reuse their KV, refusals."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgellm import LLM, ChatMessage, ConstraintSpec, FinishReason, SamplingParams
from edgellm.contracts import ConstraintKind
from edgellm_models.errors import BadInputError, NotFoundError, UsageError
from tests.support.bigram import make_bigram

CHAIN = ["one", " two", " th", "ree", "."]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_bigram(tmp_path_factory.mktemp("m") / "m", CHAIN, chat_template=TEMPLATE, encodable=False)
    with LLM(folder, ctx=512) as loaded:
        yield loaded


def test_many_prompts_in_order(llm: LLM) -> None:
    prompts = [f"prompt {'x' * i}" for i in range(40)]
    results = llm.generate(prompts)
    assert [result.text for result in results] == ["one two three."] * 40
    assert len({result.prompt_token_ids for result in results}) == 40
    answer = results[0].answers[0]
    assert answer.finish_reason is FinishReason.STOP and answer.error is None
    assert answer.usage.completion_tokens == len(answer.token_ids) == len(CHAIN) + 1


def test_one_text_ids_and_texts_alike(llm: LLM) -> None:
    [text] = llm.generate("hello")
    [ids] = llm.generate(text.prompt_token_ids)
    assert ids.prompt_token_ids == text.prompt_token_ids and ids.text == text.text == "one two three."
    assert llm.generate([]) == []


def test_samples_logprobs_and_prompt_logprobs(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=2)
    [result] = llm.generate(["hello"], sampling, num_samples=3, logprobs=2, prompt_logprobs=0)
    assert len(result.answers) == 3 and {answer.text for answer in result.answers} == {"one two"}
    assert all(len(answer.logprobs) == 2 for answer in result.answers)
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids) - 1
    assert [p.token_id for p in result.prompt_logprobs] == list(result.prompt_token_ids[1:])


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    each = [SamplingParams(temperature=0.0, max_new_tokens=most) for most in (1, 3, 2)]
    results = llm.generate(["hello"] * 3, each)
    assert [result.text for result in results] == ["one", "one two th", "one two"]
    with pytest.raises(UsageError, match="3 prompts have 2 samplings"):
        llm.generate(["hello"] * 3, each[:2])


def test_a_chat_reuses_what_it_computed(llm: LLM) -> None:
    messages = [{"role": "user", "content": "q" * 43}]
    first = llm.chat(messages)
    assert first.text == "one two three."
    again = [*messages, {"role": "assistant", "content": first.text}, ChatMessage("user", "more")]
    second = llm.chat(again)
    # The end token has no KV.
    shared = len(first.prompt_token_ids) + len(first.answers[0].token_ids) - 1
    assert shared // 16 > len(first.prompt_token_ids) // 16, "the answer must fill a block"
    assert second.answers[0].usage.cached_tokens == shared // 16 * 16


def test_a_constraint_is_kept(llm: LLM) -> None:
    constraint = ConstraintSpec(ConstraintKind.REGEX, "(yes|no)")
    [result] = llm.generate("sure?", constraint=constraint)
    assert result.text in ("yes", "no")


def test_inside_of_a_running_loop_and_from_threads(llm: LLM) -> None:
    async def notebook() -> str:
        return llm.generate("hello")[0].text

    assert asyncio.run(notebook()) == "one two three."
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda i: llm.generate(f"t{i}")[0].text, range(8)))
    assert texts == ["one two three."] * 8


def test_what_cannot_be_served_is_refused_before_anything_runs(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"prompt 1: .*512"):
        llm.generate(["fine", "x" * 3000])
    with pytest.raises(BadInputError, match="colour"):
        llm.chat([{"role": "user", "content": "hi", "colour": "red"}])
    with pytest.raises(NotFoundError):
        LLM("no-such-model")
    with pytest.raises(UsageError, match="--kv-dtype"):
        LLM(tmp_path, kv_dtype="f99")
    assert llm.generate("hello")[0].text == "one two three."


def test_an_interrupt_leaves_the_model_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_bigram(tmp_path / "m", ["a", "b"], loop=True, dead_layers=4, context=100_000)
    with LLM(folder, ctx=50_000) as llm:
        engine = llm._runtime.core
        step, count = engine.step, 0

        def interrupted() -> object:
            nonlocal count
            count += 1
            if count == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return step()

        monkeypatch.setattr(engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("x", SamplingParams(temperature=0.0, max_new_tokens=40_000))
        assert count < 5_000 and not engine.has_work()
        [result] = llm.generate("x", SamplingParams(temperature=0.0, max_new_tokens=4))
        assert result.text == "abab"


def test_interrupts_at_many_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for ever and nothing is left running, wherever the main thread was."""
    folder = make_bigram(tmp_path / "m", ["a", "b"], loop=True, dead_layers=1, context=100_000)
    with LLM(folder, ctx=50_000) as llm:
        engine = llm._runtime.core
        step = engine.step
        for moment in range(60):
            begun = threading.Event()

            def interrupt(begun: threading.Event = begun, seconds: float = moment * 5e-5) -> None:
                assert begun.wait(30)
                time.sleep(seconds)
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            monkeypatch.setattr(engine, "step", lambda begun=begun: begun.set() or step())
            with pytest.raises(KeyboardInterrupt):
                llm.generate("x", SamplingParams(temperature=0.0, max_new_tokens=40_000))
            thread.join()
            llm._runtime.engine.call(lambda: None)
            assert not engine.has_work()
