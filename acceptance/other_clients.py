"""Clients that nobody here wrote against the server: llama-benchy, lm-evaluation-harness.

Each is installed into an environment of its own in a temporary folder (EDGELLM_TEST_CLIENTS keeps them in a
folder of yours and uses them again), so the package index must be within reach.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from acceptance.harness import Figure, version
from acceptance.server_peer import started
from tests.support.command_line import ROOT
from tests.support.other_environment import make_environment
from tests.support.real_models import real_model

MODEL = os.environ.get("EDGELLM_TEST_SERVED_MODEL", "smollm2-135m")
LM_EVAL_TASK = ROOT / "acceptance" / "lm_eval"
PROMPT_TOKENS, NEW_TOKENS, CONCURRENT = 256, 32, (1, 4)


def run() -> Iterator[Figure]:
    path = real_model(MODEL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept = Path(os.environ.get("EDGELLM_TEST_CLIENTS") or folder)
        tokenizer = folder / "tokenizer"
        _write_tokenizer(path, tokenizer)
        command = [sys.executable, "-m", "edgellm", "serve", str(path), "--port", "0", "--json"]
        process, address = started(command, lambda line: json.loads(line)["address"])
        try:
            yield from _llama_benchy(kept, address, tokenizer, folder)
            yield _lm_eval(kept, address, tokenizer, path, folder)
        finally:
            process.terminate()
            process.wait(30)


def client_programs(kept: Path, name: str, *requirements: str) -> Path:
    """The folder with the programs of a client, which is installed unless it is there."""
    folder = kept / name
    if not folder.exists():
        return make_environment(folder, *requirements)
    return folder / ("Scripts" if sys.platform == "win32" else "bin")


def _llama_benchy(kept: Path, address: str, tokenizer: Path, folder: Path) -> Iterator[Figure]:
    """Its figures. It calls the first chunk a response; a first token is the first text."""
    programs = client_programs(kept, "llama-benchy", "llama-benchy")
    result = folder / "benchy.json"
    with _Book(folder) as book:
        command = [str(programs / "llama-benchy"), "--base-url", f"{address}/v1", "--model", MODEL]
        command += ["--tokenizer", str(tokenizer), "--book-url", book, "--exact-tg", "--no-cache"]
        command += [
            "--pp",
            str(PROMPT_TOKENS),
            "--tg",
            str(NEW_TOKENS),
            "--runs",
            "2",
            "--exit-on-first-fail",
        ]
        # A model of this size does not know what its question is about when it may draw by lot.
        command += ["--skip-coherence", "--extra-body", "temperature=0"]
        command += ["--concurrency", *(str(n) for n in CONCURRENT)]
        command += ["--format", "json", "--save-result", str(result)]
        environment = {**os.environ, "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not result.exists():
        yield Figure("llama-benchy", (done.stdout + done.stderr)[-300:], "", "completes", False)
        return
    found = json.loads(result.read_text(encoding="utf-8"))
    for row in found["benchmarks"]:
        speed, first = row["tg_throughput"], row["e2e_ttft"]
        yield Figure(
            f"{MODEL}: llama-benchy {found['version']}, {PROMPT_TOKENS} tokens in and {NEW_TOKENS} out, "
            f"{row['concurrency']} at once",
            speed["mean"] if speed else "none",
            f"tok/s; {first['mean'] / 1000:.2f} s to the first token" if first else "",
            "completes",
            bool(speed and first),
            detail=row,
        )


def _lm_eval(kept: Path, address: str, tokenizer: Path, path: Path, folder: Path) -> Figure:
    """A small task of its own through local-completions, beside transformers' answers to the same."""
    programs = client_programs(kept, "lm-eval", "lm-eval[api]")
    model = f"model={MODEL},base_url={address}/v1/completions,tokenizer={tokenizer},num_concurrent=4"
    command = [str(programs / "lm-eval"), "run", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", "facts", "--include_path", str(LM_EVAL_TASK), "--output_path", str(folder / "out")]
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--log_samples"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    results = list((folder / "out").rglob("results_*.json"))
    if done.returncode or not results:
        return Figure("lm-evaluation-harness", (done.stdout + done.stderr)[-300:], "", "completes", False)
    found = json.loads(results[0].read_text(encoding="utf-8"))
    [samples] = (folder / "out").rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    right, difference = _beside_transformers(rows, path, tokenizer)
    accuracy = found["results"]["facts"]["acc,none"]
    return Figure(
        f"{MODEL}: lm-evaluation-harness {found['lm_eval_version']}, local-completions, {len(rows)} items",
        accuracy,
        f"accuracy; log-likelihoods differ by {difference:.4f} at most",
        "that of transformers, log-likelihoods to 0.1",
        abs(accuracy - right) < 1e-9 and difference < 0.1,
        f"transformers {version('transformers')}, f32, the same weights: {right:.4g}",
    )


def _beside_transformers(rows: list[Any], path: Path, tokenizer: Path) -> tuple[float, float]:
    """Accuracy of transformers on the same questions, and the largest difference of a log-likelihood."""
    import torch
    from tokenizers import Tokenizer

    from tests.support.transformers_oracle import transformers_logits, transformers_model

    model, words = transformers_model(path), Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    right, difference = 0, 0.0
    for row in rows:
        likelihoods = []
        for number, response in enumerate(row["resps"]):
            arguments = row["arguments"][f"gen_args_{number}"]
            start = len(words.encode(arguments["arg_0"], add_special_tokens=False).ids)
            ids = words.encode(arguments["arg_0"] + arguments["arg_1"], add_special_tokens=False).ids
            rows_of_log = torch.log_softmax(transformers_logits(model, ids).double(), -1)
            total = sum(float(rows_of_log[i - 1, ids[i]]) for i in range(start, len(ids)))
            likelihoods.append(total)
            difference = max(difference, abs(total - float(response[0][0])))
        right += likelihoods.index(max(likelihoods)) == int(row["target"])
    return right / len(rows), difference


def _write_tokenizer(path: Path, folder: Path) -> None:
    """The tokenizer of a GGUF file as the files that these clients read."""
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_quantize.hf_from_gguf import write_tokenizer_files

    folder.mkdir()
    write_tokenizer_files(open_checkpoint(path), folder)


class _Book:
    """Serves a text of our own, which llama-benchy would fetch from the network otherwise; its address."""

    def __init__(self, folder: Path) -> None:
        from edgellm.bench.natural_text import natural_text

        (folder / "book").mkdir()
        text = "\n".join(natural_text(kind) for kind in ("prose", "chat", "code"))
        (folder / "book" / "book.txt").write_text(text, encoding="utf-8")
        handler = partial(_Quiet, directory=str(folder / "book"))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}/book.txt"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...
