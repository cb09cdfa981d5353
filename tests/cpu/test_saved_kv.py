"""Saved KV: a chat goes on from its file as from memory; files of others and damaged ones are refused."""

from __future__ import annotations

import json
import os
import random
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from edgellm import LLM, SamplingParams
from edgellm.engine.async_engine import AsyncEngine
from edgellm.engine.kv_exchange import KVExchange
from edgellm.engine.saved_kv import KVIdentity
from edgellm_models.errors import BadInputError, EdgeLLMError, EngineError, NotFoundError, OutputError
from tests.support.bigram import make_bigram
from tests.support.engines import LoadedEngine, load_engine
from tests.support.fake_engine import FakeEngine
from tests.support.tiny_models import make_tiny

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
PROMPT = list(range(30, 119))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One without windows, and one whose windows have left most of the prompt behind."""
    return make_tiny(request.param, tmp_path_factory.mktemp("m") / request.param, quantizable=True)


@pytest.mark.parametrize("kv", ["f32", "bf16", "fp8", "int8", "int4"])
def test_a_chat_goes_on_from_its_file_as_from_memory(model: Path, tmp_path: Path, kv: str) -> None:
    """The same tokens are reused and the same bits come, log-probabilities included."""
    file = tmp_path / "chat.kv"
    with LLM(model, ctx=512, kv_dtype=kv) as llm:
        [first] = llm.generate([PROMPT], GREEDY)
        history = [*PROMPT, *first.answers[0].token_ids]
        saved = llm.save_kv(history, file)
        assert saved == (len(history) - 1) // 16 * 16
        [memory] = llm.generate([[*history, 7, 8, 9]], GREEDY, logprobs=2)
        assert memory.answers[0].usage.cached_tokens == saved
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with LLM(model, ctx=512, kv_dtype=kv) as llm:
        assert llm.load_kv(file) == saved == llm.load_kv(file)
        [again] = llm.generate([[*history, 7, 8, 9]], GREEDY, logprobs=2)
        assert again.answers[0].usage.cached_tokens == saved
        assert again.answers[0].logprobs == memory.answers[0].logprobs
        llm._runtime.core.check_integrity()
        copy = tmp_path / "copy.kv"
        assert llm.save_kv(history, copy) == saved and copy.read_bytes() == file.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat.kv", "copy.kv"]


def test_the_answers_of_a_chat_keep_their_ids(tmp_path: Path) -> None:
    """F19: what the model said is tokenized otherwise than it was generated; the file knows how it was."""
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    folder = make_bigram(
        tmp_path / "m", ["one", " two", " th", "ree", "."], chat_template=template, encodable=False
    )
    messages = [{"role": "user", "content": "q" * 43}]
    with LLM(folder, ctx=512) as llm:
        first = llm.chat(messages)
        history = [*messages, {"role": "assistant", "content": first.text}]
        saved = llm.save_kv(history, tmp_path / "chat.kv")
    with LLM(folder, ctx=512) as llm:
        assert llm.load_kv(tmp_path / "chat.kv") == saved > len(first.prompt_token_ids)
        second = llm.chat([*history, {"role": "user", "content": "more"}])
        assert second.answers[0].usage.cached_tokens == saved


# --- what is refused ---


def engine_with_file(model: Path, tmp_path: Path, kv: str = "f32") -> tuple[KVExchange, Path]:
    loaded = load_engine(model, context=256, kv=kv)
    exchange = exchange_of(loaded, KVIdentity("a" * 32, kv, "16", "r"))
    exchange_request(loaded, PROMPT)
    file = tmp_path / "chat.kv"
    exchange.write(file, exchange.snapshot(PROMPT), [("hello", (5, 6))])
    return exchange, file


def exchange_of(loaded: LoadedEngine, identity: KVIdentity) -> KVExchange:
    engine = loaded.engine
    return KVExchange(engine._kv, engine._runner, 256, engine.vocab_size, None, lambda: identity, "tiny")


def exchange_request(loaded: LoadedEngine, ids: list[int]) -> None:
    from tests.support.engines import run_one

    run_one(loaded, ids, SamplingParams(temperature=0.0, max_new_tokens=1))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("model", ("another model", "aaaa", "zzzz", "tiny")),
        ("kv_type", ("KV of type 'f32'", "'zzzz'")),
        ("block_size", ("blocks of '16'", "'zzzz'")),
        ("rope", ("rotary", "'r'", "'zzzz'")),
    ],
)
def test_a_file_of_something_else_is_refused_with_both_values(
    model: Path, tmp_path: Path, field: str, words: tuple[str, ...]
) -> None:
    from dataclasses import replace

    exchange, file = engine_with_file(model, tmp_path)
    other = replace(exchange._identity(), **{field: "zzzz"})
    with pytest.raises(BadInputError) as refused:
        replace(exchange, identity=lambda: other).read(file)
    message = str(refused.value)
    assert "\n" not in message and str(file) in message and all(word in message for word in words)
    assert refused.value.exit_code == 65


def rewritten(file: Path, change: Callable[[dict[str, object]], None]) -> None:
    """The header changed, the data as it was."""
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def set_metadata(name: str, value: str) -> Callable[[dict[str, object]], None]:
    return lambda header: header["__metadata__"].__setitem__(name, value)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_metadata("version", "1"), "version '1', this edgellm reads '2'"),
        (set_metadata("format", "pt"), "no saved KV: its format is 'pt'"),
        (lambda header: header.pop("__metadata__"), "without the metadata"),
        (lambda header: header["keys.0"]["shape"].__setitem__(0, 1 << 40), "needs"),
        (lambda header: header["token_ids"].__setitem__("dtype", "F64"), "no list of token ids"),
        (lambda header: header.__setitem__("more", header.pop("values.0")), "this engine needs"),
        (set_metadata("answers", "[[1]]"), "CRC-32"),
    ],
)
def test_a_header_that_says_something_else_is_refused(
    model: Path, tmp_path: Path, change: Callable[[dict[str, object]], None], words: str
) -> None:
    exchange, file = engine_with_file(model, tmp_path)
    rewritten(file, change)
    with pytest.raises(BadInputError) as refused:
        exchange.read(file)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_truncated_and_flipped_files_are_refused_and_change_nothing(model: Path, tmp_path: Path) -> None:
    """Any one bit, anywhere; any shorter length; other files altogether."""
    exchange, file = engine_with_file(model, tmp_path)
    whole = file.read_bytes()
    assert len(exchange.read(file).token_ids) == 80
    rng = random.Random(1)
    counts = exchange.kv.counts()
    places = [*range(0, 40, 3), *(rng.randrange(len(whole)) for _ in range(60))]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(EdgeLLMError) as refused:
            exchange.read(file)
        assert refused.value.exit_code == 65 and "\n" not in str(refused.value)
    for length in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(BadInputError):
            exchange.read(file)
    file.write_bytes(whole + b"x")
    with pytest.raises(BadInputError, match="longer"):
        exchange.read(file)
    for data in (b"GGUF" + bytes(100), b"\xff" * 200, os.urandom(300)):
        file.write_bytes(data)
        with pytest.raises(BadInputError):
            exchange.read(file)
    file.write_bytes(whole)
    os.truncate(file, 1 << 41)  # sparse: nothing of that size may be allocated
    with pytest.raises(BadInputError):
        exchange.read(file)
    assert exchange.kv.counts() == counts
    with pytest.raises(NotFoundError):
        exchange.read(tmp_path / "absent")
    with pytest.raises(BadInputError, match="regular"):
        exchange.read(tmp_path)


def test_ids_and_lengths_that_the_model_does_not_have_are_refused(model: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    exchange, file = engine_with_file(model, tmp_path)
    with pytest.raises(BadInputError, match="token ids from 30 to 109, but the vocabulary has 100"):
        replace(exchange, vocab_size=100).read(file)
    with pytest.raises(BadInputError, match=r"80 tokens.*context of 64"):
        replace(exchange, context_length=64).read(file)


@pytest.mark.parametrize(("kv", "bits"), [("f32", 0xFF), ("fp8", 0x7F), ("fp8", 0xFF)])
def test_values_that_are_no_numbers_are_refused(model: Path, tmp_path: Path, kv: str, bits: int) -> None:
    """Whole files by their checksums, whose pages hold NaN: of f32 four bytes of ones, of e4m3 one of two."""
    exchange, file = engine_with_file(model, tmp_path, kv)
    saved = exchange.snapshot(PROMPT)
    keys = saved.pages[0][0].view(torch.uint8)
    keys[0, 0, 3, 0, 4:8] = 0x7E if kv == "fp8" else 0
    exchange.write(file, saved)
    exchange.read(file)
    keys[0, 0, 3, 0, 4:8] = bits
    exchange.write(file, saved)
    with pytest.raises(BadInputError, match="no numbers"):
        exchange.read(file)


def test_a_file_that_cannot_be_written_leaves_nothing(model: Path, tmp_path: Path) -> None:
    exchange, file = engine_with_file(model, tmp_path)
    saved = exchange.snapshot(PROMPT)
    with pytest.raises(OutputError) as failed:
        exchange.write(tmp_path / "no" / "chat.kv", saved)
    assert failed.value.exit_code == 73
    with pytest.raises(OutputError):
        exchange.write(tmp_path, saved)  # a folder
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    with pytest.raises(BadInputError, match="nothing of these 20 tokens"):
        exchange.snapshot([5] * 20)


def test_too_few_free_blocks_are_told_and_change_nothing(model: Path, tmp_path: Path) -> None:
    groups = 2 if "gemma" in model.name else 1
    exchange, file = engine_with_file(model, tmp_path)
    small = load_engine(model, context=256, num_blocks=[4] * groups)
    other = exchange_of(small, exchange._identity())
    with pytest.raises(EdgeLLMError, match="needs 5 free blocks and 4 are free"):
        other.adopt(other.read(file))
    small.engine.check_integrity()
    assert other.kv.counts()["cached"] == 0


# --- the engine's thread ---


def test_a_call_runs_between_steps_and_its_failure_is_the_callers() -> None:
    service = AsyncEngine(FakeEngine())
    assert service.call(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        service.call(lambda: 1 // 0)
    with pytest.raises(EngineError, match="keeps no KV"):
        service.load_kv(Path("x"))
    assert service.call(lambda: 6) == 6
    service.close()
    with pytest.raises(EngineError, match="closed"):
        service.call(lambda: 7)
