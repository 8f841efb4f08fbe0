"""The choice of a request's workers, kept to be explained: nothing is computed for it until somebody asks."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.config import WorkerRole
from services.gateway.dispatch.router import (
    Candidate,
    Demand,
    Plan,
    can_pair,
    cost,
    fits,
    lacks,
    queued_tokens,
    uncached_tokens,
    why_not_ready,
)


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan, and what it was made from."""

    candidates: Sequence[Candidate]
    demand: Demand
    plan: Plan

    def describe(self) -> dict[str, object]:
        """The figures that decided, and each worker with its cost and the reason why it lost, as JSON values."""
        plan = self.plan
        return {
            "why": plan.why.value,
            "expected_s": {"pair": plan.pair_s, "alone": plan.alone_s},
            "candidates": [self._describe(worker) for worker in self.candidates],
        }

    def _describe(self, worker: Candidate) -> dict[str, object]:
        num_tokens = self.demand.num_tokens
        uncached = uncached_tokens(worker, num_tokens)
        return {
            "worker": worker.address,
            "role": worker.role.value,
            "cached_tokens": num_tokens - uncached,
            "queued_tokens": queued_tokens(worker),
            "sequences": max(worker.load.running + worker.load.waiting, worker.assigned),
            "cost": cost(worker, num_tokens),
            "verdict": self._verdict(worker),
        }

    def _verdict(self, worker: Candidate) -> str:
        plan, demand = self.plan, self.demand
        if worker.id in [chosen.id for chosen in plan.workers()]:
            return "chosen"
        if (lack := lacks(worker, demand)) is not None:
            return lack
        if not fits(worker, demand):
            return "too small"
        if (reason := why_not_ready(worker, demand)) is not None:
            return reason
        rival = plan.prefill if worker.role is WorkerRole.PREFILL else plan.decode
        if rival is None:
            return f"no {worker.role.value} worker is wanted: {plan.why.value}"
        if plan.split and not self._pairs(worker):
            return "no handoff with the other worker that was chosen"
        if rival.id == demand.stays_with:
            return "its session is at the other worker"
        least, own = cost(rival, demand.num_tokens), cost(worker, demand.num_tokens)
        return "costs more" if own > least else "another's turn among equals" if own == least else "its pair costs more"

    def _pairs(self, worker: Candidate) -> bool:
        prefill, decode = self.plan.prefill, self.plan.decode
        assert prefill is not None
        assert decode is not None
        if worker.role is WorkerRole.PREFILL:
            return can_pair(worker, decode, self.demand)
        return can_pair(prefill, worker, self.demand)
