"""The consumer's side of all its handoffs: a state machine without I/O.

Inputs are method calls, outputs are actions, taken in order with `take_actions`. One row goes through

    submit ─▶ open sent ─▶ first blocks announced ─▶ reserved ─▶ reading … ─▶ ready
                             (Enqueue)            (all or none)   (Read, Arrived)  (Ready, release sent)

and may end at any point, for any reason, in one way: `_end` drops it, lets go of its blocks except those that an open
read may still write to (they go to quarantine), releases the producer's, and tells the gateway unless it knows.

Of a row's blocks   [0 ─── held ───┬─── read and checked ───┬─── being read ───┬─── not announced yet ───]
                    in our cache   held                  arrived             posted
"""

from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvtransfer.messages import (
    Announcement,
    Ended,
    EndReason,
    FirstToken,
    HandoffId,
    Open,
    Release,
    StreamId,
    ToProducer,
)
from kvtransfer.quarantine import Quarantine, QuarantinedRead
from kvtransfer.transports.base import ReadEnd


@dataclass(frozen=True, slots=True)
class SendToProducer:
    """Put this message on the control stream; drop it if the stream is gone."""

    stream: StreamId
    message: ToProducer


@dataclass(frozen=True, slots=True)
class Enqueue:
    """The prompt has blocks at its producer: reserve ours, in turn, and answer with `reserved`."""

    id: HandoffId


@dataclass(frozen=True, slots=True)
class PostRead:
    """Have the transport read these blocks, and answer with `read_ended`."""

    read_id: int
    producer: int
    source: tuple[int, ...]
    destination: tuple[int, ...]
    generations: tuple[int, ...]  # of the source's blocks, as announced


@dataclass(frozen=True, slots=True)
class StopRead:
    """Nobody wants this read any more. Its end is still to be answered with `read_ended`, whenever it comes."""

    read_id: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """The sequence's first `num_blocks` blocks are here and checked."""

    id: HandoffId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Ready:
    """All blocks are here: the sequence, or each over this prompt, can go on from its first token."""

    id: HandoffId
    first_tokens: tuple[FirstToken, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the sequence and free its blocks, except `held_back`: an open read may still write to those."""

    id: HandoffId
    held_back: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GiveBack:
    """These blocks were held back, and are free now."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConsumerReport:
    """Tell the gateway that this handoff failed on our side."""

    id: HandoffId
    reason: EndReason


ConsumerAction = SendToProducer | Enqueue | PostRead | StopRead | Arrived | Ready | Drop | GiveBack | ConsumerReport


@dataclass(frozen=True, slots=True)
class ConsumerLimits:
    """grace_s: how long a handoff outlives its stream. slow_open_s: when an open without an answer is reported."""

    grace_s: float = 3.0
    slow_open_s: float = 2.0


@dataclass(slots=True)
class _Row:
    producer: int
    deadline: float
    waiting_since: float  # for a stream, or for the answer to an open
    stream: StreamId | None = None
    answered: bool = False
    blocks: list[int] = field(default_factory=list)  # announced
    generations: list[int] = field(default_factory=list)
    first_tokens: tuple[FirstToken, ...] = ()
    destination: tuple[int, ...] | None = None  # reserved
    arrived: int = 0
    posted: int = 0
    checked: dict[int, int] = field(default_factory=dict)  # start -> end of reads checked beyond `arrived`
    reads: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Read:
    id: HandoffId
    start: int
    end: int
    producer: int
    blocks: tuple[int, ...]


class Consumer:
    """All handoffs that this worker is the destination of."""

    def __init__(self, limits: ConsumerLimits | None = None) -> None:
        self._limits = limits or ConsumerLimits()
        self._rows: dict[HandoffId, _Row] = {}
        self._reads: dict[int, _Read] = {}
        self._streams: dict[int, StreamId] = {}  # producer -> live control stream
        self._read_ids = count(1)
        self._actions: list[ConsumerAction] = []
        self.quarantine = Quarantine()

    def take_actions(self) -> list[ConsumerAction]:
        """What is to be done since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def open_ids(self) -> set[HandoffId]:
        """Handoffs under way."""
        return set(self._rows)

    @property
    def idle(self) -> bool:
        """True when no handoff is under way; reads in quarantine may be."""
        return not self._rows

    def knows(self, id: HandoffId) -> bool:
        """True while this handoff is under way."""
        return id in self._rows

    @property
    def num_open_reads(self) -> int:
        """Posted reads whose end was not reported yet, in quarantine or not."""
        return len(self._reads)

    def avoid(self, now: float) -> set[int]:
        """Producers not to be paired with us now: open reads in quarantine, or an open without an answer."""
        slow = {
            row.producer
            for row in self._rows.values()
            if not row.answered and now - row.waiting_since >= self._limits.slow_open_s
        }
        return slow | self.quarantine.producers

    # From the gateway.

    def submit(self, id: HandoffId, producer: int, deadline: float, now: float) -> None:
        """The gateway's request; its handle was admitted by the marks just now."""
        row = self._rows[id] = _Row(producer, deadline, waiting_since=now)
        if (stream := self._streams.get(producer)) is not None:
            self._open(id, row, stream, now)

    def abort(self, id: HandoffId, now: float) -> None:
        """The gateway gives the handle up. Unknown and repeated aborts change nothing."""
        self._end(id, now, report=None)

    def gateway_lost(self, gateway: int, now: float) -> None:
        """The gateway's stream broke: that ends its handles."""
        for id in [id for id in self._rows if id.gateway == gateway]:
            self._end(id, now, report=None)

    # From the producer.

    def stream_up(self, producer: int, stream: StreamId, now: float) -> None:
        """A control stream is there, for the first time or again: every handoff with it is opened (again)."""
        self._streams[producer] = stream
        for id, row in self._rows.items():
            if row.producer == producer:
                self._open(id, row, stream, now)

    def stream_lost(self, producer: int, stream: StreamId, now: float) -> None:
        """The control stream broke; its handoffs wait for another one, for the grace."""
        if self._streams.get(producer) == stream:
            del self._streams[producer]
        for row in self._rows.values():
            if row.stream == stream:
                row.stream = None
                row.waiting_since = now

    def producer_lost(self, producer: int, now: float) -> None:
        """The producer cannot be reached, dead or not: its handoffs have nothing to wait for, its open reads go on."""
        for id in [id for id, row in self._rows.items() if row.producer == producer]:
            self._end(id, now, report=EndReason.PEER_LOST)

    def announcement(self, stream: StreamId, message: Announcement, now: float) -> None:
        """Blocks are complete. What was announced before may come again, with the same generations."""
        row = self._rows.get(message.id)
        if row is None:
            self._actions.append(SendToProducer(stream, Release(message.id)))
            return
        if not self._take_note(row, message):
            self._end(message.id, now, report=EndReason.STALE)
            return
        if row.destination is None:
            return
        self._go_on(message.id, row)

    def ended(self, stream: StreamId, message: Ended, now: float) -> None:
        """The producer ended it."""
        if message.id not in self._rows:
            self._actions.append(SendToProducer(stream, Release(message.id)))
            return
        # The producer's engine has told the gateway itself how these two ended.
        told = message.reason in (EndReason.FINISHED, EndReason.FAILED)
        self._end(message.id, now, report=None if told else message.reason)

    # From the engine.

    def reserved(self, id: HandoffId, blocks: list[int], num_held: int) -> None:
        """Our block table for the whole sequence; the first num_held blocks were in our cache and are not read."""
        row = self._rows[id]
        row.destination = tuple(blocks)
        row.arrived = row.posted = num_held
        self._go_on(id, row)

    def refused(self, id: HandoffId, now: float) -> None:
        """Our engine cannot take it, and has told the gateway why."""
        self._end(id, now, report=None)

    # From the transport.

    def read_ended(self, end: ReadEnd, now: float) -> None:
        """A read is over: its blocks are good, or its handoff failed, or nobody wants them any more."""
        read = self._reads.pop(end.read_id)
        row = self._rows.get(read.id)
        if row is None or end.read_id not in row.reads:
            self._actions.append(GiveBack(self.quarantine.end(end.read_id)))
            return
        row.reads.remove(end.read_id)
        if end.generations is None:
            self._end(read.id, now, report=EndReason.READ_FAILED)
        elif not np.array_equal(end.generations, row.generations[read.start : read.end]):
            self._end(read.id, now, report=EndReason.STALE)
        else:
            row.checked[read.start] = read.end
            self._advance(read.id, row)

    # From the clock.

    def tick(self, now: float) -> None:
        """Ends what is over by time."""
        for id, row in list(self._rows.items()):
            if now >= row.deadline:
                self._end(id, now, report=EndReason.EXPIRED)
            elif row.stream is None and now - row.waiting_since >= self._limits.grace_s:
                self._end(id, now, report=EndReason.PEER_LOST)

    def _open(self, id: HandoffId, row: _Row, stream: StreamId, now: float) -> None:
        row.stream = stream
        row.waiting_since = now
        self._actions.append(SendToProducer(stream, Open(id, row.producer)))

    def _take_note(self, row: _Row, message: Announcement) -> bool:
        """Merges an announcement; False when it contradicts an earlier one or leaves a gap."""
        known = len(row.blocks) - message.first_index
        if known < 0:
            return False
        again = min(known, len(message.blocks))
        there = slice(message.first_index, message.first_index + again)
        if tuple(row.blocks[there]) != message.blocks[:again]:
            return False
        if tuple(row.generations[there]) != message.generations[:again]:
            return False
        first_news = not row.blocks
        row.answered = True
        row.blocks += message.blocks[again:]
        row.generations += message.generations[again:]
        row.first_tokens = message.first_tokens or row.first_tokens
        if first_news and row.blocks:
            self._actions.append(Enqueue(message.id))
        return True

    def _go_on(self, id: HandoffId, row: _Row) -> None:
        """Reads what is announced and not posted yet."""
        assert row.destination is not None
        start, end = row.posted, len(row.blocks)
        if start < end:
            read_id = next(self._read_ids)
            destination = row.destination[start:end]
            blocks, generations = tuple(row.blocks[start:end]), tuple(row.generations[start:end])
            row.posted = end
            row.reads.add(read_id)
            self._reads[read_id] = _Read(id, start, end, row.producer, destination)
            self._actions.append(PostRead(read_id, row.producer, blocks, destination, generations))
        self._finish_if_complete(id, row)

    def _advance(self, id: HandoffId, row: _Row) -> None:
        """Moves `arrived` over checked reads: a block counts only when all before it do."""
        before = row.arrived
        while (end := row.checked.pop(row.arrived, None)) is not None:
            row.arrived = end
        if row.arrived > before:
            self._actions.append(Arrived(id, row.arrived))
        self._finish_if_complete(id, row)

    def _finish_if_complete(self, id: HandoffId, row: _Row) -> None:
        if not row.first_tokens or row.arrived < len(row.blocks):
            return
        del self._rows[id]
        self._release(id, row)
        self._actions.append(Ready(id, row.first_tokens))

    def _end(self, id: HandoffId, now: float, *, report: EndReason | None) -> None:
        row = self._rows.pop(id, None)
        if row is None:
            return
        held_back: tuple[int, ...] = ()
        for read_id in row.reads:
            read = self._reads[read_id]
            self.quarantine.add(read_id, QuarantinedRead(read.producer, read.blocks, now))
            held_back += read.blocks
        self._actions.append(Drop(id, held_back))
        self._actions += [StopRead(read_id) for read_id in row.reads]
        self._release(id, row)
        if report is not None:
            self._actions.append(ConsumerReport(id, report))

    def _release(self, id: HandoffId, row: _Row) -> None:
        if row.stream is not None:
            self._actions.append(SendToProducer(row.stream, Release(id)))
