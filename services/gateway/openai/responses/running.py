"""The responses that this gateway is generating, which can be read and cancelled by their ids."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any


class ResponseCancelled(Exception):
    """Somebody cancelled the response."""


class RunningResponse:
    """A response that is being generated. described: its JSON values, at last those of its end."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        self.described = described
        self.ended = asyncio.Event()
        self._cancelled = asyncio.Event()

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Cancels the `async with` block and raises ResponseCancelled when the response is cancelled."""
        try:
            async with asyncio.timeout(None) as time_left:
                watcher = asyncio.create_task(self._expire_when_cancelled(time_left))
                try:
                    yield
                finally:
                    watcher.cancel()
        except TimeoutError as error:
            if not time_left.expired():
                raise
            raise ResponseCancelled from error

    async def _expire_when_cancelled(self, time_left: asyncio.Timeout) -> None:
        await self._cancelled.wait()
        time_left.reschedule(asyncio.get_running_loop().time())

    def cancel(self) -> None:
        """Has the generation end, if it has not ended already; `ended` is set when it has."""
        self._cancelled.set()

    def end(self, described: Mapping[str, Any]) -> None:
        """Takes note of how the response ended."""
        self.described = described
        self.ended.set()


class RunningResponses:
    """All that are being generated, by tenant and id."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], RunningResponse] = {}

    @contextmanager
    def added(
        self, tenant: str, response_ids: Sequence[str], described: Mapping[str, Any]
    ) -> Iterator[RunningResponse]:
        """Has a response found by each of its ids during the `with` block. Of two with one id the newer is found."""
        keys = [(tenant, response_id) for response_id in response_ids]
        running = RunningResponse(described)
        self._running.update(dict.fromkeys(keys, running))
        try:
            yield running
        finally:
            running.ended.set()
            for key in keys:
                if self._running.get(key) is running:
                    del self._running[key]

    def find(self, tenant: str, response_id: str) -> RunningResponse | None:
        """Returns the response with this id; None: it is not being generated here."""
        return self._running.get((tenant, response_id))
