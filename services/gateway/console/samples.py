"""History: a sample of the gateway's figures every few seconds, an hour of them, as JSON.

A sample is all that is computed while nobody listens.
"""

import time
from collections import deque
from itertools import islice

import orjson

from services.gateway.console.sources import Sources
from services.gateway.console.totals import Totals, read_bounds, read_totals
from services.gateway.overview import DispatchOverview

STEP_S = 5
KEPT_SAMPLES = 720


class History:
    """The samples of the last hour. num_samples: of all that were ever taken, so that a number names a place."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.bounds = read_bounds(sources.metrics)
        self.num_samples = 0
        self._samples: deque[bytes] = deque(maxlen=KEPT_SAMPLES)
        self._totals = read_totals(sources.metrics)
        self._ended = _Ended.read(sources)
        self._evicted: dict[object, int] = {}  # by worker id
        self._taken = time.monotonic()

    def take(self, overview: DispatchOverview) -> bytes:
        """Takes a sample of the time since the last one."""
        sources, now = self._sources, time.monotonic()
        totals, ended = read_totals(sources.metrics), _Ended.read(sources)
        sample = orjson.dumps(
            {
                "at": round(time.time(), 3),
                "s": round(now - self._taken, 3),
                **self._grown(totals, ended),
                "in_flight": len(sources.records.rows.in_flight),
                "waiting": overview.waiting,
                "kv_used": {
                    worker.address: round(worker.blocks.used / max(1, worker.blocks.total), 4)
                    for worker in overview.workers
                    if worker.blocks is not None
                },
                "evicted_blocks": self._evicted_since(overview),
            }
        )
        self._totals, self._ended, self._taken = totals, ended, now
        self._samples.append(sample)
        self.num_samples += 1
        return sample

    def since(self, place: int) -> list[bytes]:
        """Returns the samples from a place on, oldest first, as far as they are kept."""
        number = min(self.num_samples - place, len(self._samples))
        return list(islice(reversed(self._samples), number))[::-1]

    def _grown(self, totals: Totals, ended: "_Ended") -> dict[str, object]:
        before = self._ended
        return {
            "requests": {name: count - before.outcomes[name] for name, count in ended.outcomes.items()},
            **totals.grown_since(self._totals),
            "ttft_slo_met": ended.slo_met - before.slo_met,
            "ttft_slo_total": ended.slo_total - before.slo_total,
        }

    def _evicted_since(self, overview: DispatchOverview) -> int | None:
        """Counts the blocks that live workers evicted since the last sample; None: there is no worker.

        Of a worker that is new here, what it evicted before does not count.
        """
        known = {
            worker.described["incarnation"]: worker.evicted_blocks
            for worker in overview.workers
            if worker.evicted_blocks is not None
        }
        before, self._evicted = self._evicted, known
        if not known:
            return None
        return sum(max(0, count - before.get(worker, count)) for worker, count in known.items())


class _Ended:
    """The requests that ended so far, by how they did."""

    __slots__ = ("outcomes", "slo_met", "slo_total")

    def __init__(self, outcomes: dict[str, int], slo_met: int, slo_total: int) -> None:
        self.outcomes = outcomes
        self.slo_met = slo_met
        self.slo_total = slo_total

    @classmethod
    def read(cls, sources: Sources) -> "_Ended":
        """Reads the counts as they are now."""
        rows = sources.records.rows
        return cls({outcome.value: count for outcome, count in rows.outcomes.items()}, rows.slo_met, rows.slo_total)
