"""The producer's side of all its handoffs: a state machine without I/O.

Inputs are method calls, outputs are actions, taken in order with `take_actions`. The caller owns the engine, the clock
and the streams.

    submit ─▶ announce … announce(first token) ─▶ release       the blocks move, the lease ends
                 │              └─ finish: nothing to hand off
                 └─ fail, abort, gateway_lost, end of the lease, deadline

`open` may come before `submit`, at any time after it, and again. Until then the lease is the gateway's, so an abort
frees the blocks at once. From then on it is the consumer's: an abort stops the computation and tells the consumer,
but the blocks stay until the consumer releases them or its lease ends, so nothing is taken from under a read.
"""

from collections.abc import Set
from dataclasses import dataclass, field

from kvtransfer.actions import FailHandoff, FreeBlocks, ProducerAction, SendToConsumer, StopComputing
from kvtransfer.announced import AnnouncedBlocks
from kvtransfer.handles import HandleMarks
from kvtransfer.ids import AttemptId, GatewayId, StreamId, WorkerId
from kvtransfer.lease import Lease
from kvtransfer.messages import Announcement, Ended, EndReason, Open, ToConsumer


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
    announced: AnnouncedBlocks = field(default_factory=AnnouncedBlocks)
    aborted: bool = False  # while the lease is a consumer's


@dataclass(frozen=True, slots=True)
class _EarlyOpen:
    stream: StreamId
    until: float


@dataclass(frozen=True, slots=True)
class _Ended:
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
        self._recent: dict[AttemptId, _Ended] = {}  # ended a short while ago, and the gateway knows why from the engine
        self._actions: list[ProducerAction] = []

    def take_actions(self) -> list[ProducerAction]:
        """Takes the actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def open_ids(self) -> Set[AttemptId]:
        """Handoffs that have blocks or may still get some; a live view."""
        return self._handoffs.keys()

    @property
    def idle(self) -> bool:
        """True when no consumer reads our blocks or is about to."""
        return not self._handoffs and not self._early

    # From the gateway.

    def submit(self, id: AttemptId, deadline: float) -> None:
        """Begins a handoff; the marks have just admitted its handle."""
        handoff = self._handoffs[id] = _Handoff(Lease(deadline))
        if (early := self._early.pop(id, None)) is not None:
            self._opened(id, handoff, early.stream)

    def abort(self, id: AttemptId) -> None:
        """Ends a handoff for its gateway. Unknown and repeated aborts change nothing."""
        handoff = self._handoffs.get(id)
        if handoff is None:
            if (early := self._early.pop(id, None)) is not None:
                self._send(early.stream, Ended(id, EndReason.ABORTED))
        elif handoff.lease.holder is None:
            self._free(id)
        elif not handoff.aborted:
            handoff.aborted = True
            self._actions.append(StopComputing(id))
            self._tell(handoff, Ended(id, EndReason.ABORTED))

    def gateway_lost(self, gateway: GatewayId) -> None:
        """Aborts the handoffs of a gateway whose stream broke, also those that were opened and not submitted."""
        for id in [id for id in (*self._handoffs, *self._early) if id.gateway == gateway]:
            self.abort(id)

    # From the engine.

    def announce(self, news: Announcement) -> None:
        """Announces further complete blocks of a prompt; the last ones come with the first tokens."""
        handoff = self._handoffs.get(news.id)
        if handoff is None or handoff.aborted:
            return
        in_order = handoff.announced.add(news)
        assert in_order
        self._tell(handoff, news)

    def finish(self, id: AttemptId, now: float) -> None:
        """Ends a handoff that is not needed: the sequence finished with its first token."""
        self._end_told(id, EndReason.FINISHED, now)

    def fail(self, id: AttemptId, now: float) -> None:
        """Ends a handoff whose request our engine failed, and told the gateway why."""
        self._end_told(id, EndReason.FAILED, now)

    # From the consumer.

    def open(self, stream: StreamId, message: Open, now: float) -> None:
        """Gives a consumer the lease of a handoff, for the first time or again, and answers with what was announced."""
        id = message.id
        handoff = self._handoffs.get(id)
        if message.producer != self._worker_id:
            self._send(stream, Ended(id, EndReason.WRONG_WORKER))
        elif handoff is not None:
            self._opened(id, handoff, stream)
        elif (recent := self._recent.get(id)) is not None:
            self._send(stream, Ended(id, recent.reason))
        elif self._marks.is_past(id) or len(self._early) >= self._limits.max_early_opens:
            self._send(stream, Ended(id, EndReason.OVER))
        else:
            self._early[id] = _EarlyOpen(stream, now + self._limits.open_wait_s)

    def release(self, id: AttemptId) -> None:
        """Frees the blocks of a handoff for its consumer. Unknown and repeated releases change nothing."""
        if id in self._handoffs:
            self._free(id)

    def stream_lost(self, stream: StreamId, now: float) -> None:
        """Lets the leases of a control stream that broke go on for the grace, unless another stream takes them."""
        for handoff in self._handoffs.values():
            handoff.lease.break_stream(stream, now + self._limits.grace_s)
        for id in [id for id, early in self._early.items() if early.stream == stream]:
            del self._early[id]

    # From the clock.

    def tick(self, now: float) -> None:
        """Ends handoffs past their deadline, or without a stream for longer than the grace, and early opens."""
        for id, handoff in list(self._handoffs.items()):
            if now >= handoff.lease.deadline:
                self._end(id, EndReason.EXPIRED, report=not handoff.aborted)
            elif handoff.lease.broken_until is not None and now >= handoff.lease.broken_until:
                self._end(id, EndReason.WORKER_LOST, report=not handoff.aborted)
        for id, early in list(self._early.items()):
            if now >= early.until:
                del self._early[id]
                self._send(early.stream, Ended(id, EndReason.OVER))
        for id in [id for id, recent in self._recent.items() if now >= recent.until]:
            del self._recent[id]

    def _opened(self, id: AttemptId, handoff: _Handoff, stream: StreamId) -> None:
        handoff.lease.take(stream)
        if handoff.aborted:
            self._send(stream, Ended(id, EndReason.ABORTED))
            return
        self._send(stream, handoff.announced.as_announcement(id))

    def _end_told(self, id: AttemptId, reason: EndReason, now: float) -> None:
        """Ends a handoff of which the gateway knows from the engine: a consumer that opens it late reports none."""
        if id in self._handoffs:
            self._end(id, reason)
            self._recent[id] = _Ended(reason, now + self._limits.open_wait_s)

    def _end(self, id: AttemptId, reason: EndReason, *, report: bool = False) -> None:
        handoff = self._handoffs.get(id)
        if handoff is None:
            return
        self._tell(handoff, Ended(id, reason))
        self._free(id)
        if report:
            self._actions.append(FailHandoff(id, reason))

    def _free(self, id: AttemptId) -> None:
        del self._handoffs[id]
        self._actions.append(FreeBlocks(id))

    def _tell(self, handoff: _Handoff, message: ToConsumer) -> None:
        if (stream := handoff.lease.live_holder) is not None:
            self._send(stream, message)

    def _send(self, stream: StreamId, message: ToConsumer) -> None:
        self._actions.append(SendToConsumer(stream, message))
