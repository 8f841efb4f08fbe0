"""Tells consoles of the dispatch side: nothing here acts."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from services.gateway.dispatch.fleet import Fleet
from services.gateway.dispatch.fleet_overview import avoided_pairs, overview_of_workers
from services.gateway.dispatch.ledger.ledger import Ledger
from services.gateway.dispatch.links import WorkerLink
from services.gateway.dispatch.lives import WorkerLives
from services.gateway.dispatch.prefix_hits import PrefixHits
from services.gateway.overview import DispatchOverview, PrefixHit


class Status(NamedTuple):
    """The gateway's id, and whether it is ready, and drains."""

    gateway: str
    ready: bool
    draining: bool


class Overseer:
    """See Overseen."""

    def __init__(
        self,
        fleet: Fleet,
        links: Mapping[str, WorkerLink],
        lives: WorkerLives,
        ledger: Ledger,
        hits: PrefixHits,
        status: Callable[[], Status],
    ) -> None:
        """links: by address, as they come and go. status: returns it as it is now."""
        self._fleet = fleet
        self._links = links
        self._lives = lives
        self._ledger = ledger
        self._hits = hits
        self._status = status

    def gateway_id(self) -> str:
        """See Overseen."""
        return self._status().gateway

    def overview(self) -> DispatchOverview:
        """See Overseen."""
        status, now = self._status(), time.time()
        return DispatchOverview(
            gateway=status.gateway,
            ready=status.ready,
            draining=status.draining,
            waiting=sum(entry.attempt is None for entry in self._ledger),
            workers=overview_of_workers(self._fleet, self._links, self._lives, now),
            avoided=avoided_pairs(self._fleet, self._ledger.pairs, self._ledger.now(), now),
        )

    def watch_prefixes(self, on: bool) -> None:
        """See Overseen."""
        self._hits.watch(on)

    def prefix_hits(self) -> tuple[float, Sequence[PrefixHit]]:
        """See Overseen."""
        return self._hits.report()
