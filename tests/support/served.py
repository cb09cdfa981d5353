"""Servers for tests: the whole application over an engine without a model, in this process or on a socket."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgellm.cache.kv_manager import KVManager
from edgellm.cache.sequence_blocks import GroupLayout
from edgellm.contracts import SamplingParams, StepPlan, StepResult
from edgellm.engine.async_engine import AsyncEngine
from edgellm.engine.engine import Engine
from edgellm.server.lifecycle import Server
from edgellm.server.model_host import ServedModel
from edgellm.server.settings import ServerSettings
from edgellm_models.tokenizer.chat_template import ChatTemplates
from edgellm_models.tokenizer.stream_decoder import StreamDecoder
from tests.support.fake_backend import FAKE_MODEL
from tests.support.fake_engine import END_ID, ByteTokenizer, FakeRunner

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A chat template without tools."""
TOOL_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE + "{# <tool_call> #}"
THINK_TEMPLATE = TEMPLATE + "{# <think> </think> #}"
MODEL = "scripted"
WAIT_S = 60
"""For what takes no time on a machine with nothing else to do."""

Script = Callable[[tuple[int, ...]], Sequence[int]]


def says(text: str) -> Script:
    """Every answer is this text, then the end."""
    return lambda prompt: [*text.encode(), END_ID]


def echoes(prompt: tuple[int, ...]) -> Sequence[int]:
    """Every answer is the last line of the prompt before the generation prompt, reversed."""
    line = [b"", b"", *bytes(t for t in prompt if t < 256).rsplit(b"\n", 2)][-2]
    return [*line.rpartition(b"]")[2][::-1], END_ID]


class StepGate:
    """Steps of a scripted engine, run only as far as a test lets them."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._open = threading.Event()

    def let(self, steps: int = 1) -> None:
        """So many more steps may run."""
        self._steps.release(steps)

    def open(self) -> None:
        """From now on every step may."""
        self._open.set()
        self._steps.release()

    def wait(self) -> None:
        """Called before a step."""
        if not self._open.is_set():
            assert self._steps.acquire(timeout=WAIT_S), "the test never let the engine step"


@dataclass
class Scripted:
    """A model that plays a script through the real engine and scheduler."""

    model: ServedModel
    core: Engine
    runner: FakeRunner


def scripted_model(
    script: Script = echoes,
    *,
    template: str | None = TEMPLATE,
    context: int = 4096,
    num_blocks: int = 2048,
    max_running: int = 8,
    sampling: SamplingParams | None = None,
    delay_s: float = 0.0,
    gate: StepGate | None = None,
    clock: Callable[[], float] = time.monotonic,
    **runner_fields: Any,
) -> Scripted:
    """``delay_s``: of every step; ``gate``: what each waits for."""
    runner = FakeRunner(script, delay_s=delay_s, **runner_fields)
    if gate is not None:
        execute = runner.execute

        def gated(plan: StepPlan) -> StepResult:
            gate.wait()
            return execute(plan)

        runner.execute = gated  # type: ignore[method-assign]
    tokenizer = ByteTokenizer()
    core = Engine(
        runner,
        tokenizer,
        KVManager([GroupLayout(None, num_blocks)], 4),
        context_length=context,
        vocab_size=258,
        make_decoder=lambda request: StreamDecoder(tokenizer, shown_ids=request.shown_token_ids),
        max_running=max_running,
        clock=clock,
    )
    engine = AsyncEngine(core)
    info = replace(FAKE_MODEL, name=MODEL, context_length=context)
    model = ServedModel(
        info=info,
        engine=engine,
        tokenizer=tokenizer,
        templates=None if template is None else ChatTemplates({"default": template}),
        sampling=sampling or SamplingParams(),
        max_running=max_running,
        vocab_size=258,
        close=engine.close,
    )
    return Scripted(model, core, runner)


@dataclass
class Running:
    """A server in a thread of this process."""

    address: str
    server: Server
    loop: asyncio.AbstractEventLoop
    made: list[Scripted]
    accesses: list[Mapping[str, Any]]

    @property
    def url(self) -> str:
        return self.address + "/v1"

    @property
    def scripted(self) -> Scripted:
        return self.made[-1]


@contextmanager
def serving(
    make: Callable[[], Scripted] = scripted_model, *, wait: bool = True, **settings: Any
) -> Iterator[Running]:
    """Runs a server on a free port (or ``uds``) until the block ends."""
    made: list[Scripted] = []
    accesses: list[Mapping[str, Any]] = []
    ready = threading.Event()

    def load() -> ServedModel:
        made.append(make())
        return made[-1].model

    fields = {"port": 0, **settings}
    server = Server(
        ServerSettings(**fields),
        MODEL,
        load,
        on_ready=lambda address: ready.set(),
        on_access=accesses.append,
    )
    address = server.claim()
    loops: list[asyncio.AbstractEventLoop] = []
    started = threading.Event()

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        started.set()
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(WAIT_S)
    if wait:
        assert ready.wait(WAIT_S)
    try:
        yield Running(address, server, loops[0], made, accesses)
    finally:
        if not loops[0].is_closed():
            loops[0].call_soon_threadsafe(server.stop)
            loops[0].call_soon_threadsafe(server.stop)  # at once
        thread.join(WAIT_S)
        server.release()
        assert not thread.is_alive(), "the server did not end"


def http(address: str, **fields: Any) -> Any:
    """A synchronous client of a server's address."""
    import httpx2

    fields.setdefault("verify", False)  # nothing is encrypted, and reading certificates takes 30 ms
    if address.startswith("unix:"):
        transport = httpx2.HTTPTransport(uds=address.removeprefix("unix:"))
        return httpx2.Client(transport=transport, base_url="http://localhost", timeout=WAIT_S, **fields)
    return httpx2.Client(base_url=address, timeout=WAIT_S, **fields)


def events_of(text: str) -> list[Any]:
    """The values of an event stream; ``[DONE]`` as it is."""
    found = []
    for block in text.split("\n\n"):
        data = [line[5:].strip() for line in block.split("\n") if line.startswith("data:")]
        if data:
            found.append(data[0] if data[0] == "[DONE]" else json.loads(data[0]))
    return found


def chat_body(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def loaded_model(path: Path, **settings: Any) -> Scripted:
    """A real model as ``edgellm serve`` loads it."""
    from edgellm.cli.options import resolve_settings
    from edgellm.cli.output import Output
    from edgellm.cli.serve import ModelLoader
    from edgellm_models.catalog import ResolvedModel

    found = ResolvedModel(MODEL, path, None)
    model = ModelLoader(found, resolve_settings(settings), Output(quiet=True), None)()
    return Scripted(model, model.engine._engine, None)  # type: ignore[arg-type]
