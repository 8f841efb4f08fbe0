"""Inputs of a worker's core from other processes: gateways, consumers that read us, producers that we read."""

from kvtransfer.ids import AttemptId, GatewayId, StreamId, WorkerId
from kvtransfer.messages import Announcement, Ended, Open, Pulse, Release, ToConsumer, ToProducer
from services.engine.sequences.request import Kind, Request
from services.protocol.frames import Failure
from services.protocol.outcomes import FailureCode
from services.worker.core.state import CoreState
from services.worker.drain import Drain


class FromGateways:
    """The commands of gateways, and the ends of their streams."""

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def hello(self, gateway: GatewayId, highest_handle: int) -> None:
        """Begins a gateway's stream: handles up to the highest it allocated that are unknown here are over."""
        self._state.marks.raise_to(gateway, highest_handle)
        self._state.frames.add_gateway(gateway)

    def submit(self, request: Request, now: float) -> None:
        """Takes a request, unless its handle was seen or aborted before."""
        state = self._state
        if request.id.gateway not in state.frames.gateways or not state.marks.admit(request.id):
            return
        for branch in request.branches:
            state.marks.admit(branch.id)
        state.times.submitted(request, now)
        if state.drain is not None:
            state.fail(request.id, Failure(request.id.handle, FailureCode.NOT_NOW, "the worker drains"), now)
            state.producer.abort(request.id)  # its consumer may have opened the handoff before
            state.settle(now)
            return
        if request.kind is Kind.PRODUCE:
            state.producer.submit(request.id, request.deadline)
        elif request.kind is Kind.CONSUME:
            assert request.paired_with is not None
            state.consumer.submit(request.id, request.paired_with, request.deadline, now)
        else:
            state.may_admit = True
        state.engine.submit(request)
        state.settle(now)

    def drain(self, budget_s: float, now: float) -> None:
        """Takes no new requests from now on, and tells all gateways so. Again: with another budget."""
        self._state.drain = Drain(now, budget_s, self._state.drain)
        self._state.frames.tell_load()

    def refuse(self, id: AttemptId, failure: Failure) -> None:
        """Fails a request that no correct gateway sends."""
        if self._state.marks.admit(id):
            self._state.frames.fail(id.gateway, failure)

    def abort(self, id: AttemptId, now: float) -> None:
        """Aborts an attempt, also one that has not come yet."""
        self._state.marks.raise_to(id.gateway, id.handle)
        self._state.abort(id, now)
        self._state.settle(now)

    def lost(self, gateway: GatewayId, now: float) -> None:
        """Aborts all attempts of a gateway whose stream broke."""
        state = self._state
        state.frames.remove_gateway(gateway)
        state.producer.gateway_lost(gateway)
        state.consumer.gateway_lost(gateway, now)
        state.settle(now)  # blocks that open reads may still write to are quarantined before the engine frees the rest
        for id in state.engine.sequences.requests.ids_of(gateway):
            state.abort(id, now)
        state.settle(now)


class FromConsumers:
    """The messages of consumers to us as a producer, and the ends of their streams."""

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def message(self, stream: StreamId, message: ToProducer, now: float) -> None:
        """Takes a consumer's open or release of a handoff."""
        match message:
            case Open():
                self._state.producer.open(stream, message, now)
            case Release(id):
                self._state.producer.release(id)
        self._state.settle(now)

    def stream_lost(self, stream: StreamId, now: float) -> None:
        """Notes that a consumer's stream broke."""
        self._state.producer.stream_lost(stream, now)
        self._state.settle(now)


class FromProducers:
    """The messages of producers to us as a consumer, and what becomes of our streams to them."""

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def message(self, stream: StreamId, message: ToConsumer, now: float) -> None:
        """Takes a producer's announcement of blocks, its end of a handoff, or a pulse."""
        match message:
            case Announcement():
                self._state.consumer.announcement(stream, message, now)
            case Ended():
                self._state.consumer.ended(stream, message, now)
            case Pulse():
                self._state.consumer.pulse(stream)
        self._state.settle(now)

    def stream_up(self, producer: WorkerId, stream: StreamId, now: float, *, pulses: bool = False) -> None:
        """Notes that our stream to a producer came up, for the first time or again; pulses: that it sends them."""
        self._state.consumer.stream_up(producer, stream, pulses=pulses)
        self._state.settle(now)

    def stream_lost(self, producer: WorkerId, stream: StreamId, now: float) -> None:
        """Notes that our stream to a producer broke."""
        self._state.consumer.stream_lost(producer, stream, now)
        self._state.settle(now)

    def lost(self, producer: WorkerId, now: float) -> None:
        """Notes that a producer cannot be reached, dead or not."""
        self._state.consumer.producer_lost(producer, now)
        self._state.settle(now)
