"""The transfer thread: the only one that touches the transports.

A worker may have several, and reads each producer by one of them. They are polled often while a read is open, and for
a while after a consumer came, whose first read of us connects only if we take part. Later reads do without us where
gets are one-sided, so while blocks of ours may be read they are polled less often, for a peer that has to connect
again, and rarely otherwise. To wake up costs 20 us on a small machine: at the fastest pace, 5 % of a core.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue

import numpy as np
import structlog

from kvtransfer.consumer import PostRead
from kvtransfer.transports.base import BlockRead, Incarnation, ReadEnd, Transport, TransportError
from kvtransfer.transports.choice import choose

_BUSY_POLL_S = 0.0005
_LEASED_POLL_S = 0.005
_IDLE_POLL_S = 0.02
_CONNECTING_S = 2.0

_log = structlog.get_logger()


class TransferThread:
    """Runs the transports that `make_transports` makes on this thread, best first.

    Both callbacks are called on this thread.
    """

    def __init__(
        self,
        make_transports: Callable[[], Sequence[Transport]],
        on_read_ended: Callable[[ReadEnd], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        self._make_transports = make_transports
        self._on_read_ended = on_read_ended
        self._on_fatal = on_fatal
        self._inbox: SimpleQueue[Callable[[_Transports], None] | None] = SimpleQueue()
        self._leased = False
        self._connecting_until = 0.0
        self._started: Future[dict[str, bytes]] = Future()
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    def start(self) -> dict[str, bytes]:
        """Starts the thread; returns the transports' descriptors, by name. Raises TransportError."""
        self._thread.start()
        return self._started.result()

    def set_leased(self, leased: bool) -> None:
        """Says whether blocks of ours may be read."""
        if leased and not self._leased:
            self._inbox.put(_wake)
        self._leased = leased

    def expect_consumer(self) -> None:
        """A consumer is there: soon it will connect, to read blocks of ours."""
        self._connecting_until = time.monotonic() + _CONNECTING_S
        self._inbox.put(_wake)

    def add_peer(self, peer: int, address: str, offers: Mapping[str, bytes]) -> None:
        """Makes a producer readable, for reads that are posted after this call, by one of the transports it offers."""
        self._inbox.put(lambda transports: transports.add_peer(Incarnation(peer), address, offers))

    def forget_peer(self, peer: int) -> None:
        """The process is proven dead: its reads are over."""
        self._inbox.put(lambda transports: transports.forget_peer(Incarnation(peer)))

    def post(self, read: PostRead) -> None:
        """Starts a read; its end is reported by `on_read_ended`."""
        blocks = BlockRead(
            read.read_id,
            Incarnation(read.producer),
            np.array(read.source, dtype=np.uint32),
            np.array(read.destination, dtype=np.uint32),
            np.array(read.generations, dtype=np.uint64),
        )
        self._inbox.put(lambda transports: transports.post(blocks))

    def give_up(self, read_id: int) -> None:
        """Nobody wants this read any more; its end is reported by `on_read_ended` all the same."""
        self._inbox.put(lambda transports: transports.give_up(read_id))

    def stop(self) -> None:
        """Ends the thread and closes the transports."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            transports = _Transports(self._make_transports())
            self._started.set_result(transports.descriptors())
        except Exception as error:
            self._started.set_exception(error)
            return
        try:
            while self._take_calls(transports):
                for end in transports.poll():
                    self._on_read_ended(end)
        except Exception:
            # Nobody would read, nor serve the reads of others, while everything else looks alive.
            _log.exception("the transport failed")
            self._on_fatal("the transport failed")
            return
        transports.close()

    def _take_calls(self, transports: "_Transports") -> bool:
        try:
            call = self._inbox.get(timeout=self._poll_interval_s(transports))
            while call is not None:
                call(transports)
                call = self._inbox.get_nowait()
        except Empty:
            return True
        return False

    def _poll_interval_s(self, transports: "_Transports") -> float:
        if transports.num_open_reads or time.monotonic() < self._connecting_until:
            return _BUSY_POLL_S
        return _LEASED_POLL_S if self._leased else _IDLE_POLL_S


def _wake(transports: "_Transports") -> None:
    """Nothing to do but look at the clock again."""


class _Transports:
    """All transports of a worker, and which of them reads which producer."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._all = transports
        self._of_peer: dict[Incarnation, Transport] = {}
        self._orphans: list[ReadEnd] = []  # reads of producers that cannot be read
        self.num_open_reads = 0

    def descriptors(self) -> dict[str, bytes]:
        return {transport.name: transport.descriptor() for transport in self._all}

    def add_peer(self, peer: Incarnation, address: str, offers: Mapping[str, bytes]) -> None:
        if peer in self._of_peer:
            return
        try:
            choice = choose(self._all, offers)
            choice.transport.add_peer(peer, address, offers[choice.transport.name])
        except TransportError as error:
            # Reads from this peer will be reported as failed, and their requests go elsewhere.
            _log.warning("cannot read from a worker", worker=f"{peer:016x}", address=address, error=str(error))
            return
        self._of_peer[peer] = choice.transport
        name = choice.transport.name
        _log.info("reads from a worker", worker=f"{peer:016x}", address=address, transport=name, why=choice.why)

    def forget_peer(self, peer: Incarnation) -> None:
        if (transport := self._of_peer.pop(peer, None)) is not None:
            transport.forget_peer(peer)

    def post(self, read: BlockRead) -> None:
        self.num_open_reads += 1
        if (transport := self._of_peer.get(read.peer)) is not None:
            transport.post(read)
        else:
            self._orphans.append(ReadEnd(read.read_id, None))

    def give_up(self, read_id: int) -> None:
        for transport in self._all:
            transport.give_up(read_id)

    def poll(self) -> list[ReadEnd]:
        ends, self._orphans = self._orphans, []
        for transport in self._all:
            ends += transport.poll()
        self.num_open_reads -= len(ends)
        return ends

    def close(self) -> None:
        for transport in self._all:
            try:
                transport.close()
            except TransportError as error:
                _log.warning("a transport was left open", transport=transport.name, reason=str(error))
