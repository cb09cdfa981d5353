"""Carries events from the engine thread to one reader in an event loop, merged when the reader is slow."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import replace

from edgellm.contracts import TokenEvent

MAX_PENDING = 64
"""Events that wait for a reader before new ones are merged into the last."""


def merge(first: TokenEvent, second: TokenEvent) -> TokenEvent | None:
    """Two consecutive events of one sample as one; None when both carry a notice or the samples differ."""
    if first.sample != second.sample or (first.notice and second.notice) or first.finish_reason is not None:
        return None
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        queue_position=first.queue_position if second.queue_position is None else second.queue_position,
        prefill_done=first.prefill_done if second.prefill_done is None else second.prefill_done,
        notice=first.notice or second.notice,
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
        self._pending: deque[TokenEvent] = deque()
        self._max_pending = max_pending
        self._arrived = asyncio.Event()
        self._wake_sent = False
        self._open_samples = num_samples
        self.reader_gone = False
        """The reader's loop is closed: nobody will ever read this."""

    def put(self, event: TokenEvent) -> None:
        """Called by the engine thread; never blocks on the reader."""
        with self._lock:
            merged = None
            if len(self._pending) >= self._max_pending:
                merged = merge(self._pending[-1], event)
            if merged is None:
                self._pending.append(event)
            else:
                self._pending[-1] = merged
            wake, self._wake_sent = not self._wake_sent, True
        if self._loop.is_closed():
            self.reader_gone = True
        elif wake:
            try:
                self._loop.call_soon_threadsafe(self._arrived.set)
            except RuntimeError:  # closed between the two
                self.reader_gone = True

    async def get(self) -> TokenEvent | None:
        """The next event; None after the last sample's last one."""
        while True:
            with self._lock:
                if self._pending:
                    event = self._pending.popleft()
                    if event.finish_reason is not None:
                        self._open_samples -= 1
                    return event
                if self._open_samples <= 0:
                    return None
                self._arrived.clear()
                self._wake_sent = False
            await self._arrived.wait()
