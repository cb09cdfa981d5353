"""Runs a coroutine from synchronous code so that an interrupt at any moment ends it in order."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")

_LOOK_SECONDS = 0.2
"""A signal that comes just before a thread begins to wait does not end the wait, so it is not endless."""


def run_in_own_loop(work: Coroutine[Any, Any, _T], give_up: Callable[[], None]) -> _T:
    """What ``work`` returns, run in a loop and thread of its own: the caller may be in a running loop, as in
    a notebook.

    An interrupt calls ``give_up`` in that loop, after the work's first step; that must end the work, which is
    waited for. Then KeyboardInterrupt. A second interrupt is raised at once and leaves the work behind.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)
    ended = threading.Lock()
    ended.acquire()
    finished = False

    def run() -> None:
        nonlocal finished
        try:
            loop.run_until_complete(asyncio.wait({task}))
        finally:
            loop.close()
            finished = True
            ended.release()

    def wait() -> None:
        # Not Thread.join: an exception there makes it take a running thread for one that has ended.
        while not finished:
            ended.acquire(timeout=_LOOK_SECONDS)

    def end() -> None:
        with suppress(RuntimeError):  # it has ended meanwhile
            loop.call_soon_threadsafe(give_up)

    thread = threading.Thread(target=run, name="edgellm-own-loop", daemon=True)
    with _interrupts_call(end) as interrupted:
        thread.start()
        try:
            wait()
        except BaseException:
            if interrupted():
                raise
            end()  # it came from a signal handler that is not ours
            wait()
            raise
    if interrupted():
        if not task.cancelled():
            task.exception()  # seen: nobody is told of it twice
        raise KeyboardInterrupt
    return task.result()


@contextmanager
def _interrupts_call(end: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """The first interrupt calls ``end`` and raises nothing: an exception between two instructions of
    ``threading`` or ``concurrent.futures`` would leave a lock taken that the working thread needs. Gives a
    function that says whether one came.

    Only where an interrupt would raise KeyboardInterrupt here: in the main thread, under Python's handler.
    """
    came = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            signal.default_int_handler(number, frame)
        came = True
        end()

    here = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if here:
        signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: came
    finally:
        if here:
            signal.signal(signal.SIGINT, signal.default_int_handler)
