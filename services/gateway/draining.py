"""The end of a gateway: one time holds for all of its doors.

    ├── answers end by themselves ──┼── errors reach their clients ──┤
    told to end                     a second before                  the time is over: connections are closed

From the first moment on the gateway is not ready, and says so at every door; no door takes a new connection.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from services.gateway.api.in_progress import InProgress

_LAST_WORDS_S = 1.0  # for errors to reach the clients whose answers did not end in time

log = structlog.get_logger()


class Door(Protocol):
    """A port at which clients come in."""

    async def stop(self, within_s: float) -> None:
        """Takes nothing new; returns when all has ended, which is cut off after so many seconds.

        A further call can only shorten the time.
        """


class Drained(Protocol):
    """A part of the gateway that has something to end: the requests that have ledger entries, the console's feed."""

    def drain(self, after_s: float) -> None:
        """Is not ready any more, and ends all that is still in flight after so many seconds, or before."""


class EndingGateway:
    """Waits for the end of a gateway, then carries it out."""

    def __init__(self, running: Sequence[Drained], in_progress: InProgress) -> None:
        """running: told in this order."""
        self._running = running
        self._in_progress = in_progress
        self._told = asyncio.Event()
        self._hurried = asyncio.Event()

    def drain(self) -> None:
        """Tells it to end."""
        self._told.set()

    def end(self) -> None:
        """Tells it not to wait for answers."""
        self._told.set()
        self._hurried.set()

    async def run(self, doors: Sequence[Door], budget_s: float) -> None:
        """Returns when it was told to end, and everything that came in by these doors has ended."""
        await self._told.wait()
        log.info("draining", timeout_s=budget_s)
        last_words_s = min(_LAST_WORDS_S, budget_s / 2)
        for part in self._running:
            part.drain(budget_s - last_words_s)
        # What has a ledger entry was ended by then, and knows more of how to end.
        asyncio.get_running_loop().call_later(budget_s - last_words_s / 2, self._in_progress.end_all)
        stopping = asyncio.gather(*(door.stop(budget_s) for door in doors))
        hurrying = asyncio.create_task(self._hurried.wait())
        await asyncio.wait((stopping, hurrying), return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not stopping.done():
            await asyncio.gather(*(door.stop(0) for door in doors))
        await stopping
