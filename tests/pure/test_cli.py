"""The command skeleton: what it imports, where it writes, its variables, exit codes and completion."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from edgellm.cli import main as main_module
from edgellm.cli.errors import one_line, report
from edgellm.cli.main import COMMANDS, LazyGroup, cli
from edgellm.cli.options import EdgeOption, SettingOption
from edgellm.cli.output import Output, plain, progress_line
from edgellm.config import BY_NAME
from edgellm.switches import SWITCHES, Switch, render_markdown
from edgellm_models.errors import (
    BadInputError,
    ConfigError,
    EdgeLLMError,
    EngineError,
    NotFoundError,
    OutputError,
    PermissionDeniedError,
    PullProgress,
    ResourceError,
    TransferError,
    UnavailableError,
    UsageError,
)
from tests.support.command_line import SOURCE_ROOTS, command_environment, run_edgellm

HEAVY = {
    "torch",
    "textual",
    "numpy",
    "jinja2",
    "huggingface_hub",
    "tokenizers",
    "sentencepiece",
    "gguf",
    "safetensors",
    "transformers",
    "triton",
    "rich",
}


def imported_by(*arguments: str) -> set[str]:
    """The top-level modules that a command line imports."""
    script = (
        "import sys\n"
        "from edgellm.cli.main import run\n"
        "code = run(sys.argv[1:])\n"
        "sys.stderr.write('MODULES ' + ' '.join({n.split('.')[0] for n in sys.modules}))\n"
        "sys.exit(code)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=command_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return set(shown.stderr.partition("MODULES ")[2].split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["list"],
        ["show", "qwen3-4b"],
        ["config", "show", "--origin"],
        ["completion", "bash"],
        ["pull", "--help"],
        ["tokenize", "--help"],
        ["rm", "--help"],
        ["doctor", "--help"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    """Help texts that take seconds (Prefect 20549): a command imports what it needs, when it needs it."""
    assert imported_by(*arguments) & HEAVY == set()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("chat", "complete")])
def test_help_begins_with_usage_and_examples(name: str) -> None:
    shown = run_edgellm(name, "-h")
    assert shown.returncode == 0 and shown.stderr == ""
    assert shown.stdout.startswith(f"Usage: edgellm {name}")
    if name != "config":  # a group whose help lists its commands
        assert "Examples:" in shown.stdout.splitlines()[2]


def test_the_root_help_lists_every_command_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_module.importlib, "import_module", lambda name: pytest.fail(name))
    text = cli.get_help(click.Context(cli, info_name="edgellm"))
    for name, row in COMMANDS.items():
        assert f"\n  {name} " in text and row.summary in text


def test_the_version_is_one_line() -> None:
    shown = run_edgellm("--version")
    assert shown.returncode == 0 and shown.stdout.startswith("edgellm ") and shown.stdout.count("\n") == 1


# --- options and their variables ---------------------------------------------------------------------


def test_every_option_has_its_variable() -> None:
    from edgellm.cli.reference import walk_commands

    walked = list(walk_commands())
    assert {path for path, _ in walked} >= {f"edgellm {name}" for name in COMMANDS}
    for path, command in walked:
        for parameter in command.params:
            if not isinstance(parameter, click.Option) or parameter.name in ("help", "version"):
                continue
            long = next(d for d in parameter.opts if d.startswith("--"))
            expected = "EDGELLM_" + long[2:].replace("-", "_").upper()
            assert isinstance(parameter, EdgeOption), f"{path} {long}"
            assert parameter.envvar == expected, f"{path} {long}"


def test_the_variable_of_an_option_works(isolated_home: Path) -> None:
    by_variable = run_edgellm("list", environ={"EDGELLM_JSON": "1"})
    assert by_variable.stdout == run_edgellm("list", "--json").stdout
    shown = run_edgellm("config", "show", "--json", environ={"EDGELLM_CTX": "77"})
    record = json.loads(shown.stdout)
    assert record["settings"]["ctx"] == 77 and record["origins"]["ctx"] == "EDGELLM_CTX"


def test_a_flag_wins_over_its_variable() -> None:
    shown = run_edgellm("config", "show", "--json", "--ctx", "5", environ={"EDGELLM_CTX": "77"})
    record = json.loads(shown.stdout)
    assert record["settings"]["ctx"] == 5 and record["origins"]["ctx"] == "flag"


def test_a_wrong_variable_is_a_configuration_error() -> None:
    for name in ("EDGELLM_JSON", "EDGELLM_QUIET"):
        shown = run_edgellm("list", environ={name: "perhaps"})
        assert shown.returncode == 78 and name in shown.stderr and shown.stdout == ""


def test_the_settings_of_the_shared_options_exist() -> None:
    from edgellm.cli.options import ENGINE_SETTINGS, SAMPLING_SETTINGS

    assert set(ENGINE_SETTINGS) | set(SAMPLING_SETTINGS) == set(BY_NAME)


def test_values_that_there_are_not_are_refused_by_name() -> None:
    shown = run_edgellm("config", "show", "--kv-dtype", "fp4")
    assert shown.returncode == 2 and "'fp4'" in shown.stderr and "--kv-dtype" in shown.stderr


# --- exit codes and streams ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nonsense"], 2, "nonsense"),
        (["list", "--nonsense"], 2, "--nonsense"),
        (["tokenize"], 2, "MODEL"),
        (["completion", "tcsh"], 2, "tcsh"),
        (["config", "show", "--ctx", "many"], 2, "--ctx must be an integer, not 'many'"),
        (["show", "smollm2-135"], 66, "nearest: smollm2-135m"),
        (["show", "./no.gguf"], 66, "no model or file './no.gguf'"),
        (["show", "hf:broken"], 65, "hf:owner/repo"),
        (["rm", "-y", "smollm2-135m"], 66, "not among the pulled models"),
        (["rm", "smollm2-135m"], 2, "add -y"),
        (["pull", "."], 65, "no config.json"),
        (["show", "a", "-m", "b"], 2, "two models were named"),
    ],
)
def test_a_mistake_is_one_line_and_its_exit_code(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    shown = run_edgellm(*arguments, folder=tmp_path)
    assert (shown.returncode, shown.stdout) == (code, "")
    assert words in shown.stderr
    assert shown.stderr.count("\n") == 1 and "Traceback" not in shown.stderr


def test_a_wrong_configuration_file_is_78(tmp_path: Path) -> None:
    (tmp_path / ".edgellm.toml").write_text("ctx = 'x'")
    shown = run_edgellm("config", "show", folder=tmp_path)
    assert shown.returncode == 78 and ".edgellm.toml: ctx" in shown.stderr


def test_every_error_class_has_the_published_code() -> None:
    published = {
        UsageError: 2,
        BadInputError: 65,
        NotFoundError: 66,
        UnavailableError: 69,
        EngineError: 70,
        ResourceError: 71,
        OutputError: 73,
        TransferError: 74,
        PermissionDeniedError: 77,
        ConfigError: 78,
    }
    known = set(EdgeLLMError.__subclasses__())
    assert {kind for kind in known if kind.__module__ == EdgeLLMError.__module__} == set(published)
    assert {kind.exit_code for kind in known} <= {*published.values(), 130}
    for kind, code in published.items():
        assert report(kind("words")) == code
    assert report(KeyboardInterrupt()) == 130 and report(click.Abort()) == 130


def test_an_unexpected_fault_keeps_its_traceback(
    isolated_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(self: LazyGroup, ctx: click.Context) -> None:
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setattr(LazyGroup, "invoke", fault)
    assert main_module.run(["list"]) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "unexpected ZeroDivisionError: one two" in line
    logs = list((isolated_home / "state" / "logs").glob("crash-*"))
    assert len(logs) == 1 and str(logs[0]) in line and "in fault" in logs[0].read_text()


def test_json_is_one_object_and_nothing_else() -> None:
    for arguments in (["list"], ["show", "qwen3-4b"], ["config", "show"], ["config", "path"]):
        shown = run_edgellm(*arguments, "--json")
        assert shown.returncode == 0 and shown.stderr == ""
        assert shown.stdout.count("\n") == 1 and isinstance(json.loads(shown.stdout), dict)


def test_show_works_without_weights_and_makes_no_folder(isolated_home: Path) -> None:
    record = json.loads(run_edgellm("show", "smollm2-135m", "--json").stdout)
    assert record["licence"] == "Apache-2.0" and record["pulled"] is False
    assert record["parameters"] == 134_515_008 and record["sampling"] == {"temperature": 0.0}
    assert record["memory"]["weights_f32_bytes"] == 4 * 134_515_008
    assert record["memory"]["kv_bytes_per_token_f32"] == 2 * 30 * 3 * 64 * 4
    assert list(isolated_home.iterdir()) == []


def test_the_default_model_is_a_setting(tmp_path: Path) -> None:
    assert "smollm2-135m" in run_edgellm("show").stdout
    assert "qwen3-4b" in run_edgellm("show", environ={"EDGELLM_MODEL": "qwen3-4b"}).stdout
    (tmp_path / ".edgellm.toml").write_text('model = "gemma3-1b"')
    assert "gemma3-1b" in run_edgellm("show", folder=tmp_path).stdout
    assert "qwen3-8b" in run_edgellm("show", "qwen3-8b", folder=tmp_path).stdout


def test_what_config_show_prints_is_valid_configuration(tmp_path: Path) -> None:
    from edgellm.config import read_config_file

    shown = run_edgellm("config", "show", "--stop", 'a"b', "--temp", "0.5", "--origin")
    (tmp_path / "config.toml").write_text(shown.stdout)
    read = read_config_file(tmp_path / "config.toml")
    assert read["stop"] == ('a"b',) and read["temp"] == 0.5 and "seed" not in read


def test_a_reader_that_goes_away_is_no_error() -> None:
    pipe = subprocess.Popen(
        [sys.executable, "-m", "edgellm", "list"],
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert pipe.stdout is not None and pipe.stderr is not None
    pipe.stdout.close()
    assert pipe.stderr.read() == ""
    assert pipe.wait() == 141
    pipe.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_73() -> None:
    with open("/dev/full", "w") as full:
        shown = subprocess.run(
            [sys.executable, "-m", "edgellm", "list"],
            env=command_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert shown.returncode == 73 and "no space left" in shown.stderr
    assert shown.stderr.count("\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_command_quietly(tmp_path: Path, number: int, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm", "tokenize", "smollm2-135m"],
        env=command_environment(),
        stdin=subprocess.PIPE,  # it waits for text
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    time.sleep(1.5)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (code, "", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_locale_without_the_characters_gives_escapes(tmp_path: Path, encoding: str) -> None:
    (tmp_path / ".edgellm.toml").write_text('stop = "é😊\x9b"', encoding="utf-8")
    environ = {"PYTHONIOENCODING": encoding, "LANG": "C"}
    shown = run_edgellm("config", "show", "--json", folder=tmp_path, environ=environ)
    assert shown.returncode == 0 and shown.stderr == ""
    assert json.loads(shown.stdout)["settings"]["stop"] == ["é😊\x9b"]
    environ["PYTHONIOENCODING"] = "ascii"
    shown = run_edgellm("config", "show", folder=tmp_path, environ=environ)
    assert shown.returncode == 0 and "\\xe9\\U0001f60a" in shown.stdout
    assert shown.stderr.count("written as escapes") == 1 and shown.stderr.count("\n") == 1
    assert run_edgellm("config", "show", "-q", folder=tmp_path, environ=environ).stderr == ""


def test_quiet_and_verbose_may_stand_before_and_behind() -> None:
    for arguments in (["-q", "list"], ["list", "-q"], ["-v", "list"], ["list", "-vv"]):
        assert run_edgellm(*arguments).returncode == 0


# --- what is written -----------------------------------------------------------------------------------


def test_names_from_outside_cannot_command_the_terminal() -> None:
    assert one_line("a\x1b]0;t\x07b\r\nc\x9bd\u2028e") == "a ]0;t b c d e"


def test_progress_is_shown_on_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.progress(PullProgress(1, 2, "s", "fetching"))
    assert capsys.readouterr() == ("", "")
    assert progress_line(PullProgress(50_000_000, 100_000_000, "s", "fetching"), 4) == (
        "fetching   [##  ]  50%  50.0 of 100.0 MB"
    )
    assert progress_line(PullProgress(500, 0, "s", "connecting")) == "connecting 0.5 kB"


def test_progress_is_redrawn_ten_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    output = Output()
    for phase in ("fetching", "unpacking", "done"):
        for _ in range(500):
            output.progress(PullProgress(2, 2, "s", phase))
    output.end_progress()
    assert 3 <= terminal.getvalue().count("\r") < 10
    assert terminal.getvalue().endswith("\n")


def test_quiet_drops_what_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(quiet=True)
    output.note("words")
    output.data("result")
    assert capsys.readouterr() == ("result\n", "")


def test_json_has_no_numbers_that_json_lacks() -> None:
    assert plain({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x"), 1: (True, None)}) == {
        "a": None,
        "b": [None, 1.5],
        "c": "x",
        "1": [True, None],
    }


# --- completion and documents --------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_valid(shell: str, tmp_path: Path) -> None:
    shown = run_edgellm("completion", shell)
    assert shown.returncode == 0 and "_EDGELLM_COMPLETE" in shown.stdout
    if shutil.which(shell) is None:
        assert shell != "bash", "bash is needed to test its script"
        return
    script = tmp_path / "script"
    script.write_text(shown.stdout)
    subprocess.run([shell, "-n", str(script)], check=True)


def test_the_powershell_script_registers_the_command() -> None:
    shown = run_edgellm("completion", "powershell")
    assert "Register-ArgumentCompleter -Native -CommandName edgellm" in shown.stdout
    assert "powershell_complete" in shown.stdout and "%(" not in shown.stdout


@pytest.mark.parametrize(
    ("line", "word", "expected"),
    [
        ("edgellm sh", "1", {"show"}),
        ("edgellm ", "1", set(COMMANDS)),
        ("edgellm show gemma3", "2", {"gemma3-270m", "gemma3-1b", "gemma3-4b"}),
        ("edgellm show -m smol", "3", {"smollm2-135m"}),
        ("edgellm config show --device c", "4", {"cpu", "cuda"}),
        ("edgellm config ", "2", {"show", "path"}),
        ("edgellm history ex", "2", {"export"}),
    ],
)
def test_bash_completion_answers(line: str, word: str, expected: set[str]) -> None:
    environ = {"_EDGELLM_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": word}
    shown = run_edgellm(environ=environ)
    assert shown.stderr == ""
    assert {row.partition(",")[2] for row in shown.stdout.splitlines()} == expected


def test_powershell_completion_answers() -> None:
    environ = {"_EDGELLM_COMPLETE": "powershell_complete", "COMP_WORDS": "edgellm sh", "COMP_CWORD": "sh"}
    shown = run_edgellm(environ=environ)
    assert shown.stdout.split("\t")[:2] == ["plain", "show"]


def test_bash_completes_from_the_script(tmp_path: Path) -> None:
    """The script itself, run by bash, with the command on the PATH."""
    program = tmp_path / "edgellm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m edgellm "$@"\n')
    program.chmod(0o755)
    environ = command_environment({"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    script = (
        'eval "$(edgellm completion bash)"\n'
        "COMP_WORDS=(edgellm show smol) COMP_CWORD=2\n"
        '_edgellm_completion edgellm; echo "${COMPREPLY[@]}"\n'
    )
    shown = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["smollm2-135m"]


def test_the_documents_name_every_variable_and_command() -> None:
    from edgellm.cli.reference import all_switches, cli_markdown, env_markdown

    env, commands = env_markdown(), cli_markdown()
    names = [switch.name for _, switches in all_switches() for switch in switches]
    assert len(names) == len(set(names))
    for name in (*names, *(switch.name for switch in SWITCHES), "EDGELLM_KV_DTYPE", "EDGELLM_JSON"):
        assert f"`{name}`" in env
    for name in COMMANDS:
        assert f"## edgellm {name}" in commands


def test_the_documents_name_every_exit_code() -> None:
    """Those of every class of error in the source, of signals and pipes, and of Click."""
    from edgellm.cli import errors
    from edgellm.cli.reference import cli_markdown

    used = {0, 1, click.UsageError.exit_code, errors.INTERRUPTED, errors.TERMINATED, errors.BROKEN_PIPE}
    for root in SOURCE_ROOTS:
        for path in root.glob("edgellm*/**/*.py"):
            found = re.findall(
                r"exit_code(?:: ClassVar\[int\])? = (\d+)$", path.read_text("utf-8"), re.MULTILINE
            )
            used |= {int(code) for code in found}
    assert {65, 73, 78} < used
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", cli_markdown(), re.MULTILINE)
    assert {int(code) for code, _ in rows} == used and len(rows) == len(used)


def test_every_variable_in_the_source_is_in_the_table() -> None:
    """A switch that only its author knows is a switch that nobody can turn off."""
    from edgellm.cli.reference import all_switches

    known = {switch.name for _, switches in all_switches() for switch in switches}
    known |= {"EDGELLM_NAME", "EDGELLM_COMPLETE"}  # the rule itself, and Click's own for completion
    known |= {"EDGELLM_API"}  # a word of the native library's headers
    for root in SOURCE_ROOTS:
        for path in root.glob("edgellm*/**/*.py"):
            # Behind -D it is a macro of the C++ compiler.
            names = set(re.findall(r"(?<!-D)EDGELLM_[A-Z][A-Z_]*[A-Z]", path.read_text(encoding="utf-8")))
            assert names <= known, f"{path}: {sorted(names - known)}"


def test_cells_of_the_table_are_escaped() -> None:
    text = render_markdown([("T", [Switch("EDGELLM_X", "a|b", "two\nlines")])])
    assert "| `EDGELLM_X` | a\\|b |  | two lines |" in text


def test_a_setting_option_does_not_read_its_variable_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the origin of the value would be lost."""
    monkeypatch.setenv("EDGELLM_CTX", "5")
    option = SettingOption(["--ctx", "ctx"], setting=BY_NAME["ctx"])
    assert option.envvar == "EDGELLM_CTX"
    assert option.value_from_envvar(click.Context(cli)) is None
