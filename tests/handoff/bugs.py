"""Bugs that the tests must find, each planted by replacing one rule of a shipped class."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kvtransfer.block_memory import GroupBlocks
from kvtransfer.consumer import Consumer
from kvtransfer.handles import HandleMarks
from kvtransfer.ids import AttemptId, GatewayId, WorkerId
from kvtransfer.messages import EndReason
from kvtransfer.producer import Producer
from kvtransfer.transports.base import ReadEnd
from services.engine.blocks.block_pool import BlockPool
from services.engine.blocks.prefix_cache import NO_BLOCK, PrefixCache
from services.engine.engine import Engine
from services.engine.schedulers.base import StepPlan
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.admission import Admitter
from services.engine.sequences.batch_state import BatchState, Phase
from services.engine.sequences.block_tables import BlockTables
from services.engine.sequences.cache_nodes import CacheNodes
from services.engine.sequences.outputs import EngineOutputs
from services.engine.sequences.request import Kind, Request
from services.engine.sequences.sequences import Sequences
from services.protocol.capsule import Capsule
from services.protocol.contents import COMMON, NO_MARKS, Namespace
from services.worker.core.core import WorkerCore
from services.worker.core.inputs import FromGateways
from tests.handoff.processes import Parts


class _TrustingConsumer(Consumer):
    """Takes whatever generation words a read brings."""

    def read_ended(self, end: ReadEnd, now: float) -> None:
        if end.generations is not None:
            end = replace(end, generations=self.reads._reads[end.read_id].read.generations)
        super().read_ended(end, now)


class _PatientConsumer(Consumer):
    """Waits for a read for as long as it takes."""

    def tick(self, now: float) -> None:
        for read in self._progress._reads.values():
            read.posted = now
        super().tick(now)


class _ConsumerThatThinksStalledIsOver(Consumer):
    """Takes it that nothing lands any more of a read that stood still."""

    def _end(self, id: AttemptId, now: float, *, report: EndReason | None) -> None:
        if report is EndReason.STALLED:
            self._handoffs[id].reads.clear()
        super()._end(id, now, report=report)


class _SequencesWithoutQuarantine(Sequences):
    """Frees blocks although a read may still write to them."""

    def free(self, id: AttemptId, quarantined: tuple[int, ...] = ()) -> None:
        super().free(id)

    def free_quarantined(self, blocks: tuple[int, ...]) -> None:
        """They were freed before."""


class _MarksPerStream(FromGateways):
    """What a gateway's older streams told is forgotten with them."""

    def hello(self, gateway: GatewayId, highest_handle: int) -> None:
        self._state.marks._highest.pop(gateway, None)
        self._state.frames.gateways.add(gateway)


class _CoreWithMarksPerStream(WorkerCore):
    def __init__(
        self, engine: Engine, worker_id: WorkerId, producer: Producer, consumer: Consumer, marks: HandleMarks
    ) -> None:
        super().__init__(engine, worker_id, producer, consumer, marks)
        self.from_gateways = _MarksPerStream(self._state)


class _LastingNodes(PrefixCache):
    """A pending node is removed by nobody."""

    def remove(self, block: int) -> None:
        if not self.is_pending(block):
            super().remove(block)


class _TrieThatLinksTwice(PrefixCache):
    """A block that several sequences enter is linked as often."""

    def insert(
        self,
        parents: list[int],
        blocks: list[int],
        token_ids: np.ndarray,
        *,
        pending: bool,
        namespace: Namespace = COMMON,
        marks: Mapping[int, bytes] = NO_MARKS,
    ) -> dict[int, int]:
        entered = {block for block in blocks if self.contains(block)}
        twins = super().insert(parents, blocks, token_ids, pending=pending, namespace=namespace, marks=marks)
        for index, (parent, block) in enumerate(zip(parents, blocks, strict=True)):
            if block in entered and index not in twins:
                first = self._first_child[parent]
                self._first_child[parent] = self._previous_sibling[first] = block
                self._next_sibling[block], self._previous_sibling[block] = first, NO_BLOCK
            entered.add(block)
        return twins


class _ChunkwiseTables(BlockTables):
    def allocate(self, cached: np.ndarray, num_blocks: int, watermark: int, unseen: np.ndarray) -> np.ndarray | None:
        return super().allocate(cached, max(num_blocks, len(cached)), watermark, unseen)


class _ChunkwiseNodes(CacheNodes):
    def enter_prompt(self, capsule: Capsule, blocks: np.ndarray, num_cached: int) -> int:
        token_ids = capsule.token_ids[: len(blocks) * self._batch.block_size]
        return super().enter_prompt(replace(capsule, token_ids=token_ids), blocks, num_cached)


class _ChunkwiseAdmitter(Admitter):
    chunkwise = False

    def blocks_needed(self, request: Request) -> int:
        one = self.chunkwise and request.kind is Kind.LOCAL and not request.branches
        return 1 if one else super().blocks_needed(request)


class _ChunkwiseSequences(Sequences):
    """A local prompt is admitted with one block, where the scheduler then gets it the others."""

    def __init__(
        self, batch: BatchState, pool: BlockPool, outputs: EngineOutputs, eos_token_ids: tuple[int, ...]
    ) -> None:
        super().__init__(batch, pool, outputs, eos_token_ids)
        self.tables = _ChunkwiseTables(batch, pool, self.frees, None)
        self.nodes = _ChunkwiseNodes(batch, pool, self.frees)
        self._admitter = self.admitter = _ChunkwiseAdmitter(
            batch, self.requests, self.tables, self.nodes, self.branches, eos_token_ids
        )


class _ChunkwiseScheduler(DecodeScheduler):
    """A local prompt gets further blocks chunk by chunk."""

    def admit(self, sequences: Sequences, now: float) -> None:
        assert isinstance(sequences, _ChunkwiseSequences)
        sequences.admitter.chunkwise = True
        super().admit(sequences, now)

    def plan(self, sequences: Sequences, now: float) -> StepPlan:
        assert isinstance(sequences, _ChunkwiseSequences)
        sequences.admitter.chunkwise = True
        plan = super().plan(sequences, now)
        has_room = [
            self._has_room(sequences, slot, count)
            for slot, count in zip(plan.slots.tolist(), plan.counts.tolist(), strict=True)
        ]
        return StepPlan(plan.slots[has_room], plan.counts[has_room]) if len(plan) else plan

    def _has_room(self, sequences: Sequences, slot: int, count: int) -> bool:
        batch = sequences.batch
        there = int(batch.num_blocks[slot])
        missing = -(-(int(batch.computed[slot]) + count) // batch.block_size) - there
        if batch.phase[slot] != Phase.PREFILL or missing <= 0:
            return True
        fresh = sequences.pool.allocate(missing)
        if fresh is None:
            return False
        batch.block_table[slot, there : there + missing] = fresh
        batch.num_blocks[slot] += missing
        return True


class _OneRanksPool(GroupBlocks):
    """The bytes of the second rank are not written."""

    def write(self, blocks: np.ndarray, start: int, data: bytes | memoryview) -> None:
        self._written_to = self._written_to[:1]
        super().write(blocks, start, data)


NO_GENERATION_CHECK = Parts(consumer=_TrustingConsumer)
NO_READ_BOUND = Parts(consumer=_PatientConsumer)
STALLED_IS_OVER = Parts(consumer=_ConsumerThatThinksStalledIsOver)
NO_QUARANTINE = Parts(sequences=_SequencesWithoutQuarantine)
MARK_PER_STREAM = Parts(core=_CoreWithMarksPerStream)
ABORT_TO_DECODE_ONLY = Parts(aborts_prefill=False)
LOST_IS_DEAD = Parts(lost_is_dead=True)
LASTING_PENDING_NODES = Parts(cache=_LastingNodes)
LINKED_TWICE = Parts(cache=_TrieThatLinksTwice)
ONE_RANKS_POOL = Parts(group_memory=_OneRanksPool)
CHUNKWISE_BLOCKS = Parts(sequences=_ChunkwiseSequences, decode_scheduler=_ChunkwiseScheduler)
