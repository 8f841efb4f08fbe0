"""The parts of a worker's core, and `settle`, which carries what one of them wants over to the others.

producer ── actions ──▶ engine, outputs        engine ── reserved, announcements, failures ──▶ producer, consumer
consumer ── actions ──▶ engine, outputs               ── rows, failures ──▶ frames
"""

from dataclasses import dataclass, field

from kvtransfer.actions import (
    AbandonRead,
    Arrived,
    ConsumerAction,
    Enqueue,
    FailHandoff,
    FreeBlocks,
    FreeQuarantined,
    FreeSequence,
    PostRead,
    ProducerAction,
    Ready,
    SendToConsumer,
    SendToProducer,
    StopComputing,
)
from kvtransfer.consumer import Consumer
from kvtransfer.handles import HandleMarks
from kvtransfer.ids import AttemptId, GatewayId, StreamId
from kvtransfer.messages import EndReason, ToConsumer, ToProducer
from kvtransfer.producer import Producer
from kvtransfer.transports.base import BlockRead
from services.engine.blocks.prefix_cache import CacheEvents
from services.engine.engine import Engine
from services.engine.sequences.outputs import EngineOutputs
from services.protocol.frames import Failure, Frame
from services.protocol.outcomes import FailureCode
from services.worker.attempt_times import AttemptTimes
from services.worker.drain import Drain
from services.worker.frame_builder import PendingFrames


@dataclass(slots=True)
class CoreOutputs:
    """Everything that is to be sent, posted and logged."""

    frames: dict[GatewayId, Frame] = field(default_factory=dict)  # by gateway
    messages: list[tuple[StreamId, ToConsumer | ToProducer]] = field(default_factory=list)
    reads: list[BlockRead] = field(default_factory=list)
    abandoned_reads: list[int] = field(default_factory=list)  # ids; to be told to the transport after `reads`
    block_events: CacheEvents = field(default_factory=CacheEvents)
    failed_handoffs: tuple[FailHandoff, ...] = ()  # for the log; gateways are told by frames
    num_moved: int = 0  # attempts that were failed for the drain
    drained: bool = False  # this worker drains, and no request is known to it any more

    @property
    def are_awaited(self) -> bool:
        """True when another worker or the transport has something to do as soon as it has them."""
        return bool(self.messages or self.reads or self.abandoned_reads)


@dataclass(slots=True, eq=False)
class CoreState:
    """The engine, both sides of all handoffs, and their outputs so far."""

    engine: Engine
    producer: Producer
    consumer: Consumer
    marks: HandleMarks
    frames: PendingFrames = field(default_factory=PendingFrames)
    times: AttemptTimes = field(default_factory=AttemptTimes)
    outputs: CoreOutputs = field(default_factory=CoreOutputs)
    drain: Drain | None = None  # None: the worker takes new work
    may_admit: bool = False  # a request was enqueued, or the grammar of one compiled, since the engine last admitted

    def abort(self, id: AttemptId, now: float) -> None:
        """Ends an attempt in each part that knows it, in that part's own way."""
        id = self.engine.sequences.requests.queued_groups.ends_with(id)
        if id in self.producer.open_ids:
            self.producer.abort(id)
        elif id in self.consumer.open_ids:
            self.consumer.abort(id, now)
        else:
            self.producer.abort(id)
            self.engine.sequences.free(id)

    def fail(self, id: AttemptId, failure: Failure, now: float) -> None:
        """Tells the gateway of an attempt that the attempt failed, and how far it had come."""
        self.times.report(id, self.frames, now)
        self.frames.fail(id.gateway, failure)

    def settle(self, now: float) -> None:
        """Carries out what each part wants of the others, until no part wants anything."""
        while True:
            self._take_engine(self.engine.take_outputs(), now)
            actions = [*self.producer.take_actions(), *self.consumer.take_actions()]
            if not actions:
                return
            for action in actions:
                self._act(action, now)

    def _take_engine(self, outputs: EngineOutputs, now: float) -> None:
        self.frames.rows += outputs.rows
        for announcement in outputs.announcements:
            self.producer.announce(announcement)
        for id in outputs.finished_first:
            self.producer.finish(id, now)
        for id in outputs.admitted:
            self.times.admitted(id, now)
        for reserved in outputs.reserved:
            self.consumer.reserved(reserved.id, reserved.blocks, reserved.num_cached, now)
        for embedded in outputs.embedded:
            self.times.report(embedded.id, self.frames, now)
            self.frames.add_embedding(embedded)
        for failed in outputs.failed:
            self.fail(failed.id, failed.failure, now)
            self.producer.fail(failed.id, now)
            self.consumer.abort(failed.id, now)

    def _act(self, action: ProducerAction | ConsumerAction, now: float) -> None:
        sequences = self.engine.sequences
        match action:
            case SendToConsumer(stream, message):
                self.outputs.messages.append((stream, message))
            case SendToProducer(stream, to_producer):
                self.outputs.messages.append((stream, to_producer))
            case PostRead(read):
                self.outputs.reads.append(read)
            case AbandonRead(read_id):
                self.outputs.abandoned_reads.append(read_id)
            case Enqueue(id, num_announced):
                self.times.announced(id, now)
                sequences.requests.enqueue(id, num_announced)
                self.may_admit = True
            case Arrived(id, num_slices):
                self.engine.arrived(id, num_slices)
            case Ready(id, first_tokens, moved):
                self.times.ready(id, moved, now)
                self.engine.ready(id, first_tokens)
            case StopComputing(id):
                sequences.stop_computing(id)
            case FreeBlocks(id):
                sequences.free(id)
            case FreeSequence(id, quarantined):
                sequences.free(id, quarantined)
            case FreeQuarantined(blocks):
                sequences.free_quarantined(blocks)
            case FailHandoff(id, reason):
                self.outputs.failed_handoffs += (action,)
                self.fail(id, _failure(id.handle, reason), now)


def _failure(handle: int, reason: EndReason) -> Failure:
    code = FailureCode.DEADLINE if reason is EndReason.EXPIRED else FailureCode.HANDOFF
    return Failure(handle, code, reason.name, reason)
