"""The lives of workers by their addresses: how often each was started anew, those that went and are not back, and those
that the registry has and that do not fit.

An address outlives its link, which goes when the registry drops a worker. What is kept of one that went has a bound in
time and in number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvtransfer.ids import WorkerId

KEPT_S = 600.0  # after a worker went
MAX_KEPT = 256  # workers that went


@dataclass(slots=True)
class Life:
    """The worker at one address. since: of its presence or absence, since 1970.

    draining_since: since when it drains; None: it does not.
    why, described: the reason why it is not there, and the worker as it was, where it went.
    """

    worker: WorkerId
    since: float
    restarted: int = 0
    is_up: bool = True
    draining_since: float | None = None
    why: str = "its stream ended"
    described: Mapping[str, object] = field(default_factory=dict)


class WorkerLives:
    """All workers that are there, and those that went lately."""

    def __init__(self) -> None:
        self._by_address: dict[str, Life] = {}
        self._refused: dict[str, tuple[str, float]] = {}  # why, and since when

    def note_up(self, address: str, worker: WorkerId, now: float) -> None:
        """Notes that a stream to a worker began. The same worker id as before is the same life."""
        self._remove_old(now)
        life = self._by_address.pop(address, None)
        restarted = 0 if life is None else life.restarted + (life.worker != worker)
        draining_since = life.draining_since if life is not None and life.worker == worker else None
        self._by_address[address] = Life(worker, now, restarted, draining_since=draining_since)

    def note_draining(self, address: str, draining: bool, now: float) -> None:
        """Notes that a worker that is there begins to drain, or does so no more."""
        life = self._by_address.get(address)
        if life is None:
            return
        if draining:
            life.draining_since = now if life.draining_since is None else life.draining_since
        elif life.draining_since is not None:
            life.draining_since, life.since = None, now

    def note_gone(self, address: str, described: Mapping[str, object], now: float) -> None:
        """Notes that the stream to a worker ended."""
        life = self._by_address.pop(address, None)
        if life is not None:
            life.is_up, life.since, life.described = False, now, described
            self._by_address[address] = life  # as the one that went last
            self._remove_old(now)

    def note_why(self, address: str, why: str) -> None:
        """Notes why a worker that went is not there."""
        life = self._by_address.get(address)
        if life is not None and not life.is_up:
            life.why = why

    def note_refused(self, refused: Mapping[str, str], now: float) -> None:
        """Notes all workers of the registry that do not fit, with the reason of each by its address."""
        before, self._refused = self._refused, {}
        for address, why in refused.items():
            _, since = before.get(address, ("", now))
            self._refused[address] = why, since

    def refused(self) -> dict[str, str]:
        """The workers of the registry that do not fit: the reason of each, by its address."""
        return {address: why for address, (why, _) in self._refused.items()}

    def refused_since(self) -> Mapping[str, tuple[str, float]]:
        """The reasons of the same workers, and since when each holds, by address."""
        return self._refused

    def get(self, address: str, now: float) -> Life | None:
        """The worker at an address; None: none was there lately."""
        life = self._by_address.get(address)
        return None if life is None or _is_old(life, now) else life

    def gone(self, now: float) -> Iterator[tuple[str, Life]]:
        """Yields those that went lately and are not back, by address."""
        lives = self._by_address.items()
        return ((address, life) for address, life in lives if not life.is_up and not _is_old(life, now))

    def _remove_old(self, now: float) -> None:
        gone = [address for address, life in self._by_address.items() if not life.is_up]
        for number, address in enumerate(gone):
            if len(gone) - number > MAX_KEPT or _is_old(self._by_address[address], now):
                del self._by_address[address]


def _is_old(life: Life, now: float) -> bool:
    """True for a worker that went too long ago to be kept."""
    return not life.is_up and life.since < now - KEPT_S
