"""The consumer's side of all its handoffs: a state machine without I/O.

Inputs are method calls, outputs are actions, taken in order with `take_actions`. One handoff goes through

    submit ─▶ open sent ─▶ first blocks announced ─▶ reserved ─▶ reading … ─▶ ready
                             (Enqueue)            (all or none)   (Read, Arrived)  (Ready, release sent)

and may end at any point, for any reason, in one way: `_end` removes it, frees its blocks except those that an open read
may still write to (they go to quarantine), releases the producer's, and tells the gateway unless it knows.

A handoff's blocks   [0 ─── cached ───┬─── read and checked ───┬─── being read ───┬─── not announced yet ───]
                     at admission   num_cached              arrived             posted
"""

from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvtransfer.ids import AttemptId, GatewayId, StreamId, WorkerId
from kvtransfer.messages import Announcement, Ended, EndReason, FirstToken, Open, Release, ToProducer
from kvtransfer.quarantine import Quarantine, QuarantinedRead
from kvtransfer.transports.base import ReadEnd


@dataclass(frozen=True, slots=True)
class SendToProducer:
    """Put this message on the control stream, if that is still there."""

    stream: StreamId
    message: ToProducer


@dataclass(frozen=True, slots=True)
class Enqueue:
    """The prompt has blocks at its producer: reserve ours, in turn, and answer with `reserved`."""

    id: AttemptId


@dataclass(frozen=True, slots=True)
class PostRead:
    """Have the transport read these blocks, and answer with `read_ended`."""

    read_id: int
    producer: WorkerId
    source: tuple[int, ...]
    destination: tuple[int, ...]
    generations: tuple[int, ...]  # of the source's blocks, as announced


@dataclass(frozen=True, slots=True)
class AbandonRead:
    """Nobody wants this read any more. Its end is still to be answered with `read_ended`, whenever it comes."""

    read_id: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """The sequence's first `num_blocks` blocks are here and checked."""

    id: AttemptId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Ready:
    """All blocks are here: the sequence, or each over this prompt, can go on from its first token."""

    id: AttemptId
    first_tokens: tuple[FirstToken, ...]


@dataclass(frozen=True, slots=True)
class FreeSequence:
    """Forget the sequence and free its blocks, except those `quarantined`: an open read may still write to them."""

    id: AttemptId
    quarantined: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FreeQuarantined:
    """Free these blocks, which were in quarantine."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConsumerReport:
    """Tell the gateway that this handoff failed on our side."""

    id: AttemptId
    reason: EndReason


ConsumerAction = (
    SendToProducer
    | Enqueue
    | PostRead
    | AbandonRead
    | Arrived
    | Ready
    | FreeSequence
    | FreeQuarantined
    | ConsumerReport
)


@dataclass(frozen=True, slots=True)
class ConsumerLimits:
    """grace_s: how long a handoff outlives its stream. slow_open_s: when an open without an answer is reported."""

    grace_s: float = 3.0
    slow_open_s: float = 2.0


@dataclass(slots=True)
class _Handoff:
    producer: WorkerId
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
    id: AttemptId
    start: int
    end: int
    producer: WorkerId
    blocks: tuple[int, ...]


class Consumer:
    """All handoffs that this worker is the destination of."""

    def __init__(self, limits: ConsumerLimits | None = None) -> None:
        self._limits = limits or ConsumerLimits()
        self._handoffs: dict[AttemptId, _Handoff] = {}
        self._reads: dict[int, _Read] = {}
        self._streams: dict[WorkerId, StreamId] = {}  # producer -> live control stream
        self._read_ids = count(1)
        self._actions: list[ConsumerAction] = []
        self.quarantine = Quarantine()

    def take_actions(self) -> list[ConsumerAction]:
        """What is to be done since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def open_ids(self) -> set[AttemptId]:
        """Handoffs under way."""
        return set(self._handoffs)

    @property
    def idle(self) -> bool:
        """True when no handoff is under way; reads in quarantine may be."""
        return not self._handoffs

    def knows(self, id: AttemptId) -> bool:
        """True while this handoff is under way."""
        return id in self._handoffs

    @property
    def num_open_reads(self) -> int:
        """Posted reads whose end was not reported yet, in quarantine or not."""
        return len(self._reads)

    def avoid(self, now: float) -> set[WorkerId]:
        """Producers not to be paired with us now: open reads in quarantine, or an open without an answer."""
        slow = {
            handoff.producer
            for handoff in self._handoffs.values()
            if not handoff.answered and now - handoff.waiting_since >= self._limits.slow_open_s
        }
        return slow | self.quarantine.producers

    # From the gateway.

    def submit(self, id: AttemptId, producer: WorkerId, deadline: float, now: float) -> None:
        """The gateway's request; its handle was admitted by the marks just now."""
        handoff = self._handoffs[id] = _Handoff(producer, deadline, waiting_since=now)
        if (stream := self._streams.get(producer)) is not None:
            self._open(id, handoff, stream, now)

    def abort(self, id: AttemptId, now: float) -> None:
        """The gateway gives the handle up. Unknown and repeated aborts change nothing."""
        self._end(id, now, report=None)

    def gateway_lost(self, gateway: GatewayId, now: float) -> None:
        """The gateway's stream broke: that ends its handles."""
        for id in [id for id in self._handoffs if id.gateway == gateway]:
            self._end(id, now, report=None)

    # From the producer.

    def stream_up(self, producer: WorkerId, stream: StreamId, now: float) -> None:
        """A control stream is there, for the first time or again: every handoff with it is opened (again)."""
        self._streams[producer] = stream
        for id, handoff in self._handoffs.items():
            if handoff.producer == producer:
                self._open(id, handoff, stream, now)

    def stream_lost(self, producer: WorkerId, stream: StreamId, now: float) -> None:
        """The control stream broke; its handoffs wait for another one, for the grace."""
        if self._streams.get(producer) == stream:
            del self._streams[producer]
        for handoff in self._handoffs.values():
            if handoff.stream == stream:
                handoff.stream = None
                handoff.waiting_since = now

    def producer_lost(self, producer: WorkerId, now: float) -> None:
        """The producer cannot be reached, dead or not: its handoffs have nothing to wait for, its open reads go on."""
        for id in [id for id, handoff in self._handoffs.items() if handoff.producer == producer]:
            self._end(id, now, report=EndReason.WORKER_LOST)

    def announcement(self, stream: StreamId, message: Announcement, now: float) -> None:
        """Blocks are complete. What was announced before may come again, with the same generations."""
        handoff = self._handoffs.get(message.id)
        if handoff is None:
            self._actions.append(SendToProducer(stream, Release(message.id)))
            return
        if not self._take_note(handoff, message):
            self._end(message.id, now, report=EndReason.STALE)
            return
        if handoff.destination is None:
            return
        self._go_on(message.id, handoff)

    def ended(self, stream: StreamId, message: Ended, now: float) -> None:
        """The producer ended it."""
        if message.id not in self._handoffs:
            self._actions.append(SendToProducer(stream, Release(message.id)))
            return
        # The producer's engine has told the gateway itself how these two ended.
        told = message.reason in (EndReason.FINISHED, EndReason.FAILED)
        self._end(message.id, now, report=None if told else message.reason)

    # From the engine.

    def reserved(self, id: AttemptId, blocks: list[int], num_cached: int) -> None:
        """Our block table for the whole sequence; the first num_cached blocks were in our cache and are not read."""
        handoff = self._handoffs[id]
        handoff.destination = tuple(blocks)
        handoff.arrived = handoff.posted = num_cached
        self._go_on(id, handoff)

    def refused(self, id: AttemptId, now: float) -> None:
        """Our engine cannot take it, and has told the gateway why."""
        self._end(id, now, report=None)

    # From the transport.

    def read_ended(self, end: ReadEnd, now: float) -> None:
        """A read is over: its blocks are good, or its handoff failed, or nobody wants them any more."""
        read = self._reads.pop(end.read_id)
        handoff = self._handoffs.get(read.id)
        if handoff is None or end.read_id not in handoff.reads:
            self._actions.append(FreeQuarantined(self.quarantine.end(end.read_id)))
            return
        handoff.reads.remove(end.read_id)
        if end.generations is None:
            self._end(read.id, now, report=EndReason.READ_FAILED)
        elif not np.array_equal(end.generations, handoff.generations[read.start : read.end]):
            self._end(read.id, now, report=EndReason.STALE)
        else:
            handoff.checked[read.start] = read.end
            self._advance(read.id, handoff)

    # From the clock.

    def tick(self, now: float) -> None:
        """Ends what is over by time."""
        for id, handoff in list(self._handoffs.items()):
            if now >= handoff.deadline:
                self._end(id, now, report=EndReason.EXPIRED)
            elif handoff.stream is None and now - handoff.waiting_since >= self._limits.grace_s:
                self._end(id, now, report=EndReason.WORKER_LOST)

    def _open(self, id: AttemptId, handoff: _Handoff, stream: StreamId, now: float) -> None:
        handoff.stream = stream
        handoff.waiting_since = now
        self._actions.append(SendToProducer(stream, Open(id, handoff.producer)))

    def _take_note(self, handoff: _Handoff, message: Announcement) -> bool:
        """Merges an announcement; False when it contradicts an earlier one or leaves a gap."""
        known = len(handoff.blocks) - message.first_index
        if known < 0:
            return False
        again = min(known, len(message.blocks))
        there = slice(message.first_index, message.first_index + again)
        if tuple(handoff.blocks[there]) != message.blocks[:again]:
            return False
        if tuple(handoff.generations[there]) != message.generations[:again]:
            return False
        first_news = not handoff.blocks
        handoff.answered = True
        handoff.blocks += message.blocks[again:]
        handoff.generations += message.generations[again:]
        handoff.first_tokens = message.first_tokens or handoff.first_tokens
        if first_news and handoff.blocks:
            self._actions.append(Enqueue(message.id))
        return True

    def _go_on(self, id: AttemptId, handoff: _Handoff) -> None:
        """Reads what is announced and not posted yet."""
        assert handoff.destination is not None
        start, end = handoff.posted, len(handoff.blocks)
        if start < end:
            read_id = next(self._read_ids)
            destination = handoff.destination[start:end]
            blocks, generations = tuple(handoff.blocks[start:end]), tuple(handoff.generations[start:end])
            handoff.posted = end
            handoff.reads.add(read_id)
            self._reads[read_id] = _Read(id, start, end, handoff.producer, destination)
            self._actions.append(PostRead(read_id, handoff.producer, blocks, destination, generations))
        self._finish_if_complete(id, handoff)

    def _advance(self, id: AttemptId, handoff: _Handoff) -> None:
        """Moves `arrived` over checked reads: a block counts only when all before it do."""
        before = handoff.arrived
        while (end := handoff.checked.pop(handoff.arrived, None)) is not None:
            handoff.arrived = end
        if handoff.arrived > before:
            self._actions.append(Arrived(id, handoff.arrived))
        self._finish_if_complete(id, handoff)

    def _finish_if_complete(self, id: AttemptId, handoff: _Handoff) -> None:
        if not handoff.first_tokens or handoff.arrived < len(handoff.blocks):
            return
        del self._handoffs[id]
        self._release(id, handoff)
        self._actions.append(Ready(id, handoff.first_tokens))

    def _end(self, id: AttemptId, now: float, *, report: EndReason | None) -> None:
        handoff = self._handoffs.pop(id, None)
        if handoff is None:
            return
        quarantined: tuple[int, ...] = ()
        for read_id in handoff.reads:
            read = self._reads[read_id]
            self.quarantine.add(read_id, QuarantinedRead(read.producer, read.blocks, now))
            quarantined += read.blocks
        self._actions.append(FreeSequence(id, quarantined))
        self._actions += [AbandonRead(read_id) for read_id in handoff.reads]
        self._release(id, handoff)
        if report is not None:
            self._actions.append(ConsumerReport(id, report))

    def _release(self, id: AttemptId, handoff: _Handoff) -> None:
        if handoff.stream is not None:
            self._actions.append(SendToProducer(handoff.stream, Release(id)))
