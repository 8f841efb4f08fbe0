"""Bugs that the tests must find, each planted by replacing one rule of a shipped class."""

from dataclasses import replace

import numpy as np

from kvtransfer.consumer import Consumer
from kvtransfer.ids import AttemptId, GatewayId
from kvtransfer.transports.base import ReadEnd
from services.decode.scheduler import DecodeScheduler
from services.engine.batch_state import BatchState, Phase
from services.engine.block_pool import BlockPool
from services.engine.prefix_cache import NO_BLOCK, PrefixCache
from services.engine.request import Kind, Request
from services.engine.scheduler import Plan
from services.engine.sequences import Sequences
from services.worker.core import WorkerCore
from tests.handoff.processes import Parts


class _TrustingConsumer(Consumer):
    """Takes whatever generation words a read brings."""

    def read_ended(self, end: ReadEnd, now: float) -> None:
        read = self._reads[end.read_id]
        row = self._handoffs.get(read.id)
        if row is not None and end.generations is not None:
            end = replace(end, generations=np.array(row.generations[read.start : read.end], dtype=np.uint64))
        super().read_ended(end, now)


class _SequencesWithoutQuarantine(Sequences):
    """Frees blocks although a read may still write to them."""

    def free(self, id: AttemptId, quarantined: tuple[int, ...] = ()) -> None:
        super().free(id)

    def free_quarantined(self, blocks: tuple[int, ...]) -> None:
        """They were freed before."""


class _CoreWithMarksPerStream(WorkerCore):
    """What a gateway's older streams told is forgotten with them."""

    def gateway_hello(self, gateway: GatewayId, highest_handle: int) -> None:
        self._marks._highest.pop(gateway, None)
        self._gateways.add(gateway)


class _LastingNodes(PrefixCache):
    """A pending node is removed by nobody."""

    def remove(self, block: int) -> None:
        if not self.is_pending(block):
            super().remove(block)


class _SequencesWithLastingNodes(Sequences):
    def __init__(self, batch: BatchState, num_blocks: int, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__(batch, num_blocks, eos_token_ids)
        self.cache = _LastingNodes(num_blocks, batch.block_size)
        self.pool = BlockPool(num_blocks, self.cache)


class _TrieThatLinksTwice(PrefixCache):
    """A block that several sequences enter is linked as often."""

    def insert(self, parents: list[int], blocks: list[int], token_ids: np.ndarray, *, pending: bool) -> dict[int, int]:
        entered = {block for block in blocks if self.contains(block)}
        twins = super().insert(parents, blocks, token_ids, pending=pending)
        for index, (parent, block) in enumerate(zip(parents, blocks, strict=True)):
            if block in entered and index not in twins:
                first = self._first_child[parent]
                self._first_child[parent] = self._previous_sibling[first] = block
                self._next_sibling[block], self._previous_sibling[block] = first, NO_BLOCK
            entered.add(block)
        return twins


class _SequencesThatLinkTwice(Sequences):
    def __init__(self, batch: BatchState, num_blocks: int, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__(batch, num_blocks, eos_token_ids)
        self.cache = _TrieThatLinksTwice(num_blocks, batch.block_size)
        self.pool = BlockPool(num_blocks, self.cache)


class _ChunkwiseSequences(Sequences):
    """A local prompt is admitted with one block, where the scheduler then gets it the others."""

    chunkwise = False

    def blocks_needed(self, request: Request) -> int:
        one = self.chunkwise and request.kind is Kind.LOCAL and not request.branches
        return 1 if one else super().blocks_needed(request)

    def _take_blocks(self, held: np.ndarray, needed: int, watermark: int) -> np.ndarray | None:
        return super()._take_blocks(held, max(needed, len(held)), watermark)

    def _enter_pending(self, token_ids: np.ndarray, blocks: np.ndarray, start: int) -> int:
        return super()._enter_pending(token_ids[: len(blocks) * self.batch.block_size], blocks, start)


class _ChunkwiseScheduler(DecodeScheduler):
    """A local prompt gets further blocks chunk by chunk."""

    def admit(self, sequences: Sequences, now: float) -> None:
        assert isinstance(sequences, _ChunkwiseSequences)
        sequences.chunkwise = True
        super().admit(sequences, now)

    def plan(self, sequences: Sequences, now: float) -> Plan:
        assert isinstance(sequences, _ChunkwiseSequences)
        sequences.chunkwise = True
        plan = super().plan(sequences, now)
        has_room = [
            self._has_room(sequences, slot, count)
            for slot, count in zip(plan.slots.tolist(), plan.counts.tolist(), strict=True)
        ]
        return Plan(plan.slots[has_room], plan.counts[has_room]) if len(plan) else plan

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


NO_GENERATION_CHECK = Parts(consumer=_TrustingConsumer)
NO_QUARANTINE = Parts(sequences=_SequencesWithoutQuarantine)
MARK_PER_STREAM = Parts(core=_CoreWithMarksPerStream)
ABORT_TO_DECODE_ONLY = Parts(aborts_prefill=False)
LOST_IS_DEAD = Parts(lost_is_dead=True)
LASTING_PENDING_NODES = Parts(sequences=_SequencesWithLastingNodes)
LINKED_TWICE = Parts(sequences=_SequencesThatLinkTwice)
CHUNKWISE_BLOCKS = Parts(sequences=_ChunkwiseSequences, decode_scheduler=_ChunkwiseScheduler)
