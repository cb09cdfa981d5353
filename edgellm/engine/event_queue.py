"""Carries events from the engine thread to one reader in an event loop, merged when the reader is slow."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from edgellm.contracts import TokenEvent

MAX_PENDING = 64
"""Events that wait for a reader before new ones are merged into the last."""


class MergedEvents:
    """Consecutive events of one sample that a slow reader gets as one. Adding costs the event's own size."""

    def __init__(self, first: TokenEvent) -> None:
        self._parts = [first]
        self._has_notice = first.notice is not None

    def add(self, event: TokenEvent) -> bool:
        """False when the event must stay apart: another sample, a second notice, or the sample has ended."""
        last = self._parts[-1]
        if event.sample != last.sample or last.finish_reason is not None:
            return False
        if event.notice is not None:
            if self._has_notice:
                return False
            self._has_notice = True
        self._parts.append(event)
        return True

    def join(self) -> TokenEvent:
        """All as one event: the last one with what the others brought."""
        parts = self._parts
        if len(parts) == 1:
            return parts[0]
        positions = [e.queue_position for e in parts if e.queue_position is not None]
        prefilled = [e.prefill_done for e in parts if e.prefill_done is not None]
        return replace(
            parts[-1],
            token_ids=tuple(token_id for e in parts for token_id in e.token_ids),
            text="".join(e.text for e in parts),
            logprobs=tuple(logprob for e in parts for logprob in e.logprobs),
            prompt_logprobs=tuple(logprob for e in parts for logprob in e.prompt_logprobs),
            queue_position=positions[-1] if positions else None,
            prefill_done=prefilled[-1] if prefilled else None,
            notice=next((e.notice for e in parts if e.notice is not None), None),
        )


class EventQueue:
    """Bounded: a reader that stops reading costs merging, never a waiting engine and never unbounded events.

    The loop is woken once per batch of events, however many come before it runs.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, num_samples: int, max_pending: int = MAX_PENDING
    ) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: deque[MergedEvents] = deque()
        self._max_pending = max_pending
        self._arrived = asyncio.Event()
        self._wake_sent = False
        self._open_samples = num_samples
        self.reader_gone = False
        """The reader's loop is closed: nobody will ever read this."""

    def put(self, event: TokenEvent) -> None:
        """``add`` and ``wake``."""
        if self.add(event):
            wake([self])

    def add(self, event: TokenEvent) -> bool:
        """Called by the engine thread; never blocks on the reader. Whether the reader must be woken."""
        with self._lock:
            full = len(self._pending) >= self._max_pending
            if not (full and self._pending[-1].add(event)):
                self._pending.append(MergedEvents(event))
            asleep, self._wake_sent = not self._wake_sent, True
        if self._loop.is_closed():
            self.reader_gone = True
        return asleep and not self.reader_gone

    async def get(self) -> TokenEvent | None:
        """The next event; None after the last sample's last one."""
        while True:
            with self._lock:
                if self._pending:
                    event = self._pending.popleft().join()
                    if event.finish_reason is not None:
                        self._open_samples -= 1
                    return event
                if self._open_samples <= 0:
                    return None
                self._arrived.clear()
                self._wake_sent = False
            await self._arrived.wait()


def wake(queues: Iterable[EventQueue]) -> None:
    """Wakes the readers of what was added, each loop once: a call from another thread costs a system call,
    after which the loop would run before the rest is told."""
    by_loop: dict[asyncio.AbstractEventLoop, list[EventQueue]] = {}
    for queue in queues:
        by_loop.setdefault(queue._loop, []).append(queue)
    for loop, readers in by_loop.items():
        try:
            loop.call_soon_threadsafe(_arrive, readers)
        except RuntimeError:  # closed meanwhile
            for queue in readers:
                queue.reader_gone = True


def _arrive(queues: Iterable[EventQueue]) -> None:
    for queue in queues:
        queue._arrived.set()
