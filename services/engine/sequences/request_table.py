"""Every request that the engine knows: one record each, which says in which state the request is.

    PARKED ──▶ WAITING ──▶ RUNNING ──▶ LEASED ──▶ removed
    (CONSUME:              │     ▲    (PRODUCE: blocks kept
    not announced)         ▼     │     for the consumer)
                          PREEMPTED

A request may be removed in any state. Only RUNNING and LEASED requests have blocks: a sequence takes all the blocks of
its known tokens at admission or none, so nothing ever waits while it has a part of what it needs.
"""

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from kvtransfer.ids import AttemptId, GatewayId, WorkerId
from services.engine.sequences.batch_state import BatchState, Phase
from services.engine.sequences.queued_groups import QueuedGroups
from services.engine.sequences.request import Request


class State(Enum):
    """The states of a request, from `Sequences.submit` until it is removed."""

    PARKED = auto()  # its producer has not announced blocks
    WAITING = auto()  # for admission
    PREEMPTED = auto()  # waits for admission again
    RUNNING = auto()  # occupies a slot; `BatchState.phase` says what the slot is doing
    LEASED = auto()  # is not computed any more; its blocks are kept for the consumer


_QUEUED = (State.PARKED, State.WAITING, State.PREEMPTED)


@dataclass(slots=True, eq=False)
class Record:
    """One request and its state."""

    request: Request
    state: State
    slot: int | None = None  # RUNNING: that it occupies
    leased: np.ndarray | None = None  # LEASED: int32[n] parts of blocks
    charged: int = 0  # PRODUCE: allocated slices that count towards its consumer's share of the pool


class RequestTable:
    """Records by id, and by state in the order in which they came to it."""

    def __init__(self) -> None:
        self._records: dict[AttemptId, Record] = {}
        self._in_state: dict[State, dict[AttemptId, Record]] = {state: {} for state in State}
        self._running, self._leased = self._in_state[State.RUNNING], self._in_state[State.LEASED]
        self.queued_groups = QueuedGroups()

    def __len__(self) -> int:
        return len(self._records)

    # Changes of state.

    def add(self, request: Request, state: State) -> None:
        """Adds a request that is PARKED or WAITING."""
        assert request.id not in self._records
        self._records[request.id] = self._in_state[state][request.id] = Record(request, state)
        self.queued_groups.add(request)

    def enqueue(self, id: AttemptId, num_announced: int = 1) -> None:
        """Makes a PARKED request WAITING, whose producer has announced leading blocks; unknown ids change nothing.

        For a request in any other state only their number is noted.
        """
        if (record := self._records.get(id)) is not None:
            record.request.announced = num_announced
            if record.state is State.PARKED:
                self._move(record, State.WAITING)

    def occupy(self, request: Request, slot: int, charged: int = 0) -> None:
        """Makes a request RUNNING, which is WAITING or PREEMPTED, or a branch that begins to exist."""
        if request.id not in self._records:
            self.add(request, State.WAITING)
        record = self._records[request.id]
        self._move(record, State.RUNNING)
        self.queued_groups.discard(request)
        record.slot, record.charged = slot, charged

    def preempt(self, request: Request) -> None:
        """Makes a RUNNING request PREEMPTED. request: the one with the same id that is to be admitted in its place."""
        record = self._records[request.id]
        self._move(record, State.PREEMPTED)
        record.request, record.slot, record.charged = request, None, 0
        self.queued_groups.add(request)

    def lease(self, id: AttemptId, parts: np.ndarray) -> None:
        """Makes a RUNNING request LEASED, with int32[n] parts of blocks."""
        record = self._records[id]
        self._move(record, State.LEASED)
        record.slot, record.leased = None, parts

    def remove(self, id: AttemptId) -> Record | None:
        """Removes a request; returns its last record, None for an unknown id."""
        record = self._records.pop(id, None)
        if record is not None:
            del self._in_state[record.state][id]
            self.queued_groups.discard(record.request)
        return record

    # Look-ups.

    def get(self, id: AttemptId) -> Record | None:
        """The record of a request; None for an unknown id."""
        return self._records.get(id)

    def slot_of(self, id: AttemptId) -> int | None:
        """The slot of a RUNNING request; None for any other id."""
        record = self._records.get(id)
        return None if record is None else record.slot

    def in_state(self, state: State) -> list[Request]:
        """The requests in a state, in the order in which they came to it; a copy."""
        return [record.request for record in self._in_state[state].values()]

    @property
    def ids(self) -> Set[AttemptId]:
        """The ids of all requests; a live view."""
        return self._records.keys()

    def ids_of(self, gateway: GatewayId) -> list[AttemptId]:
        """The ids of one gateway's requests."""
        return [id for id in self._records if id.gateway == gateway]

    @property
    def num_queued(self) -> int:
        """Requests without blocks."""
        return len(self._records) - self.num_with_blocks

    @property
    def num_with_blocks(self) -> int:
        """Requests that have blocks."""
        return len(self._running) + len(self._leased)

    def blocks_charged_to(self, consumer: WorkerId | None) -> int:
        """Slices allocated for one consumer, from admission to release; those that were cached do not count."""
        return sum(
            record.charged
            for state in (State.RUNNING, State.LEASED)
            for record in self._in_state[state].values()
            if record.charged and record.request.paired_with == consumer
        )

    def check(self, batch: BatchState) -> None:
        """Asserts that records, states and the slots of the batch agree. Slow; for tests and for an idle worker."""
        for state, records in self._in_state.items():
            assert all(self._records.get(id) is record for id, record in records.items()), f"{state}: a lost record"
            assert all(record.state is state for record in records.values()), f"{state}: a record of another state"
        assert sum(map(len, self._in_state.values())) == len(self._records), "a record in two states, or in none"
        for id, record in self._records.items():
            assert record.request.id == id, f"{id} has the request of {record.request.id}"
            assert (record.slot is not None) == (record.state is State.RUNNING), f"{id}: slot {record.slot}"
            assert (record.leased is not None) == (record.state is State.LEASED), f"{id}: blocks of a lease"
            assert record.slot is None or batch.requests[record.slot] is record.request, f"{id}: another's slot"
        self.queued_groups.check(request for state in _QUEUED for request in self.in_state(state))
        slots = sorted(record.slot for record in self._in_state[State.RUNNING].values() if record.slot is not None)
        assert slots == np.flatnonzero(batch.phase != Phase.FREE).tolist(), "slots that are occupied by no request"

    def _move(self, record: Record, state: State) -> None:
        id = record.request.id
        del self._in_state[record.state][id]
        record.state = state
        self._in_state[state][id] = record
