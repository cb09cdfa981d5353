"""The life of a server process: address, loading, ready, drain on SIGTERM, end with the parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from edgellm.locations import Locations
from edgellm.server.address import ClaimedAddress, claim_tcp, claim_unix
from edgellm.server.application import make_application
from edgellm.server.gate import Gate
from edgellm.server.metrics import ServerMetrics
from edgellm.server.model_host import Loader, ModelHost, State
from edgellm.server.server_files import ServerRecord, write_record
from edgellm.server.settings import ServerSettings

CLOSE_S = 5.0
"""How long cancelled answers may take to tell their clients."""
PARENT_POLL_S = 0.5
KEEP_ALIVE_S = 60

INTERRUPTED = 130
_SIGNALS = {signal.SIGTERM: 0, signal.SIGINT: INTERRUPTED}
"""Those that end a server in good order, and the exit codes."""


@dataclass
class Server:
    """One server: ``claim`` the address, then ``run`` until it ends."""

    settings: ServerSettings
    model_name: str
    loader: Loader
    record: Callable[[str], ServerRecord] | None = None
    """Makes the record of the address that was claimed; without one no file is written."""
    on_ready: Callable[[str], None] = lambda address: None
    """Hears the address once the model answers."""
    on_access: Callable[[Mapping[str, Any]], None] | None = None
    locations: Locations | None = None
    _claimed: ClaimedAddress | None = None
    _exit: _Exit = field(default_factory=lambda: _Exit())
    _before: dict[int, Any] = field(default_factory=dict)
    """Signal handlers that were there before."""

    def claim(self) -> str:
        """Listens on the address, so that its being taken is known before anything is loaded; the address."""
        settings = self.settings
        # From here on, and until the event loop has handlers of its own, a signal is an orderly end too.
        for number, code in _SIGNALS.items():
            with contextlib.suppress(ValueError, OSError):  # not in the main thread
                self._before[number] = signal.signal(number, lambda *_, code=code: self._exit.ask(code))
        if settings.uds is not None:
            self._claimed = claim_unix(settings.uds)
        else:
            self._claimed = claim_tcp(settings.host, settings.port)
        return self._claimed.url

    def run(self) -> int:
        """Serves until a signal, the parent's end or a load that fails. Returns the exit code; raises what
        loading raised."""
        if self._claimed is None:
            self.claim()
        try:
            return asyncio.run(self.serve())
        finally:
            self.release()

    def release(self) -> None:
        """Gives the address back."""
        claimed, self._claimed = self._claimed, None
        if claimed is not None:
            claimed.release()
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    async def serve(self) -> int:
        """``run`` inside an event loop that is there already."""
        assert self._claimed is not None
        settings, claimed = self.settings, self._claimed
        host = ModelHost(
            self.model_name, self.loader, queue=settings.queue, idle_unload_s=settings.idle_unload_s
        )
        metrics = ServerMetrics()
        application = make_application(host, settings, metrics)
        gate = Gate(application, settings, claimed.host, self.on_access)
        web = _Web(
            uvicorn.Config(
                gate,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                http="h11",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(CLOSE_S),
            )
        )
        with self._recorded(claimed.url), self._signals(asyncio.get_running_loop()):
            tasks = [asyncio.create_task(host.sleep_when_idle())]
            if settings.parent_pid is not None:
                tasks.append(asyncio.create_task(self._watch_parent(settings.parent_pid)))
            serving = asyncio.create_task(web.serve(sockets=[claimed.socket]))
            loading = asyncio.create_task(host.load())
            stopping = asyncio.create_task(self._exit.wait())
            try:
                await asyncio.wait({loading, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
                if loading.done() and host.state is State.READY:
                    self.on_ready(claimed.url)
                    await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
                await self._end(host, web, serving)
            finally:
                for task in (*tasks, stopping, loading):
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(*tasks, stopping, loading, return_exceptions=True)
        if host.error is not None and host.state is not State.READY and not self._exit.is_set():
            raise host.error
        return self._exit.code

    def stop(self, code: int = 0) -> None:
        """Ends the server as SIGTERM does. From the loop's thread."""
        self._exit.ask(code)

    async def _end(self, host: ModelHost, web: _Web, serving: asyncio.Task[None]) -> None:
        """Lets open answers end for a while, then cancels them, then closes the connections."""
        if not serving.done():
            draining = asyncio.create_task(host.drain(self.settings.grace_s))
            hurry = asyncio.create_task(self._exit.hurried.wait())
            await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
            for task in (draining, hurry):
                task.cancel()
            await host.close()
            await host.drain(CLOSE_S / 2)
            web.should_exit = True
            if self._exit.hurried.is_set():
                web.force_exit = True
            await serving
        else:
            await host.close()

    @contextlib.contextmanager
    def _recorded(self, address: str) -> Iterator[None]:
        if self.record is None:
            yield
            return
        path = write_record(self.record(address), self.locations or Locations.from_environment())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the server in good order; a second one at once."""
        added = []
        for number, code in _SIGNALS.items():
            # Not on Windows, and not outside of the main thread: there KeyboardInterrupt ends the run.
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                loop.add_signal_handler(number, self._exit.ask, code)
                added.append(number)
        try:
            yield
        finally:
            for number in added:
                loop.remove_signal_handler(number)

    async def _watch_parent(self, pid: int) -> None:
        own = os.getppid() == pid
        while True:
            # A child learns of it for certain; of another process only its number is known.
            if (own and os.getppid() != pid) or (not own and not _exists(pid)):
                self._exit.ask(0)
                return
            await asyncio.sleep(PARENT_POLL_S)


class _Exit:
    """That the server is to end, and how."""

    def __init__(self) -> None:
        self.code = 0
        self.hurried = asyncio.Event()
        self._asked = asyncio.Event()

    def ask(self, code: int = 0) -> None:
        if self._asked.is_set():
            self.hurried.set()
        else:
            self.code = code
            self._asked.set()

    def is_set(self) -> bool:
        return self._asked.is_set()

    async def wait(self) -> None:
        await self._asked.wait()


class _Web(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
