"""Overload: refuses a request whose first token would come too late, before any work is done for it.

The expected time follows from the queue of the worker that the router has chosen and from what the cost model has
learned. A request for a worker without a queue is never refused, so there is always something to learn from.

Tenants share by tokens. While several have requests in flight, one with more than an equal share of the tokens may use
half of the time for which a request may wait; so there is room when another one comes.
"""

import math
from collections import Counter
from collections.abc import Iterable

from services.config import WorkerRole
from services.gateway.api.generation import Overloaded, Refusal
from services.gateway.dispatch.ledger.entry import LedgerEntry
from services.gateway.dispatch.router import Figures, Plan, queued_tokens, uncached_tokens

_OVER_SHARE = 0.5  # of the time that others may wait
_LONGEST_RETRY_S = 60


def expected_ttft_s(plan: Plan, num_tokens: int, figures: Figures) -> float | None:
    """The expected time to the first token by a plan, in seconds; None: there is no queue, or nothing was learned."""
    worker = plan.computes
    decodes = worker.role is WorkerRole.DECODE
    line = figures.first_at_decode if decodes else figures.first_at_prefill
    if line is None or not (queued_tokens(worker) or worker.load.waiting):
        return None
    slots_s = worker.load.waiting * figures.slot_s if decodes and figures.slot_s is not None else 0.0
    return slots_s + line.at(queued_tokens(worker) + uncached_tokens(worker, num_tokens))


def check_overload(entry: LedgerEntry, others: Iterable[LedgerEntry], expected_s: float | None, now: float) -> None:
    """Raises Overloaded where the first token is expected too late. `others` are all entries in flight."""
    left_s, slo_s = entry.deadline - now, entry.request.ttft_slo_s
    limit_s, refusal = (left_s, Refusal.DEADLINE) if slo_s is None or slo_s > left_s else (slo_s, Refusal.SLO)
    if expected_s is None or expected_s <= _OVER_SHARE * limit_s:
        return
    if _has_more_than_its_share(entry, others):
        limit_s, refusal = _OVER_SHARE * limit_s, Refusal.SHARE
    if expected_s > limit_s:
        retry_after_s = min(_LONGEST_RETRY_S, max(1, math.ceil(expected_s - limit_s)))
        message = f"the first token is expected in {expected_s:.3g} s, and the limit is {limit_s:.3g} s"
        raise Overloaded(message, retry_after_s, refusal)


def _has_more_than_its_share(entry: LedgerEntry, others: Iterable[LedgerEntry]) -> bool:
    """True when the tenant has more tokens in flight than an equal share, and another tenant has some."""
    tokens: Counter[str] = Counter()
    for other in others:
        if other.attempt is not None:
            tokens[other.request.tenant] += other.length
    return len(tokens) > 1 and tokens[entry.request.tenant] * len(tokens) > tokens.total()
