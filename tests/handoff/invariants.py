"""What must hold inside a worker after each event."""

from collections import Counter

import numpy as np

from kvtransfer.consumer import PostRead
from services.engine.batch_state import Phase
from services.engine.request import Kind
from tests.handoff.processes import Violation, WorkerProcess


def check_worker(worker: WorkerProcess, open_reads: list[PostRead]) -> None:
    """Raises Violation where blocks and requests do not agree."""
    sequences = worker.core.engine.sequences
    sequences.pool.check()
    _check_references(worker)
    _check_owners(worker)
    _check_pending_nodes(worker)
    _check_destinations(worker, open_reads)


def _check_references(worker: WorkerProcess) -> None:
    """Each block is referenced by exactly those who hold it: none is leaked, none freed twice."""
    sequences = worker.core.engine.sequences
    batch = sequences.batch
    holders: Counter[int] = Counter(sequences._held_back)
    for slot in np.flatnonzero(batch.phase != Phase.FREE).tolist():
        holders.update(batch.blocks(slot))
    for blocks in sequences._leased.values():
        holders.update(blocks)
    counted = {block: int(n) for block, n in enumerate(sequences.pool._references) if n}
    if counted != dict(holders):
        raise Violation(f"{worker} references {counted}, held are {dict(holders)}")


def _check_owners(worker: WorkerProcess) -> None:
    """Whoever holds blocks for a handoff is known to the side that will end it."""
    core = worker.core
    batch, sequences = core.engine.sequences.batch, core.engine.sequences
    producing, receiving = set(sequences._leased), set(sequences._parked)
    for slot in np.flatnonzero(batch.phase != Phase.FREE).tolist():
        if batch.is_producing(slot):
            producing.add(batch.request(slot).id)
        if batch.phase[slot] == Phase.RECEIVING:
            receiving.add(batch.request(slot).id)
    for request in sequences.waiting.values():
        if request.kind is not Kind.LOCAL:
            (producing if request.kind is Kind.PRODUCE else receiving).add(request.id)
    if producing - core._producer.open_ids or receiving - core._consumer.open_ids:
        raise Violation(f"{worker} holds what no handoff names: {producing} {receiving}")
    if core._producer.open_ids - producing or core._consumer.open_ids - receiving:
        raise Violation(f"{worker} has handoffs without a sequence: {core._producer.open_ids} {core._consumer.open_ids}")


def _check_pending_nodes(worker: WorkerProcess) -> None:
    """A pending node has an owner that is computing or reading its block."""
    sequences = worker.core.engine.sequences
    batch = sequences.batch
    owned = set()
    for slot in np.flatnonzero((batch.phase == Phase.PREFILL) | (batch.phase == Phase.RECEIVING)).tolist():
        owned |= set(batch.blocks(slot)[int(batch.num_ready[slot]) : int(batch.num_entered[slot])])
    pending = {block for block in range(sequences.pool.num_blocks) if sequences.cache.is_pending(block)}
    if pending != owned:
        raise Violation(f"{worker} has pending nodes {pending}, being made are {owned}")


def _check_destinations(worker: WorkerProcess, open_reads: list[PostRead]) -> None:
    """Where a read may still land there is nothing else: its own sequence, or quarantine."""
    sequences = worker.core.engine.sequences
    batch = sequences.batch
    users: Counter[int] = Counter(block for read in open_reads for block in read.destination)
    if any(n > 1 for n in users.values()):
        raise Violation(f"{worker} has two reads into one block")
    for slot in np.flatnonzero((batch.phase == Phase.PREFILL) | (batch.phase == Phase.DECODE)).tolist():
        if taken := set(batch.blocks(slot)) & set(users):
            raise Violation(f"{worker} uses blocks {taken}, to which an open read may still write")
    for block in users:
        if block not in sequences._held_back and not sequences.pool._references[block]:
            raise Violation(f"{worker} gave block {block} back, to which an open read may still write")
