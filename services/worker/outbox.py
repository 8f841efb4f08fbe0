"""A bounded queue of messages for one stream. Whoever does not read its stream loses the stream, and nobody waits."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Filled by plain calls on the loop, drained by the stream's one writer.

    `on_full` is called when a message finds no room: the outbox is closed then, but its writer may be stuck in the
    stream for as long as nobody reads there.
    """

    def __init__(self, max_messages: int, on_full: Callable[[], None]) -> None:
        self._on_full = on_full
        self._messages: deque[T] = deque()
        self._max_messages = max_messages
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, message: T) -> None:
        """Adds a message; one too many closes the outbox."""
        if self._closed:
            return
        if len(self._messages) >= self._max_messages:
            self.close()
            self._on_full()
            return
        self._messages.append(message)
        self._wake.set()

    def close(self) -> None:
        """No more messages: the drain ends."""
        self._closed = True
        self._messages.clear()
        self._wake.set()

    def finish(self) -> None:
        """No more messages: the drain ends after those that are there."""
        self._closed = True
        self._wake.set()

    async def drain(self) -> AsyncIterator[T]:
        """Messages in order, until closed or finished."""
        while self._messages or not self._closed:
            while self._messages:
                yield self._messages.popleft()
            self._wake.clear()
            if not self._closed:
                await self._wake.wait()
