"""The life of a request in the engine: queued, admitted, preempted, leased, finished or failed.

Mechanism only; when to do what is the schedulers' policy. Each part of a request's state has one owner:

    requests   its state and its slot                       RequestTable
    batch      the arrays that a step reads, by slot        BatchState
    branches   choices that wait for their prompt           Branches
    tables     allocated and freed blocks, quarantine       BlockTables
    frees      blocks that a step under way may still use   DeferredFrees
    nodes      its blocks in the prefix cache               CacheNodes
    pool       references to blocks                         BlockPool, with its PrefixCache
"""

from dataclasses import replace

import numpy as np

from kvtransfer.ids import AttemptId
from services.engine.blocks.block_pool import BlockPool
from services.engine.blocks.deferred_frees import DeferredFrees
from services.engine.sequences.admission import Admission, Admitter
from services.engine.sequences.batch_state import BatchState, Phase
from services.engine.sequences.block_tables import BlockTables
from services.engine.sequences.branches import Branches
from services.engine.sequences.cache_nodes import CacheNodes
from services.engine.sequences.outputs import EngineOutputs, FailedRequest, Reserved
from services.engine.sequences.request import Kind, Request
from services.engine.sequences.request_table import RequestTable, State
from services.protocol.frames import Failure
from services.protocol.outcomes import FailureCode

_ENDS_ALONE = (Phase.PREFILL, Phase.DECODE, Phase.ENDING)  # by its deadline, unlike a handoff that is under way


class Sequences:
    """All requests of one engine, and the blocks that they reference. `outputs` takes reservations and failures."""

    def __init__(
        self,
        batch: BatchState,
        pool: BlockPool,
        outputs: EngineOutputs,
        eos_token_ids: tuple[int, ...],
        window: int | None = None,
        *,
        whole_prompts: bool = False,
    ) -> None:
        """window: of the model's attention, in tokens; None: there is none. whole_prompts: see `Runner`; then no
        request has blocks.
        """
        self.whole_prompts = whole_prompts
        self.batch = batch
        self.pool = pool
        batch.slices = pool.parts.rows
        batch.unseen = np.zeros((batch.max_num_seqs, len(pool.parts.unseen(0))), dtype=np.int64)
        self.requests = RequestTable()
        self.frees = DeferredFrees(pool)
        self.tables = BlockTables(batch, pool, self.frees, window)
        self.nodes = CacheNodes(batch, pool, self.frees)
        self.branches = Branches(batch, pool)
        self._outputs = outputs
        self._admitter = Admitter(
            batch, self.requests, self.tables, self.nodes, self.branches, eos_token_ids, keeps_blocks=not whole_prompts
        )

    # Queues and admission.

    def submit(self, request: Request) -> None:
        """Queues a request; one whose blocks are to be received is parked until its producer announces them."""
        if self._fail_if_too_large(request):
            return
        if not self.batch.ask_grammar(request):
            self.fail(request, FailureCode.NOT_NOW, "too many grammars wait to be compiled")
            return
        cached = len(self.nodes.match(request).blocks) * self.batch.block_size
        request.work = len(request.capsule.token_ids) - cached
        self.requests.add(request, State.PARKED if request.kind is Kind.CONSUME else State.WAITING)

    def admit(self, request: Request, now: float, *, watermark: int = 0) -> Admission:
        """Gives a queued request its slots and all its blocks, leaving `watermark` blocks; or changes nothing.

        A request that has become too large for the pool fails, and so does one whose grammar is none.
        """
        if self._fail_if_too_large(request):
            return Admission.FAILED
        if not self.batch.is_guided(request):
            return Admission.WAITS_FOR_GRAMMAR
        if request.grammar is not None and request.grammar.error:
            self.fail(request, FailureCode.UNSUPPORTED, f"its grammar: {request.grammar.error}")
            return Admission.FAILED
        admission = self._admitter.admit(request, watermark, now)
        if admission is Admission.ADMITTED and not request.started:
            self._outputs.admitted.append(request.id)
        if admission is Admission.ADMITTED and request.kind is Kind.CONSUME:
            slot = self.requests.slot_of(request.id)
            assert slot is not None
            unseen, num_cached = self.batch.unseen[slot], int(self.batch.done[slot]) // self.batch.block_size
            slices = self.pool.parts.slices_of(self.batch.table(slot), 0, unseen).tolist()
            self._outputs.reserved.append(Reserved(request.id, slices, self.pool.parts.num_slices(num_cached, unseen)))
        return admission

    def preempt(self, slot: int) -> None:
        """Takes a sequence's blocks; it comes back by recompute. No step may be under way: all its tokens are known."""
        assert not self.frees.steps_under_way
        batch, request = self.batch, self.batch.request(slot)
        tokens = batch.known_tokens(slot).copy()
        sampling = request.capsule.sampling
        if batch.phase[slot] == Phase.DECODE:
            sampling = replace(sampling, num_prompt_logprobs=None)
        capsule = replace(request.capsule, token_ids=tokens, sampling=sampling)
        again = Request(
            request.id,
            capsule,
            Kind.LOCAL,
            request.arrival,
            request.deadline,
            work=len(tokens),
            started=bool(batch.cached[slot] < 0),
            branches=tuple(branch for branch in request.branches if branch.id in self.requests.ids),
            grammar=request.grammar,
        )
        self._vacate(slot)
        self.requests.preempt(again)

    def fork(self, slot: int) -> list[tuple[int, int]]:
        """Makes sequences of the branches of a complete prompt, and frees its slot. See `Branches.fork`."""
        copies = self.branches.fork(slot)
        self.free(self.batch.request(slot).id)
        return copies

    # Sequences end.

    def lease(self, slot: int) -> None:
        """Frees a slot, but keeps its blocks for the consumer until `free`."""
        id, batch = self.batch.request(slot).id, self.batch
        parts = self.pool.parts.referenced(batch.table(slot), batch.unseen[slot])
        self.pool.reference(parts)
        self._vacate(slot)
        self.requests.lease(id, parts)

    def stop_computing(self, id: AttemptId) -> None:
        """Computes a request no further, but keeps its blocks until `free`; removes one that has none."""
        record = self.requests.get(id)
        if record is None or record.state is State.LEASED:
            return
        if record.slot is not None:
            self.lease(record.slot)
        else:
            self._remove(id)

    def free(self, id: AttemptId, quarantined: tuple[int, ...] = ()) -> None:
        """Removes a request and frees its blocks, but for the quarantined slices. Unknown ids change nothing.

        A branch whose group is queued is taken out of the group, which ends with its last branch.
        """
        id = self.requests.queued_groups.ends_with(id)
        record = self.requests.get(id)
        if record is None:
            self.requests.queued_groups.remove(id)
            return
        if record.slot is not None:
            self._vacate(record.slot, frozenset(quarantined))
        if record.leased is not None:
            self.pool.free(record.leased[::-1])
        self._remove(id)

    def free_quarantined(self, slices: tuple[int, ...]) -> None:
        """Frees slices that were in quarantine."""
        self.tables.free_quarantined(slices)

    def fail(self, request: Request, code: FailureCode, detail: str) -> None:
        """Removes a request, frees its blocks and says why in the outputs.

        A prompt that is to be handed off fails with the last of its branches: nobody else would end it.
        """
        self.free(request.id)
        self._outputs.failed.append(FailedRequest(request.id.gateway, Failure(request.id.handle, code, detail)))
        prompt = None if request.parent is None else self.requests.slot_of(request.parent)
        if prompt is not None and not self.branches.of(prompt):
            self.fail(self.batch.request(prompt), code, detail)

    def expel(self, slot: int) -> Request:
        """Frees a slot whose numbers are not finite, with nothing of its blocks left in the prefix cache; returns its
        request, for the caller to fail.
        """
        request = self.batch.request(slot)
        self.nodes.withdraw(slot)
        self.free(request.id)
        return request

    def fail_expired(self, now: float) -> None:
        """Fails requests past their deadline. Handoffs under way are ended by their own state machines."""
        batch = self.batch
        late = np.isin(batch.phase, _ENDS_ALONE) & (batch.deadline <= now)
        for slot in np.flatnonzero(late).tolist():
            self.fail(batch.request(slot), FailureCode.DEADLINE, "deadline passed")
        for state in (State.WAITING, State.PREEMPTED):
            for request in self.requests.in_state(state):
                if request.deadline <= now and request.kind is not Kind.CONSUME:
                    self.fail(request, FailureCode.DEADLINE, "deadline passed")

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens still to be computed or received: of requests that wait, and of prompts being computed."""
        batch, requests = self.batch, self.requests
        computing = batch.slots_in(Phase.PREFILL)
        under_way = int((batch.length[computing] - batch.computed[computing]).sum()) if len(computing) else 0
        if not requests.num_queued:
            return under_way
        queued = (*requests.in_state(State.WAITING), *requests.in_state(State.PREEMPTED))
        return under_way + sum(request.work for request in queued)

    def check(self) -> None:
        """Asserts that blocks, prefix cache, states and slots agree. Slow; for tests and for an idle worker."""
        self.pool.check()
        self.pool.cache.check()
        self.requests.check(self.batch)
        self.branches.check()

    def _fail_if_too_large(self, request: Request) -> bool:
        needed, num_blocks, num_quarantined = (
            self._admitter.slices_needed(request),
            self.pool.num_blocks,
            self.tables.num_quarantined,
        )
        too_long = len(request.capsule.token_ids) + (request.kind is not Kind.EMBED) > self.batch.max_model_len
        too_many = 1 + len(request.branches) > self.batch.max_num_seqs
        if too_long or too_many or needed > num_blocks:
            self.fail(request, FailureCode.TOO_LARGE, f"{needed} blocks needed, the pool has {num_blocks}")
            return True
        if needed > num_blocks - num_quarantined:
            self.fail(request, FailureCode.NOT_NOW, f"{needed} blocks needed, {num_quarantined} in quarantine")
            return True
        return False

    def _remove(self, id: AttemptId) -> None:
        record = self.requests.remove(id)
        if record is not None:
            self.batch.leave_grammar(record.request)

    def _vacate(self, slot: int, quarantined: frozenset[int] = frozenset()) -> None:
        """Frees a slot and its blocks but for quarantined slices, and removes the branches that wait for its prompt.

        The state of the slot's own request is the caller's to change.
        """
        request = self.batch.request(slot)
        for branch in self.branches.take(slot):
            self.free(self.batch.request(branch).id)
        if self.batch.phase[slot] == Phase.BRANCH:
            self._leave_prompt(request, slot)
        self.nodes.leave(slot)
        self.tables.free(slot, quarantined)
        self.batch.close(slot)

    def _leave_prompt(self, request: Request, slot: int) -> None:
        """Takes a waiting branch out of those that wait for its prompt, unless the prompt's own slot is being freed.

        A prompt whose last branch has left is freed: nobody wants it. A prompt that is handed off stays: the state
        machine of its handoff ends it.
        """
        assert request.parent is not None
        prompt = self.requests.slot_of(request.parent)
        if prompt is None or slot not in self.branches.of(prompt):
            return
        self.branches.remove(prompt, slot)
        if not self.branches.of(prompt) and self.batch.request(prompt).kind is Kind.LOCAL:
            self.free(request.parent)
