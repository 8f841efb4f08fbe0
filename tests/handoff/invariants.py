"""What must hold inside a worker after each event."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvtransfer.ids import AttemptId
from kvtransfer.transports.base import BlockRead
from services.engine.blocks.block_pool import BlockPool
from services.engine.blocks.sliced_pool import SlicedPool
from services.engine.runner.base import StepTokens
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request import Kind
from services.engine.sequences.request_table import State
from tests.handoff.processes import Violation, WorkerProcess

_COMPUTING, _DECODING, _RECEIVING = int(Phase.PREFILL), int(Phase.DECODE), int(Phase.RECEIVING)


@dataclass
class _Seen:
    """Who holds what, found by looking at every slot and queue."""

    holders: Counter[int]  # by part of a block, see `parts.py`
    in_use: set[int] = field(default_factory=set)  # parts that steps read and write
    being_made: set[int] = field(default_factory=set)  # blocks whose nodes must be pending
    producing: set[AttemptId] = field(default_factory=set)
    receiving: set[AttemptId] = field(default_factory=set)


def check_worker(worker: WorkerProcess, open_reads: list[BlockRead]) -> None:
    """Raises Violation where blocks and requests do not agree."""
    seen = _look(worker)
    _check_places(worker)
    _check_references(worker, seen)
    _check_steps(worker, seen)
    _check_owners(worker, seen)
    _check_pending_nodes(worker, seen)
    _check_destinations(worker, seen, open_reads)


def _look(worker: WorkerProcess) -> _Seen:
    sequences = worker.core.engine.sequences
    batch = sequences.batch
    requests = sequences.requests
    leased, parked = requests.in_state(State.LEASED), requests.in_state(State.PARKED)
    pool = sequences.pool
    quarantined = np.array(sorted(sequences.tables._quarantined), dtype=np.int32)
    seen = _Seen(Counter(pool.parts.parts_with(quarantined).tolist()))
    seen.producing.update(request.id for request in leased)
    seen.receiving.update(request.id for request in parked)
    for slot, phase in enumerate(batch.phase.tolist()):
        if not phase:
            continue
        blocks, request = batch.blocks(slot), batch.request(slot)
        held = pool.parts.referenced(batch.table(slot), batch.unseen[slot]).tolist()
        seen.holders.update(held)
        if phase == _RECEIVING:
            seen.receiving.add(request.id)
        else:
            seen.in_use.update(held)
        if request.kind is Kind.PRODUCE:
            seen.producing.add(request.id)
        if phase != _DECODING:
            seen.being_made.update(blocks[int(batch.num_ready[slot]) : int(batch.num_entered[slot])])
    leases = [record.leased for record in requests._records.values() if record.leased is not None]
    for referenced in (*leases, *(blocks for _, blocks, _ in sequences.frees._waiting)):
        seen.holders.update(referenced.tolist())
    for step in worker.runner._launched:
        seen.in_use.update(_parts_in_use(pool, step.tokens))
    for request in requests.in_state(State.WAITING):
        if request.kind is Kind.PRODUCE:
            seen.producing.add(request.id)
        elif request.kind is Kind.CONSUME:
            seen.receiving.add(request.id)
    return seen


def _parts_in_use(pool: BlockPool, step: StepTokens) -> set[int]:
    """What a step reads and writes."""
    found: set[int] = set()
    size = pool.cache.block_size
    for table, seq_len, count in zip(step.block_tables, step.seq_lens, np.diff(step.query_starts), strict=True):
        num_blocks = -(-int(seq_len) // size)
        if isinstance(pool, SlicedPool):
            rows = table.reshape(pool.parts.slices_per_block, -1).T[:num_blocks]
            seen = pool.parts.wanted(num_blocks, pool.parts.unseen(int(seq_len - count)))
            found.update(pool.parts.part_of[rows[seen]].tolist())
        else:
            found.update(table[:num_blocks].tolist())
    return found


def _check_places(worker: WorkerProcess) -> None:
    """Each block is in one place, and the prefix trie is a tree."""
    try:
        worker.core.engine.sequences.check()
    except AssertionError as error:
        raise Violation(f"{worker} has blocks out of place: {error}") from error


def _check_references(worker: WorkerProcess, seen: _Seen) -> None:
    """Each block is referenced by exactly those who hold it: none is leaked, none freed twice."""
    counted = {block: n for block, n in enumerate(worker.core.engine.sequences.pool._references.tolist()) if n}
    if counted != dict(seen.holders):
        raise Violation(f"{worker} references {counted}, held are {dict(seen.holders)}")


def _check_steps(worker: WorkerProcess, seen: _Seen) -> None:
    """What a step uses, also one that is under way, is held by somebody."""
    if loose := seen.in_use - set(seen.holders):
        raise Violation(f"{worker} gave blocks {loose} back, which a step still uses")


def _check_owners(worker: WorkerProcess, seen: _Seen) -> None:
    """Whoever holds blocks for a handoff is known to the side that will end it."""
    core = worker.core
    if nameless := (seen.producing - core._state.producer.open_ids) | (seen.receiving - core._state.consumer.open_ids):
        raise Violation(f"{worker} holds {nameless}, which no handoff names")
    if empty := core._state.consumer.open_ids - seen.receiving:
        raise Violation(f"{worker} receives {empty} without a sequence")


def _check_pending_nodes(worker: WorkerProcess, seen: _Seen) -> None:
    """A pending node has an owner that is computing or reading its block."""
    cache = worker.core.engine.sequences.pool.cache
    pending = {block for block in range(len(cache.is_node)) if cache.is_pending(block)}
    if pending != seen.being_made:
        raise Violation(f"{worker} has pending nodes {pending}, being made are {seen.being_made}")


def _check_destinations(worker: WorkerProcess, seen: _Seen, open_reads: list[BlockRead]) -> None:
    """Where a read may still land there is nothing else: its own sequence, or quarantine."""
    slices = [block for read in open_reads for block in read.destination.tolist()]
    if len(set(slices)) != len(slices):
        raise Violation(f"{worker} has two reads into one block")
    pool = worker.core.engine.sequences.pool
    destinations = pool.parts.part_of[slices].tolist() if isinstance(pool, SlicedPool) else slices
    if taken := seen.in_use.intersection(destinations):
        raise Violation(f"{worker} uses blocks {taken}, to which an open read may still write")
    if given := set(destinations) - set(seen.holders):
        raise Violation(f"{worker} gave {given} back, to which an open read may still write")
