"""One worker: its threads, its streams, and how they are joined.

event loop        gateways' streams, kv control streams, health
    │  ▲
calls  outputs
    ▼  │
engine thread     the core: engine, both sides of all handoffs
    │  ▲
reads  their ends
    ▼  │
transfer thread   the transports; one of them has its bytes carried by the event loop
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvtransfer.consumer import Consumer
from kvtransfer.handles import HandleMarks
from kvtransfer.ids import WorkerId
from kvtransfer.layout import KV_PROTOCOL_VERSION
from kvtransfer.process import ProcessIdentity
from kvtransfer.producer import Producer
from kvtransfer.transports.base import Memory, ReadEnd, Transport
from kvtransfer.transports.byte_stream import BlockSource, ByteStreamTransport, Dial
from kvtransfer.transports.parts import has_parts
from protos import kv_pb2_grpc, worker_pb2_grpc
from services.config import WorkerRole
from services.engine.engine import Engine
from services.engine.runner.base import LoadedWeights, RankGroup, Runner
from services.engine.sampling.guidance import Guidance
from services.engine.schedulers.base import Scheduler
from services.engine.self_check import SelfCheckError
from services.prefix_index.registry import WorkerRecord
from services.process.gc_watch import GcWatch
from services.process.supervised import supervised
from services.protocol.capabilities import EMBEDDINGS, GRAMMAR, OF_EVERY_WORKER, TOKEN_TYPES
from services.protocol.grpc_options import SERVER_OPTIONS, host_port
from services.protocol.messages import WorkerHello, WorkerNews
from services.tls.files import CertificateFiles
from services.tls.grpc_ends import Channels, open_port
from services.tls.role_check import RoleInterceptor
from services.worker.callers import CALLERS
from services.worker.core.core import WorkerCore
from services.worker.core.state import CoreOutputs
from services.worker.engine_thread import EngineThread, no_pause
from services.worker.engine_watch import EngineWatch
from services.worker.gateway_servicer import GatewayServicer
from services.worker.index_link import IndexLink
from services.worker.kv_bytes import GrpcByteChannel, KvBytesServicer
from services.worker.kv_streams import KvIdentity, KvServicer, KvStreams
from services.worker.pages_ahead import PagesAhead
from services.worker.transfer_thread import TransferThread

MakeTransports = Callable[[BlockSource, Dial], Sequence[Transport]]  # over this memory; best first

_STOP_GRACE_S = 0.5
_LONGEST_STEP_S = 60.0  # that is waited for at the end
_LONGEST_COMPILATION_S = 1.0  # of a grammar, likewise
_LAST_WORDS_S = 0.1  # after a drain: for gateways whose commands crossed with its news

log = structlog.get_logger()


class WorkerError(Exception):
    """A worker cannot start: one line for the person who started it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The parts that a worker is made of."""

    role: WorkerRole
    runner: Runner
    scheduler: Scheduler
    make_transports: MakeTransports  # called on the transfer thread
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    model: str = ""  # digest, for gateways that serve one model
    kernels: str = ""  # see LoadedModel; empty: a simulated runner's
    weights: LoadedWeights | None = None  # None: a simulated runner's
    redis_url: str | None = None  # of registry and prefix index; None: gateways are told of the worker by hand
    advertised_host: str = "127.0.0.1"  # where gateways and other workers reach it, as the registry tells them
    gc_watch: GcWatch | None = None  # of this process, for the load that gateways are told
    pipeline_depth: int = 0  # see Engine
    guidance: Guidance | None = None  # of answers that match grammars; None: it takes no requests for them
    decode_pause_s: Callable[[], float] = no_pause  # see EngineThread
    num_ranks: int = 1  # processes that share the model, this one included
    group: RankGroup | None = None  # of these processes; None: there is one
    drain_timeout_s: float = 30.0  # the time of a whole drain
    tls: CertificateFiles | None = None  # of this worker; None: it speaks plain text
    health_address: str | None = None  # host:port for health alone, as plain text; None: no such port


class Worker:
    """Serves from `start` to `stop`. `ended` is set when it is time for that: to the reason, where it had to fail.

    `drain` is the way to end it without loss; `end` the short one. Raises WorkerError where the runner does not pass
    its self-check.
    """

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._worker_id = WorkerId(secrets.randbits(64))
        engine = Engine(
            parts.runner,
            parts.scheduler,
            max_num_seqs=parts.max_num_seqs,
            max_model_len=parts.max_model_len,
            eos_token_ids=parts.eos_token_ids,
            pipeline_depth=parts.pipeline_depth,
            guidance=parts.guidance,
        )
        try:
            engine.check.learn()
        except SelfCheckError as error:
            raise WorkerError(str(error)) from error
        pool = engine.sequences.pool
        generations = pool.generations
        # A transport may reach memory by process id, and those are used again: no two lives share generations.
        generations[:] = secrets.randbits(62)
        self._channels = Channels(parts.tls)
        self._source = BlockSource(self._worker_id, Memory(parts.runner.kv_memory(), generations))
        self._pages = PagesAhead(parts.runner.kv_memory(), lambda: pool.num_used)
        marks = HandleMarks()
        producer = Producer(self._worker_id, marks)
        consumer = Consumer(block_bytes=parts.runner.layout.block_bytes)
        core = WorkerCore(engine, self._worker_id, producer, consumer, marks, parts.gc_watch, parts.group)
        self.engine = EngineThread(core, self._on_outputs, self._on_fatal, parts.decode_pause_s)
        if parts.guidance is not None:
            parts.guidance.grammars.on_compiled = lambda: self.engine.call(lambda core, now: core.grammar_compiled())
        self._watch = EngineWatch(self.engine, self._on_hang)
        self._index: IndexLink | None = None
        self._health_server: grpc.aio.Server | None = None
        self._drain_until: float | None = None  # None: it does not drain
        self._drained = False
        self._num_moved = 0
        self.threads_ended = False  # the engine's and those that compile grammars, in `stop`
        self._transfer = TransferThread(
            lambda: parts.make_transports(self._source, self._dial), self._on_read_ended, self._on_fatal
        )

    async def start(self, address: str) -> int:
        """Opens the port, when all else is ready; returns its number. Raises WorkerError and TransportError."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str | None] = self._loop.create_future()
        offers = self._transfer.start()
        # The end of this process would not tell that of the others of a worker of several.
        process = None if any(map(has_parts, offers.values())) else ProcessIdentity.own()
        identity = KvIdentity(self._worker_id, self._parts.fingerprint, offers, process)
        self._kv = KvStreams(self.engine, self._transfer, identity, self._channels)
        self._gateways = GatewayServicer(self.engine, self._hello(tuple(offers)), self._kv.ensure, self._asked_to_drain)
        self.engine.start()
        if self._parts.group is not None:
            self._parts.group.when_lost(self._on_fatal)
        self._watching = asyncio.create_task(supervised("the watch on the engine", self._watch.run))
        self._providing = asyncio.create_task(supervised("pages ahead", self._pages.run))
        port = await self._open(address)
        if self._parts.redis_url is not None:
            await self._join(self._parts.redis_url, port)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        parts, worker, transports = self._parts, f"{self._worker_id:016x}", ", ".join(offers)
        told: dict[str, object] = {} if parts.weights is None else {**parts.weights.told()}
        if parts.num_ranks > 1:
            told["ranks"] = parts.num_ranks
        kernels = parts.kernels
        log.info(
            "ready", role=parts.role.value, port=port, worker=worker, transports=transports, kernels=kernels, **told
        )
        return port

    async def stop(self) -> None:
        """Leaves the registry, closes the streams and ends the threads, the engine's too unless it hangs."""
        self._watching.cancel()
        self._providing.cancel()
        if self._index is not None:
            if self._drain_until is None:
                self._index_task.cancel()
            await asyncio.wait([self._index_task])
        self._gateways.close()
        await self._kv.close()
        await self._server.stop(_STOP_GRACE_S)
        if self._health_server is not None:
            await self._health_server.stop(0)
        self.threads_ended = await asyncio.to_thread(self._stop_threads)
        self._transfer.stop()

    def _stop_threads(self) -> bool:
        guidance = self._parts.guidance
        compiled = guidance is None or guidance.grammars.close(_LONGEST_COMPILATION_S)
        return self.engine.stop(0.0 if self._watch.hangs else _LONGEST_STEP_S) and compiled

    async def _open(self, address: str) -> int:
        interceptors = [] if self._parts.tls is None else [RoleInterceptor(CALLERS)]
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=interceptors)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._gateways, self._server)
        kv_pb2_grpc.add_KvControlServicer_to_server(KvServicer(self._kv), self._server)
        if ByteStreamTransport.name in self._kv.identity.offers:
            kv_pb2_grpc.add_KvBytesServicer_to_server(KvBytesServicer(self._source), self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        port = _open_port(self._server, address, self._parts.tls)
        await self._server.start()
        if self._parts.health_address is not None:
            self._health_server = grpc.aio.server(options=SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
            _open_port(self._health_server, self._parts.health_address, None)
            await self._health_server.start()
        return port

    async def _join(self, redis_url: str, port: int) -> None:
        """Tells Redis of this worker, from now on."""
        record = WorkerRecord(
            address=host_port(self._parts.advertised_host, port),
            role=self._parts.role.value,
            worker_id=self._worker_id,
            model=self._parts.model,
            fingerprint=self._parts.fingerprint,
            block_size=self._parts.runner.layout.block_size,
            num_blocks=self._num_blocks,
        )
        self._index = IndexLink(redis_url, self._worker_id, record)
        self._gateways.block_log.subscribe(self._index.blocks_changed)
        await self._index.register()
        self._index_task = asyncio.create_task(self._index.run())
        await asyncio.sleep(0)  # it has begun: a task that is cancelled before would not leave the registry

    def _dial(self, address: str) -> GrpcByteChannel:
        """Called on the transfer thread."""
        return GrpcByteChannel(address, self._loop, self._channels)

    @property
    def _num_blocks(self) -> int:
        """Whole blocks for which the pool has room."""
        return self._parts.runner.num_blocks // self._parts.runner.layout.num_slices

    def _hello(self, transports: tuple[str, ...]) -> WorkerHello:
        parts = self._parts
        embedding_size = parts.runner.embedding_size if parts.role is WorkerRole.PREFILL else 0
        depend_on_parts = {
            GRAMMAR: parts.guidance is not None,
            EMBEDDINGS: embedding_size > 0,
            TOKEN_TYPES: embedding_size > 0 and parts.runner.token_types,
        }
        return WorkerHello(
            worker_id=self._worker_id,
            role=parts.role,
            fingerprint=parts.fingerprint,
            kv_protocol=KV_PROTOCOL_VERSION,
            transports=transports,
            block_size=parts.runner.layout.block_size,
            num_blocks=self._num_blocks,
            max_model_len=parts.max_model_len,
            max_num_seqs=parts.max_num_seqs,
            vocab_size=parts.runner.vocab_size,
            model=parts.model,
            kernels=parts.kernels,
            embedding_size=embedding_size,
            weight_bytes=0 if parts.weights is None else parts.weights.num_bytes,
            shares_weights=parts.weights is not None and parts.weights.not_shared is None,
            num_ranks=parts.num_ranks,
            kv_token_bytes=parts.runner.layout.token_bytes * parts.runner.layout.num_slices,
            knows=OF_EVERY_WORKER.union(name for name, has in depend_on_parts.items() if has),
        )

    def tell_gateways(self, news: WorkerNews) -> None:
        """Tells gateways what the worker can do from now on: those of today at once, later and older ones by its hello.

        Called on the event loop, when the engine can do it.
        """
        self._gateways.tell(news)

    def _on_outputs(self, outputs: CoreOutputs, has_leases: bool) -> None:
        """Called on the engine thread, after a round or in the next one's step."""
        self._transfer.set_leased(has_leases)
        for read in outputs.reads:
            self._transfer.post(read)
        for read_id in outputs.abandoned_reads:
            self._transfer.abandon(read_id)
        news = outputs.frames or outputs.messages or outputs.block_events or outputs.failed_handoffs
        if news or outputs.num_moved or outputs.drained:
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: CoreOutputs) -> None:
        try:
            self._hand_out(outputs)
        except Exception as error:
            if not self.ended.done():
                log.error("what the engine said cannot be delivered", exc_info=error)
            self.end("what the engine said cannot be delivered")  # tokens would be missing: others compute them again

    def _hand_out(self, outputs: CoreOutputs) -> None:
        self._gateways.deliver(outputs.frames)
        for stream, message in outputs.messages:
            self._kv.deliver(stream, message)
        self._gateways.block_log.append(outputs.block_events)
        for failed in outputs.failed_handoffs:
            gateway, handle = failed.id
            log.info("handoff ended", reason=failed.reason.name, gateway=f"{gateway:016x}", handle=handle)
        self._num_moved += outputs.num_moved
        if outputs.drained:
            self._on_drained()

    def _on_read_ended(self, end: ReadEnd) -> None:
        """Called on the transfer thread."""
        self.engine.call(lambda core, now: core.read_ended(end, now))

    def _on_hang(self, reason: str) -> None:
        self._not_serving()
        self.end(reason)

    def _not_serving(self) -> None:
        """Tells who asks for this worker's health, for good."""
        self._unhealthy = asyncio.create_task(self._health.enter_graceful_shutdown())

    def _on_fatal(self, reason: str) -> None:
        """Called on the thread that cannot go on."""
        self._loop.call_soon_threadsafe(self.end, reason)

    def drain(self, timeout_s: float | None = None) -> None:
        """Takes no new work, and sets `ended` when all work is done or `timeout_s` is over.

        Attempts that do not end in time are failed one after the other, and continue on other workers. None: the
        worker's own timeout. A later call can only shorten the time.
        """
        budget_s = self._parts.drain_timeout_s if timeout_s is None else timeout_s
        until = self._loop.time() + budget_s
        if self._drain_until is not None and until >= self._drain_until:
            return
        log.info("draining", timeout_s=budget_s)
        self._not_serving()
        if self._drain_until is None and self._index is not None:
            self._index_task.cancel()  # which takes the worker out of registry and index
        self._drain_until = until
        self._loop.call_at(until, self.end)
        self.engine.call(lambda core, now: core.from_gateways.drain(budget_s, now))

    async def _asked_to_drain(self, timeout_s: float | None) -> tuple[bool, int]:
        self.drain(timeout_s)
        await asyncio.wait([self.ended])
        return self._drained, self._num_moved

    def _on_drained(self) -> None:
        if not self._drained:
            self._drained = True
            log.info("drained", moved=self._num_moved)
            self._loop.call_later(_LAST_WORDS_S, self.end)

    def end(self, reason: str | None = None) -> None:
        """Says that it is time to stop."""
        if not self.ended.done():
            self.ended.set_result(reason)


def _open_port(server: grpc.aio.Server, address: str, tls: CertificateFiles | None) -> int:
    try:
        return open_port(server, address, tls)
    except RuntimeError as error:
        raise WorkerError(f"cannot listen on {address}: is the port in use?") from error
