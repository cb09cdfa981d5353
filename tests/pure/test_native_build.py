"""Building the native library: what is kept, what is said where it cannot be built, and when it is stale."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgellm_kernels import native_library
from edgellm_kernels.native import build


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A source folder with only the library's core: it compiles in a second."""
    sources = tmp_path / "native"
    sources.mkdir()
    for name in ("api.h", "api_core.h"):
        shutil.copy(build.SOURCES / name, sources)
    (sources / "one.cpp").write_text(
        '#include "api_core.h"\n'
        "int edgellm_has_avx2(int32_t* answer) { *answer = 1; return 0; }\n"
        "int edgellm_has_avx512vnni(int32_t* answer) { *answer = 1; return 0; }\n"
    )
    return sources


def test_a_build_holds_every_back_end_and_is_fresh_until_a_source_changes(small: Path) -> None:
    target = small / build.BUILT
    assert build.build_or_explain(target, small) is None
    assert {path.name for path in target.iterdir()} == {
        build.STAMP,
        *(build.library_name(backend) for backend in build.backends()),
    }
    assert build.is_fresh(target, small)
    times = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    assert build.build_or_explain(target, small) is None
    assert times == {path: path.stat().st_mtime_ns for path in target.iterdir()}, "nothing is built twice"
    with (small / "api.h").open("a") as header:
        header.write("// changed\n")
    assert not build.is_fresh(target, small)


def test_an_installation_takes_the_libraries_that_lie_beside_fresh_sources(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.build_or_explain(small / build.BUILT, small) is None
    monkeypatch.setenv("CXX", "/nowhere/compiler")
    assert build.build_or_explain(tmp_path / "installed", small) is None
    assert build.is_fresh(tmp_path / "installed", small)


def test_without_a_compiler_the_reason_is_kept(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    target = small / build.BUILT
    reason = build.build_or_explain(target, small)
    assert reason == "no C++ compiler was found (c++, g++ or clang++); CXX names another one"
    assert (target / build.REASON).read_text().strip() == reason
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    assert "CXX names, no-such-compiler, was not found" in str(build.build_or_explain(target, small))


def test_a_failed_compile_leaves_one_line_and_no_old_library(small: Path) -> None:
    target = small / build.BUILT
    assert build.build_or_explain(target, small) is None
    (small / "one.cpp").write_text("int broken(\n")
    reason = build.build_or_explain(target, small)
    assert reason is not None and reason.startswith("compiling one.cpp failed: ") and "\n" not in reason
    assert [path.name for path in target.iterdir()] == [build.REASON]
    (small / "one.cpp").write_text("int mended() { return 0; }\n")
    assert build.build_or_explain(target, small) is None
    assert not (target / build.REASON).exists()


def test_what_is_missing_is_said(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "_FOLDER", small)
    monkeypatch.setattr(build, "source_stamp", lambda sources=small: "stamp")
    assert native_library.find_library() is None
    assert native_library.why_missing().startswith("it was not built (python -m edgellm_kernels.native.build")
    target = small / build.BUILT
    target.mkdir()
    (target / build.STAMP).write_text("another stamp\n")
    assert "was built from other sources" in native_library.why_missing()
    (target / build.REASON).write_text("no C++ compiler was found\n")
    assert native_library.why_missing() == "no C++ compiler was found"
    for backend in build.backends():
        (target / build.library_name(backend)).write_bytes(b"no library")
    (target / build.STAMP).write_text("stamp\n")
    (target / build.REASON).unlink()
    assert native_library.find_library() is None
    assert native_library.why_missing() == f"the library in {target} cannot be loaded"


def test_a_back_end_that_is_asked_for_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native_library.BACKEND_VARIABLE, "portable")
    path = native_library.find_library()
    assert path is not None and path.name == build.library_name("portable")
    assert native_library.unmet_wish() == native_library.why_missing() == ""
    library = native_library.open_library(path)
    assert native_library.why_chosen(library) == "as EDGELLM_NATIVE_BACKEND asks"
    monkeypatch.setenv(native_library.BACKEND_VARIABLE, "sse9")
    assert native_library.find_library() is None
    assert native_library.why_missing() == native_library.unmet_wish()
    assert native_library.unmet_wish().startswith("EDGELLM_NATIVE_BACKEND is 'sse9': this processor runs ")
    monkeypatch.delenv(native_library.BACKEND_VARIABLE)
    assert native_library.why_chosen(library) == "the fastest that this processor runs"


def test_every_function_of_the_headers_is_in_the_library() -> None:
    built = native_library.built_libraries()
    assert built, native_library.why_missing()
    names = [name for name, _ in native_library._prototypes()]
    assert {"edgellm_linear", "edgellm_pack", "edgellm_pool_new"} <= set(names)
    assert set(native_library.open_library(built["portable"]).functions) == set(names)
