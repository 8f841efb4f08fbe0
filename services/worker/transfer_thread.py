"""The transfer thread: the only one that touches the transport.

It polls often while any lease or read is open, on producers too (their side of a read needs it), and rarely otherwise.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

import numpy as np
import structlog

from kvtransfer.consumer import PostRead
from kvtransfer.transports.base import BlockRead, Incarnation, ReadEnd, Transport, TransportError

_ACTIVE_POLL_S = 0.0005
_IDLE_POLL_S = 0.02

_log = structlog.get_logger()


class TransferThread:
    """Runs a transport that `make_transport` makes on this thread. Both callbacks are called on this thread."""

    def __init__(
        self,
        make_transport: Callable[[], Transport],
        on_read_ended: Callable[[ReadEnd], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        self._make_transport = make_transport
        self._on_read_ended = on_read_ended
        self._on_fatal = on_fatal
        self._inbox: SimpleQueue[Callable[[Transport], None] | None] = SimpleQueue()
        self._active = False
        self._started: Future[tuple[str, bytes]] = Future()
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    def start(self) -> tuple[str, bytes]:
        """Starts the thread; returns the transport's name and descriptor. Raises TransportError."""
        self._thread.start()
        return self._started.result()

    def set_active(self, active: bool) -> None:
        """Says whether blocks of ours may be read or reads of ours are open."""
        if active and not self._active:
            self._inbox.put(_wake)
        self._active = active

    def add_peer(self, peer: int, descriptor: bytes) -> None:
        """Makes a producer readable, for reads that are posted after this call."""
        self._inbox.put(lambda transport: _add_peer(transport, peer, descriptor))

    def forget_peer(self, peer: int) -> None:
        """The process is proven dead: its reads are over."""
        self._inbox.put(lambda transport: transport.forget_peer(Incarnation(peer)))

    def post(self, read: PostRead) -> None:
        """Starts a read; its end is reported by `on_read_ended`."""
        blocks = BlockRead(
            read.read_id,
            Incarnation(read.producer),
            np.array(read.source, dtype=np.uint32),
            np.array(read.destination, dtype=np.uint32),
        )
        self._inbox.put(lambda transport: transport.post(blocks))

    def stop(self) -> None:
        """Ends the thread and closes the transport."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            transport = self._make_transport()
            self._started.set_result((transport.name, transport.descriptor()))
        except Exception as error:
            self._started.set_exception(error)
            return
        try:
            while self._take_calls(transport):
                for end in transport.poll():
                    self._on_read_ended(end)
        except Exception:
            # Nobody would read, nor serve the reads of others, while everything else looks alive.
            _log.exception("the transport failed")
            self._on_fatal("the transport failed")
            return
        try:
            transport.close()
        except TransportError as error:
            _log.warning("the transport was left open", reason=str(error))

    def _take_calls(self, transport: Transport) -> bool:
        try:
            call = self._inbox.get(timeout=_ACTIVE_POLL_S if self._active else _IDLE_POLL_S)
            while call is not None:
                call(transport)
                call = self._inbox.get_nowait()
        except Empty:
            return True
        return False


def _wake(transport: Transport) -> None:
    """Nothing to do but look at the clock again."""


def _add_peer(transport: Transport, peer: int, descriptor: bytes) -> None:
    try:
        transport.add_peer(Incarnation(peer), descriptor)
    except TransportError as error:
        # Reads from this peer will be reported as failed, and their requests go elsewhere.
        _log.warning("cannot read from a worker", worker=f"{peer:016x}", error=str(error))
