"""Admission: a waiting request gets its slots and all the blocks of its known tokens, or nothing."""

from dataclasses import replace
from enum import Enum, auto

import numpy as np

from services.engine.blocks.prefix_cache import Match
from services.engine.sequences.batch_state import BatchState, Phase
from services.engine.sequences.block_tables import BlockTables
from services.engine.sequences.branches import Branches
from services.engine.sequences.cache_nodes import CacheNodes
from services.engine.sequences.request import Branch, Kind, Request
from services.engine.sequences.request_table import RequestTable

# A request waits for a prefix that another sequence computes about as long as it would compute its own tokens at this
# rate, and no longer. The rate is a guess: no worker measures its own.
_TOKENS_A_WAITED_SECOND = 2000.0


class Admission(Enum):
    """The results of an attempt to admit a request."""

    ADMITTED = auto()
    WAITS_FOR_PREFIX = auto()  # its next block is pending; others may pass it
    WAITS_FOR_GRAMMAR = auto()  # it is being compiled; others may pass the request
    NO_ROOM = auto()  # not enough blocks or no slot now
    FAILED = auto()  # it never fits, or not before a quarantine ends


class Admitter:
    """Puts requests into slots."""

    def __init__(
        self,
        batch: BatchState,
        requests: RequestTable,
        tables: BlockTables,
        nodes: CacheNodes,
        branches: Branches,
        eos_token_ids: tuple[int, ...],
        *,
        keeps_blocks: bool = True,
    ) -> None:
        """keeps_blocks: False where nothing of a prompt is kept, so that no request has blocks."""
        self._batch = batch
        self._pool = tables.pool
        self._requests = requests
        self._tables = tables
        self._nodes = nodes
        self._branches = branches
        self._eos_token_ids = eos_token_ids
        self._keeps_blocks = keeps_blocks

    def slices_needed(self, request: Request) -> int:
        """Slices of `blocks_needed`, all that a request may ever need at once: a preempted one is computed from its
        first token.
        """
        return self.blocks_needed(request) * self._pool.parts.slices_per_block

    def blocks_needed(self, request: Request) -> int:
        """Blocks for the known tokens, and for the next position of each branch where that is computed here too."""
        if not self._keeps_blocks:
            return 0
        length = len(request.capsule.token_ids) + (request.kind not in (Kind.PRODUCE, Kind.EMBED))
        return -(-length // self._batch.block_size) + _own_blocks(request)

    def admit(self, request: Request, watermark: int, now: float) -> Admission:
        """Allocates slots and blocks for a queued request, leaving `watermark` blocks; or changes nothing."""
        known = self._nodes.known_match(request)
        if known is not None and self._waits_for(known, request, now):
            return Admission.WAITS_FOR_PREFIX
        if self._batch.num_free_slots < 1 + len(request.branches):
            return Admission.NO_ROOM
        match = self._nodes.match(request)
        if self._waits_for(match, request, now):
            return Admission.WAITS_FOR_PREFIX
        unseen = self._unseen(request, len(match.blocks))
        blocks = self._tables.allocate(match.blocks, self.blocks_needed(request), watermark, unseen)
        if blocks is None:
            return Admission.NO_ROOM
        request.match = None
        self._open(request, blocks, len(match.blocks), unseen)
        return Admission.ADMITTED

    def _unseen(self, request: Request, num_cached: int) -> np.ndarray:
        """Returns what the first token that is computed here sees nothing of, see `WholeBlocks.unseen`."""
        received = len(request.capsule.token_ids) if request.kind is Kind.CONSUME else 0
        return self._pool.parts.unseen(received or num_cached * self._batch.block_size)

    def _waits_for(self, match: Match, request: Request, now: float) -> bool:
        """True when another sequence computes or receives the request's next block, and is expected to be sooner.

        A handoff waits for an earlier handoff of the same prompt while the earlier one has at least as many blocks
        announced; else its own producer is the faster one. A prompt that is to be computed here waits for blocks that a
        producer has announced; for other blocks it waits only about as long as computing them takes.
        """
        if not match.next_is_pending:
            return False
        batch, at = self._batch, len(match.blocks)
        receiving = batch.slots_in(Phase.RECEIVING)
        owners = receiving[batch.block_table[receiving, at] == match.pending].tolist()
        if not owners:
            return True
        earlier = batch.request(owners[0])
        announced = self._pool.parts.num_whole(earlier.announced, batch.unseen[owners[0]])
        if request.kind is Kind.CONSUME:
            return announced >= self._pool.parts.num_whole(request.announced, self._unseen(request, 0))
        num_uncached = len(request.capsule.token_ids) - at * batch.block_size
        return announced > at or now - request.arrival < num_uncached / _TOKENS_A_WAITED_SECOND

    def _open(self, request: Request, blocks: np.ndarray, num_cached: int, unseen: np.ndarray) -> None:
        batch = self._batch
        num_shared = len(blocks) - _own_blocks(request)
        blocks, own = blocks[:num_shared], blocks[num_shared:]
        phase = Phase.RECEIVING if request.kind is Kind.CONSUME else Phase.PREFILL
        charged = self._tables.num_fresh(num_cached, len(blocks), unseen) if request.kind is Kind.PRODUCE else 0
        slot = self._occupy(request, blocks, phase, charged)
        batch.unseen[slot] = unseen
        batch.computed[slot] = batch.done[slot] = num_cached * batch.block_size
        batch.cached[slot] = -1 if request.started else batch.computed[slot]
        batch.num_ready[slot] = num_cached
        batch.num_entered[slot] = self._nodes.enter_prompt(request.capsule, blocks, num_cached)
        batch.num_announced[slot] = 0
        if request.branches:
            self._open_branches(request, slot, own)

    def _open_branches(self, request: Request, prompt: int, own: np.ndarray) -> None:
        batch, slots = self._batch, []
        for index, branch in enumerate(request.branches):
            blocks = own[index - 1 : index] if index else own[:0]
            slot = self._occupy(_branch_request(request, branch), blocks, Phase.BRANCH)
            batch.cached[slot] = batch.cached[prompt]
            batch.computed[slot] = batch.done[slot] = 0
            batch.num_entered[slot] = batch.num_ready[slot] = 0
            slots.append(slot)
        self._branches.add(prompt, slots)

    def _occupy(self, request: Request, blocks: np.ndarray, phase: Phase, charged: int = 0) -> int:
        sampling = request.capsule.sampling
        eos = () if sampling.ignore_eos else self._eos_token_ids
        slot = self._batch.open(request, blocks, eos + sampling.stop_token_ids)
        self._batch.set_phase(slot, phase)
        self._requests.occupy(request, slot, charged)
        return slot


def _branch_request(request: Request, branch: Branch) -> Request:
    """A request of one branch alone, over the prompt of `request`."""
    capsule = request.capsule
    sampling = replace(capsule.sampling, seed=branch.seed, num_prompt_logprobs=None)
    return Request(
        branch.id,
        replace(capsule, sampling=sampling),
        Kind.LOCAL,
        request.arrival,
        request.deadline,
        parent=request.id,
        grammar=request.grammar,
    )


def _own_blocks(request: Request) -> int:
    """Blocks that branches will need beside their prompt's: the first one takes the prompt's last block over."""
    return 0 if request.kind is Kind.PRODUCE else max(0, len(request.branches) - 1)
