"""Events of the fleet, found by comparing what is with what was when it was last looked at."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice

import orjson

from services.gateway.metrics import PairFailures, PairNames
from services.gateway.overview import DispatchOverview, WorkerOverview, WorkerState

KEPT_EVENTS = 200

_KINDS = {
    WorkerState.OK: "worker_up",
    WorkerState.GONE: "worker_gone",
    WorkerState.REFUSED: "worker_refused",
    WorkerState.DRAINING: "draining",
}


class FleetEvents:
    """The last events, as JSON. num_events: of all so far, so that a number names a place."""

    def __init__(self) -> None:
        self.num_events = 0
        self._kept: deque[bytes] = deque(maxlen=KEPT_EVENTS)
        self._workers: Mapping[str, WorkerOverview] = {}
        self._avoided: set[PairNames] = set()
        self._draining = False
        self._redis_down = False

    def look(
        self, overview: DispatchOverview, failures: Mapping[PairNames, PairFailures], redis_down: str | None
    ) -> list[bytes]:
        """Returns the events since the last call.

        failures: of handoffs since then. redis_down: why Redis does not answer; None: it does.
        """
        of_pairs = self._of_pairs(overview, failures)
        found = [*self._of_workers(overview), *of_pairs, *self._of_gateway(overview, redis_down)]
        self._kept.extend(found)
        self.num_events += len(found)
        return found

    def since(self, place: int) -> list[bytes]:
        """Returns the events from a place on, oldest first, as far as they are kept."""
        number = min(self.num_events - place, len(self._kept))
        return list(islice(reversed(self._kept), number))[::-1]

    def _of_workers(self, overview: DispatchOverview) -> Iterator[bytes]:
        before, self._workers = self._workers, {worker.address: worker for worker in overview.workers}
        for address, worker in self._workers.items():
            was = before.get(address)
            same_life = was is not None and was.restarted == worker.restarted
            if was is not None and same_life and was.state is worker.state:
                continue
            if was is not None and not same_life and was.state in (WorkerState.OK, WorkerState.DRAINING):
                yield _event(worker.since, "worker_gone", address, "it was started anew")
            if worker.state in _KINDS:
                yield _event(worker.since, _KINDS[worker.state], address, _text_of(worker))

    def _of_pairs(self, overview: DispatchOverview, failures: Mapping[PairNames, PairFailures]) -> Iterator[bytes]:
        for names, failed in failures.items():
            many = "a handoff" if failed.number == 1 else f"{failed.number} handoffs"
            text = f"{many} failed, the last one with {failed.last}"
            yield _event(None, "handoff_failed", " → ".join(names), text)
        avoided = {(pair.prefill, pair.decode): pair for pair in overview.avoided}
        for names in avoided.keys() - self._avoided:
            yield _event(avoided[names].since, "link_avoided", " → ".join(names), avoided[names].why)
        self._avoided = set(avoided)

    def _of_gateway(self, overview: DispatchOverview, redis_down: str | None) -> Iterator[bytes]:
        if overview.draining and not self._draining:
            yield _event(None, "gateway_draining", overview.gateway, "it takes no new requests, and ends soon")
        self._draining = overview.draining
        is_down = redis_down is not None
        if is_down is not self._redis_down:
            text = f"it does not answer: {redis_down}" if is_down else "it answers again"
            yield _event(None, "redis_down" if is_down else "redis_up", "redis", text)
        self._redis_down = is_down


def _text_of(worker: WorkerOverview) -> str:
    if worker.why is not None:
        return worker.why
    role = worker.described.get("role")
    if worker.state is WorkerState.DRAINING:
        return f"{role}: it takes no new work, and ends soon"
    again = f", for the {worker.restarted + 1}. time" if worker.restarted else ""
    return f"{role}: connected{again}"


def _event(at: float | None, kind: str, name: str, text: str) -> bytes:
    when = round(time.time() if at is None else at, 3)
    return orjson.dumps({"at": when, "kind": kind, "name": name, "text": text})
