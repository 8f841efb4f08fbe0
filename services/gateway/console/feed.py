"""The feed: what consoles are told, computed once a second for all of them, and nothing but samples while none listens.

    every second    tick, rows that changed, events of the fleet     one piece of bytes for all who see everything,
    every 5 s       a sample of the history, prefixes                one for each key whose own requests are seen

A listener whose client does not read skips turns; its own task sends what it missed when it reads again. So what is
unwritten of a listener is bounded, whatever its client does.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import orjson

from services.gateway.api.errors import ApiError, unavailable
from services.gateway.api.records.request_rows import KeyedRow
from services.gateway.console.fleet_events import FleetEvents
from services.gateway.console.listener import Listener, Position
from services.gateway.console.row_changes import RowChanges, seen
from services.gateway.console.samples import STEP_S, History
from services.gateway.console.server_events import ROWS_AT_ONCE, event, json_list, rows_events
from services.gateway.console.sources import Sources
from services.gateway.console.tick import Ticks
from services.gateway.console.view import View
from services.gateway.overview import DispatchOverview

TURN_S = 1.0
MAX_LISTENERS = 32
MAX_OF_TENANTS = 16  # of those: keys that see their own requests alone
MAX_OF_KEY = 4  # of those, of one key

DRAINS = "the gateway ends"
KEY_GONE = "the key is not valid any more"


class Feed:
    """Tells listeners what changes, while `run` runs."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._listeners: dict[Listener, None] = {}
        self._ticks = Ticks(sources, TURN_S / 2)
        self._rows = RowChanges(sources.records.rows)
        self._history = History(sources)
        self._events = FleetEvents()
        self._position = Position()
        self._tick = self._prefixes = b""  # the last ones
        self._sampled = time.monotonic()
        self._draining = False

    async def run(self) -> NoReturn:
        """Takes a turn every second, until cancelled; then all streams end. Raises what a turn raises."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        try:
            while True:
                due = max(due + TURN_S, loop.time())
                await asyncio.sleep(due - loop.time())
                self.take_turn()
        except asyncio.CancelledError:
            self._end_all(DRAINS)
            raise

    def drain(self, after_s: float) -> None:
        """Ends the streams that would hold up the end of the gateway, at once, and begins no such one from now on."""
        self._draining = True
        for listener in self._listeners:
            if listener.leaves_early:
                listener.end(DRAINS)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Counts a listener in the `with` block. Raises ApiError where there are too many, or the gateway ends."""
        self._check_room(listener)
        is_first = not self._listeners
        self._listeners[listener] = None
        try:
            if is_first:
                self._begin()
            yield
        finally:
            del self._listeners[listener]
            if not self._listeners:
                self._stop()

    def _begin(self) -> None:
        """Takes a first turn, for the first listener."""
        self._sources.dispatch.watch_prefixes(True)
        self._sources.take_longest_pause_s()  # those that nobody saw
        self.take_turn()

    def _stop(self) -> None:
        """Drops what is kept while somebody listens."""
        self._sources.dispatch.watch_prefixes(False)
        self._rows.stop()
        self._ticks.stop()
        self._prefixes = b""

    def _check_room(self, listener: Listener) -> None:
        if self._draining and listener.leaves_early:
            raise unavailable("The server is restarting. Try again.", retry_after_s=1)
        tenants = [other for other in self._listeners if not other.view.sees_all]
        of_key = [other for other in tenants if other.view == listener.view]
        if len(self._listeners) >= MAX_LISTENERS:
            raise _too_many(f"{MAX_LISTENERS} consoles listen")
        if not listener.view.sees_all and len(of_key) >= MAX_OF_KEY:
            raise _too_many(f"{MAX_OF_KEY} consoles with this key listen")
        if not listener.view.sees_all and len(tenants) >= MAX_OF_TENANTS:
            raise _too_many(f"{MAX_OF_TENANTS} consoles that see the requests of one key listen")

    def take_turn(self) -> None:
        """Tells all listeners what is and has changed; takes a sample where one is due. Raises what its parts raise."""
        samples_due = time.monotonic() >= self._sampled + STEP_S
        if not self._listeners and not samples_due:
            return
        before = self._position
        try:
            self._take_turn(before, samples_due)
        except Exception:  # a defect; the next turn may be without
            self._skip_turn(before)
            raise

    def _take_turn(self, before: Position, samples_due: bool) -> None:
        self._sources.records.rows.settle()
        overview, parts = self._sources.dispatch.overview(), []
        found = self._events.look(overview, self._sources.metrics.pairs.take_failures(), self._redis_down())
        if samples_due:
            self._sampled += STEP_S * max(1, (time.monotonic() - self._sampled) // STEP_S)
            parts.append(_event_of("sample", self._history.take(overview)))
        if self._listeners:
            parts += [_event_of("event", each) for each in found]
            self._tell(overview, parts, before, samples_due)

    def _skip_turn(self, before: Position) -> None:
        """Lets all listeners catch up with a turn that a defect cut off."""
        self._position = before._replace(turn=before.turn + 1)
        for listener in self._listeners:
            listener.fall_behind(before)

    def _tell(self, overview: DispatchOverview, parts: list[bytes], before: Position, samples_due: bool) -> None:
        turn = before.turn + 1
        changed = self._rows.take(turn)
        self._position = Position(turn, self._rows.ended, self._history.num_samples, self._events.num_events)
        self._tick = event("tick", self._ticks.make(overview))
        if samples_due or not self._prefixes:
            self._prefixes = event("prefixes", self._describe_prefixes())
            parts.append(self._prefixes)
        of_all = b"".join([*rows_events([row for _, row, _ in changed]), *parts, self._tick])
        of_key: dict[View, bytes] = {}
        for listener in list(self._listeners):
            if not listener.is_valid():
                listener.end(KEY_GONE)
            elif listener.view.sees_all:
                listener.offer(of_all, before)
            else:
                if listener.view not in of_key:
                    of_key[listener.view] = self._of_key(changed, listener.view)
                listener.offer(of_key[listener.view], before)

    def _of_key(self, changed: Sequence[KeyedRow], view: View) -> bytes:
        return b"".join([*rows_events(list(seen(changed, view))), own_tick()])

    def _describe_prefixes(self) -> dict[str, Any]:
        since, hits = self._sources.dispatch.prefix_hits()
        names = ("name", "tokens", "uses", "saved_tokens", "workers")
        listed = [{name: getattr(hit, name) for name in names} for hit in hits]
        return {"now": round(time.time(), 3), "since": round(since, 3), "prefixes": listed}

    def _redis_down(self) -> str | None:
        return None if self._sources.redis is None else self._sources.redis.registry.why

    def _end_all(self, why: str) -> None:
        for listener in self._listeners:
            listener.end(why)

    # For the task of a listener

    def next_parts(self, listener: Listener, about: Callable[[], dict[str, Any]]) -> list[bytes]:
        """Returns what a listener that is behind lacks; nothing: it keeps up from now on.

        about: returns what a hello says of the gateway.
        """
        position, view = listener.position, listener.view
        if position == self._position:
            listener.catch_up(position)
            return []
        if position.turn == 0 or self._rows.is_lost(position.ended):
            parts = self._hello(view, about())
        else:
            parts = rows_events(self._rows.missed(view, position.turn, position.ended))
            if view.sees_all:
                parts += [_event_of("sample", each) for each in self._history.since(position.samples)]
                parts += [_event_of("event", each) for each in self._events.since(position.events)]
        listener.position = self._position
        return [*parts, self._prefixes, self._tick] if view.sees_all else [*parts, own_tick()]

    def _hello(self, view: View, about: dict[str, Any]) -> list[bytes]:
        rows = self._rows.missed(view, 0, 0)
        history = {"step_s": STEP_S, "bounds": self._history.bounds}
        samples = self._history.since(0) if view.sees_all else []
        events = self._events.since(0) if view.sees_all else []
        hello = {
            **about,
            "now": round(time.time(), 3),
            "history": {**history, "samples": json_list(samples)},
            "requests": json_list(rows[:ROWS_AT_ONCE]),
            "events": json_list(events),
        }
        return [event("hello", hello), *rows_events(rows[ROWS_AT_ONCE:])]


def own_tick() -> bytes:
    """Returns the tick of those who see their own requests alone."""
    return event("tick", {"now": round(time.time(), 3)})


def _event_of(name: str, data: bytes) -> bytes:
    return event(name, orjson.Fragment(data))


def _too_many(limit: str) -> ApiError:
    return unavailable(f"{limit} already. Close one, or try again later.", retry_after_s=5)
