"""Work in a loop of its own: results, errors, and interrupts of every kind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from types import FrameType

import pytest

from edgellm.own_loop import run_in_own_loop


class Work:
    """Waits until it is given up, and says whether it ended in order."""

    def __init__(self) -> None:
        self.began, self.ended = threading.Event(), threading.Event()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        self.began.set()
        await self._stop.wait()
        self.ended.set()

    def give_up(self) -> None:
        self._stop.set()

    def interrupt_when_begun(self, seconds_later: float = 0.0) -> threading.Thread:
        def interrupt() -> None:
            assert self.began.wait(30)
            time.sleep(seconds_later)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        return thread


async def _answer() -> int:
    await asyncio.sleep(0)
    return 7


async def _fails() -> int:
    raise ValueError("no")


def _not_asked() -> None:
    raise AssertionError("nobody interrupted")


def test_results_and_errors_come_back() -> None:
    assert run_in_own_loop(_answer(), _not_asked) == 7
    with pytest.raises(ValueError, match="no"):
        run_in_own_loop(_fails(), _not_asked)


def test_inside_of_a_running_loop_and_in_another_thread() -> None:
    async def outer() -> int:
        return run_in_own_loop(_answer(), _not_asked)

    assert asyncio.run(outer()) == 7
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(run_in_own_loop(_answer(), _not_asked)))
    thread.start()
    thread.join(30)
    assert found == [7]


def test_an_interrupt_gives_up_and_waits() -> None:
    work = Work()
    thread = work.interrupt_when_begun()
    with pytest.raises(KeyboardInterrupt):
        run_in_own_loop(work.run(), work.give_up)
    thread.join(30)
    assert work.ended.is_set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_before_the_work_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up after its first step: what was not asked for yet cannot be taken back."""
    work = Work()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_in_own_loop(work.run(), work.give_up)
    assert work.began.is_set() and work.ended.is_set()


def test_a_second_interrupt_does_not_wait() -> None:
    work = Work()
    asked = threading.Event()

    def give_up() -> None:
        asked.set()  # and nothing ends

    def interrupt() -> None:
        for event in (work.began, asked):
            assert event.wait(30)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_in_own_loop(work.run(), give_up)
    thread.join(30)
    assert not work.ended.is_set()


def test_a_handler_of_the_caller_stays_in_charge() -> None:
    class OwnError(Exception):
        pass

    def handle(number: int, frame: FrameType | None) -> None:
        raise OwnError

    before = signal.signal(signal.SIGINT, handle)
    try:
        work = Work()
        thread = work.interrupt_when_begun(0.3)  # the caller waits by then
        with pytest.raises(OwnError):
            run_in_own_loop(work.run(), work.give_up)
        thread.join(30)
        assert work.ended.is_set()
        assert signal.getsignal(signal.SIGINT) is handle
    finally:
        signal.signal(signal.SIGINT, before)
