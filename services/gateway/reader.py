"""The reader's side of one request: news of any of its choices, and new attempts for those that lost theirs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from services.gateway.generation import Delta
from services.gateway.ledger import LedgerRow
from services.gateway.router import NoPlan


class Reader:
    """A `Generation` over ledger rows, one for each choice. `place` starts attempts of rows, `close` ends a row."""

    def __init__(
        self, place: Callable[[Sequence[LedgerRow]], Awaitable[NoPlan | None]], close: Callable[[LedgerRow], None]
    ) -> None:
        self._place = place
        self._close = close
        self._rows: Sequence[LedgerRow] = ()
        self._woken: dict[LedgerRow, None] = {}  # to be looked at, oldest news first
        self._refused: dict[LedgerRow, float | None] = {}  # without a worker, until when; None: until it is woken
        self._news = asyncio.Event()

    def start(self, rows: Sequence[LedgerRow]) -> None:
        """The choices, by number, after their first placement."""
        self._rows = rows
        for row in rows:
            if row.attempt is None:
                self.wake(row)

    def wake(self, row: LedgerRow) -> None:
        """There is news of this choice."""
        self._woken[row] = None
        self._news.set()

    async def next(self) -> Delta:
        """See Generation."""
        while True:
            while self._woken:
                row = next(iter(self._woken))
                del self._woken[row]
                self._refused.pop(row, None)
                if (delta := row.take()) is not None:
                    if row.error is not None or (row.attempt is None and not row.closed):
                        self.wake(row)  # that is news too, for the next call
                    return delta
                await self._go_on(row)
            await self._wait()

    def end(self, choice: int) -> None:
        """See Generation."""
        row = self._rows[choice]
        self._close(row)
        self._woken.pop(row, None)

    async def _go_on(self, row: LedgerRow) -> None:
        if row.error is not None:
            raise row.error
        if row.attempt is not None or row.closed:
            return
        if await self._place([row]) is not None and not row.closed:
            self._refused[row] = min(row.avoid.values(), default=None)

    async def _wait(self) -> None:
        """Until there is news, or a worker that refused may be asked again."""
        self._news.clear()
        until = min((when for when in self._refused.values() if when is not None), default=None)
        try:
            async with asyncio.timeout_at(until):
                await self._news.wait()
        except TimeoutError:
            for row, when in self._refused.items():
                if when is not None and when <= asyncio.get_running_loop().time():
                    self._woken[row] = None
