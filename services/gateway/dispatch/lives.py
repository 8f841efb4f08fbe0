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
    """The worker at one address. since: of its presence or absence, since 1970. described: as it was when it went."""

    worker: WorkerId
    since: float
    restarted: int = 0
    is_up: bool = True
    why: str = "its stream ended"
    described: Mapping[str, object] = field(default_factory=dict)


class WorkerLives:
    """All workers that are there, and those that went lately."""

    def __init__(self) -> None:
        self._by_address: dict[str, Life] = {}
        self._refused: dict[str, tuple[str, float]] = {}  # why, and since when

    def note_up(self, address: str, worker: WorkerId, now: float) -> None:
        """Notes that a stream to a worker began. The same worker id as before is the same life."""
        life = self._by_address.pop(address, None)
        restarted = 0 if life is None else life.restarted + (life.worker != worker)
        self._by_address[address] = Life(worker, now, restarted)

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

    def get(self, address: str) -> Life | None:
        """The worker at an address; None: none was there lately."""
        return self._by_address.get(address)

    def gone(self, now: float) -> Iterator[tuple[str, Life]]:
        """Yields those that went and are not back, by address."""
        self._remove_old(now)
        return ((address, life) for address, life in self._by_address.items() if not life.is_up)

    def _remove_old(self, now: float) -> None:
        gone = [address for address, life in self._by_address.items() if not life.is_up]
        for number, address in enumerate(gone):
            if len(gone) - number > MAX_KEPT or self._by_address[address].since < now - KEPT_S:
                del self._by_address[address]
