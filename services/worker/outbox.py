"""A bounded queue of messages for one stream. Whoever does not read its stream loses the stream, and nobody waits."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Filled by plain calls on the loop, drained by the stream's one writer."""

    def __init__(self, max_messages: int) -> None:
        self._messages: deque[T] = deque()
        self._max_messages = max_messages
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, message: T) -> None:
        """Adds a message, or closes the outbox when it is full."""
        if len(self._messages) >= self._max_messages:
            self.close()
        if not self._closed:
            self._messages.append(message)
            self._wake.set()

    def close(self) -> None:
        """No more messages: the drain ends."""
        self._closed = True
        self._messages.clear()
        self._wake.set()

    async def drain(self) -> AsyncIterator[T]:
        """Messages in order, until closed."""
        while not self._closed:
            while self._messages:
                yield self._messages.popleft()
            self._wake.clear()
            if not self._closed:
                await self._wake.wait()
