"""All that a feed has told so far, as far as it is shown."""

from collections import deque
from dataclasses import dataclass, field

from services.top.told import FleetEvent, Hello, Link, Request, Rows, Sample, Tick, Told, Worker

MAX_REQUESTS = 5000
MAX_EVENTS = 200


@dataclass(slots=True)
class View:
    """The fleet as the last events described it. A further `hello` begins anew."""

    hello: Hello | None = None
    tick: Tick | None = None
    sample: Sample | None = None
    events: deque[FleetEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    _requests: dict[int, Request] = field(default_factory=dict)  # by their numbers

    def take(self, told: Told) -> None:
        """Takes in what the feed told."""
        match told:
            case Hello():
                self.hello = told
                self._requests = {each.n: each for each in told.requests}
                self.events = deque(sorted(told.events, key=lambda event: event.at), maxlen=MAX_EVENTS)
            case Tick():
                self.tick = told
            case Sample():
                self.sample = told
            case FleetEvent():
                self.events.append(told)
            case Rows(rows=rows):
                self._take_rows(rows)

    def requests(self) -> list[Request]:
        """Lists requests, the newest first."""
        return sorted(self._requests.values(), key=lambda request: request.n, reverse=True)

    def workers(self) -> tuple[Worker, ...]:
        """Lists the workers of the last tick."""
        return () if self.tick is None else self.tick.workers

    def links(self) -> tuple[Link, ...]:
        """Lists the links of the last tick."""
        return () if self.tick is None else self.tick.links

    def _take_rows(self, rows: tuple[Request, ...]) -> None:
        for row in rows:
            self._requests[row.n] = row
        for number in sorted(self._requests)[: max(0, len(self._requests) - MAX_REQUESTS)]:
            del self._requests[number]
