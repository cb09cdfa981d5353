"""The hub source: the real huggingface_hub against a server that cuts, stalls, refuses and lies."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm_models.catalog import Entry, find_local, iterate_pull, pull_model
from edgellm_models.catalog.catalog import hub_entry
from edgellm_models.catalog.hub_files import RemoteFile, choose_files
from edgellm_models.errors import (
    BadInputError,
    EdgeLLMError,
    NotFoundError,
    Notice,
    OutputError,
    PermissionDeniedError,
    PullProgress,
    TransferError,
)
from tests.support.hub_server import COMMIT, Fault, HubState, serve_hub
from tests.support.oracles import require_oracle

require_oracle("huggingface_hub")

CONTENT = random.Random(7).randbytes(400_000)
OTHER = random.Random(8).randbytes(400_000)
MODEL = "hf:acme/tiny:tiny.gguf"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubState]:
    state = HubState(repos={"acme/tiny": {"tiny.gguf": CONTENT, "README.md": b"tiny"}})
    with serve_hub(state) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield state


def fetch(
    models: Path, name: str = MODEL, stall_s: float = 20.0
) -> tuple[Path, list[PullProgress], list[Notice]]:
    progress: list[PullProgress] = []
    notices: list[Notice] = []
    local = pull_model(
        hub_entry(name), models, on_progress=progress.append, on_notice=notices.append, stall_s=stall_s
    )
    return local.path, progress, notices


def assert_not_pulled(models: Path, name: str = MODEL) -> None:
    assert find_local(name, models) is None
    assert [path.name for path in models.iterdir() if not path.name.startswith(".")] == []


def test_a_file_is_fetched_checked_and_not_fetched_again(hub: HubState, tmp_path: Path) -> None:
    path, progress, notices = fetch(tmp_path)
    assert path.read_bytes() == CONTENT
    assert [notice.detail for notice in notices] == [f"licence of {MODEL}: apache-2.0"]
    assert progress[-1].phase == "done" and progress[-1].done_bytes == len(CONTENT)
    seen = len(hub.requests)
    again, _, _ = fetch(tmp_path)
    assert again == path and len(hub.requests) == seen
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".locks",
        ".partial",
        "hf--acme--tiny@tiny.gguf",
    ]


def test_progress_never_falls_and_the_total_is_fixed_before_the_first_byte(
    hub: HubState, tmp_path: Path
) -> None:
    """ollama 14254 and 13167: totals that jump, bars that run backwards."""
    hub.faults.extend([Fault("cut", 100_000), Fault("cut", 50_000)])
    _, progress, _ = fetch(tmp_path)
    counts = [event.done_bytes for event in progress]
    assert counts == sorted(counts)
    assert {event.total_bytes for event in progress if event.done_bytes} == {len(CONTENT)}


def test_the_token_goes_to_the_hub_and_never_to_another_host(hub: HubState, tmp_path: Path) -> None:
    fetch(tmp_path)
    by_kind = {request.path.startswith("/content/"): request.authorization for request in hub.requests}
    assert by_kind == {False: "Bearer hf_secret", True: None}


def test_cut_connections_are_gone_on_with(hub: HubState, tmp_path: Path) -> None:
    hub.faults.extend([Fault("cut", 120_000), Fault("cut", 0), Fault("cut", 100_000)])
    path, _, _ = fetch(tmp_path)
    assert path.read_bytes() == CONTENT
    assert hub.sent_bytes < len(CONTENT) + 3 * 70_000, "a cut must not start the file again"
    assert [r for r in hub.ranges()[1:] if r is None] == []


def test_a_stall_ends_the_pull_and_the_next_one_resumes(hub: HubState, tmp_path: Path) -> None:
    """ollama 1736, 4755: pulls that hang for ever, or begin again from nothing."""
    hub.faults.append(Fault("stall", 200_000))
    with pytest.raises(TransferError, match=r"stalled: nothing arrived for 1.5 s; run the same command"):
        fetch(tmp_path, stall_s=1.5)
    assert len(hub.ranges()) == 1, "given up, not begun again"
    assert_not_pulled(tmp_path)
    path, progress, _ = fetch(tmp_path)
    assert path.read_bytes() == CONTENT
    assert hub.ranges()[1] not in (None, "bytes=0-")
    assert next(event for event in progress if event.phase == "fetching").done_bytes > 0


def test_a_file_that_changed_meanwhile_is_not_mixed(hub: HubState, tmp_path: Path) -> None:
    hub.faults.append(Fault("stall", 200_000))
    with pytest.raises(TransferError):
        fetch(tmp_path, stall_s=1.5)
    hub.repos["acme/tiny"]["tiny.gguf"] = OTHER
    path, _, _ = fetch(tmp_path)
    assert path.read_bytes() == OTHER


@pytest.mark.parametrize("where", ["api", "content"])
def test_too_many_requests_waits_as_told(hub: HubState, tmp_path: Path, where: str) -> None:
    fault = Fault("status", status=429, retry_after=1)
    (hub.api_faults if where == "api" else hub.faults).append(fault)
    started = time.monotonic()
    path, _, notices = fetch(tmp_path, stall_s=1.5)
    assert path.read_bytes() == CONTENT
    assert time.monotonic() - started >= 1.0
    assert any("429" in notice.detail or "Rate limited" in notice.detail for notice in notices)


def test_a_wait_that_is_too_long_is_an_error_that_says_so(hub: HubState, tmp_path: Path) -> None:
    hub.api_faults.extend([Fault("status", status=429, retry_after=3600)] * 9)
    with pytest.raises(TransferError, match=r"slow down.*Retry-After 3600 s.*HF_TOKEN"):
        fetch(tmp_path)


def test_server_errors_end_as_one_line(hub: HubState, tmp_path: Path) -> None:
    hub.api_faults.extend([Fault("status", status=503, retry_after=0)] * 9)
    with pytest.raises(TransferError, match=r"503.*run the same command to resume") as caught:
        fetch(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_wrong_hash_is_thrown_away(hub: HubState, tmp_path: Path) -> None:
    hub.faults.append(Fault("garble"))
    with pytest.raises(TransferError, match="thrown away"):
        fetch(tmp_path)
    assert_not_pulled(tmp_path)
    path, _, _ = fetch(tmp_path)
    assert path.read_bytes() == CONTENT
    assert hub.ranges() == [None, None], "damaged bytes must not be resumed"


def test_a_file_other_than_the_pinned_one_is_not_fetched(hub: HubState, tmp_path: Path) -> None:
    entry = hub_entry(MODEL)
    pinned = Entry(name="tiny", sources=entry.sources, sha256="0" * 64)
    with pytest.raises(TransferError, match="the catalog says 0000"):
        pull_model(pinned, tmp_path)
    assert hub.started() == 0


def test_no_room_is_said_before_the_first_byte(
    hub: HubState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=300_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match=r"not enough room .* 0 MB needed"):
        fetch(tmp_path)
    assert hub.started() == 0


def test_a_disk_that_fills_up_leaves_nothing_under_the_name(hub: HubState, tmp_path: Path) -> None:
    """E16 for downloads: no plausible but truncated file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    try:
        with pytest.raises(OutputError, match=r"disk is full.*make room"):
            fetch(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_not_pulled(tmp_path)
    path, _, _ = fetch(tmp_path)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("hf:acme/tiny:tinny.gguf", NotFoundError, "nearest: tiny.gguf"),
        ("hf:acme/nothing", PermissionDeniedError, "does not exist, or is private"),
        ("hf:acme/tiny:README.md", BadInputError, "no GGUF file"),
        ("hf:Qwen/Qwen3-0.6B-GUFF", PermissionDeniedError, "nearest in the catalog: hf:Qwen/Qwen3-0.6B-GGUF"),
    ],
)
def test_wrong_names(hub: HubState, tmp_path: Path, name: str, kind: type[EdgeLLMError], words: str) -> None:
    with pytest.raises(kind, match=words):
        fetch(tmp_path, name)


def test_a_gated_model_says_what_to_do(hub: HubState, tmp_path: Path) -> None:
    hub.gated = True
    with pytest.raises(PermissionDeniedError, match=r"gated: accept its terms .* HF_TOKEN"):
        fetch(tmp_path)


def test_a_folder_takes_what_belongs_to_the_model(hub: HubState, tmp_path: Path) -> None:
    hub.repos["acme/folder"] = {
        "config.json": b"{}",
        "tokenizer.json": b'{"a": 1}',
        "model.safetensors": CONTENT,
        "consolidated.safetensors": OTHER,
        "pytorch_model.bin": OTHER,
        "onnx/model.onnx": OTHER,
        "LICENSE": b"free",
        "../evil.json": b"evil",
        "edgellm-model.json": b"not ours",
    }
    path, _, _ = fetch(tmp_path, "hf:acme/folder")
    assert sorted(p.name for p in path.iterdir()) == [
        "LICENSE",
        "config.json",
        "edgellm-model.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (path / "model.safetensors").read_bytes() == CONTENT
    assert find_local("hf:acme/folder", tmp_path) is not None


@pytest.mark.parametrize(
    "name",
    ["../../evil.gguf", "/evil.gguf", "a/../../evil.gguf", "..\\evil.gguf", "a//evil.gguf", ".evil.gguf"],
)
def test_no_file_of_a_repository_leaves_its_folder(name: str) -> None:
    """A listing is untrusted: a name that is no plain relative path is not there, named or not."""
    files = [RemoteFile(name, 1, None)]
    with pytest.raises(BadInputError, match="no GGUF file"):
        choose_files("acme/evil", files, None)
    with pytest.raises(NotFoundError):
        choose_files("acme/evil", files, name)
    shards = [RemoteFile(f"../m-{i:05d}-of-00002.gguf", 1, None) for i in (1, 2)]
    with pytest.raises(NotFoundError):
        choose_files("acme/evil", shards, shards[0].name)


def test_a_small_file_is_checked_by_its_git_id(hub: HubState, tmp_path: Path) -> None:
    """Configs and tokenizers have no SHA-256 on the hub, but a blob id: other content is refused too."""
    hub.repos["acme/folder"] = {"config.json": b"{}", "model.safetensors": CONTENT}
    hub.false_small = b"[]"
    with pytest.raises(TransferError, match=r"config\.json"):
        fetch(tmp_path, "hf:acme/folder")
    assert find_local("hf:acme/folder", tmp_path) is None


def test_every_shard_of_a_split_file_is_fetched(hub: HubState, tmp_path: Path) -> None:
    names = [f"big-{i:05d}-of-00002.gguf" for i in (1, 2)]
    hub.repos["acme/split"] = {names[0]: CONTENT, names[1]: OTHER}
    path, _, _ = fetch(tmp_path, f"hf:acme/split:{names[1]}")
    assert path.name == names[0]
    assert path.with_name(names[1]).read_bytes() == OTHER


def test_several_models_need_a_name(hub: HubState, tmp_path: Path) -> None:
    hub.repos["acme/many"] = {"a-Q8_0.gguf": CONTENT, "a-Q6_K.gguf": OTHER}
    with pytest.raises(BadInputError, match="holds 2 models; name one"):
        fetch(tmp_path, "hf:acme/many")
    hub.repos["acme/many"]["a-Q4_K_M.gguf"] = OTHER
    path, _, notices = fetch(tmp_path, "hf:acme/many")
    assert path.name == "a-Q4_K_M.gguf"
    assert [n.kind for n in notices if n.kind == "file_chosen"] == ["file_chosen"]


def test_pickles_are_refused_by_name(hub: HubState, tmp_path: Path) -> None:
    hub.repos["acme/pickle"] = {"config.json": b"{}", "pytorch_model.bin": CONTENT}
    with pytest.raises(BadInputError, match="only pickled weights"):
        fetch(tmp_path, "hf:acme/pickle")


def test_offline_takes_the_hubs_own_cache(
    hub: HubState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "from huggingface_hub import hf_hub_download as d; d('acme/tiny', 'tiny.gguf')"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    seen = len(hub.requests)
    path, _, _ = fetch(tmp_path / "models")
    assert path.read_bytes() == CONTENT
    assert len(hub.requests) == seen


def test_offline_without_a_cache_is_one_line(
    hub: HubState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TransferError, match=r"HF_HUB_OFFLINE is set and .* not in the hub's local cache"):
        fetch(tmp_path)
    assert hub.requests == []


def test_a_hub_that_does_not_answer_is_one_line(
    hub: HubState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TransferError, match=r"failed: .*; run the same command to resume") as caught:
        fetch(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_the_hubs_cache_holds_is_not_fetched_again(hub: HubState, tmp_path: Path) -> None:
    script = "from huggingface_hub import hf_hub_download as d; d('acme/tiny', 'tiny.gguf')"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert hub.started() == 1
    path, _, _ = fetch(tmp_path / "models")
    assert path.read_bytes() == CONTENT and hub.started() == 1


def test_two_pulls_at_once_fetch_once(hub: HubState, tmp_path: Path) -> None:
    hub.pace_s = 0.005
    paths: list[Path] = []
    waits: list[Notice] = []

    def work() -> None:
        path, _, notices = fetch(tmp_path)
        paths.append(path)
        waits.extend(n for n in notices if n.kind == "pull_waits")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2 and paths[0].read_bytes() == CONTENT
    assert hub.started() == 1 and len(waits) == 1


def test_a_killed_pull_leaves_no_process_and_is_resumed(hub: HubState, tmp_path: Path) -> None:
    hub.faults.append(Fault("stall", 200_000))
    script = (
        "import sys; from pathlib import Path\n"
        "from edgellm_models.catalog.catalog import hub_entry\n"
        "from edgellm_models.catalog import pull_model\n"
        "pull_model(hub_entry(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script, MODEL, str(tmp_path)], env=environment, start_new_session=True
    )
    part = wait_for_part(tmp_path, 100_000)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert_not_pulled(tmp_path)
    assert part.stat().st_size >= 100_000
    path, _, _ = fetch(tmp_path)
    assert path.read_bytes() == CONTENT
    assert hub.ranges()[1] not in (None, "bytes=0-")


def wait_for_part(models: Path, size: int) -> Path:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for part in (models / ".partial").rglob("*.part"):
            if part.stat().st_size >= size:
                return part
        time.sleep(0.05)
    raise AssertionError("nothing was fetched")


def test_closing_the_iterator_cancels(hub: HubState, tmp_path: Path) -> None:
    hub.faults.append(Fault("stall", 200_000))
    events = iterate_pull(hub_entry(MODEL), tmp_path)
    for event in events:
        if event.done_bytes > 0:
            break
    started = time.monotonic()
    events.close()  # type: ignore[attr-defined]
    assert time.monotonic() - started < 25, "it waited for the hub, which is silent for 30 s"
    assert_not_pulled(tmp_path)
    last = list(iterate_pull(hub_entry(MODEL), tmp_path))[-1]
    assert last.phase == "done" and find_local(MODEL, tmp_path) is not None


def test_the_iterator_hands_on_errors(hub: HubState, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        list(iterate_pull(hub_entry("hf:acme/tiny:no.gguf"), tmp_path))


def test_the_commit_that_was_listed_is_the_one_that_is_fetched(hub: HubState, tmp_path: Path) -> None:
    """A push between listing and download must not mix two versions."""
    fetch(tmp_path)
    resolved = [r.path for r in hub.requests if "/resolve/" in r.path]
    assert resolved and all(f"/resolve/{COMMIT}/" in path for path in resolved)
