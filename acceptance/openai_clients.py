"""OpenAI's client, two major versions of it, against a real model: one list, over TCP and the unix socket.

The older version is installed into an environment of its own (EDGELLM_TEST_CLIENTS keeps it, as for
other_clients), so the package index must be within reach.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from acceptance.harness import Figure
from acceptance.other_clients import client_programs
from acceptance.server_peer import started
from tests.support.command_line import ROOT, command_environment
from tests.support.openai_cases import CASES
from tests.support.real_models import real_model

MODEL = os.environ.get("EDGELLM_TEST_SERVED_MODEL", "smollm2-135m")
OLDER = "openai<3"
CONTEXT = 1024
KEY = "key-of-the-acceptance-run"


def run() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept = Path(os.environ.get("EDGELLM_TEST_CLIENTS") or folder)
        pythons = [str(client_programs(kept, "openai", OLDER) / "python"), sys.executable]
        keys = folder / "keys"
        keys.write_text(KEY + "\n", encoding="utf-8")
        keys.chmod(0o600)
        for place in (["--port", "0"], ["--uds", str(folder / "own" / "s")]):
            command = [sys.executable, "-m", "edgellm", "serve", str(real_model(MODEL)), *place, "--json"]
            command += ["--ctx", str(CONTEXT), "--api-key-file", str(keys), "--strict"]
            process, address = started(command, lambda line: json.loads(line)["address"])
            try:
                for python in pythons:
                    yield _list(python, address)
            finally:
                process.terminate()
                process.wait(30)


def _list(python: str, address: str) -> Figure:
    """The whole list with the client that this interpreter has."""
    command = [python, "-m", "tests.support.openai_cases", address, MODEL, KEY]
    environment = command_environment()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    passed = [row["case"] for row in rows if not row["problem"]]
    seconds = sum(row["seconds"] for row in rows)
    version = rows[0]["openai"] if rows else "none"
    where = "the unix socket" if address.startswith("unix:") else "TCP"
    return Figure(
        f"{MODEL}: openai {version} over {where}",
        f"{len(passed)} of {len(CASES)}",
        f"cases ({', '.join(passed)}); {seconds:.0f} s",
        "all",
        len(passed) == len(CASES),
        detail={"problems": [row for row in rows if row["problem"]], "stderr": done.stderr[-300:]},
    )
