"""The life of ``edgellm serve``: address first, ready, drained, stopped, gone with its parent."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgellm.locations import Locations
from edgellm.server.address import MAX_UNIX_PATH_BYTES, claim_tcp, claim_unix
from edgellm.server.model_host import State
from edgellm.server.server_files import ServerRecord, new_record, read_records, servers_folder, write_record
from edgellm_models.errors import PermissionDeniedError, UnavailableError, UsageError
from tests.support.command_line import ROOT, command_environment
from tests.support.served import WAIT_S, chat_body, echoes, http, scripted_model, serving

FOR_EVER = "3600"
"""Seconds of loading: what ends before does not wait for it."""


class Process:
    """A server process: its lines as they come."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fake_serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=command_environment(environ),
        )
        self.out: queue.Queue[str] = queue.Queue()
        self.err: list[str] = []
        self.readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=lambda: self.err.extend(self.process.stderr or ()), daemon=True),
        ]
        for reader in self.readers:
            reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.out.put(line)

    def ready(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.get(timeout=WAIT_S))
        assert found["event"] == "ready" and found["pid"] == self.process.pid
        return found

    def end(self) -> int:
        """The exit code, once all was read that it wrote."""
        code = self.process.wait(WAIT_S)
        for reader in self.readers:
            reader.join(WAIT_S)
        return code


@contextmanager
def process(*arguments: str, **environ: str) -> Iterator[Process]:
    found = Process(*arguments, **environ)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.kill()
            found.process.wait(10)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "scripted.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def wait_for(claim: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not claim():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_the_address_is_claimed_before_loading_and_one_line_says_ready(
    model: str, isolated_home: Path
) -> None:
    """The unix socket: 0600 in a folder 0700, a second server refused with 69 at once, removed at the end."""
    path = isolated_home / "own" / "s.sock"
    with process("serve", model, "--uds", str(path), "--json", FAKE_LOAD_S="1.5") as server:
        wait_for(path.exists)
        with http(f"unix:{path}") as client:
            loading = client.get("/health")
            assert loading.status_code == 503 and loading.json()["status"] == "loading"
            assert loading.headers["retry-after"]
            refused = client.post("/v1/chat/completions", json=chat_body())
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "loading"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            with process("serve", model, "--uds", str(path), FAKE_LOAD_S=FOR_EVER) as second:
                assert second.end() == 69
            assert len(second.err) == 1 and "another server" in second.err[0]
            assert server.ready()["address"] == f"unix:{path}"
            assert client.get("/health").status_code == 200
            files = list((isolated_home / "run" / "servers").iterdir())
            assert [f.name for f in files] == [f"{server.process.pid}.json"]
            assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert not path.exists() and not list((isolated_home / "run" / "servers").iterdir())
        assert server.out.empty(), "one line only"


def test_a_port_in_use_is_one_line_before_loading(model: str) -> None:
    """G20: exit 69 without a traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with process("serve", model, "--port", port, FAKE_LOAD_S=FOR_EVER) as server:
            assert server.end() == 69
    assert len(server.err) == 1 and port in server.err[0] and "in use" in server.err[0]


def test_after_kill_9_with_open_streams_both_kinds_of_address_are_free_at_once(
    model: str, isolated_home: Path
) -> None:
    """G20: no waiting for a minute; a stale socket of ours is replaced."""
    path = isolated_home / "own" / "s.sock"
    with process("serve", model, "--uds", str(path), "--json", FAKE_STEP_S="0.05") as server:
        server.ready()
        with (
            http(f"unix:{path}") as client,
            client.stream("POST", "/v1/chat/completions", json=chat_body("x" * 500, stream=True)) as response,
        ):
            next(response.iter_lines())
            server.process.kill()
            server.end()
    assert path.exists()
    with process("serve", model, "--uds", str(path), "--json") as again:
        again.ready()
        again.process.send_signal(signal.SIGINT)
        assert again.end() == 130
    first = claim_tcp("127.0.0.1", 0)
    port = first.socket.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):
        accepted, _ = first.socket.accept()
        accepted.close()  # the server's side ends first: its end stays in TIME_WAIT
        first.release()
    claim_tcp("127.0.0.1", port).release()


def test_sigterm_lets_open_answers_end_and_takes_no_new_ones(model: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with process("serve", model, "--port", "0", "--json", "--grace", "60", FAKE_GATE=str(gate)) as server:
        address = server.ready()["address"]
        texts: list[str] = []
        with (
            http(address) as client,
            client.stream("POST", "/v1/chat/completions", json=chat_body("a" * 40, stream=True)) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: http(address).get("/health").json()["status"] == "draining")
            late = http(address).post("/v1/chat/completions", json=chat_body())
            assert late.status_code == 503 and late.json()["error"]["code"] == "shutting_down"
            gate.touch()
            texts = list(lines)
        assert texts[-2] == "data: [DONE]" or "data: [DONE]" in texts
        assert server.end() == 0


def test_grace_is_an_end(model: str) -> None:
    with process("serve", model, "--port", "0", "--json", "--grace", "0.2", FAKE_STEP_S="0.05") as server:
        address = server.ready()["address"]
        with (
            http(address) as client,
            client.stream(
                "POST", "/v1/chat/completions", json=chat_body("a" * 2000, stream=True)
            ) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            text = "\n".join(lines)
        assert '"finish_reason":"cancelled"' in text
        assert server.end() == 0


def test_the_access_log_is_a_line_of_json_a_request_without_secrets(model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-key-123\n")
    keys.chmod(0o600)
    options = ("--api-key-file", str(keys), "--access-log", "--json")
    with process("serve", model, "--port", "0", *options) as server:
        with http(server.ready()["address"]) as client:
            headers = {"Authorization": "Bearer secret-key-123"}
            answers = [
                client.get("/v1/models?key=secret-key-123", headers=headers),
                client.post("/v1/chat/completions", json=chat_body("private words"), headers=headers),
                client.post("/v1/chat/completions", json=chat_body()),
            ]
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    rows = [json.loads(line) for line in server.err]
    assert [(row["method"], row["path"], row["status"]) for row in rows] == [
        ("GET", "/v1/models", 200),
        ("POST", "/v1/chat/completions", 200),
        ("POST", "/v1/chat/completions", 401),
    ]
    assert [row["request_id"] for row in rows] == [answer.headers["x-request-id"] for answer in answers]
    assert all(row["duration_ms"] >= 0 for row in rows)
    assert "secret" not in str(server.err) and "private" not in str(server.err)


def test_a_server_ends_with_its_parent(model: str, isolated_home: Path) -> None:
    path = isolated_home / "own" / "s.sock"
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with process("serve", model, "--uds", str(path), "--json", "--parent-pid", str(parent.pid)) as server:
        server.ready()
        parent.kill()
        parent.wait()
        assert server.end() == 0
    assert not path.exists()


def test_a_load_that_fails_ends_the_server_with_its_code(model: str) -> None:
    with process("serve", model, "--port", "0", FAKE_LOAD_ERROR="needs 9 GB, 1 GB free") as server:
        assert server.end() == 71
    assert server.err == ["edgellm: needs 9 GB, 1 GB free\n"] and server.out.empty()


def test_a_signal_while_loading_ends_the_server_at_once(model: str, isolated_home: Path) -> None:
    path = isolated_home / "own" / "s.sock"
    with process("serve", model, "--uds", str(path), FAKE_LOAD_S=FOR_EVER) as server:
        wait_for(path.exists)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert not path.exists() and not list((isolated_home / "run" / "servers").iterdir())


def test_ps_and_stop(model: str) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "edgellm", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, env=command_environment(), check=False, timeout=30
        )

    assert run("stop").returncode == 66
    with process("serve", model, "--port", "0", "--json") as server:
        ready = server.ready()
        [row] = json.loads(run("ps", "--json").stdout)["servers"]
        assert (row["pid"], row["address"], row["state"]) == (server.process.pid, ready["address"], "ok")
        assert (row["running"], row["waiting"]) == (0, 0)
        assert run("stop", "1").returncode == 66
        done = run("stop", str(server.process.pid), "--json")
        assert json.loads(done.stdout) == {"stopped": [server.process.pid], "running": []}
        assert server.end() == 0
    assert len(run("ps").stdout.splitlines()) == 1


# --- addresses ---


def test_only_a_stale_socket_of_ours_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir(mode=0o700)
    path = folder / "s"
    path.write_text("mine")
    with pytest.raises(UnavailableError, match="no socket"):
        claim_unix(path)
    assert path.read_text() == "mine"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnavailableError):
        claim_unix(path)
    assert path.is_symlink()
    path.unlink()
    with socket.socket(socket.AF_UNIX) as foreign:  # a live one that knows nothing of our lock
        foreign.bind(str(path))
        foreign.listen()
        with pytest.raises(UnavailableError, match="another server"):
            claim_unix(path)
    first = claim_unix(path)  # closed, so stale
    with pytest.raises(UnavailableError):
        claim_unix(path)
    path.unlink()
    path.write_text("somebody else's by now")
    first.release()
    assert path.read_text() == "somebody else's by now"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_a_folder_that_others_enter_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionDeniedError, match="0700"):
        claim_unix(folder / "s")
    assert not list(folder.iterdir())


def test_a_path_that_is_too_long_is_said_early(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(MAX_UNIX_PATH_BYTES)):
        claim_unix(tmp_path / ("x" * 120))


def test_a_socket_is_never_open_to_others_not_even_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    bind = socket.socket.bind

    def watched(self: socket.socket, address: Any) -> None:
        bind(self, address)
        modes.append(stat.S_IMODE(os.lstat(address).st_mode))

    monkeypatch.setattr(socket.socket, "bind", watched)
    claim_unix(tmp_path / "f" / "s").release()
    assert modes == [0o600]


def test_small_packets_are_sent_at_once() -> None:
    """Each event of a stream is one; asyncio looks at the protocol to decide."""
    claimed = claim_tcp("127.0.0.1", 0)
    with socket.create_connection(claimed.socket.getsockname()):
        accepted, _ = claimed.socket.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    claimed.release()


# --- files of servers ---


def test_server_files_of_processes_that_ended_go(isolated_home: Path) -> None:
    locations = Locations.from_environment()
    write_record(new_record("unix:/x", "m", "", "", "1"), locations)
    folder = servers_folder(locations)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for record in (
        ServerRecord(ended.pid, "http://a", "gone"),
        ServerRecord(os.getppid(), "http://b", "its number was given to another", process_start="1"),
    ):
        (folder / f"{record.pid}.json").write_text(json.dumps(record.__dict__))
    (folder / "9.json").write_text("{")
    (folder / "77.json").write_text(json.dumps({"pid": 78, "address": "", "model": ""}))
    assert [record.model for record in read_records(locations)] == ["m"]
    assert sorted(f.name for f in folder.iterdir()) == sorted(["9.json", "77.json", f"{os.getpid()}.json"])


# --- the model's states ---


def test_an_idle_model_is_unloaded_and_comes_back() -> None:
    with serving(idle_unload_s=0.2) as running, http(running.address) as client:
        first = client.post("/v1/chat/completions", json=chat_body("abc"))
        wait_for(lambda: client.get("/health").json()["status"] == "asleep")
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["edgellm"]["state"] == "asleep"
        again = client.post("/v1/chat/completions", json=chat_body("abc"))
        assert again.json()["choices"] == first.json()["choices"]
        assert len(running.made) == 2
        assert not running.made[0].model.engine._thread.is_alive()


def test_a_failed_step_is_an_error_object_and_the_server_lives_on() -> None:
    made: list[int] = []

    def make() -> Any:
        made.append(1)
        return scripted_model(echoes, raise_at_step=3 if len(made) == 1 else None)

    with serving(make) as running, http(running.address) as client:
        failed = client.post("/v1/chat/completions", json=chat_body("abc"))
        assert failed.status_code == 500
        assert failed.json()["error"]["type"] == "server_error"
        assert "fire" in failed.json()["error"]["message"]

        def answered() -> bool:
            response = client.post("/v1/chat/completions", json=chat_body("abc"))
            assert response.status_code in (200, 503), response.text
            return response.status_code == 200

        wait_for(answered)
        assert len(made) == 2
        assert 'requests_total{status="engine"} 1' in client.get("/metrics").text


def test_states_are_the_words_of_health() -> None:
    assert [state.value for state in State] == ["loading", "ok", "asleep", "failed", "draining"]
