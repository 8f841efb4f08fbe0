"""The reader of one request: takes what its ledger entries deliver, and starts new attempts for those without one.

The request's task either waits for the next delta, or relays tokens to a sink. While it relays, tokens do not wake the
task. An entry gives a plain token to the sink at once; anything else is handed on from the loop, once for each turn in
which there was news, and the task sleeps until an entry needs a new attempt or the relay is over. A frame brings news
for many readers, and one callback serves all of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context

from services.gateway.api.generation import Delta, Sink, never
from services.gateway.dispatch.ledger.entry import LedgerEntry
from services.gateway.dispatch.router import NoPlan


class Relays:
    """Readers with deltas to hand on in this turn of the loop."""

    def __init__(self) -> None:
        self._readers: list[Reader] = []

    def add(self, reader: "Reader") -> None:
        """Arranges that `hand_on` of this reader is called soon."""
        if not self._readers:
            asyncio.get_running_loop().call_soon(self._hand_on)
        self._readers.append(reader)

    def _hand_on(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.hand_on()


class _Relay:
    """A relay to one sink. Once it is over, the sink is given nothing more."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.over = False
        self._error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Ends the relay; `check` raises the error."""
        if self._error is None:
            self._error = error
        self.over = True

    def check(self) -> None:
        """Raises the error that ended the relay, if one did."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose traceback holds this frame


class Reader:
    """A `RunningRequest` over ledger entries, one for each choice.

    `place` starts attempts of entries, `close` ends an entry, `relays` is one object for all readers.
    """

    def __init__(
        self,
        place: Callable[[Sequence[LedgerEntry]], Awaitable[NoPlan | None]],
        close: Callable[[LedgerEntry], None],
        relays: Relays,
    ) -> None:
        self._place = place
        self._close = close
        self._relays = relays
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # of the request: the sink is called in it
        self._entries: Sequence[LedgerEntry] = ()
        self._woken: dict[LedgerEntry, None] = {}  # have news, oldest first
        self._lost: dict[LedgerEntry, None] = {}  # need the task: they have no attempt, or an error
        self._refused: dict[LedgerEntry, float | None] = {}  # without a worker, until when; None: until there is news
        self._news = asyncio.Event()  # wakes the task
        self._relay: _Relay | None = None  # None: the task waits for deltas
        self._relay_due = False

    def start(self, entries: Sequence[LedgerEntry]) -> None:
        """Sets the choices, by number, after their first placement."""
        self._entries = entries
        for entry in entries:
            if entry.attempt is None:
                self.on_news(entry)

    def stop(self) -> None:
        """Drops all references to the entries, which refer to the reader: no cycle is left to the garbage collector."""
        self._entries = ()
        for entries in (self._woken, self._lost, self._refused):
            entries.clear()

    def on_news(self, entry: LedgerEntry) -> None:
        """See EntryListener."""
        self._woken[entry] = None
        if self._relay is None:
            self._news.set()
        elif not self._relay_due:
            self._relay_due = True
            self._relays.add(self)

    def on_error(self, error: Exception) -> None:
        """See EntryListener."""
        if self._relay is not None:
            self._relay.fail(error)
            self._reset_takers()

    async def next(self) -> Delta:
        """See RunningRequest."""
        while True:
            if (delta := self._poll()) is not None:
                return delta
            await self._go_on()

    async def relay(self, sink: Sink) -> None:
        """See RunningRequest."""
        self._relay = relay = _Relay(sink)
        try:
            self._hand_on(relay)
            if not relay.over:
                for choice, entry in enumerate(self._entries):
                    entry.take_token = sink.token_taker(choice)
            while not relay.over:
                await self._go_on()
                self._hand_on(relay)
        finally:
            self._relay = None
            self._reset_takers()
        relay.check()

    def _reset_takers(self) -> None:
        for entry in self._entries:
            entry.take_token = never

    def end(self, choice: int) -> None:
        """See RunningRequest."""
        entry = self._entries[choice]
        self._close(entry)
        self._woken.pop(entry, None)
        self._lost.pop(entry, None)

    def hand_on(self) -> None:
        """Hands what came to the sink, if it still takes any. Raises nothing."""
        self._relay_due = False
        relay = self._relay
        if relay is not None:
            if not relay.over:
                self._context.run(self._hand_on, relay)
            if self._lost or relay.over:
                self._news.set()

    def _hand_on(self, relay: _Relay) -> None:
        try:
            while not relay.over and (delta := self._poll()) is not None:
                relay.over = not relay.sink.take(delta)
        except Exception as error:  # the task raises it; here it would end the worker's stream
            relay.fail(error)
        if relay.over:
            self._reset_takers()  # at once: the task may wake only after further tokens

    def _poll(self) -> Delta | None:
        """Returns the next delta that is there; None: there is none."""
        while self._woken:
            entry = next(iter(self._woken))
            del self._woken[entry]
            delta = entry.take()
            if entry.error() is not None or (entry.attempt is None and not entry.closed):
                self._lost[entry] = None
            if delta is not None:
                return delta
        return None

    async def _go_on(self) -> None:
        """Places the entries that have no attempt and raises the error of one, or waits until there is news."""
        if not self._lost:
            await self._wait()
        lost, self._lost = self._lost, {}
        for entry in lost:
            entry.check()
            if entry.attempt is None and not entry.closed:
                self._refused.pop(entry, None)
                if await self._place([entry]) is not None and not entry.closed:
                    self._refused[entry] = entry.retries.again_at()

    async def _wait(self) -> None:
        """Waits until there is news, or until a worker that refused may be asked again."""
        self._news.clear()
        until = min((when for when in self._refused.values() if when is not None), default=None)
        try:
            async with asyncio.timeout_at(until):
                await self._news.wait()
        except TimeoutError:
            for entry, when in self._refused.items():
                if when is not None and when <= self._loop.time():
                    self._woken[entry] = None
