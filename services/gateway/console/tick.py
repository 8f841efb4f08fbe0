"""The state of the gateway and its fleet, as one event a second has it."""

import os
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import psutil

from services.gateway.console.sources import Sources
from services.gateway.console.unhealthy import unhealthy
from services.gateway.metrics import PairFigures, PairNames
from services.gateway.overview import DispatchOverview, WorkerOverview
from services.protocol.versions import PROTOCOL_MAJOR, PROTOCOL_MINOR


class Ticks:
    """Makes ticks."""

    def __init__(self, sources: Sources, least_s: float) -> None:
        """least_s: a rate is over so many seconds or more."""
        self._sources = sources
        self._least_s = least_s
        self._version = version("baton-serve")  # is read from files
        self._process = psutil.Process()
        self._began = time.monotonic()
        self._computed: dict[object, tuple[int, float]] = {}  # by worker id: tokens, and when

    def make(self, overview: DispatchOverview) -> dict[str, Any]:
        """Returns the state of everything, as JSON values."""
        sources, now = self._sources, time.time()
        refused_files_s = {name: seconds() for name, seconds in sources.refused_files_s.items()}
        known = None if sources.num_gateways is None else sources.num_gateways()
        return {
            "now": round(now, 3),
            "gateway": self._gateway(overview),
            "gateways": {"known": known},
            "redis": self._redis(),
            "workers": self._workers(overview),
            "links": list(_links(sources.metrics.pairs.by_pair, overview)),
            "unhealthy": unhealthy(overview, sources.redis, refused_files_s),
        }

    def stop(self) -> None:
        """Drops what the next tick would be compared with."""
        self._computed = {}

    def _gateway(self, overview: DispatchOverview) -> dict[str, Any]:
        return {
            "id": overview.gateway,
            "pid": os.getpid(),
            "version": self._version,
            "protocol": f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
            "in_flight": len(self._sources.records.rows.in_flight),
            "waiting": overview.waiting,
            "uptime_s": round(time.monotonic() - self._began, 1),
            "draining": overview.draining,
            "cpu_s": round(time.process_time(), 3),
            "rss_bytes": self._process.memory_info().rss,
            "loop_pause_ms": round(self._sources.take_longest_pause_s() * 1e3, 3),
        }

    def _redis(self) -> dict[str, Any]:
        redis = self._sources.redis
        if redis is None:
            return {"state": "none", "why": None, "since": None}
        why, since = redis.registry.why, redis.registry.since
        state = "ok" if why is None else "down"
        return {"state": state, "why": why, "since": None if since is None else round(since, 3)}

    def _workers(self, overview: DispatchOverview) -> list[dict[str, Any]]:
        before, self._computed = self._computed, {}
        return [self._worker(worker, before) for worker in overview.workers]

    def _worker(self, worker: WorkerOverview, before: Mapping[object, tuple[int, float]]) -> dict[str, Any]:
        blocks = worker.blocks
        use = None if blocks is None else {name: getattr(blocks, name) for name in ("used", "total", "quarantined")}
        return {
            **worker.described,
            "state": worker.state,
            "why": worker.why,
            "detail": worker.detail,
            "since": round(worker.since, 3),
            "restarted": worker.restarted,
            "kv": None if use is None else {"device": use},
            "tokens_per_s": self._tokens_per_s(worker, before),
        }

    def _tokens_per_s(self, worker: WorkerOverview, before: Mapping[object, tuple[int, float]]) -> float | None:
        if worker.computed_tokens is None:
            return None
        now, life = time.monotonic(), worker.described["incarnation"]
        tokens, then = self._computed[life] = before.get(life, (worker.computed_tokens, now))
        if now - then < self._least_s:
            return None
        self._computed[life] = worker.computed_tokens, now
        return round((worker.computed_tokens - tokens) / (now - then), 1)


def _links(by_pair: Mapping[PairNames, PairFigures], overview: DispatchOverview) -> Iterator[dict[str, Any]]:
    avoided = {(pair.prefill, pair.decode) for pair in overview.avoided}
    nothing = PairFigures()
    for names in sorted(by_pair.keys() | avoided):
        figures = by_pair.get(names, nothing)
        yield {
            "prefill": names[0],
            "decode": names[1],
            "transport": figures.moved.transport or None,
            "why": figures.moved.why or None,
            "handoffs": figures.completed,
            "failed": figures.failed,
            "bytes": figures.moved.num_bytes,
            "reading_s": round(figures.moved.reading_s, 6),
            "avoided": names in avoided,
        }
