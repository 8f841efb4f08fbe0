"""The transports of a worker: which of them reads which producer, and the reads that are open.

A producer that cannot be reached any more is *lost*: it may be dead, or alive behind a firewall that refuses us. A
transport is told to remove a lost producer, and so to report its open reads as failed, only when nothing can land:

- no read of it is open: the transport has reported the end of each, or
- its process was seen alive on this host, and now it is seen to be gone.

Without either, its reads stay open and their blocks in quarantine. One that is reached again is not lost any more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from kvtransfer.ids import WorkerId
from kvtransfer.process import ProcessIdentity
from kvtransfer.transports.base import BlockRead, ReadEnd, Transport, TransportError
from kvtransfer.transports.choice import choose

_LOOK_S = 1.0  # between two looks at lost producers
_LANDING_S = 1.0  # for what a process had sent before it ended: bytes in a socket, a device's copy

log = structlog.get_logger()


@dataclass(slots=True)
class _RemoteWorker:
    transport: Transport
    why: str  # the reason for this transport and no other
    process: ProcessIdentity | None = None  # None: its end cannot be seen from here
    lost: bool = False
    gone_since: float | None = None  # that its process was seen to be gone


class RemoteReads:
    """Used by the transfer thread alone. Times are those of one monotonic clock, in seconds."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        """transports: best first."""
        self._all = transports
        self._workers: dict[WorkerId, _RemoteWorker] = {}
        self._open: dict[int, WorkerId] = {}  # by read
        self._wanted: set[int] = set()  # open reads that somebody waits for
        self._orphans: list[ReadEnd] = []  # reads of producers that cannot be read
        self._next_look = 0.0
        self._pace_s = 0.0

    def descriptors(self) -> dict[str, bytes]:
        """The descriptors of this worker's memory, by transport."""
        return {transport.name: transport.descriptor() for transport in self._all}

    @property
    def has_wanted_reads(self) -> bool:
        """True while somebody waits for a read."""
        return bool(self._wanted)

    def add_worker(
        self, worker: WorkerId, address: str, offers: Mapping[str, bytes], process: ProcessIdentity | None
    ) -> None:
        """A producer is reached, for the first time or again."""
        known = self._workers.get(worker) or self._new_worker(worker, address, offers)
        if known is None:
            return
        known.lost, known.gone_since = False, None
        if process is not None and process.is_seen_alive():
            known.process = process

    def worker_lost(self, worker: WorkerId) -> None:
        """A producer is reached no more. Whether it can be removed is looked at now, and then time and again."""
        if (known := self._workers.get(worker)) is not None:
            known.lost = True
            self._next_look = 0.0

    def post(self, read: BlockRead) -> None:
        """Starts a read."""
        self._open[read.read_id] = read.worker
        self._wanted.add(read.read_id)
        if (worker := self._workers.get(read.worker)) is not None:
            worker.transport.post(read)
        else:
            self._orphans.append(ReadEnd(read.read_id, None))

    def abandon(self, read_id: int) -> None:
        """Abandons a read: nobody waits for it any more."""
        self._wanted.discard(read_id)
        for transport in self._all:
            transport.abandon(read_id)

    def set_pace(self, poll_s: float) -> None:
        """Tells the transports in which intervals `poll` is called from now on, where that is new."""
        if poll_s != self._pace_s:
            self._pace_s = poll_s
            for transport in self._all:
                transport.set_pace(poll_s)

    def poll(self, now: float) -> list[ReadEnd]:
        """Reads that ended since the last call; also lets workers' reads of our memory progress."""
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._remove_where_nothing_can_land(now)
        ends, self._orphans = self._orphans, []
        for transport in self._all:
            ends += [replace(end, transport=transport.name, why=self._why(end)) for end in transport.poll()]
        for end in ends:
            del self._open[end.read_id]
            self._wanted.discard(end.read_id)
        return ends

    def close(self) -> None:
        """Closes the transports; one with an open read is left open."""
        for transport in self._all:
            try:
                transport.close()
            except TransportError as error:
                log.warning("a transport was left open", transport=transport.name, reason=str(error))

    def _new_worker(self, worker: WorkerId, address: str, offers: Mapping[str, bytes]) -> _RemoteWorker | None:
        try:
            choice = choose(self._all, offers)
            choice.transport.add_worker(worker, address, offers[choice.transport.name])
        except TransportError as error:
            # Reads from this worker will be reported as failed, and their requests go elsewhere.
            log.warning("cannot read from a worker", worker=f"{worker:016x}", address=address, error=str(error))
            return None
        name = choice.transport.name
        log.info("reads from a worker", worker=f"{worker:016x}", address=address, transport=name, why=choice.why)
        added = self._workers[worker] = _RemoteWorker(choice.transport, choice.why)
        return added

    def _why(self, end: ReadEnd) -> str:
        worker = self._workers.get(self._open[end.read_id])
        return "" if worker is None else worker.why

    def _remove_where_nothing_can_land(self, now: float) -> None:
        """Looks at lost producers. Polls that follow take in what a process that is gone had sent before."""
        being_read = set(self._open.values())
        for id, worker in list(self._workers.items()):
            if not worker.lost:
                continue
            if id not in being_read or (worker.gone_since is not None and now - worker.gone_since >= _LANDING_S):
                del self._workers[id]
                worker.transport.remove_worker(id)
            elif worker.gone_since is None and worker.process is not None and worker.process.is_seen_gone():
                worker.gone_since = now
                log.info("the process of a lost worker is gone", worker=f"{id:016x}", pid=worker.process.pid)
