"""The worker without threads and I/O: the engine and both sides of all handoffs, joined.

              from_gateways   from_consumers   from_producers        inputs: method calls
                        │            │              │
    read_ended, tick ──▶└────────  state  ──────────┘◀── reserve, step
                                     │
                               take_outputs                          frames, messages, reads

Everything that owns a block is in here, on one thread, so there is no moment at which two parts disagree about its
owner. Times are those of one monotonic clock, in seconds.
"""

from collections.abc import Callable, Set

from kvtransfer.consumer import Consumer
from kvtransfer.handles import HandleMarks
from kvtransfer.ids import AttemptId, WorkerId
from kvtransfer.producer import Producer
from kvtransfer.transports.base import ReadEnd
from services.engine.engine import Engine
from services.engine.runner.base import RankGroup
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request_table import State
from services.process.gc_watch import GcWatch
from services.protocol.frames import Failure, Load
from services.protocol.outcomes import FailureCode
from services.worker.core.inputs import FromConsumers, FromGateways, FromProducers
from services.worker.core.state import CoreOutputs, CoreState
from services.worker.drain import Drain


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
        group: RankGroup | None = None,
    ) -> None:
        self.engine = engine
        self.worker_id = worker_id
        self.bytes_moved = 0
        self._state = state = CoreState(engine, producer, consumer, marks)
        self.from_gateways = FromGateways(state)
        self.from_consumers = FromConsumers(state)
        self.from_producers = FromProducers(state)
        self._gc_watch, self._group = gc_watch, group

    # Inputs from the transport and the clock.

    def read_ended(self, end: ReadEnd, now: float) -> None:
        """Takes the end of a read, which brought its blocks or failed."""
        if end.generations is not None:
            self.bytes_moved += len(end.generations) * self.engine.runner.layout.block_bytes
        self._state.consumer.read_ended(end, now)
        self._state.settle(now)

    def tick(self, now: float) -> None:
        """Ends handoffs and requests whose time is up."""
        self._state.producer.tick(now)
        self._state.consumer.tick(now)
        self.engine.sequences.fail_expired(now)
        self._state.settle(now)
        if self._state.drain is not None:
            self._move_attempts(self._state.drain, now)

    def _move_attempts(self, drain: Drain, now: float) -> None:
        """Fails the attempts whose time has come in a drain, for their gateways to continue them elsewhere."""
        state = self._state
        for id in drain.due(self.open_ids, self._tokens_left, now):
            state.fail(id, Failure(id.handle, FailureCode.DRAINING, "the worker drains"), now)
            state.abort(id, now)
            state.outputs.num_moved += 1
        state.settle(now)

    def _tokens_left(self, id: AttemptId) -> int:
        """Returns how many tokens this worker may still compute for a request; 0: its blocks wait for their reader."""
        sequences = self.engine.sequences
        record = sequences.requests.get(id)
        if record is None or record.state is State.LEASED:
            return 0
        length = 0 if record.slot is None else int(sequences.batch.length[record.slot])
        return record.request.capsule.max_len - length

    # The engine.

    def reserve(self, now: float) -> None:
        """Admits requests that were enqueued since the last time, so that their reads begin before the next step.

        Prompts of our own are then no longer waiting, where there is room for them: see `only_decodes`.
        """
        if self._state.may_admit:
            self._state.may_admit = False
            self.engine.admit(now)
            self._state.settle(now)

    def step(self, now: float, on_computing: Callable[[], None] | None = None) -> bool:
        """Does `Engine.step`; returns False when there was nothing to compute."""
        stepped = self.engine.step(now, on_computing)
        self._state.settle(now)
        return stepped

    def grammar_compiled(self) -> None:
        """Lets requests be admitted that waited for a grammar."""
        self._state.may_admit = True

    # Outputs.

    def take_outputs(self, now: float, *, heartbeat: bool = False) -> CoreOutputs:
        """Takes everything since the last call, with frames for gateways that have something to hear or are new.

        heartbeat: with frames for all gateways.
        """
        state = self._state
        outputs, state.outputs = state.outputs, CoreOutputs()
        outputs.block_events = self.engine.sequences.pool.cache.take_events()
        outputs.drained = state.drain is not None and self.idle
        state.times.report_rows(state.frames.rows, state.frames, now)
        if heartbeat and state.times:
            state.times.retain(self.open_ids)
        outputs.frames = state.frames.take(self.load, to_all=heartbeat)
        return outputs

    def load(self) -> Load:
        """Says how much there is to do here, for routers."""
        sequences, experts = self.engine.sequences, self.engine.expert_imbalance
        batch, imbalance = sequences.batch, None if experts is None else experts.latest
        of_ranks = None if experts is None else experts.latest_of_ranks
        slowest = None if self._group is None else self._group.slowest_rank
        slices_per_block = sequences.pool.parts.slices_per_block
        return Load(
            running=batch.max_num_seqs - batch.num_free_slots,
            waiting=sequences.requests.num_queued,
            waiting_tokens=sequences.waiting_tokens,
            available_blocks=sequences.pool.available // slices_per_block,
            quarantined_blocks=-(-sequences.tables.num_quarantined // slices_per_block),
            avoid=tuple(sorted(self._state.consumer.avoid())),
            bytes_moved=self.bytes_moved,
            gc_collections=0 if self._gc_watch is None else self._gc_watch.num_collections,
            gc_pause_us=0 if self._gc_watch is None else round(self._gc_watch.pause_s * 1e6),
            draining=self._state.drain is not None,
            computed_tokens=self.engine.computed_tokens,
            not_finite=self.engine.num_not_finite,
            evicted_blocks=sequences.pool.num_evicted,
            worst_expert_imbalance=None if imbalance is None else imbalance.worst,
            mean_expert_imbalance=None if imbalance is None else imbalance.mean,
            worst_rank_imbalance=None if of_ranks is None else of_ranks.worst,
            mean_rank_imbalance=None if of_ranks is None else of_ranks.mean,
            slowest_rank=None if slowest is None else slowest.rank,
            waited_for_slowest_rank=None if slowest is None else slowest.waited,
        )

    # Questions.

    @property
    def open_ids(self) -> Set[AttemptId]:
        """Every request that this worker knows; no others have blocks, quarantine aside."""
        state = self._state
        return state.producer.open_ids | state.consumer.open_ids | self.engine.sequences.requests.ids

    @property
    def idle(self) -> bool:
        """True when no request is known."""
        state = self._state
        return state.producer.idle and not state.consumer.open_ids and not self.engine.sequences.requests.ids

    @property
    def is_awaited(self) -> bool:
        """True when another worker or the transport waits for the outputs so far."""
        return self._state.outputs.are_awaited

    @property
    def only_decodes(self) -> bool:
        """True when there is something to decode, and no prompt that a next step would compute beside it."""
        slots_in = self.engine.sequences.batch.slots_in
        return bool(len(slots_in(Phase.DECODE))) and not len(slots_in(Phase.PREFILL))

    @property
    def has_leases(self) -> bool:
        """True while blocks of ours may be read."""
        return not self._state.producer.idle

    @property
    def has_open_reads(self) -> bool:
        """True while reads of ours are open, abandoned or not."""
        return len(self._state.consumer.reads) > 0

    def why_start_afresh(self, now: float) -> str | None:
        """Says, for a person, why this worker cannot go on; None: it can."""
        quarantine = self._state.consumer.reads.quarantine
        return quarantine.why_start_afresh(now, self.engine.sequences.pool.num_blocks)
