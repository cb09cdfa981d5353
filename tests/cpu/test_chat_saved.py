"""``edgellm chat`` and its memory: what is saved, gone on with, kept after a kill; and who answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edgellm.cache.kv_storage import BLOCK_SIZE
from edgellm.cli.chat_kv import ChatKV
from edgellm.cli.chat_session import ChatSession
from edgellm.cli.output import Output
from edgellm.cli.plain_chat import line_mode
from edgellm.cli.runtime import load_runtime
from edgellm.config import EngineConfig
from edgellm.contracts import Finished, FinishReason, SamplingParams
from edgellm.history.kv_files import KVFiles
from edgellm.history.store import HistoryStore, chats_file
from edgellm.locations import Locations
from edgellm.server.server_files import new_record, write_record
from edgellm_models.errors import NotFoundError
from tests.support.bigram import make_bigram
from tests.support.child_output import read_exactly, start_child
from tests.support.openai_stub import openai_stub

ROOT = Path(__file__).resolve().parents[2]
SOURCES = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "models", "quantize", "tui"))


def start(*arguments: str, **extra: str) -> subprocess.Popen[bytes]:
    return start_child(
        [sys.executable, "-m", "tests.support.fake_chat", "chat", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": SOURCES, "PYTHONUTF8": "1", **extra},
    )


def chat(*arguments: str, code: int = 0, **extra: str) -> tuple[str, str]:
    """Standard output and error of one command."""
    process = start(*arguments, **extra)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert b"Traceback" not in errors
    return out.decode(), errors.decode()


def store() -> HistoryStore:
    return HistoryStore(chats_file(Locations.from_environment().data))


def asked(path: Path) -> list[list[list[str]]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_chat_is_saved_and_gone_on_with_by_its_id_or_as_the_last(tmp_path: Path) -> None:
    record = tmp_path / "asked"
    chat("--system", "Be brief.", "--seed", "5", "One?", FAKE_RECORD=str(record))
    lines = chat("--json", "Other?", FAKE_RECORD=str(record))[0].splitlines()
    other_id = json.loads(lines[-1])["chat_id"]
    first_id = next(found.id for found in store().list_chats() if found.id != other_id)
    _, errors = chat("-c", first_id[:8], "Two?", FAKE_RECORD=str(record))
    assert f'going on with chat {first_id[:8]} "One?": 2 messages' in errors
    chat("--continue", "face", "it", FAKE_RECORD=str(record))  # face is too short for an id
    paris = "The capital of France is Paris."
    begin = [["system", "Be brief."], ["user", "One?"], ["assistant", paris]]
    assert asked(record)[2] == [*begin, ["user", "Two?"]]
    assert asked(record)[3] == [*begin, ["user", "Two?"], ["assistant", paris], ["user", "face it"]]
    branch = store().branch(first_id)
    assert [m.message.role for m in branch] == ["user", "assistant"] * 3
    assert (
        branch[1].sampling["seed"] == 5 and branch[1].usage is not None and branch[1].model == "smollm2-135m"
    )


def test_no_save_leaves_no_trace_and_goes_on_without_changing(tmp_path: Path) -> None:
    record = tmp_path / "asked"
    chat("--no-save", "One?")
    assert not chats_file(Locations.from_environment().data).exists()
    chat("One?")
    chat("--no-save", "-c", "Two?", FAKE_RECORD=str(record))
    assert len(asked(record)[0]) == 3
    (saved,) = store().list_chats()
    assert saved.num_messages == 2


def test_ctrl_c_keeps_the_partial_answer_and_is_130() -> None:
    """H09: stopping an answer loses nothing of it."""
    process = start("Hi", FAKE_SCRIPTS='[{"pieces": ["one ", "two "], "hold_after": 2}]')
    assert read_exactly(process, 8) == b"one two "
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    (saved,) = store().list_chats()
    answer = store().branch(saved.id)[-1]
    assert (answer.message.content, answer.finish_reason) == ("one two ", FinishReason.CANCELLED)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_killed_chat_keeps_its_partial_answer_and_goes_on(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = start("Hi", FAKE_SCRIPTS='[{"pieces": ["one ", "two "], "hold_after": 2}]')
    assert read_exactly(process, 8) == b"one two "
    time.sleep(1.0)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    record = tmp_path / "asked"
    chat("-c", "Go on.", FAKE_RECORD=str(record))
    assert asked(record)[0] == [["user", "Hi"], ["assistant", "one two "], ["user", "Go on."]]


def test_a_failed_question_is_no_part_of_what_goes_on(tmp_path: Path) -> None:
    record = tmp_path / "asked"
    chat("One?")
    chat("-c", "Two?", code=70, FAKE_SCRIPTS='[{"pieces": [], "error": "NaN logits"}]')
    chat("-c", "Three?", FAKE_RECORD=str(record))
    assert [content for _, content in asked(record)[0]] == [
        "One?",
        "The capital of France is Paris.",
        "Three?",
    ]
    (saved,) = store().list_chats()
    assert "Two?" in [m.message.content for m in store().tree(saved.id)]  # but it is not lost either


def test_a_history_that_cannot_be_used_never_stops_an_answer() -> None:
    path = chats_file(Locations.from_environment().data)
    path.parent.parent.mkdir(parents=True)
    path.parent.write_text("in the way")
    out, errors = chat("Hi")
    assert out == "The capital of France is Paris.\n"
    assert "note: this chat is not saved: the chat history" in errors
    path.parent.unlink()
    path.parent.mkdir()
    path.write_bytes(b"no database " * 1000)
    out, errors = chat("Hi")
    assert out == "The capital of France is Paris.\n" and "set aside as" in errors
    assert len(store().list_chats()) == 1


def test_the_model_of_a_chat_answers_again_or_is_named_when_it_is_gone(tmp_path: Path) -> None:
    model = tmp_path / "own.gguf"
    model.write_bytes(b"GGUF")
    chat("-m", str(model), "One?")
    assert "answers; -m names another" not in chat("-c", "Two?")[1]
    model.unlink()
    _, errors = chat("-c", "Three?", code=66)
    assert "own.gguf" in errors and "was begun with it; -m names another model" in errors
    chat("-c", "-m", "smollm2-135m", "Three?")


def test_control_characters_are_saved_as_they_came() -> None:
    evil = "\x1b]0;owned\x07red\x9b2J"
    chat("Hi", FAKE_SCRIPTS=json.dumps([{"pieces": [evil]}]))
    (saved,) = store().list_chats()
    assert store().branch(saved.id)[-1].message.content == evil


# --- servers ---


def test_any_openai_server_answers_with_url(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-key\n")
    keys.chmod(0o600)
    with openai_stub("Hel", "lo.", key="secret-key") as server:
        options = ("--url", server.address + "/v1", "--api-key-file", str(keys))
        out, errors = chat(*options, "--temp", "0.5", "Hi")
        assert (out, errors.count("note: seed")) == ("Hello.\n", 1)
        body = server.asked[0]
        assert body["model"] == "their-model" and body["temperature"] == 0.5
        assert "top_k" not in body and "conversation_id" not in body
        chat("-c", *options, "More.")
        assert [m["content"] for m in server.asked[1]["messages"]] == ["Hi", "Hello.", "More."]
        _, errors = chat(*options, "-m", "another", "Hi", code=66)
        assert "does not have the model another; it has their-model" in errors
        _, errors = chat("--url", server.address, "Hi", code=77)  # without the key
        assert "no such key" in errors and "secret" not in errors
    (saved,) = (found for found in store().list_chats() if found.num_messages == 4)
    assert saved.model == "their-model"


def test_a_running_server_of_the_same_model_answers_instead_of_a_second_copy(tmp_path: Path) -> None:
    model = make_bigram(tmp_path / "own", ["a", "b"], chat_template="{{ messages[0].content }}")
    linked = tmp_path / "linked"
    linked.symlink_to(model, target_is_directory=True)
    locations = Locations.from_environment()
    here = "The capital of France is Paris.\n"
    with openai_stub("From ", "there.", model="own", owner="edgellm") as server:
        write_record(new_record(server.address, "own", str(model), "", "1"), locations)
        out, errors = chat("-m", str(linked), "--temp", "0.25", "Hi")
        assert out == "From there.\n"
        assert f"note: the server at {server.address} (process {os.getpid()}) answers" in errors
        assert server.asked[0]["temperature"] == 0.25 and server.asked[0]["min_p"] == 0.05
        # One who asks for another context gets an engine with it.
        assert chat("-m", str(linked), "--ctx", "99", "Hi")[0] == here
        assert len(server.asked) == 1
    out, errors = chat("-m", str(linked), "Hi")
    assert out == here
    assert "is not used" in errors and "cannot be reached" in errors and "it is loaded here" in errors


# --- KV ---


class Lines:
    """What a person types in the line mode."""

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)

    def __call__(self) -> str:
        if not self._lines:
            raise EOFError
        return self._lines.pop(0)


def talk(
    path: Path, session: ChatSession, kv_folder: Path, *lines: str, max_bytes: int = 1 << 30
) -> tuple[list[int], str]:
    """A process's worth of the line mode over a real engine; cached tokens of each answer, and the chat's id.

    Everything here begins anew but the files.
    """
    resolved = EngineConfig().resolve(environ={}, folder=path.parent, user_file=path / "none.toml")
    runtime = load_runtime(resolved, path, "scripted")
    record = session.record("", str(path))
    kv = ChatKV(KVFiles(kv_folder, max_bytes), session.on_notice, min_tokens=64)
    client = runtime.client()
    cached: list[int] = []
    watched = client.stream_chat

    def stream_chat(*arguments: Any, **named: Any) -> Any:
        async def events() -> Any:
            async for event in watched(*arguments, **named):
                if isinstance(event, Finished):
                    cached.append(event.usage.cached_tokens)
                yield event

        return events()

    client.stream_chat = stream_chat  # type: ignore[method-assign]
    with asyncio.Runner() as runner:
        runner.run(kv.load(client, record.conversation_id, record.tokens))
        sampling = SamplingParams(temperature=0.0, max_new_tokens=48)
        line_mode(runner, client, record, sampling, session.output, read=Lines(*lines))
        runner.run(kv.save(client, record.conversation_id, record.tokens))
        runner.run(client.close())
    runtime.close()
    session.close()
    return cached, record.conversation_id


def test_a_chat_that_goes_on_computes_nothing_of_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer's own ids cannot be spelled back into tokens, so only remembered ones meet the saved KV."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    options: dict[str, Any] = {"chat_template": template, "loop": True, "context": 4000}
    path = make_bigram(tmp_path / "m", ["he", "llo", " there"], encodable=False, **options)
    folder = tmp_path / "kv"
    output = Output(quiet=True)
    first, chat_id = talk(path, ChatSession(output), folder, "x" * 100, "y" * 50)
    asked_tokens = 6 + 100 + 11  # [user] and [assistant]; a byte is a token
    # Whole blocks are reused, and the KV of an answer's last token is never there.
    assert first == [0, (asked_tokens + 48 - 1) // BLOCK_SIZE * BLOCK_SIZE]

    def go_on(**settings: Any) -> tuple[int, list[str]]:
        session = ChatSession(output)
        session.take_up(chat_id[:8])
        cached, again = talk(path, session, folder, "more", **settings)
        assert again == chat_id
        return cached[0], [notice.kind for notice in session.notices]

    cached, kinds = go_on()
    assert kinds == ["continued"]
    both = asked_tokens + 48 + 6 + 50 + 11 + 48
    assert cached == (both - 1) // BLOCK_SIZE * BLOCK_SIZE  # both questions and both answers
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(file.stat().st_mode) == 0o600
    # A damaged file is told, and written anew; a missing one too; one over the limit is not kept.
    file.write_bytes(file.read_bytes()[:-1])
    assert go_on() == (0, ["continued", "kv_refused"])
    cached, kinds = go_on()
    assert cached > 100 and kinds == ["continued"]
    file.unlink()
    assert go_on() == (0, ["continued", "kv_missing"])
    assert go_on(max_bytes=1000)[1] == ["continued", "kv_not_saved"]
    assert not any(folder.iterdir())
    assert "Traceback" not in capsys.readouterr().err


def test_the_kv_unused_for_longest_goes_first(tmp_path: Path) -> None:
    files = KVFiles(tmp_path / "kv", max_bytes=2500)
    for number, name in enumerate(("aa", "bb", "cc", "dd")):
        files.prepare(name).write_bytes(bytes(1000))
        os.utime(files.path(name), (number, number))
    (tmp_path / "kv" / "theirs.txt").write_bytes(bytes(5000))
    assert files.find("aa") == files.path("aa")  # used now
    assert files.make_room() == [files.path("bb"), files.path("cc")]
    assert files.find("bb") is None and files.remove("aa") and not files.remove("aa")
    assert (tmp_path / "kv" / "theirs.txt").exists()
    for bad in ("", "../x", "a/b", "G"):
        with pytest.raises(NotFoundError):
            files.path(bad)
