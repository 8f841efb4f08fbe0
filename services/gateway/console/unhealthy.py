"""Lists what is not as it should be, worst first: a pure function of what is known."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.console.sources import RedisUsers
from services.gateway.overview import DispatchOverview, WorkerOverview, WorkerState


@dataclass(frozen=True, slots=True)
class Ill:
    """One thing that is not as it should be. since: in seconds since 1970; None: not known."""

    what: str
    name: str
    why: str
    since: float | None = None

    def describe(self) -> dict[str, Any]:
        """The thing as JSON values."""
        return {"what": self.what, "name": self.name, "why": self.why, "since": self.since}


def unhealthy(
    overview: DispatchOverview, redis: RedisUsers | None, refused_files_s: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Returns all that is not as it should be, worst first, as JSON values. refused_files_s: by what they hold."""
    found: list[Ill] = []
    if overview.draining:
        found.append(Ill("gateway", overview.gateway, "it drains: it takes no new requests, and ends soon"))
    elif not overview.ready:
        found.append(Ill("gateway", overview.gateway, "it is not ready: no decode worker takes requests"))
    found += _of_redis(redis)
    found += _of_workers(overview.workers, WorkerState.GONE)
    found += _of_workers(overview.workers, WorkerState.REFUSED)
    found += _of_workers(overview.workers, WorkerState.CONNECTING)
    found += [Ill("link", f"{pair.prefill} → {pair.decode}", pair.why, pair.since) for pair in overview.avoided]
    found += _of_files(refused_files_s)
    found += _of_quarantine(overview.workers)
    found += _of_workers(overview.workers, WorkerState.DRAINING)
    return [each.describe() for each in found]


def _of_workers(workers: Iterable[WorkerOverview], state: WorkerState) -> Iterator[Ill]:
    for worker in workers:
        if worker.state is state:
            yield Ill("worker", worker.address, worker.why or "it drains: it takes no new work", worker.since)


def _of_redis(redis: RedisUsers | None) -> Iterator[Ill]:
    if redis is None:
        return
    if redis.registry.why is not None:
        yield Ill("redis", "registry", f"no news of workers: {redis.registry.why}", redis.registry.since)
    if redis.index():
        yield Ill("redis", "prefix index", "it does not answer: requests go by load and by what this gateway sent")
    if redis.quotas is not None and redis.quotas():
        yield Ill("redis", "limits of keys", "this gateway counts its part of them alone")


def _of_files(refused_s: Mapping[str, float]) -> Iterator[Ill]:
    for name, seconds in refused_s.items():
        if seconds:
            why = "the files cannot be used; what they held before stays in use (the gateway's log has the reason)"
            yield Ill(name, "files", why, time.time() - seconds)


def _of_quarantine(workers: Iterable[WorkerOverview]) -> Iterator[Ill]:
    for worker in workers:
        if worker.blocks is not None and worker.blocks.quarantined:
            yield Ill("worker", worker.address, f"{worker.blocks.quarantined} blocks are in quarantine")
