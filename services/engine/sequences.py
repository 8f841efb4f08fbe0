"""Sequences and their blocks: queues, admission, growth, preemption, release.

Mechanism only; when to do what is the schedulers' policy. A sequence takes all the blocks of its known tokens at
admission or none, so nothing ever waits while it holds a part of what it needs.

Where a request is:

    submit ──▶ parked ──▶ waiting ──▶ a slot ──▶ leased ──▶ gone
             (CONSUME,      ▲            │      (PRODUCE: blocks held
              not announced)└─ preempted ┘       for the consumer)

A request with branches has a slot for its prompt and one for each branch. For P prompt tokens and block size b:

    prompt's slot     [0 ─── full blocks, ⌊P / b⌋ ───┬─ last ]     last: partly filled, or empty for the next position
    branches, waiting                                 [ own  ]     but the first, which will take over `last`
    branches, forked  [────── the same blocks ───────┬─ own  ]     own: a copy of `last`
"""

from collections import deque
from dataclasses import replace
from enum import Enum, auto

import numpy as np

from kvtransfer.ids import AttemptId, GatewayId, WorkerId
from services.engine.batch_state import BatchState, Phase
from services.engine.block_pool import BlockPool
from services.engine.outputs import EngineOutputs, FailedRequest, Reserved
from services.engine.prefix_cache import NO_BLOCK, NO_MATCH, Match, PrefixCache
from services.engine.request import Kind, Request
from services.protocol.capsule import Capsule
from services.protocol.frames import Failure
from services.protocol.outcomes import FailureCode


class Admission(Enum):
    """What came of an attempt to admit a request."""

    ADMITTED = auto()
    WAITS_FOR_PREFIX = auto()  # its next block is pending; others may pass it
    NO_ROOM = auto()  # not enough blocks or no slot now
    REFUSED = auto()  # never, or not before quarantine ends; it was given up


class Sequences:
    """All requests of one engine, and the blocks they hold."""

    def __init__(
        self, batch: BatchState, num_blocks: int, eos_token_ids: tuple[int, ...], window: int | None = None
    ) -> None:
        self.batch = batch
        self.cache = PrefixCache(num_blocks, batch.block_size)
        self.pool = BlockPool(num_blocks, self.cache)
        self.waiting: dict[AttemptId, Request] = {}
        self.preempted: dict[AttemptId, Request] = {}
        self.outputs = EngineOutputs()
        self._eos_token_ids = eos_token_ids
        self._window = window  # of the model's attention
        self._parked: dict[AttemptId, Request] = {}
        self._slot: dict[AttemptId, int] = {}
        self._leased: dict[AttemptId, np.ndarray] = {}  # int32[n] blocks
        self._quarantined: set[int] = set()  # in quarantine
        self._num_launched = 0  # steps
        self._num_collected = 0
        self._to_free: deque[tuple[int, np.ndarray, bool]] = deque()  # see _free_after_steps; after that many steps
        self._branches: dict[AttemptId, list[int]] = {}  # of a prompt that is not complete: slots of those still wanted
        self._charged: dict[
            AttemptId, tuple[WorkerId | None, int]
        ] = {}  # to hand off: consumer, blocks that were not cached

    # Requests come.

    def submit(self, request: Request) -> None:
        """Takes a request: into the queue, or aside until its producer announces."""
        if self._refuse_if_too_large(request):
            return
        cached = len(self._match(request).blocks) * self.batch.block_size
        request.work = len(request.capsule.token_ids) - cached
        queue = self._parked if request.kind is Kind.CONSUME else self.waiting
        queue[request.id] = request

    def enqueue(self, id: AttemptId) -> None:
        """A parked request's blocks were announced: it may be admitted in its turn."""
        if (request := self._parked.pop(id, None)) is not None:
            self.waiting[id] = request

    def blocks_needed(self, request: Request) -> int:
        """Blocks for the known tokens, and for the next position of each branch where that is computed here too."""
        length = len(request.capsule.token_ids) + (request.kind is not Kind.PRODUCE)
        return -(-length // self.batch.block_size) + _own_blocks(request)

    def admit(self, request: Request, *, watermark: int = 0) -> Admission:
        """Gives a waiting request its slots and all its blocks, leaving `watermark` blocks; or changes nothing."""
        if self._refuse_if_too_large(request):
            return Admission.REFUSED
        known = request.match_at(self.cache.version)
        if known is not None and known.next_is_pending:
            return Admission.WAITS_FOR_PREFIX
        if self.batch.num_free_slots < 1 + len(request.branches):
            return Admission.NO_ROOM
        match = self._match(request)
        if match.next_is_pending:
            return Admission.WAITS_FOR_PREFIX
        blocks = self._take_blocks(match.blocks, self.blocks_needed(request), watermark)
        if blocks is None:
            return Admission.NO_ROOM
        self.waiting.pop(request.id, None)
        self.preempted.pop(request.id, None)
        request.match = None
        self._open(request, blocks, num_cached=len(match.blocks))
        return Admission.ADMITTED

    # Sequences go on.

    def grow(self, slots: np.ndarray) -> bool:
        """Gives each of these decoding slots the block for its next position, where it needs one; all or none.

        What lies behind the window of that position is let go of before.
        """
        batch = self.batch
        if self._window is not None:
            self._free_unseen(slots, self._window)
        short = slots[batch.computed[slots] >= batch.num_blocks[slots] * batch.block_size]
        if short.size == 0:
            return True
        fresh = self.pool.allocate(short.size)
        if fresh is None:
            return False
        batch.block_table[short, batch.num_blocks[short]] = fresh
        batch.num_blocks[short] += 1
        return True

    def preempt(self, slot: int) -> None:
        """Takes a sequence's blocks; it comes back by recompute. No step may be under way: all its tokens are known."""
        assert not self.steps_under_way
        batch, request = self.batch, self.batch.request(slot)
        tokens = batch.known_tokens(slot).copy()
        sampling = request.capsule.sampling
        if batch.phase[slot] == Phase.DECODE:
            sampling = replace(sampling, num_prompt_logprobs=None)
        capsule = Capsule(tokens, request.capsule.num_prompt, sampling)
        again = Request(
            request.id,
            capsule,
            Kind.LOCAL,
            request.arrival,
            request.deadline,
            work=len(tokens),
            started=bool(batch.cached[slot] < 0),
            branches=tuple(branch for branch in request.branches if branch.id in self._slot),
        )
        self.free_slot(slot)
        self.preempted[again.id] = again

    def make_ready(self, slot: int, num_blocks: int) -> None:
        """The slot's first num_blocks blocks are complete: its nodes up to there become hits."""
        batch = self.batch
        end = min(num_blocks, int(batch.num_entered[slot]))
        for block in batch.block_table[slot, batch.num_ready[slot] : end].tolist():
            self.cache.make_ready(block)
        batch.num_ready[slot] = max(end, int(batch.num_ready[slot]))

    def enter_filled(self, slots: np.ndarray) -> None:
        """Of these decoding slots, those that filled a block enter it into the cache, for others to find."""
        batch = self.batch
        num_full, entered = batch.done[slots] // batch.block_size, batch.num_entered[slots]
        filled = num_full > entered
        if not filled.any():
            return
        slots, num_full, entered = slots[filled], num_full[filled], entered[filled]
        usual = (num_full == entered + 1) & (batch.num_ready[slots] == entered) & (entered > 0)
        left = self._enter_one_each(slots[usual], entered[usual])
        for slot in (*left, *slots[~usual].tolist()):
            self._enter_filled(slot)

    def _enter_one_each(self, slots: np.ndarray, at: np.ndarray) -> list[int]:
        """Enters block at[i] of slot i, whose parent is ready or was evicted; returns slots where there is a twin."""
        batch, size = self.batch, self.batch.block_size
        parents, blocks = batch.block_table[slots, at - 1], batch.block_table[slots, at]
        tokens = batch.tokens[slots[:, None], at[:, None] * size + np.arange(size)]
        twins = list(self.cache.insert(parents.tolist(), blocks.tolist(), tokens, pending=False))
        entered = np.delete(np.arange(len(slots)), twins) if twins else slice(None)
        batch.num_entered[slots[entered]] = batch.num_ready[slots[entered]] = at[entered] + 1
        left: list[int] = slots[twins].tolist()
        return left

    def sampled(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a token is sampled for when the known tokens of these slots are computed: their branches, or themselves.

        Returns int64[N] indices into `slots` and int64[N] the slots that get a token.
        """
        if not self._branches:
            return np.arange(len(slots)), slots
        targets = [(index, target) for index, slot in enumerate(slots.tolist()) for target in self.branches_of(slot)]
        pairs = np.array(targets, dtype=np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def branches_of(self, slot: int) -> list[int]:
        """Slots of the branches of a slot's prompt that are still wanted; of a prompt without any, the slot itself."""
        return self._branches.get(self.batch.request(slot).id, [slot])

    def fork(self, slot: int) -> list[tuple[int, int]]:
        """Makes sequences of the branches of a complete prompt, and frees its slot. Some may have their first token.

        Returns the blocks to copy before the next step: source, destination.
        """
        batch = self.batch
        blocks, computed = batch.blocks(slot), int(batch.computed[slot])
        num_full = computed // batch.block_size
        copies = []
        for branch in self._branches.pop(batch.request(slot).id, []):
            own = batch.blocks(branch)
            table = blocks[:num_full] + (own or blocks[num_full:])
            self.pool.reference(np.array(table[:num_full] if own else table, dtype=np.int32))
            if own and computed % batch.block_size:
                copies.append((blocks[num_full], own[0]))
            batch.block_table[branch, : len(table)] = table
            batch.num_blocks[branch] = len(table)
            batch.computed[branch] = batch.done[branch] = computed
            batch.num_entered[branch] = batch.num_entered[slot]
            batch.num_ready[branch] = batch.num_ready[slot]
            batch.set_phase(branch, Phase.DECODE)
        self.free_slot(slot)
        return copies

    def slot_of(self, id: AttemptId) -> int | None:
        """The slot of a request, if it has one."""
        return self._slot.get(id)

    # Sequences end.

    def free_slot(self, slot: int, quarantined: frozenset[int] = frozenset()) -> None:
        """Frees a slot and its blocks, except those held back; computed full blocks stay as cached content."""
        batch = self.batch
        self._free_branches(slot)
        self._enter_filled(slot)
        first = int(batch.num_freed[slot])
        blocks = batch.table(slot)
        for block in blocks[max(0, int(batch.num_ready[slot]) - first) :][::-1].tolist():
            if self.cache.is_pending(block):
                self.cache.remove(block)
        if quarantined:
            stays = np.isin(blocks, list(quarantined))
            self._quarantined.update(blocks[stays].tolist())
            blocks = blocks[~stays]
        self._free_after_steps(blocks[::-1], touches_above=first > 0)
        del self._slot[batch.request(slot).id]
        batch.close(slot)

    def _free_branches(self, slot: int) -> None:
        """A prompt takes the branches that wait for it along; one of these alone is no longer waited for."""
        request = self.batch.request(slot)
        for branch in self._branches.pop(request.id, []):
            self.free_slot(branch)
        if self.batch.phase[slot] == Phase.BRANCH and request.parent in self._branches:
            self._branches[request.parent].remove(slot)

    def lease(self, slot: int) -> None:
        """Frees a slot, but keeps its blocks for the consumer until `free`."""
        batch, id = self.batch, self.batch.request(slot).id
        blocks = batch.table(slot)
        self.pool.reference(blocks)
        self.free_slot(slot)
        self._leased[id] = blocks

    def stop_computing(self, id: AttemptId) -> None:
        """Computes a request no further, but keeps its blocks until `free`."""
        self._dequeue(id)
        if (slot := self._slot.get(id)) is not None:
            self.lease(slot)

    def free(self, id: AttemptId, quarantined: tuple[int, ...] = ()) -> None:
        """Lets go of a request, wherever it is. Unknown ones change nothing."""
        self._dequeue(id)
        if (slot := self._slot.get(id)) is not None:
            self.free_slot(slot, frozenset(quarantined))
        if (leased := self._leased.pop(id, None)) is not None:
            self.pool.free(leased[::-1])
        self._charged.pop(id, None)

    def free_quarantined(self, blocks: tuple[int, ...]) -> None:
        """Blocks that were held back may be used again."""
        assert self._quarantined.issuperset(blocks)
        self._quarantined.difference_update(blocks)
        self.pool.free(np.array(blocks[::-1], dtype=np.int32))

    def fail(self, request: Request, code: FailureCode, detail: str) -> None:
        """Lets go of a request and says why."""
        self.free(request.id)
        self.outputs.failed.append(FailedRequest(request.id.gateway, Failure(request.id.handle, code, detail)))

    def fail_expired(self, now: float) -> None:
        """Gives up what is past its deadline. Handoffs under way are ended by their own state machines."""
        batch = self.batch
        ends_alone = np.isin(batch.phase, (Phase.PREFILL, Phase.DECODE, Phase.ENDING))
        late = ends_alone & (batch.deadline <= now)
        requests = [batch.request(slot) for slot in np.flatnonzero(late).tolist()]
        for queue in (self.waiting, self.preempted):
            requests += [request for request in queue.values() if request.deadline <= now]
        for request in requests:
            if request.kind is not Kind.CONSUME or request.id in self._slot:
                self.fail(request, FailureCode.DEADLINE, "deadline passed")

    # Steps.

    @property
    def steps_under_way(self) -> bool:
        """True when a step was launched and not collected."""
        return self._num_launched > self._num_collected

    def step_launched(self) -> None:
        """From now on, a block that a sequence lets go of may still be read and written."""
        self._num_launched += 1

    def step_collected(self) -> None:
        """The oldest step that was launched is complete."""
        self._num_collected += 1
        while self._to_free and self._to_free[0][0] <= self._num_collected:
            _, blocks, touches_above = self._to_free.popleft()
            self._free_blocks(blocks, touches_above)

    def _free_after_steps(self, blocks: np.ndarray, *, touches_above: bool = False) -> None:
        """Frees int32[n] blocks, tail first, once no step that was launched can read or write them any more.

        touches_above: what lies above them in the cache was freed before, and is to be evicted after them.
        """
        if self.steps_under_way:
            self._to_free.append((self._num_launched, blocks, touches_above))
        else:
            self._free_blocks(blocks, touches_above)

    def _free_blocks(self, blocks: np.ndarray, touches_above: bool) -> None:
        self.pool.free(blocks)
        if touches_above and len(blocks) and self.cache.contains(top := int(blocks[-1])):
            self.pool.touch(np.array(self.cache.ancestors(top), dtype=np.int32))

    # What is held.

    def check(self) -> None:
        """Asserts that the blocks' places and the prefix cache are sound. Slow; for tests and for an idle worker."""
        self.pool.check()
        self.cache.check()

    @property
    def num_quarantined(self) -> int:
        """Blocks in quarantine."""
        return len(self._quarantined)

    @property
    def ids_with_blocks(self) -> set[AttemptId]:
        """Requests that hold blocks."""
        return set(self._slot) | set(self._leased)

    @property
    def known_ids(self) -> set[AttemptId]:
        """Every request that is queued or holds blocks."""
        return self.ids_with_blocks | set(self.waiting) | set(self.preempted) | set(self._parked)

    @property
    def idle(self) -> bool:
        """True when no request is known."""
        return not (self._slot or self._leased or self.waiting or self.preempted or self._parked)

    def ids_of(self, gateway: GatewayId) -> list[AttemptId]:
        """Requests of one gateway."""
        return [id for id in self.known_ids if id.gateway == gateway]

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens still to be computed or received: of requests that wait, and of prompts being computed."""
        batch = self.batch
        computing = batch.slots_in(Phase.PREFILL)
        under_way = int((batch.length[computing] - batch.computed[computing]).sum()) if len(computing) else 0
        return under_way + sum(request.work for queue in (self.waiting, self.preempted) for request in queue.values())

    @property
    def num_queued(self) -> int:
        """Requests without blocks."""
        return len(self.waiting) + len(self.preempted) + len(self._parked)

    def blocks_charged_to(self, consumer: WorkerId | None) -> int:
        """Blocks held for one consumer, from admission to release; those that were cached already do not count."""
        return sum(count for other, count in self._charged.values() if other == consumer)

    def _match(self, request: Request) -> Match:
        match = request.match_at(self.cache.version)
        if match is None:
            match = NO_MATCH if request.scores_prompt else self.cache.match(request.capsule.token_ids)
            request.match, request.matched_at = match, self.cache.version
        return match

    def _dequeue(self, id: AttemptId) -> None:
        for queue in (self.waiting, self.preempted, self._parked):
            queue.pop(id, None)

    def _refuse_if_too_large(self, request: Request) -> bool:
        needed, num_blocks = self.blocks_needed(request), self.pool.num_blocks
        too_long = len(request.capsule.token_ids) >= self.batch.max_model_len
        too_many = 1 + len(request.branches) > self.batch.max_num_seqs
        if too_long or too_many or needed > num_blocks:
            self.fail(request, FailureCode.TOO_LARGE, f"{needed} blocks needed, the pool has {num_blocks}")
            return True
        if needed > num_blocks - self.num_quarantined:
            self.fail(request, FailureCode.NOT_NOW, f"{needed} blocks needed, {self.num_quarantined} in quarantine")
            return True
        return False

    def _take_blocks(self, held: np.ndarray, needed: int, watermark: int) -> np.ndarray | None:
        self.pool.reference(held)
        count = needed - len(held)
        fresh = self.pool.allocate(count) if self.pool.available - count >= watermark else None
        if fresh is None:
            self.pool.free(held[::-1])
            return None
        return np.concatenate([held, fresh])

    def _open(self, request: Request, blocks: np.ndarray, num_cached: int) -> None:
        batch = self.batch
        num_shared = len(blocks) - _own_blocks(request)
        blocks, own = blocks[:num_shared], blocks[num_shared:]
        phase = Phase.RECEIVING if request.kind is Kind.CONSUME else Phase.PREFILL
        slot = self._occupy(request, blocks, phase)
        batch.computed[slot] = batch.done[slot] = num_cached * batch.block_size
        batch.cached[slot] = -1 if request.started else batch.computed[slot]
        batch.num_ready[slot] = num_cached
        batch.num_entered[slot] = self._enter_pending(request.capsule.token_ids, blocks, num_cached)
        batch.num_announced[slot] = 0
        if request.kind is Kind.PRODUCE:
            self._charged[request.id] = (request.paired_with, len(blocks) - num_cached)
        if request.kind is Kind.CONSUME:
            self.outputs.reserved.append(Reserved(request.id, blocks.tolist(), num_cached))
        if request.branches:
            self._open_branches(request, own, int(batch.cached[slot]))

    def _open_branches(self, request: Request, own: np.ndarray, cached: int) -> None:
        slots = self._branches[request.id] = []
        for index, branch in enumerate(request.branches):
            capsule = request.capsule
            sampling = replace(capsule.sampling, seed=branch.seed, num_prompt_logprobs=None)
            alone = Request(
                branch.id,
                replace(capsule, sampling=sampling),
                Kind.LOCAL,
                request.arrival,
                request.deadline,
                parent=request.id,
            )
            slot = self._occupy(alone, own[index - 1 : index] if index else own[:0], Phase.BRANCH)
            self.batch.cached[slot] = cached
            self.batch.computed[slot] = self.batch.done[slot] = 0
            self.batch.num_entered[slot] = self.batch.num_ready[slot] = 0
            slots.append(slot)

    def _occupy(self, request: Request, blocks: np.ndarray, phase: Phase) -> int:
        sampling = request.capsule.sampling
        eos = () if sampling.ignore_eos else self._eos_token_ids
        slot = self.batch.open(request, blocks, eos + sampling.stop_token_ids)
        self.batch.set_phase(slot, phase)
        self._slot[request.id] = slot
        return slot

    def _enter_pending(self, token_ids: np.ndarray, blocks: np.ndarray, start: int) -> int:
        """Enters the full blocks from index `start` as pending nodes; returns how many leading blocks are nodes.

        The first twin ends it: the last block, which is never taken as a hit, or any block of a prompt that is scored.
        """
        size = self.batch.block_size
        end = len(token_ids) // size
        chain: list[int] = blocks[start:end].tolist()
        parents = [int(blocks[start - 1]) if start else NO_BLOCK, *chain][:-1]
        content = token_ids[start * size : end * size].reshape(-1, size)
        twins = self.cache.insert(parents, chain, content, pending=True)
        return start + min(twins, default=len(chain))

    def _free_unseen(self, slots: np.ndarray, window: int) -> None:
        """Lets go of the blocks of these decoding slots that neither their next token nor any later one sees.

        They stay cached content while nobody needs the room. The last block that was entered is kept in any case: the
        next one is entered below it.
        """
        batch = self.batch
        unseen = (batch.computed[slots] - window + 1) // batch.block_size
        behind = unseen > batch.num_freed[slots]
        for slot, end in zip(slots[behind].tolist(), unseen[behind].tolist(), strict=True):
            start = int(batch.num_freed[slot])
            end = max(start, min(end, int(batch.num_entered[slot]) - 1))
            self._free_after_steps(batch.block_table[slot, start:end][::-1].copy())
            batch.block_table[slot, start:end] = 0
            batch.num_freed[slot] = end

    def _enter_filled(self, slot: int) -> None:
        """Enters computed full blocks that are no nodes yet; a ready one with the same content takes their place.

        So sequences that generate the same text share its blocks, and a duplicate is free at once. A pending one may
        become ready or go: the block is entered at a later step then. Below a parent that was evicted there is nothing
        to enter.
        """
        batch, size = self.batch, self.batch.block_size
        table, entered = batch.block_table[slot], int(batch.num_entered[slot])
        if batch.num_ready[slot] < entered:
            return
        for index in range(entered, int(batch.done[slot]) // size):
            block, parent = int(table[index]), int(table[index - 1]) if index else NO_BLOCK
            tokens = batch.tokens[slot, None, index * size : (index + 1) * size]
            twin = self.cache.insert([parent], [block], tokens, pending=False).get(0)
            if twin is not None:
                if self.cache.is_pending(twin):
                    return
                self.pool.reference(np.array([twin], dtype=np.int32))
                table[index] = twin
                self._free_after_steps(np.array([block], dtype=np.int32))
            batch.num_entered[slot] = batch.num_ready[slot] = index + 1


def _own_blocks(request: Request) -> int:
    """Blocks that branches will need beside their prompt's: the first one takes the prompt's last block over."""
    return 0 if request.kind is Kind.PRODUCE else max(0, len(request.branches) - 1)
