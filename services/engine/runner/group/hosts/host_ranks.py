"""The ranks on other hosts, as rank 0 sees to them: they join, load, get steps, and are lost.

joining     each comes to the group's port; one that leaves again may come back, since nothing has begun
started     all are there: each has its number of blocks, and loads
watched     all have loaded; silence of three seconds is loss from now on
lost        for whatever reason: all connections are closed, and every rank ends
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from services.engine.kernels.ranks import RankLostError
from services.engine.runner.group.connection import Connection, ConnectionLostError
from services.engine.runner.group.hosts.group_port import GroupPort
from services.engine.runner.group.hosts.host_messages import (
    BATON_VERSION,
    Entry,
    Hello,
    KvTaken,
    RefusedError,
    Room,
    Say,
    Start,
    StrangeMessageError,
    Terms,
)
from services.engine.runner.group.hosts.host_rank import HostRank
from services.engine.runner.group.hosts.place import HostPlace
from services.engine.runner.group.rank_config import RankAnswer
from services.protocol.model_files.base import ModelError

# Of silence. Reading weights and importing torch keep the interpreter busy. Connections for KV have this one for ever:
# the other connection tells that a host is lost, and that a firewall drops this one alone can wait.
LOADING_PATIENCE_S = 60.0
# A group that is lost by mistake loads its model again, and NIXL's first connection may take a second.
SERVING_PATIENCE_S = 3.0
_NOTICED_S = 2.0  # in which the watch has seen what others saw before
_LOOK_S = 0.05  # between two looks at whether a wait was ended
_MOST_SHOWN = 40  # characters of a version that a stranger may have made up
_TOLD_S = 10.0  # between two log lines of who is waited for

log = structlog.get_logger()


class RankLeftError(ModelError):
    """A rank has left before the start: it, or its successor, may come again."""


class HostRanks:
    """`StepChannel` and `OtherRanks` of ranks on other hosts."""

    def __init__(self, place: HostPlace, terms: Terms) -> None:
        """Opens the group's port. Raises ModelError."""
        self._size, self._terms = place.size, terms
        self._changed = threading.Condition()
        self._ranks: dict[int, HostRank] = {}
        self._started: list[HostRank] = []  # all, in order, once they have been told to start
        self._on_entry: Callable[[int, Entry], None] | None = None  # None: nobody has anything to set yet
        self._on_lost: Callable[[str], None] | None = None
        self._num_sent = 0
        self._closing = False
        self.lost: str | None = None
        self._is_lost = threading.Event()
        self._port = GroupPort(place, self._welcome)

    def gathered(self) -> list[Room]:
        """Waits until all have joined; returns what room their hosts have, by rank from 1 on."""
        with self._changed:
            while missing := self._missing():
                log.info("waiting for ranks on other hosts", ranks=", ".join(map(str, missing)))
                self._changed.wait_for(lambda: not self._missing(), _TOLD_S)
            return [room for rank in range(1, self._size) if (room := self._ranks[rank].room) is not None]

    @property
    def own_host(self) -> str:
        """Returns the address of this host at which the others have reached it."""
        return self._ranks[1].steps.local_host

    def start(self, start: Start, on_entry: Callable[[int, Entry], None]) -> None:
        """Tells all ranks to load. on_entry: called with what a rank sets in the store, on a thread of its own.

        Raises RankLeftError where one has left since it joined, and ModelError.
        """
        with self._changed:
            if missing := self._missing():
                raise RankLeftError(f"rank {missing[0]} has left")
            self._started = [self._ranks[rank] for rank in range(1, self._size)]
            self._on_entry = on_entry
        self._tell(self._started, start.pack(), ModelError)

    def tell_entry(self, entry: Entry) -> None:
        """Tells all ranks of an entry that rank 0 has set in the store. Raises ModelError."""
        self._tell(self._started, entry.pack(), ModelError)

    def pass_on(self, rank: int, entry: Entry) -> None:
        """Tells the others of an entry that a rank has set. One of them that is lost is left to who reads from it."""
        with suppress(ModelError):
            self._tell([other for other in self._started if other.rank != rank], entry.pack(), ModelError)

    def answers(self) -> list[RankAnswer]:
        """Waits until all have loaded and have their connection for KV. Raises ModelError where one cannot serve."""

        def ready() -> bool:
            loaded = all(rank.answer is not None and rank.kv is not None for rank in self._started)
            return loaded or self.lost is not None or any(rank.answer and rank.answer.refused for rank in self._started)

        with self._changed:
            self._changed.wait_for(ready)  # silence ends it, and a rank that gets no connection for KV ends
        for rank in self._started:
            if rank.answer is not None and rank.answer.refused:
                raise ModelError(f"rank {rank.rank}: {rank.answer.refused}")
        self.check()
        return [rank.answer for rank in self._started if rank.answer is not None]

    def check(self) -> None:
        """Raises ModelError where a rank was lost while all load."""
        if self.lost is not None:
            raise ModelError(self.lost)

    @property
    def ranks(self) -> range:
        """Returns the numbers of the ranks on other hosts."""
        return range(1, self._size)

    def kv(self, rank: int) -> Connection:
        """Returns the connection for KV to a rank, once all have loaded."""
        connection = self._started[rank - 1].kv
        assert connection is not None, "`answers` has waited for it"
        return connection

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """See `OtherRanks.watch`. on_lost is called on the thread of whichever connection is lost first."""
        for rank in self._started:
            rank.steps.set_patience(SERVING_PATIENCE_S)
        with self._changed:
            self._on_lost = on_lost
            lost = self.lost
        if lost is not None:
            on_lost(lost)

    def why_lost(self) -> str | None:
        """See `OtherRanks.why_lost`."""
        self._is_lost.wait(_NOTICED_S)
        return self.lost

    def send(self, parts: Sequence[bytes]) -> None:
        """See `StepChannel.send`."""
        self._num_sent += 1
        self._tell(self._started, (bytes((Say.STEP,)), *parts), RankLostError)

    def wait_done(self, check: Callable[[], None]) -> None:
        """See `StepChannel.wait_done`."""
        with self._changed:
            while any(rank.num_done < self._num_sent for rank in self._started):
                check()
                self._changed.wait(_LOOK_S)

    def waited_s(self) -> list[float]:
        """See `StepChannel.waited_s`."""
        return [rank.waited_s for rank in self._started]

    def close(self) -> None:
        """See `OtherRanks.close`."""
        with self._changed:
            self._closing = True
            ranks = list(self._ranks.values())
        self._port.close()
        for rank in ranks:
            rank.close()

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._size) if rank not in self._ranks or self._ranks[rank].room is None]

    def _tell(self, ranks: Sequence[HostRank], parts: Sequence[bytes], error_of: type[Exception]) -> None:
        for rank in ranks:
            try:
                rank.steps.send(parts)
            except ConnectionLostError as error:
                raise error_of(f"rank {rank.rank} is lost: {error}") from error

    def _welcome(self, connection: Connection, hello: Hello) -> None:
        """Lets a rank join, and reads what it says on this thread; or keeps its connection for KV. Raises RefusedError
        and ConnectionLostError.
        """
        self._check(hello)
        if hello.group:
            self._take_kv(connection, hello)
            return
        rank = HostRank(hello.rank, connection, self._changed, lambda entry: self._heard(hello.rank, entry))
        with self._changed:
            if hello.rank in self._ranks or self._closing:
                raise RefusedError(f"there is a rank {hello.rank} in this group already", again=True)
            self._ranks[hello.rank] = rank
        connection.set_patience(LOADING_PATIENCE_S)
        connection.beat()
        try:
            connection.send(self._terms.pack())
            reason = rank.read()
        except ConnectionLostError as error:
            reason = f"rank {rank.rank} is lost: {error}"
        connection.close()
        self._left(rank, reason)

    def _check(self, hello: Hello) -> None:
        if hello.version != BATON_VERSION:
            raise RefusedError(f"rank 0 is Baton {BATON_VERSION}, this is {hello.version[:_MOST_SHOWN]}", again=False)
        if hello.size != self._size:
            raise RefusedError(f"--world-size {hello.size}: rank 0 has {self._size}", again=False)
        if not 0 < hello.rank < self._size:
            raise RefusedError(f"--rank {hello.rank}: ranks above 0 are 1 to {self._size - 1}", again=False)

    def _take_kv(self, connection: Connection, hello: Hello) -> None:
        with self._changed:
            if self._closing or self.lost is not None:
                raise RefusedError("this group is over", again=False)
            rank = self._ranks.get(hello.rank)
            if hello.group != self._terms.group or rank is None or rank not in self._started or rank.kv is not None:
                raise RefusedError("this group has no place for such a connection", again=False)
            connection.set_patience(LOADING_PATIENCE_S)
            connection.send(KvTaken().pack())  # first of all that is sent there
            connection.beat()
            rank.kv = connection
            self._changed.notify_all()

    def _heard(self, rank: int, entry: Entry) -> None:
        if self._on_entry is None:
            raise StrangeMessageError("an entry before the start")
        self._on_entry(rank, entry)

    def _left(self, rank: HostRank, reason: str) -> None:
        """Ends the group where it has started; else the rank's place is free."""
        with self._changed:
            if rank not in self._started:
                del self._ranks[rank.rank]
                log.warning("a rank has left before the group began", reason=reason)
                return
            if self._closing or self.lost is not None:
                return
            self.lost, on_lost = reason, self._on_lost
            self._changed.notify_all()
        log.error("a rank is lost", reason=reason)
        self._is_lost.set()
        for each in self._started:  # the group is over: nobody waits for one that stands still
            each.close()
        if on_lost is not None:
            on_lost(reason)
