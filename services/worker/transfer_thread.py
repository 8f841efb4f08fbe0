"""The transfer thread: the only one that touches the transports.

A worker may have several transports, and reads each producer by one of them. It polls them

    often        while somebody waits for a read, and for a while after a consumer came: the consumer's first read of
                 this worker's blocks connects only if this worker takes part
    less often   while this worker's blocks may be read: where gets are one-sided, further reads do without this worker,
                 but a consumer may have to connect again
    rarely       otherwise, also while reads in quarantine are open: nobody waits for these, which may last minutes

To wake up costs 20 us on a small machine: at the fastest pace, 5 % of a core.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue

import structlog

from kvtransfer.ids import WorkerId
from kvtransfer.process import ProcessIdentity
from kvtransfer.transports.base import BlockRead, ReadEnd, Transport
from services.worker.remote_reads import RemoteReads

_BUSY_POLL_S = 0.0005
_LEASED_POLL_S = 0.005
_IDLE_POLL_S = 0.02
_CONNECTING_S = 2.0

log = structlog.get_logger()


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
        self._inbox: SimpleQueue[Callable[[RemoteReads], None] | None] = SimpleQueue()
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

    def add_worker(
        self, worker: WorkerId, address: str, offers: Mapping[str, bytes], process: ProcessIdentity | None
    ) -> None:
        """A producer is reached, for the first time or again: it can be read, by one of the transports it offers.

        process: that it is, as it says itself; None: it does not say.
        """
        self._inbox.put(lambda reads: reads.add_worker(worker, address, offers, process))

    def worker_lost(self, worker: WorkerId) -> None:
        """A producer is reached no more; that ends none of its reads. See `RemoteReads`."""
        self._inbox.put(lambda reads: reads.worker_lost(worker))

    def post(self, read: BlockRead) -> None:
        """Starts a read; its end is reported by `on_read_ended`."""
        self._inbox.put(lambda reads: reads.post(read))

    def abandon(self, read_id: int) -> None:
        """Abandons a read. Its end is reported by `on_read_ended` all the same."""
        self._inbox.put(lambda reads: reads.abandon(read_id))

    def stop(self) -> None:
        """Ends the thread and closes the transports."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            reads = RemoteReads(self._make_transports())
            self._started.set_result(reads.descriptors())
        except Exception as error:
            self._started.set_exception(error)
            return
        try:
            while self._take_calls(reads):
                for end in reads.poll(time.monotonic()):
                    self._on_read_ended(end)
        except Exception:
            # Nobody would read, nor serve the reads of others, while everything else looks alive.
            log.exception("the transport failed")
            self._on_fatal("the transport failed")
            return
        reads.close()

    def _take_calls(self, reads: RemoteReads) -> bool:
        poll_s = self._poll_interval_s(reads)
        reads.set_pace(poll_s)
        try:
            call = self._inbox.get(timeout=poll_s)
            while call is not None:
                call(reads)
                call = self._inbox.get_nowait()
        except Empty:
            return True
        return False

    def _poll_interval_s(self, reads: RemoteReads) -> float:
        if reads.has_wanted_reads or time.monotonic() < self._connecting_until:
            return _BUSY_POLL_S
        return _LEASED_POLL_S if self._leased else _IDLE_POLL_S


def _wake(reads: RemoteReads) -> None:
    """Wakes the thread, which then looks at the clock again."""
