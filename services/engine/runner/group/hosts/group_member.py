"""A rank's connection to rank 0 on another host, read by a thread of its own, which notices a loss in a step."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from services.engine.kernels.ranks import RankLostError
from services.engine.runner.group.connection import Connection, ConnectionLostError
from services.engine.runner.group.hosts.host_messages import (
    Done,
    Entry,
    RefusedError,
    Say,
    Start,
    StrangeMessageError,
)
from services.engine.runner.group.hosts.host_ranks import SERVING_PATIENCE_S
from services.engine.runner.group.messages import is_end
from services.engine.runner.group.rank_config import RankAnswer


class GroupMember:
    """`StepReader` of a rank on another host than rank 0's."""

    def __init__(
        self, rank: int, steps: Connection, on_entry: Callable[[Entry], None], on_lost: Callable[[str], None]
    ) -> None:
        """steps: of a rank that was told the terms, and has told what room it has.

        on_entry: called with what other ranks set in the store. on_lost: called once when rank 0 is lost before it has
        said that all is over. Both on a thread of its own.
        """
        self.rank, self._steps = rank, steps
        self._on_entry, self._on_lost = on_entry, on_lost
        self._started: Future[Start] = Future()
        self._messages: SimpleQueue[bytearray | None] = SimpleQueue()  # of steps; None: there will be none
        self._serves = self._closing = False
        threading.Thread(target=self._read, name="rank 0", daemon=True).start()

    @property
    def own_host(self) -> str:
        """Returns the address of this host at which rank 0 sees it."""
        return self._steps.local_host

    def started(self) -> Start:
        """Waits until all ranks are there. Raises RankLostError."""
        return self._started.result()

    def tell_entry(self, entry: Entry) -> None:
        """Tells the other ranks what this one has set in the store. Raises RankLostError."""
        self._send(entry.pack()[0], entry.pack()[1])

    def answer(self, answer: RankAnswer, longest: int) -> None:
        """Says that this rank has loaded, or cannot. longest: bytes of what comes then, at most.

        Raises RankLostError.
        """
        self._steps.most_bytes = longest + 1
        self._send(bytes((Say.ANSWER,)), answer.pack())

    def receive(self) -> bytearray:
        """See `StepReader.receive`."""
        message = self._messages.get()
        if message is None:
            raise RankLostError("rank 0 is lost")
        return message

    def done(self, waited_s: float) -> None:
        """See `StepReader.done`."""
        self._send(Done(waited_s).pack())

    def close(self) -> None:
        """Closes the connection."""
        self._closing = True
        self._steps.close()

    def _send(self, *parts: bytes) -> None:
        try:
            self._steps.send(parts)
        except ConnectionLostError as error:
            raise RankLostError(f"rank 0 is lost: {error}") from error

    def _read(self) -> None:
        try:
            while not self._closing:
                self._take(self._steps.receive())
            return
        except (ConnectionLostError, StrangeMessageError, RefusedError) as error:
            reason = f"rank 0 is lost: {error}"
        if not self._started.done():
            self._started.set_exception(RankLostError(reason))
        self._messages.put(None)
        if not self._closing:
            self._on_lost(reason)

    def _take(self, message: bytearray) -> None:
        kind = message[0]
        if kind == Say.STEP:
            if not self._serves:  # rank 0 has ended loading, too
                self._serves = True
                self._steps.set_patience(SERVING_PATIENCE_S)
            del message[:1]
            self._closing = is_end(message)  # rank 0 closes its end now
            self._messages.put(message)
        elif kind == Say.SET:
            self._on_entry(Entry.unpack(message))
        else:
            self._started.set_result(Start.unpack(message))
