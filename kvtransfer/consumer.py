"""The consumer's side of all its handoffs: a state machine without I/O.

Inputs are method calls, outputs are actions, taken in order with `take_actions`. One handoff goes through

    submit ─▶ open sent ─▶ first blocks announced ─▶ reserved ─▶ reading … ─▶ ready
                             (Enqueue)            (all or none)   (PostRead,     (Ready,
                                                                   Arrived)       release sent)

and may end at any point, for any reason, in one way: `_end` removes it, frees its blocks except those that an open read
may still write to (they go to quarantine), releases the producer's, and has the gateway told unless it knows.

A handoff's blocks   [0 ─── cached ───┬─── read and checked ───┬─── being read ───┬─── not announced yet ───]
                     at admission   num_cached              arrived             posted
"""

from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np

from kvtransfer.actions import (
    AbandonRead,
    Arrived,
    ConsumerAction,
    Enqueue,
    FailHandoff,
    FreeQuarantined,
    FreeSequence,
    PostRead,
    Ready,
    SendToProducer,
)
from kvtransfer.announced import AnnouncedBlocks
from kvtransfer.ids import AttemptId, GatewayId, StreamId, WorkerId
from kvtransfer.messages import Announcement, Ended, EndReason, Open, Release
from kvtransfer.moved import Moved
from kvtransfer.open_reads import OpenReads
from kvtransfer.progress import Progress, ProgressLimits
from kvtransfer.transports.base import ReadEnd


@dataclass(frozen=True, slots=True)
class ConsumerLimits:
    """grace_s: how long a handoff outlives its stream."""

    grace_s: float = 3.0
    progress: ProgressLimits = field(default_factory=ProgressLimits)


@dataclass(slots=True)
class _Handoff:
    producer: WorkerId
    deadline: float
    waiting_since: float  # for a stream
    stream: StreamId | None = None
    announced: AnnouncedBlocks = field(default_factory=AnnouncedBlocks)
    destination: list[int] | None = None  # blocks that our engine reserved
    arrived: int = 0
    posted: int = 0
    checked: dict[int, int] = field(default_factory=dict)  # start -> end of reads checked beyond `arrived`
    reads: set[int] = field(default_factory=set)  # ids of open reads
    reading_since: float = 0.0  # while reads are open: the first of them was posted
    moved: Moved = field(default_factory=Moved)


class Consumer:
    """All handoffs that this worker is the destination of."""

    def __init__(self, limits: ConsumerLimits | None = None, block_bytes: int = 1) -> None:
        self._limits = limits or ConsumerLimits()
        self._progress = Progress(self._limits.progress, block_bytes)
        self._block_bytes = block_bytes
        self._handoffs: dict[AttemptId, _Handoff] = {}
        self._streams: dict[WorkerId, StreamId] = {}  # producer -> live control stream
        self._actions: list[ConsumerAction] = []
        self.reads = OpenReads()

    def take_actions(self) -> list[ConsumerAction]:
        """Takes the actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def open_ids(self) -> Set[AttemptId]:
        """Handoffs under way, a live view. Without any, abandoned reads may still be open."""
        return self._handoffs.keys()

    def avoid(self) -> set[WorkerId]:
        """Finds producers not to be paired with us now: reads in quarantine, a stall, or silence."""
        return self.reads.quarantine.producers | self._progress.avoided(self.open_ids)

    # From the gateway.

    def submit(self, id: AttemptId, producer: WorkerId, deadline: float, now: float) -> None:
        """Begins a handoff; the marks have just admitted its handle."""
        self._progress.submitted(id, producer, self.open_ids)
        handoff = self._handoffs[id] = _Handoff(producer, deadline, waiting_since=now)
        if (stream := self._streams.get(producer)) is not None:
            self._open(id, handoff, stream)

    def abort(self, id: AttemptId, now: float) -> None:
        """Ends a handoff whose gateway needs no word of it: it aborted the attempt, or our engine failed the request.

        Unknown and repeated aborts change nothing.
        """
        self._end(id, now, report=None)

    def gateway_lost(self, gateway: GatewayId, now: float) -> None:
        """Ends the handoffs of a gateway whose stream broke."""
        for id in [id for id in self._handoffs if id.gateway == gateway]:
            self._end(id, now, report=None)

    # From the producer.

    def stream_up(self, producer: WorkerId, stream: StreamId, *, pulses: bool = False) -> None:
        """Opens all handoffs with a producer, for the first time or again, on a control stream that came up.

        pulses: that the producer sends them; else its silence says nothing.
        """
        self._streams[producer] = stream
        if pulses:
            self._progress.heard(producer)
        else:
            self._progress.unheard(producer)
        for id, handoff in self._handoffs.items():
            if handoff.producer == producer:
                self._open(id, handoff, stream)

    def pulse(self, stream: StreamId) -> None:
        """Notes that the producer at the other end of a control stream serves it."""
        for producer, live in self._streams.items():
            if live == stream:
                self._progress.heard(producer)

    def stream_lost(self, producer: WorkerId, stream: StreamId, now: float) -> None:
        """Lets the handoffs of a control stream that broke wait for another one, for the grace."""
        if self._streams.get(producer) == stream:
            del self._streams[producer]
            self._progress.unheard(producer)
        for handoff in self._handoffs.values():
            if handoff.stream == stream:
                handoff.stream = None
                handoff.waiting_since = now

    def producer_lost(self, producer: WorkerId, now: float) -> None:
        """Ends the handoffs with a producer that cannot be reached, dead or not. Its open reads go on."""
        for id in [id for id, handoff in self._handoffs.items() if handoff.producer == producer]:
            self._end(id, now, report=EndReason.WORKER_LOST)
        self._progress.producer_lost(producer)

    def announcement(self, stream: StreamId, message: Announcement, now: float) -> None:
        """Reads the blocks of an announcement, which may repeat earlier ones with the same generations."""
        handoff = self._handoffs.get(message.id)
        if handoff is None:
            self._actions.append(SendToProducer(stream, Release(message.id)))
            return
        before = len(handoff.announced)
        if not handoff.announced.add(message):
            self._end(message.id, now, report=EndReason.STALE)
            return
        if len(handoff.announced) > before:
            self._actions.append(Enqueue(message.id, len(handoff.announced)))
        if handoff.destination is not None:
            self._go_on(message.id, handoff, now)

    def ended(self, stream: StreamId, message: Ended, now: float) -> None:
        """Ends a handoff that the producer ended."""
        if message.id not in self._handoffs:
            self._actions.append(SendToProducer(stream, Release(message.id)))
            return
        # The gateway knows of these two from the producer's engine.
        told = message.reason in (EndReason.FINISHED, EndReason.FAILED)
        self._end(message.id, now, report=None if told else message.reason)

    # From the engine.

    def reserved(self, id: AttemptId, blocks: list[int], num_cached: int, now: float) -> None:
        """Takes our block table for the whole sequence; its first num_cached blocks were cached and are not read."""
        handoff = self._handoffs[id]
        handoff.destination = blocks
        handoff.arrived = handoff.posted = num_cached
        self._go_on(id, handoff, now)

    # From the transport.

    def read_ended(self, end: ReadEnd, now: float) -> None:
        """Checks the blocks of a read that ended, or fails its handoff; frees the blocks of an abandoned read."""
        read = self.reads.end(end.read_id)
        handoff = self._handoffs.get(read.id)
        wanted = handoff is not None and end.read_id in handoff.reads
        self._progress.read_ended(end.read_id, moved=end.generations is not None, wanted=wanted)
        if handoff is None or not wanted:
            self._actions.append(FreeQuarantined(self.reads.quarantine.end(end.read_id)))
            return
        handoff.reads.remove(end.read_id)
        self._note_moved(handoff, end, now)
        if end.generations is None:
            self._end(read.id, now, report=EndReason.READ_FAILED)
        elif not np.array_equal(end.generations, read.read.generations):
            self._end(read.id, now, report=EndReason.STALE)
        else:
            handoff.checked[read.start] = read.end
            self._advance(read.id, handoff)

    # From the clock.

    def tick(self, now: float) -> None:
        """Ends handoffs past their deadline, without a stream for longer than the grace, or that stall."""
        self._progress.look(now)
        for id, handoff in list(self._handoffs.items()):
            if now >= handoff.deadline:
                self._end(id, now, report=EndReason.EXPIRED)
            elif handoff.stream is None and now - handoff.waiting_since >= self._limits.grace_s:
                self._progress.stalled(handoff.producer)
                self._end(id, now, report=EndReason.WORKER_LOST)
            elif self._is_stalled(handoff):
                self._progress.stalled(handoff.producer)
                self._end(id, now, report=EndReason.STALLED)

    def _is_stalled(self, handoff: _Handoff) -> bool:
        if not handoff.announced.first_tokens and self._progress.is_stalled(handoff.producer):
            return True
        return any(map(self._progress.stands_still, handoff.reads))

    def _open(self, id: AttemptId, handoff: _Handoff, stream: StreamId) -> None:
        handoff.stream = stream
        self._actions.append(SendToProducer(stream, Open(id, handoff.producer)))

    def _note_moved(self, handoff: _Handoff, end: ReadEnd, now: float) -> None:
        """Adds the bytes of a read that ended, and after the last open one the time in which reads were open."""
        moved = handoff.moved
        num_bytes = 0 if end.generations is None else len(end.generations) * self._block_bytes
        reading_s = 0.0 if handoff.reads else now - handoff.reading_since
        handoff.moved = Moved(end.transport, end.why, moved.num_bytes + num_bytes, moved.reading_s + reading_s)

    def _go_on(self, id: AttemptId, handoff: _Handoff, now: float) -> None:
        """Reads the blocks that are announced and not posted yet."""
        assert handoff.destination is not None
        announced, start, end = handoff.announced, handoff.posted, len(handoff.announced)
        if start < end:
            blocks, generations = announced.blocks[start:end], announced.generations[start:end]
            read = self.reads.post(id, start, handoff.producer, blocks, generations, handoff.destination[start:end])
            handoff.posted = end
            if not handoff.reads:
                handoff.reading_since = now
            handoff.reads.add(read.read_id)
            self._progress.read_posted(read.read_id, handoff.producer, end - start)
            self._actions.append(PostRead(read))
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
        if not handoff.announced.first_tokens or handoff.arrived < len(handoff.announced):
            return
        del self._handoffs[id]
        self._release(id, handoff)
        self._actions.append(Ready(id, handoff.announced.first_tokens, handoff.moved))

    def _end(self, id: AttemptId, now: float, *, report: EndReason | None) -> None:
        handoff = self._handoffs.pop(id, None)
        if handoff is None:
            return
        quarantined: tuple[int, ...] = ()
        for read_id in handoff.reads:
            quarantined += self.reads.abandon(read_id, now)
        self._actions.append(FreeSequence(id, quarantined))
        self._actions += [AbandonRead(read_id) for read_id in handoff.reads]
        self._release(id, handoff)
        if report is not None:
            self._actions.append(FailHandoff(id, report))

    def _release(self, id: AttemptId, handoff: _Handoff) -> None:
        if handoff.stream is not None:
            self._actions.append(SendToProducer(handoff.stream, Release(id)))
