"""Starts attempts: asks the index who caches a prompt and the router for a plan, and has the ledger send it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from services.gateway.api.generation import TooLarge
from services.gateway.dispatch.costs import CostModel
from services.gateway.dispatch.entry import LedgerEntry
from services.gateway.dispatch.fleet import Fleet
from services.gateway.dispatch.ledger import Ledger, handles_needed
from services.gateway.dispatch.router import Demand, NoPlan, Plan, Policy, make_plan
from services.protocol.block_hash import BlockHash
from services.protocol.messages import MAX_HANDLE

log = structlog.get_logger()


class PlacementObserver(Protocol):
    """Counts plans."""

    def planned(self, workers: str, why: str) -> None:
        """Counts a plan. `workers` is a PlanKind, `why` a Why."""


class Placement:
    """Places ledger entries on the workers of a fleet."""

    def __init__(
        self,
        ledger: Ledger,
        fleet: Fleet,
        policy: Policy,
        costs: CostModel,
        observer: PlacementObserver,
        begin_again: Callable[[], None],
    ) -> None:
        """`begin_again` is called when too few handles are left; it sets the ledger's highest one back to 0."""
        self._ledger = ledger
        self._fleet = fleet
        self._policy = policy
        self._costs = costs
        self._observer = observer
        self._begin_again = begin_again
        self._turn = 0

    async def place(self, entries: Sequence[LedgerEntry]) -> NoPlan | None:
        """Starts the next attempt of entries that have the same tokens. Closes them when no worker is large enough.

        Returns why no attempt was started; None: it was, or the entries were closed meanwhile.
        """
        entry = entries[0]
        prefix = await self._fleet.look_up(entry.capsule())
        if entry.closed:
            return None
        if self._ledger.highest_handle + handles_needed(len(entries)) > MAX_HANDLE:
            self._begin_again()
        workload = self._ledger.workload
        self._fleet.deepen(prefix, workload.queued_blocks)
        candidates = self._fleet.candidates(prefix.depths, workload)
        plan = make_plan(candidates, self._demand(entry), self._policy, self._turn, self._costs.figures())
        self._turn += 1
        if isinstance(plan, NoPlan):
            if plan is NoPlan.TOO_LARGE:
                for entry in entries:
                    self._ledger.close(entry, TooLarge("the request needs more KV memory than any worker has"))
            return plan
        self._observer.planned(plan.kind, plan.why)
        most = self._fleet.most_choices(plan)
        blocks = self._fleet.missing_blocks(prefix, plan.computes)
        for first in range(0, len(entries), most):
            self._start(entries[first : first + most], plan, blocks if first == 0 else ())
        self._fleet.placed(prefix, plan)
        return None

    def _demand(self, entry: LedgerEntry) -> Demand:
        return Demand(
            num_tokens=entry.length,
            one_token=entry.length + 1 == entry.max_len,
            larger_than=entry.retries.larger_than,
            avoid=entry.retries.still_avoided(self._ledger.now()),
        )

    def _start(self, entries: Sequence[LedgerEntry], plan: Plan, blocks: Sequence[BlockHash]) -> None:
        self._ledger.start(entries, plan, blocks)
        entry = entries[0]
        assert entry.attempt is not None
        log.info(
            "placed",
            request_id=entry.request.request_id,
            handle=entry.attempt.handle,
            choices=len(entries),
            attempt=entry.retries.attempts,
            tokens=entry.length,
            predicted_cached=entry.attempt.predicted_cached,
            prefill=plan.prefill.address if plan.prefill else None,
            decode=plan.decode.address if plan.decode else None,
            why=plan.why.value,
        )
