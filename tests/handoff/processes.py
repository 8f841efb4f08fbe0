"""The processes in the world of these tests: workers around the shipped core, gateways around the shipped ledger.

A worker process is one life of a worker. A gateway routes by turns; its clients compare every token with what the
model says alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.block_memory import GroupBlocks
from kvtransfer.consumer import Consumer, ConsumerLimits
from kvtransfer.handles import HandleMarks
from kvtransfer.ids import GatewayId, WorkerId
from kvtransfer.layer_groups import LayerGroups
from kvtransfer.messages import EndReason
from kvtransfer.moved import Moved
from kvtransfer.producer import Producer
from kvtransfer.progress import ProgressLimits
from services.config import WorkerRole
from services.engine.blocks.block_pool import BlockPool
from services.engine.blocks.prefix_cache import PrefixCache
from services.engine.engine import Engine
from services.engine.runner.simulated import SimulatedRunner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.engine.sequences.sequences import Sequences
from services.gateway.api.generation import GenerationRequest
from services.gateway.dispatch.costs import CostModel
from services.gateway.dispatch.ledger.entry import LedgerEntry
from services.gateway.dispatch.ledger.ledger import Ledger, handles_needed
from services.gateway.dispatch.router import Candidate, Plan
from services.protocol.capsule import Capsule
from services.protocol.frames import Load
from services.protocol.messages import Command, Submit
from services.protocol.outcomes import FinishReason
from services.protocol.sampling import SamplingParams
from services.worker.core.core import WorkerCore
from tests.engine.harness import reference
from tests.handoff.wires import GatewayStream

if TYPE_CHECKING:
    from tests.handoff.world import World

BLOCK_SIZE = 2
MAX_MODEL_LEN = 14
# The world's clock leaps, and workers look at it when they step: a look counts for as long as it was.
LIMITS = ConsumerLimits(progress=ProgressLimits(read_s=4.0, first_read_s=4.0, longest_look_s=10.0))


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass(frozen=True)
class Parts:
    """The classes that a world is made of. A planted bug replaces one of them."""

    producer: type[Producer] = Producer
    consumer: type[Consumer] = Consumer
    marks: type[HandleMarks] = HandleMarks
    cache: type[PrefixCache] = PrefixCache
    sequences: type[Sequences] = Sequences
    decode_scheduler: type[DecodeScheduler] = DecodeScheduler
    core: type[WorkerCore] = WorkerCore
    aborts_prefill: bool = True  # of the gateways
    group_memory: type[GroupBlocks] = GroupBlocks
    lost_is_dead: bool = False  # a consumer's transport reports reads of a producer that cannot be reached as failed


@dataclass(frozen=True)
class Sizes:
    """How tiny everything is."""

    num_blocks: int = 8  # whole ones
    max_num_seqs: int = 4
    chunk: int = 4  # tokens of a step
    depth: int = 0  # of the step loop's pipeline; with one, steps run as late as they may
    groups: LayerGroups | None = None  # of the model's layers
    of_ranks: WorkerRole | None = None  # workers of this role are groups of two ranks

    @property
    def num_slices(self) -> int:
        """Of all blocks."""
        return self.num_blocks * (1 if self.groups is None else self.groups.num_slices)


def divide_among_ranks(runner: SimulatedRunner, group_memory: type[GroupBlocks]) -> None:
    """Moves the runner's pool into those of two ranks: one has the K of each block, the other its V."""
    planes = np.ascontiguousarray(runner._pool.transpose(1, 0, 2))  # K and V of all blocks, one behind the other
    runner._pool = planes.transpose(1, 0, 2)
    k, v = planes[:, : runner.num_blocks].view(np.uint8)
    each = runner.layout.plane_bytes
    runner._memory = group_memory([k, v], [[range(each)], [range(each, 2 * each)]])


class WorkerProcess:
    """One life of a worker."""

    def __init__(self, name: str, role: WorkerRole, worker_id: WorkerId, parts: Parts, sizes: Sizes) -> None:
        self.name = name
        self.role = role
        self.worker_id = worker_id
        self.alive = True
        self.gateways: dict[GatewayId, GatewayStream] = {}  # by gateway: the stream that counts
        self.sizes = sizes
        self.runner = SimulatedRunner(sizes.num_slices, BLOCK_SIZE, late=sizes.depth > 0, groups=sizes.groups)
        if role is sizes.of_ranks:
            divide_among_ranks(self.runner, parts.group_memory)
        scheduler = (
            PrefillScheduler(sizes.chunk)
            if role is WorkerRole.PREFILL
            else parts.decode_scheduler(sizes.chunk, prefill_chunk=2)
        )
        engine = Engine(
            self.runner,
            scheduler,
            max_num_seqs=sizes.max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(),
            pipeline_depth=sizes.depth,
        )
        pool = engine.sequences.pool
        if sizes.groups is None:
            pool = BlockPool(sizes.num_blocks, parts.cache(sizes.num_blocks, BLOCK_SIZE))
        engine.sequences = parts.sequences(engine.sequences.batch, pool, engine._outputs, ())
        marks = parts.marks()
        producer, consumer = parts.producer(worker_id, marks), parts.consumer(LIMITS)
        self.core = parts.core(engine, worker_id, producer, consumer, marks)

    def __repr__(self) -> str:
        return f"{self.name}#{self.worker_id}"

    def candidate(self) -> Candidate:
        """This worker, for a plan."""
        return Candidate(
            id=self.worker_id,
            address=self.name,
            role=self.role,
            pairs_by=("", 1),
            transports=frozenset({"memory"}),
            block_size=BLOCK_SIZE,
            num_blocks=self.sizes.num_blocks,
            max_model_len=MAX_MODEL_LEN,
            load=Load(),
        )


@cache
def model_says(prompt: tuple[int, ...], count: int, groups: LayerGroups | None = None) -> tuple[int, ...]:
    """The tokens that follow a prompt."""
    return tuple(reference(list(prompt), count, groups=groups))


@dataclass(frozen=True)
class Ask:
    """What a client wants. stops_at: how many tokens until a stop token, or until the gateway sees a stop string."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_at: int | None = None
    stop_string_at: int | None = None
    timeout_s: float = 1000.0
    alone: bool = False  # on a decode worker, without handoff
    turn: int = 0
    num_choices: int = 1
    groups: LayerGroups | None = None  # of the model that is asked

    def expected(self) -> tuple[int, ...]:
        """All tokens of the answer."""
        tokens = model_says(self.prompt, self.max_tokens, self.groups)[: self.stop_string_at]
        stops = self._stop_token_ids()
        return next((tokens[: index + 1] for index, token in enumerate(tokens) if token in stops), tokens)

    def generation_request(self) -> GenerationRequest:
        """For the ledger."""
        sampling = SamplingParams(max_tokens=self.max_tokens, temperature=0, stop_token_ids=self._stop_token_ids())
        capsule = Capsule(np.array(self.prompt, dtype=np.int32), len(self.prompt), sampling)
        return GenerationRequest("", (capsule,) * self.num_choices, self.timeout_s, self.num_choices)

    def _stop_token_ids(self) -> tuple[int, ...]:
        return () if self.stop_token_at is None else (model_says(self.prompt, self.stop_token_at, self.groups)[-1],)


@dataclass(eq=False)
class Client:
    """A client of one choice; ended exactly once, in one way."""

    ask: Ask
    entry: LedgerEntry
    got: list[int] = field(default_factory=list)
    finished: bool = False
    left: bool = False  # went away itself, or its gateway died
    attempts: int = 0

    @property
    def ended(self) -> bool:
        """True when there is nothing to wait for."""
        return self.finished or self.left or self.entry.error() is not None

    def read(self, ledger: Ledger) -> None:
        """Takes what is there and compares it."""
        while not self.ended and (delta := self.entry.take()) is not None:
            self.got += delta.tokens
            expected = self.ask.expected()
            if self.ask.stop_string_at is not None and len(self.got) >= len(expected):
                del self.got[len(expected) :]
                ledger.close(self.entry)
                self.finished = True
            self._compare(expected)
            if delta.finish is not FinishReason.NONE:
                self.finished = True
        if self.finished and tuple(self.got) != self.ask.expected():
            raise Violation(f"an answer ended as {self.got}, not {self.ask.expected()}")

    def _compare(self, expected: tuple[int, ...]) -> None:
        if tuple(self.got) != expected[: len(self.got)]:
            raise Violation(f"a client got {self.got} of {expected}: wrong tokens")


class GatewayNode:
    """One life of a gateway."""

    def __init__(self, id: GatewayId, world: "World", aborts_prefill: bool) -> None:
        self.id = id
        self.alive = True
        self.workers: dict[WorkerId, GatewayStream] = {}  # the live streams
        self._clock = lambda: world.now
        self.ledger = Ledger(self._send, self._clock, _NoObserver(), CostModel())
        self.clients: list[Client] = []
        self.ask_of_handle: dict[int, Ask] = {}
        self._aborts_prefill = aborts_prefill

    def ask(self, ask: Ask) -> Client:
        """A client's request comes. Returns its first choice."""
        request = ask.generation_request()
        entries = [self.ledger.open(request, choice, _NoReader()) for choice in range(ask.num_choices)]
        clients = [Client(ask, entry) for entry in entries]
        self.clients += clients
        self._place(clients)
        self.look_after()
        return clients[0]

    def look_after(self) -> None:
        """Readers read, and requests without an attempt get one."""
        for client in self.open_clients():
            client.read(self.ledger)
            if not client.ended and client.entry.attempt is None:
                self._place([client])

    def open_clients(self) -> Iterator[Client]:
        """Those that still wait."""
        return (client for client in self.clients if not client.ended)

    def clock_moved(self, now: float) -> None:
        """Deadlines."""
        for client in list(self.open_clients()):
            if now >= client.entry.deadline:
                self.ledger.on_deadline(client.entry)
        self.look_after()

    def _place(self, clients: list[Client]) -> None:
        client = clients[0]
        ask, avoided = client.ask, client.entry.retries.still_avoided(self._clock())
        ready = [stream.worker.candidate() for id, stream in self.workers.items() if id not in avoided]
        prefills = sorted((worker for worker in ready if worker.role is WorkerRole.PREFILL), key=lambda w: w.id)
        decodes = sorted((worker for worker in ready if worker.role is WorkerRole.DECODE), key=lambda w: w.id)
        turn = ask.turn + client.attempts
        prefill = prefills[turn % len(prefills)] if prefills and not ask.alone else None
        decode = decodes[turn // 2 % len(decodes)] if decodes else None
        if prefill is not None and len(client.got) == ask.max_tokens - 1:
            decode = None
        elif decode is None:
            return
        for each in clients:
            each.attempts += 1
        before = self.ledger.highest_handle
        for handle in range(before + 1, before + 1 + handles_needed(len(clients))):
            self.ask_of_handle[handle] = ask
        self.ledger.start([each.entry for each in clients], Plan(prefill, decode))

    def _send(self, worker: WorkerId, command: Command) -> None:
        stream = self.workers.get(worker)
        if stream is None:
            return
        if not self._aborts_prefill and not isinstance(command, Submit) and stream.worker.role is WorkerRole.PREFILL:
            return
        stream.down.append(command)


class _NoReader:
    """An EntryListener. Clients look for themselves, and relay nothing."""

    def on_news(self, entry: LedgerEntry) -> None: ...

    def on_error(self, error: Exception) -> None:
        raise error


class _NoObserver:
    def attempt_started(self) -> None: ...

    def attempt_ended(self, reason: str) -> None: ...

    def blocks_moved(self, prefill: str, decode: str, moved: Moved) -> None: ...

    def handoff_ended(self, outcome: str, pair: tuple[str, str]) -> None: ...

    def handoff_failed(self, reason: EndReason, pair: tuple[str, str]) -> None: ...

    def cached_tokens(self, predicted: int, actual: int) -> None: ...
