"""The one model of a server and its state: loading, ready, asleep, failed; who uses it, and how many."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from edgellm.chat.request import chat_encoder
from edgellm.contracts import ModelInfo, Notice, SamplingParams
from edgellm.engine.async_engine import AsyncEngine
from edgellm.log import log_notice
from edgellm.server.api_errors import ApiError, loading, queue_full, shutting_down
from edgellm_models.errors import BadInputError, EdgeLLMError
from edgellm_models.tokenizer.base import Tokenizer
from edgellm_models.tokenizer.chat_encoding import ChatEncoder
from edgellm_models.tokenizer.chat_template import ChatTemplates

WAKE_TIMEOUT_S = 120.0
"""How long a request waits for a model that was unloaded while nobody used it."""


class State(enum.Enum):
    """What ``/health`` says."""

    LOADING = "loading"
    READY = "ok"
    ASLEEP = "asleep"
    """Unloaded after a while without requests; the next one loads it again."""
    FAILED = "failed"
    DRAINING = "draining"


@dataclass
class ServedModel:
    """A loaded model as the server uses it."""

    info: ModelInfo
    engine: AsyncEngine
    tokenizer: Tokenizer
    templates: ChatTemplates | None
    sampling: SamplingParams
    """What a request that says nothing about sampling gets."""
    max_running: int
    """Answers that run at once; more wait."""
    kv_policy: str = "stop"
    vocab_size: int = 0
    template_error: str | None = None
    """Why its chat template cannot be used."""
    close: Callable[[], None] = lambda: None
    """Stops the engine and frees the memory. Called once, from a worker thread."""
    _encoder: ChatEncoder | None = field(default=None, repr=False)

    def encoder(self) -> ChatEncoder:
        """The encoder of conversations. BadInputError for a base model."""
        if self.template_error is not None:
            raise BadInputError(self.template_error)
        if self._encoder is None:
            self._encoder, _ = chat_encoder(self.tokenizer, self.templates, model_name=self.info.name)
        return self._encoder


Loader = Callable[[], ServedModel]
"""Called in a thread; raises EdgeLLMError when the model cannot be loaded."""


class ModelHost:
    """Loads, lends, unloads. All methods belong to the event loop's thread."""

    def __init__(
        self, name: str, loader: Loader, *, queue: int = 64, idle_unload_s: float | None = None
    ) -> None:
        self.name = name
        """Of the model, known before it is loaded."""
        self._loader = loader
        self._queue = queue
        self._idle_unload_s = idle_unload_s
        self.state = State.LOADING
        self.error: EdgeLLMError | Exception | None = None
        """Why it failed."""
        self.model: ServedModel | None = None
        self.open_answers = 0
        self._last_use = time.monotonic()
        self._changed = asyncio.Event()
        self._loading: asyncio.Task[None] | None = None
        self.last_info: ModelInfo | None = None
        """Also of a model that is asleep."""

    async def load(self) -> None:
        """Loads the model; its failure is in ``error``. Several callers share one loading."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
        await asyncio.shield(self._loading)

    @property
    def is_loading(self) -> bool:
        return self._loading is not None

    async def _load(self) -> None:
        if self.state is not State.DRAINING:
            self.state = State.LOADING
        try:
            if self.model is not None:
                failed, self.model = self.model, None
                await asyncio.to_thread(failed.close)
            model = await _in_daemon_thread(self._loader)
        except Exception as error:
            self.error = error
            self._become(State.FAILED)
        else:
            self.model, self.error, self.last_info = model, None, model.info
            self._become(State.READY)
            self._last_use = time.monotonic()
        finally:
            self._loading = None

    def _become(self, state: State) -> None:
        if self.state is not State.DRAINING:
            self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lend(self, answers: int = 1) -> AsyncIterator[ServedModel]:
        """The model for a request of so many answers; 0 is one that needs no step of the engine.

        ApiError 503 while it loads for the first time or the server ends, 429 when the queue is full. One
        that sleeps is loaded first; one whose engine failed is loaded anew.
        """
        model = await self._awake()
        if answers and self.open_answers + answers > model.max_running + self._queue:
            raise queue_full(self._queue)
        self.open_answers += answers
        self._last_use = time.monotonic()
        try:
            yield model
        finally:
            self.open_answers -= answers
            self._last_use = time.monotonic()

    async def _awake(self) -> ServedModel:
        if self.state is State.READY and self.model is not None and self.model.engine.fault is not None:
            log_notice(
                Notice("engine_reloaded", f"the engine failed and is loaded anew: {self.model.engine.fault}")
            )
            self.state = State.LOADING
            self._background = asyncio.create_task(self.load())
        if self.state is State.ASLEEP:
            try:
                async with asyncio.timeout(WAKE_TIMEOUT_S):
                    await self.load()
            except TimeoutError:
                raise loading("the model is loaded again after a pause") from None
        if self.state is State.DRAINING:
            raise shutting_down()
        if self.state is State.FAILED:
            raise ApiError(
                503,
                f"the model cannot be loaded: {self.error}",
                kind="service_unavailable",
                code="load_failed",
                retry_after_s=10,
            )
        if self.state is not State.READY or self.model is None:
            raise loading()
        return self.model

    async def sleep_when_idle(self) -> None:
        """Unloads the model whenever nobody used it for a while; runs until it is cancelled."""
        if self._idle_unload_s is None:
            return
        while True:
            await asyncio.sleep(min(1.0, self._idle_unload_s / 4))
            idle_s = time.monotonic() - self._last_use
            if self.state is State.READY and not self.open_answers and idle_s >= self._idle_unload_s:
                await self._sleep(idle_s)

    async def _sleep(self, idle_s: float) -> None:
        model, self.model = self.model, None
        self._become(State.ASLEEP)
        if model is not None:
            detail = f"the model was unloaded after {idle_s:.0f} s without a request (--idle-unload)"
            log_notice(Notice("idle_unload", detail))
            await asyncio.to_thread(model.close)

    async def drain(self, grace_s: float) -> bool:
        """Takes nothing new and waits until what is open has ended; whether it did within the time."""
        self.state = State.DRAINING
        end = time.monotonic() + grace_s
        while self.open_answers and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return not self.open_answers

    async def close(self) -> None:
        """Stops the engine, which cancels what is open."""
        self.state = State.DRAINING
        model, self.model = self.model, None
        if model is not None:
            await asyncio.to_thread(model.close)


async def _in_daemon_thread(work: Loader) -> ServedModel:
    """The result of a thread that does not keep the process from ending: a load cannot be interrupted."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ServedModel] = loop.create_future()

    def tell(model: ServedModel | None, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        elif model is not None:
            future.set_result(model)

    def run() -> None:
        model, problem = None, None
        try:
            model = work()
        except Exception as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, model, problem)

    threading.Thread(target=run, name="edgellm-load", daemon=True).start()
    return await future
