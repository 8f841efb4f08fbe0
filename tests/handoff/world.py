"""A small world for handoffs: gateways, workers, streams and reads, moved one event at a time by whoever tests.

Nothing happens by itself. Events are methods; `things` says to what they can happen now. After each event the world
looks at everything that was said and, unless told not to, inside the workers (`tests.handoff.invariants`).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from kvtransfer.ids import AttemptId, GatewayId, StreamId, WorkerId
from kvtransfer.messages import Announcement, Ended, ToConsumer, ToProducer
from kvtransfer.transports.base import ReadEnd
from services.config import WorkerRole
from services.protocol.frames import Frame
from services.protocol.messages import Abort, GatewayHello, Submit
from services.worker.core.core import WorkerCore
from services.worker.core.state import CoreOutputs
from services.worker.gateway_servicer import engine_request
from tests.handoff.invariants import check_worker
from tests.handoff.processes import (
    Ask,
    Client,
    GatewayNode,
    Parts,
    Sizes,
    Violation,
    WorkerProcess,
    model_says,
)
from tests.handoff.wires import Break, ControlStream, Flight, GatewayStream, Stream

SHIPPED = Parts()


class World:
    """Named workers (the first letter tells the role), and so many gateways."""

    def __init__(
        self,
        workers: tuple[str, ...] = ("prefill", "decode-a", "decode-b"),
        *,
        num_gateways: int = 1,
        parts: Parts = SHIPPED,
        sizes: Sizes | None = None,
        looks_inside: bool = True,
    ) -> None:
        self.now = 0.0
        self._parts = parts
        self._sizes = sizes or Sizes()
        self._looks_inside = looks_inside
        self._ids = count(1)  # of workers and gateways
        self._stream_ids = count(1)
        self.streams: list[Stream] = []
        self.flights: list[Flight] = []
        self.late_submits: dict[tuple[int, int], list[Submit]] = {}  # gateway, worker: held up when a stream broke
        self.lives: dict[int, WorkerProcess] = {}  # every worker there ever was, by id
        self.gateways = [self._new_gateway() for _ in range(num_gateways)]
        self.dead_gateways: list[GatewayNode] = []
        self.workers = {name: self._new_worker(name) for name in workers}
        self.connect()

    # Processes.

    def _new_gateway(self) -> GatewayNode:
        return GatewayNode(GatewayId(next(self._ids)), self, self._parts.aborts_prefill)

    def _new_worker(self, name: str) -> WorkerProcess:
        role = WorkerRole.PREFILL if name.startswith("p") else WorkerRole.DECODE
        worker = WorkerProcess(name, role, WorkerId(next(self._ids)), self._parts, self._sizes)
        self.lives[worker.worker_id] = worker
        return worker

    def kill(self, worker: WorkerProcess) -> None:
        """A worker dies; nothing of it is delivered or lands any more, and another life starts in its place."""
        worker.alive = False
        self.flights = [flight for flight in self.flights if flight.reader is not worker]
        for stream in self.streams:
            if isinstance(stream, GatewayStream) and stream.worker is worker:
                stream.far_noticed()
            if isinstance(stream, ControlStream) and stream.consumer is worker:
                stream.near_noticed()
            if isinstance(stream, ControlStream) and stream.producer is worker:
                stream.far_noticed()
        self.workers[worker.name] = self._new_worker(worker.name)

    def kill_gateway(self, gateway: GatewayNode) -> None:
        """A gateway dies with its clients' requests; another life starts in its place."""
        gateway.alive = False
        for client in gateway.open_clients():
            client.left = True
        for stream in self.streams:
            if isinstance(stream, GatewayStream) and stream.gateway is gateway:
                stream.near_noticed()
        self.gateways[self.gateways.index(gateway)] = self._new_gateway()
        self.dead_gateways.append(gateway)

    def prove_dead(self, reader: WorkerProcess) -> None:
        """A consumer sees that producers it read from are gone: its transport reports their reads as failed."""
        dead = {flight.source for flight in self.flights if flight.reader is reader}
        dead |= {stream.producer for stream in self.control_streams() if stream.consumer is reader}
        for producer in dead:
            if producer.alive:
                continue
            self.lose(reader, producer)
            for flight in self._flights_between(reader, producer):
                self.fail_read(flight)

    def lose(self, reader: WorkerProcess, producer: WorkerProcess) -> None:
        """A consumer cannot reach a producer, which may be alive: what it reads from it may still land."""
        self._call(reader, lambda core: core.from_producers.lost(producer.worker_id, self.now))
        if self._parts.lost_is_dead:
            for flight in self._flights_between(reader, producer):
                self._report(flight, None)

    def _flights_between(self, reader: WorkerProcess, producer: WorkerProcess) -> list[Flight]:
        return [each for each in self.flights if each.reader is reader and each.source is producer]

    # Streams.

    def control_streams(self) -> list[ControlStream]:
        """All control streams."""
        return [stream for stream in self.streams if isinstance(stream, ControlStream)]

    def connect(self) -> None:
        """Every near end that knows of no stream to a living far end opens one."""
        workers = list(self.workers.values())
        for gateway in self.gateways:
            for worker in workers:
                if worker.worker_id not in gateway.workers:
                    self._connect_gateway(gateway, worker)
        for consumer in (worker for worker in workers if worker.role is WorkerRole.DECODE):
            for producer in (worker for worker in workers if worker.role is WorkerRole.PREFILL):
                self._connect_control(consumer, producer)

    def _connect_gateway(self, gateway: GatewayNode, worker: WorkerProcess) -> None:
        stream = GatewayStream(gateway=gateway, worker=worker)
        self.streams.append(stream)
        gateway.workers[worker.worker_id] = stream
        stream.down.append(GatewayHello(gateway.id, gateway.ledger.highest_handle))
        stream.down += self.late_submits.pop((gateway.id, worker.worker_id), [])
        gateway.look_after()

    def _connect_control(self, consumer: WorkerProcess, producer: WorkerProcess) -> None:
        for stream in self.control_streams():
            if stream.consumer is consumer and stream.producer is producer and not stream.near_knows:
                return
        stream = ControlStream(id=StreamId(next(self._stream_ids)), consumer=consumer, producer=producer)
        self.streams.append(stream)
        self._call(consumer, lambda core: core.from_producers.stream_up(producer.worker_id, stream.id, self.now))

    def break_stream(self, stream: Stream, how: Break) -> None:
        """A stream breaks; whoever broke it knows at once."""
        if isinstance(stream, GatewayStream):
            key = stream.gateway.id, stream.worker.worker_id
            held_up = [message for message in stream.down if isinstance(message, Submit)]
            self.late_submits.setdefault(key, []).extend(held_up)
        stream.break_it(how)
        if how is Break.NEAR:
            self.notice_near(stream)
        elif how is Break.FAR:
            self.notice_far(stream)

    def notice_near(self, stream: Stream) -> None:
        """The near end of a broken stream notices."""
        stream.near_noticed()
        match stream:
            case GatewayStream(gateway=gateway, worker=worker) if gateway.alive:
                if gateway.workers.get(worker.worker_id) is stream:
                    del gateway.workers[worker.worker_id]
                    gateway.ledger.on_lost(worker.candidate().id)
                    gateway.look_after()
            case ControlStream(consumer=consumer, producer=producer) if consumer.alive:
                self._call(
                    consumer, lambda core: core.from_producers.stream_lost(producer.worker_id, stream.id, self.now)
                )
        self._forget_ended_streams()

    def notice_far(self, stream: Stream) -> None:
        """The far end of a broken stream notices."""
        stream.far_noticed()
        match stream:
            case GatewayStream(gateway=gateway, worker=worker) if worker.alive:
                if worker.gateways.get(gateway.id) is stream:
                    del worker.gateways[gateway.id]
                    self._call(worker, lambda core: core.from_gateways.lost(gateway.id, self.now))
            case ControlStream(producer=producer) if producer.alive:
                self._call(producer, lambda core: core.from_consumers.stream_lost(stream.id, self.now))
        self._forget_ended_streams()

    def _forget_ended_streams(self) -> None:
        self.streams = [stream for stream in self.streams if not (stream.near_knows and stream.far_knows)]

    # What can happen, and to what.

    def things(self, kind: str) -> list[Callable[[], object]]:
        """Events of a kind that can happen now."""
        match kind:
            case "deliver":
                down = [
                    partial(self.deliver_down, stream) for stream in self.streams if stream.down_open and stream.down
                ]
                up = [partial(self.deliver_up, stream) for stream in self.streams if stream.up_open and stream.up]
                return [*down, *up]
            case "duplicate":
                queues = [queue for stream in self.streams for queue in (stream.down, stream.up)]
                return [partial(_duplicate, queue) for queue in queues if queue]
            case "break":
                return [
                    partial(self.break_stream, stream, how) for stream in self.streams if stream.whole for how in Break
                ]
            case "notice":
                near = [partial(self.notice_near, stream) for stream in self.streams if stream.near_can_notice]
                far = [partial(self.notice_far, stream) for stream in self.streams if stream.far_can_notice]
                return [*near, *far]
            case "step":
                return [partial(self.step, worker) for worker in self.workers.values()]
            case "land":
                return [partial(self.land, each) for each in self.flights if each.source.alive and not each.has_data]
            case "end read":
                return [partial(self.end_read, each) for each in self.flights if each.source.alive and each.has_data]
            case "fail read":
                return [partial(self.fail_read, flight) for flight in self.flights]
            case "prove dead":
                return [partial(self.prove_dead, reader) for reader in self.workers.values()]
            case "lose":
                reached = {(each.consumer, each.producer) for each in self.control_streams() if not each.near_knows}
                opened = [
                    (reader, self.lives[handoff.producer])
                    for reader in self.workers.values()
                    for handoff in reader.core._state.consumer._handoffs.values()
                ]
                pairs = dict.fromkeys([*opened, *((each.reader, each.source) for each in self.flights)])
                return [partial(self.lose, *pair) for pair in pairs if pair not in reached]
            case "kill":
                return [partial(self.kill, worker) for worker in self.workers.values()]
            case "kill gateway":
                return [partial(self.kill_gateway, gateway) for gateway in self.gateways]
            case "leave":
                open_clients = [(gateway, client) for gateway in self.gateways for client in gateway.open_clients()]
                return [partial(self.leave, gateway, client) for gateway, client in open_clients]
        raise ValueError(kind)

    # Events.

    def ask(self, ask: Ask, gateway: int = 0) -> Client:
        """A client's request comes to a gateway."""
        return self.gateways[gateway].ask(replace(ask, groups=self._sizes.groups))

    def leave(self, gateway: GatewayNode, client: Client) -> None:
        """A client goes away."""
        client.left = True
        gateway.ledger.close(client.entry)

    def advance(self, seconds: float) -> None:
        """The clock moves. Workers look at it when they step."""
        self.now += seconds
        for gateway in self.gateways:
            gateway.clock_moved(self.now)

    def step(self, worker: WorkerProcess) -> bool:
        """A worker looks at the clock, sends what it has to, and computes a step, if there is one."""
        self._call(worker, lambda core: core.tick(self.now))
        self._call(worker, lambda core: core.reserve(self.now))
        return bool(self._call(worker, lambda core: core.step(self.now)))

    def deliver_down(self, stream: Stream) -> None:
        """The next message from the near to the far end arrives."""
        message = stream.down.popleft()
        match stream:
            case GatewayStream():
                self._from_gateway(stream, message)
            case ControlStream():
                self._call(stream.producer, lambda core: core.from_consumers.message(stream.id, message, self.now))

    def deliver_up(self, stream: Stream) -> None:
        """The next message from the far to the near end arrives."""
        message = stream.up.popleft()
        match stream:
            case GatewayStream():
                self._from_worker(stream, message)
            case ControlStream():
                self._call(stream.consumer, lambda core: core.from_producers.message(stream.id, message, self.now))

    def land(self, flight: Flight) -> None:
        """One more block of a read lands, wanted or not."""
        flight.land_block()

    def end_read(self, flight: Flight) -> None:
        """The generation words of a read are read, and its reader hears of its end."""
        self.flights.remove(flight)
        self._report(flight, flight.source.core.engine.sequences.pool.generations[flight.read.source])

    def fail_read(self, flight: Flight) -> None:
        """The transport gives up a read, wherever it is."""
        self.flights.remove(flight)
        self._report(flight, None)

    def _report(self, flight: Flight, words: np.ndarray | None) -> None:
        """The reader hears of a read's end, once."""
        if not flight.reported:
            flight.reported = True
            self._call(flight.reader, lambda core: core.read_ended(ReadEnd(flight.read.read_id, words), self.now))

    def _from_gateway(self, stream: GatewayStream, message: GatewayHello | Submit | Abort) -> None:
        worker, gateway = stream.worker, stream.gateway.id
        match message:
            case GatewayHello(_, highest_handle):
                older = worker.gateways.get(gateway)
                if older is stream:
                    return
                if older is not None:
                    self.notice_far(older)
                worker.gateways[gateway] = stream
                self._call(worker, lambda core: core.from_gateways.hello(gateway, highest_handle))
            case Submit():
                request = engine_request(gateway, message, self.now)
                self._call(worker, lambda core: core.from_gateways.submit(request, self.now))
            case Abort(handle):
                id = AttemptId(gateway, handle)
                self._call(worker, lambda core: core.from_gateways.abort(id, self.now))

    def _from_worker(self, stream: GatewayStream, frame: Frame) -> None:
        gateway, worker = stream.gateway, stream.worker.candidate().id
        gateway.ledger.on_rows(worker, frame.rows())
        for failure in frame.failures:
            gateway.ledger.on_failure(worker, failure)
        gateway.look_after()

    def _call(self, worker: WorkerProcess, call: Callable[[WorkerCore], object]) -> object:
        result = call(worker.core)
        self._carry_out(worker, worker.core.take_outputs(self.now))
        if self._looks_inside:
            self._look_inside(worker)
        return result

    def look_inside(self) -> None:
        """Raises Violation where something inside a worker does not agree."""
        for worker in self.workers.values():
            self._look_inside(worker)

    def _look_inside(self, worker: WorkerProcess) -> None:
        check_worker(worker, [flight.read for flight in self.flights if flight.reader is worker])

    def _carry_out(self, worker: WorkerProcess, outputs: CoreOutputs) -> None:
        for gateway, frame in outputs.frames.items():
            self._check_tokens(worker, gateway, frame)
            if (to_gateway := worker.gateways.get(gateway)) is not None:
                to_gateway.up.append(frame)
        for id, message in outputs.messages:
            self._put(id, message)
        self.flights += [Flight(read, worker, self.lives[read.worker]) for read in outputs.reads]

    def _put(self, id: StreamId, message: ToConsumer | ToProducer) -> None:
        for stream in self.control_streams():
            if stream.id == id:
                (stream.up if isinstance(message, Announcement | Ended) else stream.down).append(message)

    def _check_tokens(self, worker: WorkerProcess, gateway: GatewayId, frame: Frame) -> None:
        asks = {node.id: node.ask_of_handle for node in (*self.gateways, *self.dead_gateways)}[gateway]
        for row in frame.rows():
            ask = asks[row.handle]
            index = row.position - len(ask.prompt)
            right = model_says(ask.prompt, ask.max_tokens, ask.groups)[index : index + len(row.tokens)]
            if tuple(row.tokens) != right:
                raise Violation(f"{worker} says {row.tokens} for {ask}, position {index}, not {right}: wrong tokens")


def _duplicate(queue: deque[Any]) -> None:
    """The next message comes again, after all that are on their way."""
    queue.append(queue[0])
