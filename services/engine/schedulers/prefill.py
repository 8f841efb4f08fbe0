"""The policy of prefill workers: by priority, then shortest remaining work first, with ageing.

Several prompts are in a step, and none is preempted.
"""

import numpy as np

from services.engine.schedulers.base import StepPlan, take_chunks
from services.engine.schedulers.priority import rank, rank_slots
from services.engine.sequences.admission import Admission
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request import Kind, Request
from services.engine.sequences.request_table import State
from services.engine.sequences.sequences import Sequences


class PrefillScheduler:
    """Admits a prompt with all its blocks and computes it in chunks, up to `max_num_batched_tokens` a step.

    The order among equal ranks is by remaining tokens less what a request has earned by waiting, so nothing starves.
    """

    def __init__(self, max_num_batched_tokens: int, *, tokens_per_waited_s: float = 2000.0) -> None:
        self._budget = max_num_batched_tokens
        self._tokens_per_waited_s = tokens_per_waited_s

    def accepts(self, request: Request) -> bool:
        """Accepts prompts to hand off or to embed, and requests that finish with their first token."""
        return request.kind in (Kind.PRODUCE, Kind.EMBED) or (
            request.kind is Kind.LOCAL and request.capsule.max_len - len(request.capsule.token_ids) == 1
        )

    def plan(self, sequences: Sequences, now: float) -> StepPlan:
        """Admits requests that fit, then takes chunks of prompts in order."""
        self.admit(sequences, now)
        batch = sequences.batch
        slots = batch.slots_in(Phase.PREFILL)
        remaining = batch.length[slots] - batch.computed[slots]
        waited = now - batch.arrival[slots]
        urgency = remaining - waited * self._tokens_per_waited_s
        order = np.lexsort((urgency, rank_slots(batch, slots, now)))
        return take_chunks(sequences, slots[order], self._budget)

    def admit(self, sequences: Sequences, now: float) -> None:
        """Admits the most urgent requests first, within each consumer's share of the pool.

        Requests of a consumer that has a quarter of the pool wait while a consumer below its own quarter waits. One
        prompt is always allowed. So a decode worker that releases slowly cannot keep others out.
        """
        if not sequences.batch.num_free_slots:
            return
        share = sequences.pool.num_blocks // 4
        requests = sequences.requests
        waiting = requests.in_state(State.WAITING)
        consumers = {request.paired_with for request in waiting}
        charged = {consumer: requests.blocks_charged_to(consumer) for consumer in consumers}
        for request in sorted(waiting, key=lambda request: self._urgency(request, now)):
            if charged[request.paired_with] >= share and any(blocks < share for blocks in charged.values()):
                continue
            if sequences.admit(request, now) is Admission.NO_ROOM:
                return
            charged[request.paired_with] = requests.blocks_charged_to(request.paired_with)

    def _urgency(self, request: Request, now: float) -> tuple[int, float]:
        return rank(request, now), request.work - (now - request.arrival) * self._tokens_per_waited_s
