"""The worker without threads and I/O: the engine and both sides of all handoffs, joined.

Inputs are method calls: what came from gateways, from other workers, from the transport, from the clock. Outputs are
gathered until `take_outputs`. Everything that owns a block is in here, on one thread, so there is no moment at which
two parts disagree about whose it is. Times are those of one monotonic clock, in seconds.
"""

from dataclasses import dataclass, field

from kvtransfer.consumer import (
    AbandonRead,
    Arrived,
    Consumer,
    ConsumerAction,
    ConsumerReport,
    Enqueue,
    FreeQuarantined,
    FreeSequence,
    PostRead,
    Ready,
    SendToProducer,
)
from kvtransfer.handles import HandleMarks
from kvtransfer.ids import AttemptId, GatewayId, StreamId, WorkerId
from kvtransfer.messages import Announcement, Ended, EndReason, Open, Release, ToConsumer, ToProducer
from kvtransfer.producer import (
    FreeBlocks,
    Producer,
    ProducerAction,
    ProducerReport,
    SendToConsumer,
    StopComputing,
)
from kvtransfer.transports.base import ReadEnd
from services.engine.batch_state import Phase
from services.engine.engine import Engine
from services.engine.outputs import EngineOutputs, StepRows
from services.engine.prefix_cache import CacheEvents
from services.engine.request import Kind, Request
from services.process.gc_watch import GcWatch
from services.protocol.frames import Failure, Frame, Load
from services.protocol.outcomes import FailureCode
from services.worker.frame_builder import build_frame


@dataclass(slots=True)
class CoreOutputs:
    """What is to be sent and posted."""

    frames: dict[GatewayId, Frame] = field(default_factory=dict)  # by gateway
    messages: list[tuple[StreamId, ToConsumer | ToProducer]] = field(default_factory=list)
    reads: list[PostRead] = field(default_factory=list)
    abandoned_reads: list[int] = field(default_factory=list)  # ids; to be told to the transport after `reads`
    block_events: CacheEvents = field(default_factory=CacheEvents)


class WorkerCore:
    """One worker's state. `worker_id` names this life of the worker."""

    def __init__(
        self,
        engine: Engine,
        worker_id: WorkerId,
        producer: Producer,
        consumer: Consumer,
        marks: HandleMarks,
        gc_watch: GcWatch | None = None,
    ) -> None:
        self.engine = engine
        self.worker_id = worker_id
        self.bytes_moved = 0
        self._producer = producer
        self._consumer = consumer
        self._marks = marks
        self._gc_watch = gc_watch
        self._rows: list[StepRows] = []
        self._failures: dict[GatewayId, list[Failure]] = {}
        self._gateways: set[GatewayId] = set()
        self._greeted: set[GatewayId] = set()  # gateways that were not told of the load so far
        self._enqueued = False  # a handoff or a prompt of our own, since blocks were last reserved
        self._outputs = CoreOutputs()

    # From gateways.

    def gateway_hello(self, gateway: GatewayId, highest_handle: int) -> None:
        """A gateway's stream begins: handles up to the highest it allocated that are unknown here are over."""
        self._marks.raise_to(gateway, highest_handle)
        self._gateways.add(gateway)
        self._greeted.add(gateway)

    def submit(self, request: Request, now: float) -> None:
        """A request, unless its handle was seen or given up before."""
        if request.id.gateway not in self._gateways or not self._marks.admit(request.id):
            return
        for branch in request.branches:
            self._marks.admit(branch.id)
        if request.kind is Kind.PRODUCE:
            self._producer.submit(request.id, request.deadline)
        elif request.kind is Kind.CONSUME:
            assert request.paired_with is not None
            self._consumer.submit(request.id, request.paired_with, request.deadline, now)
        else:
            self._enqueued = True
        self.engine.submit(request)
        self._settle(now)

    def refuse(self, id: AttemptId, failure: Failure) -> None:
        """A request that no correct gateway sends."""
        if self._marks.admit(id):
            self._failures.setdefault(id.gateway, []).append(failure)

    def abort(self, id: AttemptId, now: float) -> None:
        """A gateway gives a handle up."""
        self._marks.raise_to(id.gateway, id.handle)
        self._abort(id, now)
        self._settle(now)

    def gateway_lost(self, gateway: GatewayId, now: float) -> None:
        """A gateway's stream broke: that ends its handles."""
        self._gateways.discard(gateway)
        self._failures.pop(gateway, None)
        self._producer.gateway_lost(gateway)
        self._consumer.gateway_lost(gateway, now)
        self._settle(now)  # what open reads may still write to is quarantined before the engine frees the rest
        for id in self.engine.sequences.ids_of(gateway):
            self._abort(id, now)
        self._settle(now)

    # From other workers.

    def consumer_message(self, stream: StreamId, message: ToProducer, now: float) -> None:
        """A consumer opens or releases a handoff."""
        match message:
            case Open():
                self._producer.open(stream, message, now)
            case Release(id):
                self._producer.release(id)
        self._settle(now)

    def consumer_stream_lost(self, stream: StreamId, now: float) -> None:
        """A stream on which consumers speak to us broke."""
        self._producer.stream_lost(stream, now)
        self._settle(now)

    def producer_message(self, stream: StreamId, message: ToConsumer, now: float) -> None:
        """A producer announces blocks, or ends a handoff."""
        match message:
            case Announcement():
                self._consumer.announcement(stream, message, now)
            case Ended():
                self._consumer.ended(stream, message, now)
        self._settle(now)

    def producer_stream_up(self, producer: WorkerId, stream: StreamId, now: float) -> None:
        """Our stream to a producer is there, for the first time or again."""
        self._consumer.stream_up(producer, stream, now)
        self._settle(now)

    def producer_stream_lost(self, producer: WorkerId, stream: StreamId, now: float) -> None:
        """Our stream to a producer broke."""
        self._consumer.stream_lost(producer, stream, now)
        self._settle(now)

    def producer_lost(self, producer: WorkerId, now: float) -> None:
        """A producer cannot be reached, dead or not."""
        self._consumer.producer_lost(producer, now)
        self._settle(now)

    # From the transport and the clock.

    def read_ended(self, end: ReadEnd, now: float) -> None:
        """A read is over, for better or worse."""
        if end.generations is not None:
            self.bytes_moved += len(end.generations) * self.engine.runner.layout.block_bytes
        self._consumer.read_ended(end, now)
        self._settle(now)

    def tick(self, now: float) -> None:
        """Ends what is over by time."""
        self._producer.tick(now)
        self._consumer.tick(now)
        self.engine.sequences.fail_expired(now)
        self._settle(now)

    # The engine.

    def reserve(self, now: float) -> None:
        """Reserves blocks for what was announced or came since the last time, so that reads begin before the next step.

        Prompts of our own are then no longer waiting, where there is room for them: see `only_decodes`.
        """
        if self._enqueued:
            self._enqueued = False
            self.engine.admit(now)
            self._settle(now)

    def step(self, now: float) -> bool:
        """One step of the engine; False when there was nothing to compute."""
        stepped = self.engine.step(now)
        self._settle(now)
        return stepped

    # What is to be done, and what is held.

    def take_outputs(self, now: float, *, heartbeat: bool = False) -> CoreOutputs:
        """Everything since the last call; frames for gateways that have something to hear or are new, or for all."""
        outputs, self._outputs = self._outputs, CoreOutputs()
        outputs.block_events = self.engine.sequences.cache.take_events()
        rows, self._rows = self._rows, []
        failures, self._failures = self._failures, {}
        concerned = self._greeted.union(failures)
        for part in rows:
            concerned.update(part.gateways.tolist() if part.gateway is None else (part.gateway,))
        self._greeted.clear()
        if heartbeat:
            concerned |= self._gateways
        if concerned:
            load = self.load(now)
            for gateway in concerned & self._gateways:
                outputs.frames[gateway] = build_frame(rows, gateway, failures.get(gateway, []), load)
        return outputs

    def load(self, now: float) -> Load:
        """What there is to do here, for routers."""
        sequences = self.engine.sequences
        batch = sequences.batch
        return Load(
            running=batch.max_num_seqs - batch.num_free_slots,
            waiting=sequences.num_queued,
            waiting_tokens=sequences.waiting_tokens,
            available_blocks=sequences.pool.available,
            quarantined_blocks=sequences.num_quarantined,
            avoid=tuple(sorted(self._consumer.avoid(now))),
            bytes_moved=self.bytes_moved,
            gc_collections=0 if self._gc_watch is None else self._gc_watch.num_collections,
            gc_pause_us=0 if self._gc_watch is None else round(self._gc_watch.pause_s * 1e6),
        )

    @property
    def open_ids(self) -> set[AttemptId]:
        """Every request that this worker knows; no others have blocks, quarantine aside."""
        return self._producer.open_ids | self._consumer.open_ids | self.engine.sequences.known_ids

    @property
    def idle(self) -> bool:
        """True when no request is known."""
        return self._producer.idle and self._consumer.idle and self.engine.sequences.idle

    @property
    def is_awaited(self) -> bool:
        """True when another worker or the transport has something to do as soon as it has our outputs."""
        return bool(self._outputs.messages or self._outputs.reads)

    @property
    def only_decodes(self) -> bool:
        """True when there is something to decode, and no prompt that a next step would compute beside it."""
        slots_in = self.engine.sequences.batch.slots_in
        return bool(len(slots_in(Phase.DECODE))) and not len(slots_in(Phase.PREFILL))

    @property
    def has_leases(self) -> bool:
        """True while blocks of ours may be read."""
        return not self._producer.idle

    @property
    def has_open_reads(self) -> bool:
        """True while reads of ours are open, in quarantine or not."""
        return self._consumer.num_open_reads > 0

    def why_start_afresh(self, now: float) -> str | None:
        """What is wrong with going on, for a person; None: nothing is."""
        return self._consumer.quarantine.why_start_afresh(now, self.engine.sequences.pool.num_blocks)

    def _abort(self, id: AttemptId, now: float) -> None:
        """Ends an attempt in each part that knows it, in that part's own way."""
        if self._producer.knows(id):
            self._producer.abort(id)
        elif self._consumer.knows(id):
            self._consumer.abort(id, now)
        else:
            self._producer.abort(id)
            self.engine.sequences.free(id)

    def _settle(self, now: float) -> None:
        """Carries what one part wants over to the others until nobody wants anything."""
        while True:
            outputs = self.engine.take_outputs()
            self._take_engine(outputs, now)
            actions = [*self._producer.take_actions(), *self._consumer.take_actions()]
            if not actions:
                return
            for action in actions:
                self._act(action)

    def _take_engine(self, outputs: EngineOutputs, now: float) -> None:
        self._rows += outputs.rows
        for announced in outputs.announced:
            self._producer.announce(announced.id, announced.blocks, announced.generations, announced.first_tokens)
        for id in outputs.finished_first:
            self._producer.finish(id, now)
        for reserved in outputs.reserved:
            self._consumer.reserved(reserved.id, reserved.blocks, reserved.num_cached)
        for failed in outputs.failed:
            self._failures.setdefault(failed.gateway, []).append(failed.failure)
            self._producer.fail(failed.id, now)
            self._consumer.refused(failed.id, now)

    def _act(self, action: ProducerAction | ConsumerAction) -> None:
        sequences = self.engine.sequences
        match action:
            case SendToConsumer(stream, message):
                self._outputs.messages.append((stream, message))
            case SendToProducer(stream, to_producer):
                self._outputs.messages.append((stream, to_producer))
            case PostRead():
                self._outputs.reads.append(action)
            case AbandonRead(read_id):
                self._outputs.abandoned_reads.append(read_id)
            case Enqueue(id):
                sequences.enqueue(id)
                self._enqueued = True
            case Arrived(id, num_blocks):
                self.engine.arrived(id, num_blocks)
            case Ready(id, first_tokens):
                self.engine.ready(id, first_tokens)
            case StopComputing(id):
                sequences.stop_computing(id)
            case FreeBlocks(id):
                sequences.free(id)
            case FreeSequence(id, quarantined):
                sequences.free(id, quarantined)
            case FreeQuarantined(blocks):
                sequences.free_quarantined(blocks)
            case ProducerReport(id, reason) | ConsumerReport(id, reason):
                self._fail(id, reason)

    def _fail(self, id: AttemptId, reason: EndReason) -> None:
        code = FailureCode.DEADLINE if reason is EndReason.EXPIRED else FailureCode.HANDOFF
        self._failures.setdefault(id.gateway, []).append(Failure(id.handle, code, reason.name))
