"""The producer's side of all its handoffs: a state machine without I/O.

Inputs are method calls, outputs are actions, taken in order with `take_actions`. Who drives it owns the engine, the
clock and the streams.

    submit ─▶ announce … announce(first token) ─▶ release       the blocks move, the lease ends
                 │              └─ finish: nothing to hand over
                 └─ fail, abort, gateway_lost, lease or deadline over

`open` may come before `submit`, at any time after it, and again. Until then the lease is the gateway's, so an abort
frees the blocks at once. From then on it is the consumer's: an abort stops the computation and tells the consumer,
but the blocks stay until the consumer releases them or its lease ends, so nothing is taken from under a read.
"""

from dataclasses import dataclass, field

from kvtransfer.handles import HandleMarks
from kvtransfer.ids import AttemptId, GatewayId, StreamId, WorkerId
from kvtransfer.lease import Lease
from kvtransfer.messages import Announcement, Ended, EndReason, FirstToken, Open, ToConsumer


@dataclass(frozen=True, slots=True)
class SendToConsumer:
    """Put this message on the control stream, if that is still there."""

    stream: StreamId
    message: ToConsumer


@dataclass(frozen=True, slots=True)
class StopComputing:
    """Compute this sequence no further, but keep its blocks."""

    id: AttemptId


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Compute this sequence no further, and free its blocks."""

    id: AttemptId


@dataclass(frozen=True, slots=True)
class ProducerReport:
    """Tell the gateway that this handoff is over on our side."""

    id: AttemptId
    reason: EndReason


ProducerAction = SendToConsumer | StopComputing | FreeBlocks | ProducerReport


@dataclass(frozen=True, slots=True)
class ProducerLimits:
    """grace_s: how long a lease outlives its stream. max_early_opens: of handoffs whose submit has not come.

    open_wait_s: how long an early open waits for its submit, and how long an open may be late for a clear answer.
    """

    grace_s: float = 3.0
    open_wait_s: float = 5.0
    max_early_opens: int = 4096


@dataclass(slots=True)
class _Handoff:
    lease: Lease
    blocks: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    first_tokens: tuple[FirstToken, ...] = ()
    stopped: bool = False  # aborted while a consumer holds the lease


@dataclass(frozen=True, slots=True)
class _EarlyOpen:
    stream: StreamId
    until: float


@dataclass(frozen=True, slots=True)
class _Over:
    reason: EndReason
    until: float


class Producer:
    """All handoffs that this worker is the source of."""

    def __init__(self, worker_id: WorkerId, marks: HandleMarks, limits: ProducerLimits | None = None) -> None:
        self._worker_id = worker_id
        self._marks = marks
        self._limits = limits or ProducerLimits()
        self._handoffs: dict[AttemptId, _Handoff] = {}
        self._early: dict[AttemptId, _EarlyOpen] = {}
        self._over: dict[AttemptId, _Over] = {}  # ended with the gateway told, a short while ago
        self._actions: list[ProducerAction] = []

    def take_actions(self) -> list[ProducerAction]:
        """What is to be done since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def open_ids(self) -> set[AttemptId]:
        """Handoffs that hold blocks or may still get some."""
        return set(self._handoffs)

    def knows(self, id: AttemptId) -> bool:
        """True while this handoff holds blocks or may still get some."""
        return id in self._handoffs

    @property
    def idle(self) -> bool:
        """True when nobody reads our blocks or is about to."""
        return not self._handoffs and not self._early

    # From the gateway.

    def submit(self, id: AttemptId, deadline: float) -> None:
        """The gateway's request; its handle was admitted by the marks just now."""
        handoff = self._handoffs[id] = _Handoff(Lease(deadline))
        if (early := self._early.pop(id, None)) is not None:
            self._opened(id, handoff, early.stream)

    def abort(self, id: AttemptId) -> None:
        """The gateway gives the handle up. Unknown and repeated aborts change nothing."""
        handoff = self._handoffs.get(id)
        if handoff is None:
            if (early := self._early.pop(id, None)) is not None:
                self._send(early.stream, Ended(id, EndReason.ABORTED))
        elif handoff.lease.holder is None:
            self._free(id)
        elif not handoff.stopped:
            handoff.stopped = True
            self._actions.append(StopComputing(id))
            self._tell(handoff, Ended(id, EndReason.ABORTED))

    def gateway_lost(self, gateway: GatewayId) -> None:
        """The gateway's stream broke: that ends its handles, known ones and those it will never send."""
        for id in [id for id in (*self._handoffs, *self._early) if id.gateway == gateway]:
            self.abort(id)

    # From the engine.

    def announce(
        self, id: AttemptId, blocks: list[int], generations: list[int], first_tokens: tuple[FirstToken, ...]
    ) -> None:
        """Further blocks of this prompt are complete; the last ones come with the first tokens."""
        handoff = self._handoffs.get(id)
        if handoff is None or handoff.stopped:
            return
        first_index = len(handoff.blocks)
        handoff.blocks += blocks
        handoff.generations += generations
        handoff.first_tokens = first_tokens
        self._tell(handoff, Announcement(id, first_index, tuple(blocks), tuple(generations), first_tokens))

    def finish(self, id: AttemptId, now: float) -> None:
        """The sequence ended at its first token: no handoff is needed."""
        self._end_told(id, EndReason.FINISHED, now)

    def fail(self, id: AttemptId, now: float) -> None:
        """The engine gave it up, and has told the gateway why."""
        self._end_told(id, EndReason.FAILED, now)

    # From the consumer.

    def open(self, stream: StreamId, message: Open, now: float) -> None:
        """The consumer takes the handoff, or takes it again."""
        id = message.id
        handoff = self._handoffs.get(id)
        if message.producer != self._worker_id:
            self._send(stream, Ended(id, EndReason.WRONG_WORKER))
        elif handoff is not None:
            self._opened(id, handoff, stream)
        elif (over := self._over.get(id)) is not None:
            self._send(stream, Ended(id, over.reason))
        elif self._marks.is_past(id) or len(self._early) >= self._limits.max_early_opens:
            self._send(stream, Ended(id, EndReason.OVER))
        else:
            self._early[id] = _EarlyOpen(stream, now + self._limits.open_wait_s)

    def release(self, id: AttemptId) -> None:
        """The consumer is done with it. Unknown and repeated releases change nothing."""
        if id in self._handoffs:
            self._free(id)

    def stream_lost(self, stream: StreamId, now: float) -> None:
        """A control stream broke; its leases go on for the grace, unless they are opened on another one."""
        for handoff in self._handoffs.values():
            handoff.lease.break_stream(stream, now + self._limits.grace_s)
        for id in [id for id, early in self._early.items() if early.stream == stream]:
            del self._early[id]

    # From the clock.

    def tick(self, now: float) -> None:
        """Ends what is over by time."""
        for id, handoff in list(self._handoffs.items()):
            if now >= handoff.lease.deadline:
                self._end(id, EndReason.EXPIRED, report=not handoff.stopped)
            elif handoff.lease.broken_until is not None and now >= handoff.lease.broken_until:
                self._end(id, EndReason.WORKER_LOST, report=not handoff.stopped)
        for id, early in list(self._early.items()):
            if now >= early.until:
                del self._early[id]
                self._send(early.stream, Ended(id, EndReason.OVER))
        for id in [id for id, over in self._over.items() if now >= over.until]:
            del self._over[id]

    def _opened(self, id: AttemptId, handoff: _Handoff, stream: StreamId) -> None:
        handoff.lease.take(stream)
        if handoff.stopped:
            self._send(stream, Ended(id, EndReason.ABORTED))
            return
        announced = Announcement(id, 0, tuple(handoff.blocks), tuple(handoff.generations), handoff.first_tokens)
        self._send(stream, announced)

    def _end_told(self, id: AttemptId, reason: EndReason, now: float) -> None:
        """Ends what the gateway was told of by the engine; a consumer that opens it late must not call it a failure."""
        if id in self._handoffs:
            self._end(id, reason)
            self._over[id] = _Over(reason, now + self._limits.open_wait_s)

    def _end(self, id: AttemptId, reason: EndReason, *, report: bool = False) -> None:
        handoff = self._handoffs.get(id)
        if handoff is None:
            return
        self._tell(handoff, Ended(id, reason))
        self._free(id)
        if report:
            self._actions.append(ProducerReport(id, reason))

    def _free(self, id: AttemptId) -> None:
        del self._handoffs[id]
        self._actions.append(FreeBlocks(id))

    def _tell(self, handoff: _Handoff, message: ToConsumer) -> None:
        if (stream := handoff.lease.live_holder) is not None:
            self._send(stream, message)

    def _send(self, stream: StreamId, message: ToConsumer) -> None:
        self._actions.append(SendToConsumer(stream, message))
