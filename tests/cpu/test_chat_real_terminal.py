"""The whole of ``edgellm chat`` on a pseudo-terminal: screen, engine process, store, real model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm.history.store import HistoryStore, chats_file
from edgellm.locations import Locations
from edgellm_models.catalog import LocalModel
from edgellm_models.catalog.store import StoredFile, move_into_place, write_manifest
from tests.support.hub_server import PIECE, HubState, serve_hub
from tests.support.pty_screen import Terminal
from tests.support.real_models import real_model
from tests.support.tiny_models import make_tiny, tiny_gguf

Start = Callable[..., Terminal]
FAMILY = "👨‍👩‍👧"


@pytest.fixture
def terminal() -> Iterator[Start]:
    started: list[Terminal] = []

    def start(*arguments: str, **options: Any) -> Terminal:
        started.append(Terminal(*arguments, module="edgellm", **options))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.mark.real_model
def test_a_real_model_is_asked_stopped_asked_anew_and_found_again_after_a_kill(terminal: Start) -> None:
    options = ("-m", str(real_model("smollm2-135m")), "--temp", "0.7", "--seed", "1", "--ctx", "2048")
    window = terminal(*options)
    window.until("Ask anything")
    window.send("What is the capital of France?\r")
    window.until("Paris.")
    window.until("tok/s")
    # Stopped in the middle, with a draft of every script in the prompt, in a window of another size.
    window.send("Tell me a long story about a lighthouse.\r")
    window.until("writing")
    window.send("你好 שלום مرحبا " + FAMILY)
    window.resize(60, 20)
    window.until(lambda: "你好" in window.text.replace("你 好", "你好") and "writing" in window.text)
    window.send("\x1b")
    window.until("■ stopped")
    assert "你" in window.text and "שלום" in window.text
    window.resize(100, 30)
    window.until("■ stopped")
    # Edited and asked anew; the old version is there. Answered again; both answers are there.
    window.send("\x15\x05")
    window.until("editing a question")
    window.send("\x15Say hello in one word.\r")
    window.until("2/2")
    window.until("ready")
    window.send("\x1b[1;3D")
    window.until("a long story")
    window.send("\x1b[1;3C")
    window.until("Say hello")
    window.send("\x12")
    window.until(lambda: window.text.count("2/2") == 2)
    window.until("ready")
    # A paste of 500 lines is one question; the process is killed in the answer to the next.
    lines = "\r".join(f"{n}" for n in range(500))
    window.send(f"\x1b[200~{lines}\x1b[201~")
    window.until("499")
    window.send("\r")
    window.until("490 more lines")
    window.send("\x1b")
    window.until("stopped")
    window.send("/branch 2\r")
    window.until(lambda: "more lines" not in window.text)
    window.send("Tell me a story of a ship.\r")
    saved = HistoryStore(chats_file(Locations.from_environment().data))

    def written() -> str:
        (chat,) = saved.list_chats()
        last = saved.branch(chat.id)[-1]
        return str(last.message.content) if last.partial and last.message.role == "assistant" else ""

    window.until(lambda: len(written()) > 40)
    window.process.kill(9)
    window.end()
    partial = written()
    window = terminal(*options, "--continue", columns=100, rows=40)
    window.until("What is the capital of France?")
    window.until("not finished")
    assert " ".join(partial.split())[:30] in " ".join(window.text.split())
    window.send("\x11")
    assert window.end() == 0
    (chat,) = saved.list_chats()
    texts = [str(m.message.content) for m in saved.tree(chat.id)]
    assert "\n".join(str(n) for n in range(500)) in texts and "Say hello in one word." in texts
    saved.close()


def put(path: Path, name: str) -> None:
    """A model as it is after a pull."""
    models = Locations.from_environment().models
    folder = models / ".partial" / "x"
    folder.mkdir(parents=True)
    (folder / path.name).write_bytes(path.read_bytes())
    files = (StoredFile(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()),)
    made = LocalModel(name, folder, files, path.name, "test", "MIT", "2026")
    write_manifest(made)
    move_into_place(made, models)


def test_the_picker_fetches_goes_on_opens_and_deletes_for_real(terminal: Start, tmp_path: Path) -> None:
    """Against a hub that is slow, with a stop in the middle: the second request asks for the rest only."""
    one = tiny_gguf(make_tiny("llama", tmp_path / "one"), tmp_path / "one.gguf")
    two = tiny_gguf(make_tiny("llama", tmp_path / "two", seed=2), tmp_path / "two.gguf")
    put(one, "hf:acme/one:one.gguf")
    hub = HubState(repos={"acme/two": {"two.gguf": two.read_bytes()}}, pace_s=0.1)
    local = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1,localhost"}
    with serve_hub(hub) as address:
        options = ("--max-tokens", "4", "--temp", "0")
        window = terminal("-m", "hf:acme/one:one.gguf", *options, rows=30, HF_ENDPOINT=address, **local)
        window.until("Ask anything")
        window.send("Hi\r")
        window.until("ready")
        window.until("cut: token limit")
        window.send("\x0f")
        window.until("hf:acme/one:one.gguf")
        window.until("F32")  # what the catalog does not know is in the file
        window.send("hf:acme/two:two.gguf\r")
        window.until(lambda: hub.sent_bytes >= 3 * PIECE and "fetching ▰" in window.text)
        window.send("\x1b")
        window.until("Enter goes on where it stopped")
        hub.pace_s = 0.0
        hub.release.set()
        window.send("\r")
        window.until("is here: Enter opens it")
        first, second = hub.ranges()
        assert first is None and second is not None and second != "bytes=0-"
        window.send("\r")
        window.until("hf:acme/two:two.gguf answers from here on")
        window.send("And you?\r")
        window.until(lambda: window.text.count("cut: token limit") == 2)
        # The one that is not open any more is deleted, then the chat.
        window.send("\x0f")
        window.until("Ctrl+D deletes")
        window.send("one.gguf")
        window.until(lambda: "acme/one" in window.text and "smollm2" not in window.text)
        window.send("\x04")
        window.until("Ctrl+D again deletes")
        window.send("\x04")
        window.until("are free")
        assert not list(Locations.from_environment().models.rglob("one.gguf"))
        assert list(Locations.from_environment().models.rglob("two.gguf"))
        window.send("\x1b")
        window.until(lambda: "╭─ Models" not in window.text)
        window.send("\x13")
        window.until("4 messages")
        window.send("\x04")
        # Both parts of a frame: a key that is sent after one of them may meet a list that is read anew.
        window.until(lambda: "Ctrl+Z brings it back" in window.text and "4 messages" not in window.text)
        window.send("\x1a")
        window.until(lambda: "4 messages" in window.text and "Ctrl+Z brings it back" not in window.text)
        window.send("\x04")
        window.until(lambda: "Ctrl+Z brings it back" in window.text and "4 messages" not in window.text)
        window.send("\x1b")
        window.until("another model")  # the empty chat's first page
        window.send("\x11")
        assert window.end() == 0
    saved = HistoryStore(chats_file(Locations.from_environment().data))
    assert not saved.list_chats() and len(saved.list_chats(deleted=True)) == 1
    saved.close()
