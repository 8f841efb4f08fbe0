"""The reader's side of one request: news of any of its choices, and new attempts for those that lost theirs.

Its task either asks for the next delta, or has deltas relayed: then plain news never wakes the task. They are handed
on from the loop, once for each turn of it in which there were any, and the task sleeps until something takes waiting.
A frame brings news for many readers: one callback sees to all of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context

from services.gateway.api.generation import Delta, TakeToken, never
from services.gateway.dispatch.ledger import LedgerRow
from services.gateway.dispatch.router import NoPlan

_Take = Callable[[Delta], bool]


class Relays:
    """Readers with deltas to hand on, in this turn of the loop."""

    def __init__(self) -> None:
        self._readers: list[Reader] = []

    def add(self, reader: "Reader") -> None:
        """Has its `hand_on` called soon."""
        if not self._readers:
            asyncio.get_running_loop().call_soon(self._hand_on)
        self._readers.append(reader)

    def _hand_on(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.hand_on()


class Reader:
    """A `Generation` over ledger rows, one for each choice.

    `place` starts attempts of rows, `close` ends a row, `relays` are those of all readers.
    """

    def __init__(
        self,
        place: Callable[[Sequence[LedgerRow]], Awaitable[NoPlan | None]],
        close: Callable[[LedgerRow], None],
        relays: Relays,
    ) -> None:
        self._place = place
        self._close = close
        self._relays = relays
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # what is relayed runs for this request, whoever brought the news
        self._rows: Sequence[LedgerRow] = ()
        self._woken: dict[LedgerRow, None] = {}  # to be looked at, oldest news first
        self._lost: dict[LedgerRow, None] = {}  # without an attempt, or in error: for the task
        self._refused: dict[LedgerRow, float | None] = {}  # without a worker, until when; None: until it is woken
        self._news = asyncio.Event()  # for the task
        self._take: _Take | None = None  # where deltas are relayed to
        self._relay_due = False
        self._relay_over: Exception | bool = False  # True: nobody takes more now

    def start(self, rows: Sequence[LedgerRow]) -> None:
        """The choices, by number, after their first placement."""
        self._rows = rows
        for row in rows:
            if row.attempt is None:
                self.wake(row)

    def stop(self) -> None:
        """Lets go of the choices, which hold on to it: what a request leaves is not the garbage collector's to find."""
        self._rows = ()
        for rows in (self._woken, self._lost, self._refused):
            rows.clear()

    def wake(self, row: LedgerRow) -> None:
        """There is news of this choice."""
        self._woken[row] = None
        if self._take is None:
            self._news.set()
        elif not self._relay_due:
            self._relay_due = True
            self._relays.add(self)

    async def next(self) -> Delta:
        """See Generation."""
        while True:
            if (delta := self._poll()) is not None:
                return delta
            await self._go_on()

    async def relay(self, take: _Take, takers: Sequence[TakeToken] | None = None) -> None:
        """See Generation."""
        self._take, self._relay_over = take, False
        try:
            self._hand_on(take)
            for row, take_token in zip(self._rows, takers or [never] * len(self._rows), strict=True):
                row.take_token = take_token
            while self._relay_over is False:
                await self._go_on()
                self._hand_on(take)
        finally:
            self._take = None
            self._take_no_tokens()
        if isinstance(error := self._relay_over, Exception):
            self._relay_over = True
            try:
                raise error
            finally:
                del error  # which holds this frame

    def _take_no_tokens(self) -> None:
        for row in self._rows:
            row.take_token = never

    def end(self, choice: int) -> None:
        """See Generation."""
        row = self._rows[choice]
        self._close(row)
        self._woken.pop(row, None)
        self._lost.pop(row, None)

    def hand_on(self) -> None:
        """Relays what is there, if that is still wanted. Raises nothing."""
        self._relay_due = False
        if self._take is not None and self._relay_over is False:
            self._context.run(self._hand_on, self._take)
            if self._lost or self._relay_over is not False:
                self._news.set()

    def _hand_on(self, take: _Take) -> None:
        try:
            while self._relay_over is False and (delta := self._poll()) is not None:
                self._relay_over = not take(delta)
        except Exception as error:  # the task's to raise: here it would hit whoever brought the news
            self._relay_over = error
        if self._relay_over is not False:
            self._take_no_tokens()  # not before the task has seen to what was the last

    def _poll(self) -> Delta | None:
        """What is there; None: nothing that takes no waiting."""
        while self._woken:
            row = next(iter(self._woken))
            del self._woken[row]
            if row.broken is not None:
                broken, row.broken = row.broken, None
                try:
                    raise broken
                finally:
                    del broken  # which holds this frame
            delta = row.take()
            if row.error is not None or (row.attempt is None and not row.closed):
                self._lost[row] = None
            if delta is not None:
                return delta
        return None

    async def _go_on(self) -> None:
        """Sees to the choices that have no attempt, or waits until there is something to do."""
        if not self._lost:
            await self._wait()
        lost, self._lost = self._lost, {}
        for row in lost:
            if row.error is not None:
                raise row.error
            if row.attempt is None and not row.closed:
                self._refused.pop(row, None)
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
                if when is not None and when <= self._loop.time():
                    self._woken[row] = None
