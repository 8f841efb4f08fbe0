"""Starts attempts: asks the index who caches a prompt and the router for a plan, and has the ledger send it."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

import structlog

from services.gateway.api.generation import Overloaded, TooLarge
from services.gateway.api.records.attempt_record import AttemptRecord
from services.gateway.dispatch.costs import CostModel
from services.gateway.dispatch.decision import Decision
from services.gateway.dispatch.fleet import Fleet, Prefix
from services.gateway.dispatch.isolation import ASK_AGAIN_S, NONE_UNPROVEN, Isolation, count_unproven
from services.gateway.dispatch.ledger.entry import LedgerEntry
from services.gateway.dispatch.ledger.ledger import Ledger, handles_needed
from services.gateway.dispatch.overload import check_overload, expected_ttft_s
from services.gateway.dispatch.prefix_hits import PrefixHits
from services.gateway.dispatch.retry_budget import RetryBudget
from services.gateway.dispatch.router import (
    Candidate,
    Demand,
    NoPlan,
    Plan,
    Policy,
    fits,
    make_plan,
    runs_alone,
    uncached_tokens,
)
from services.gateway.dispatch.sessions import Sessions
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
        self._isolation = Isolation()
        self._sessions = Sessions()
        self._budget = RetryBudget(ledger.now)
        self.prefix_hits = PrefixHits()

    async def place(self, entries: Sequence[LedgerEntry]) -> NoPlan | None:
        """Starts the next attempt of entries that have the same tokens. Closes them when no worker is large enough.

        Returns why no attempt was started; None: it was, or the entries were closed meanwhile.
        """
        entry = entries[0]
        entry.retries.not_before = None
        look_up_began = monotonic()
        prefix = await self._fleet.look_up(entry.capsule())
        looked_up = monotonic()
        if entry.closed:
            return None
        if self._ledger.highest_handle + handles_needed(len(entries)) > MAX_HANDLE:
            self._begin_again()
        workload = self._ledger.workload
        self._fleet.deepen(prefix, workload.queued_blocks)
        suspects = self._ledger.suspects or entry.retries.suspect
        unproven = count_unproven(self._ledger) if suspects else NONE_UNPROVEN
        candidates = self._fleet.candidates(prefix.depths, workload, unproven)
        demand = self._demand(entry)
        plan = make_plan(candidates, demand, self._policy, self._turn, self._costs.figures())
        self._turn += 1
        if plan is NoPlan.TOO_LARGE:
            for entry in entries:
                self._ledger.close(entry, TooLarge("the request needs more KV memory than any worker has"))
        if plan is NoPlan.NOT_NOW:
            self._wait_for_isolation(entry, demand, candidates)
        if isinstance(plan, NoPlan):
            return plan
        if not entry.retries.number and not self._admits(entries, plan):
            return None
        if not self._may_retry(entry):
            return NoPlan.NOT_NOW
        self._observer.planned(plan.kind, plan.why)
        if self.prefix_hits.watched and not entry.retries.number:
            self._note_hit(entry, prefix, plan)
        most = self._fleet.most_choices(plan)
        blocks = self._fleet.missing_blocks(prefix, plan.computes)
        decision = None if entry.request.attempts.is_full else Decision(candidates, demand, plan)
        for first in range(0, len(entries), most):
            record = self._start(entries[first : first + most], plan, blocks if first == 0 else ())
            record.look_up_began, record.looked_up, record.decision = look_up_began, looked_up, decision
        self._fleet.placed(prefix, plan)
        if (session := entry.request.session) is not None and plan.decode is not None:
            self._sessions.note(session, plan.decode.id)
        return None

    def _admits(self, entries: Sequence[LedgerEntry], plan: Plan) -> bool:
        """Closes entries whose first token would come too late; returns whether there are none."""
        entry = entries[0]
        try:
            expected_s = expected_ttft_s(plan, entry.length, self._costs.figures())
            check_overload(entry, self._ledger, expected_s, self._ledger.now())
        except Overloaded as refused:
            for entry in entries:
                self._ledger.close(entry, refused)
            return False
        return True

    def _note_hit(self, entry: LedgerEntry, prefix: Prefix, plan: Plan) -> None:
        """Notes which cached prefix the worker that computes the prompt is to use, if any."""
        computes = plan.computes
        cached = entry.length - uncached_tokens(computes, entry.length)
        worker = self._fleet.get(computes.id)
        if cached and worker is not None and (chain := prefix.chains.get(worker.naming)):
            self.prefix_hits.note(chain[cached // computes.block_size - 1], cached, computes.address)

    def _may_retry(self, entry: LedgerEntry) -> bool:
        """Takes a retry out of the gateway's budget where the last attempt failed; False: the entry waits for one."""
        retries = entry.retries
        if not retries.number:
            self._budget.note_request()
        if not retries.failed or not (wait_s := self._budget.take()):
            return True
        retries.not_before = self._ledger.now() + wait_s
        return False

    def _demand(self, entry: LedgerEntry) -> Demand:
        now, retries, session = self._ledger.now(), entry.retries, entry.request.session
        return Demand(
            num_tokens=entry.length,
            one_token=entry.length + 1 == entry.max_len,
            too_small=frozenset(retries.too_small),
            avoid=retries.still_avoided(now),
            avoid_pairs=self._ledger.pairs.avoided(now) | retries.failed_pairs,
            without_handoff=retries.without_handoff,
            needs=entry.request.capsules[0].needs,
            stays_with=None if session is None else self._sessions.worker_of(session),
            suspect=retries.suspect,
            kept=self._isolation.kept(now),
        )

    def _wait_for_isolation(self, entry: LedgerEntry, demand: Demand, candidates: Sequence[Candidate]) -> None:
        """Lets an entry ask again soon where a suspect is in its way, or where it is one itself."""
        now = self._ledger.now()
        if demand.suspect:
            able = [worker for worker in candidates if fits(worker, demand) and runs_alone(worker, demand)]
            self._isolation.keep_one(able, now)
        if demand.suspect or demand.kept or any(worker.suspects for worker in candidates):
            entry.retries.not_before = now + ASK_AGAIN_S

    def _start(self, entries: Sequence[LedgerEntry], plan: Plan, blocks: Sequence[BlockHash]) -> AttemptRecord:
        record = self._ledger.start(entries, plan, blocks)
        if plan.pair is not None:
            self._ledger.pairs.note_tried(plan.pair, self._ledger.now())
        entry = entries[0]
        assert entry.attempt is not None
        log.info(
            "placed",
            request_id=entry.request.request_id,
            handle=entry.attempt.handle,
            choices=len(entries),
            attempt=entry.retries.number,
            tokens=entry.length,
            predicted_cached=entry.attempt.predicted_cached,
            prefill=plan.prefill.address if plan.prefill else None,
            decode=plan.decode.address if plan.decode else None,
            why=plan.why.value,
        )
        return record
