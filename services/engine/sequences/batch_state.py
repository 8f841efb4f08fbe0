"""The running batch: sequences that have KV are entries of persistent arrays, not objects.

A sequence has a slot from admission to its end. Everything that a step needs is read from these arrays in a handful of
numpy operations, whatever the number of sequences; Python loops only touch those that start, finish or fill a block.

Of a sequence's tokens   [0 ─── done ───┬─── launched ───┬─── still to compute ───]
                          KV is there    computed                            length
                                         ▲ by steps that were launched and not collected, if any
A decoding sequence has length = computed + 1. While steps are under way, the token that the last of them samples for it
counts as its last token already, and is UNKNOWN.
"""

from enum import IntEnum

import numpy as np

from services.engine.sampling.guidance import Guidance
from services.engine.sampling.logit_edits import SequenceEdits, edits_of
from services.engine.sampling.pooling import PromptPool
from services.engine.sequences.request import Kind, Request

UNKNOWN = -1  # as a token id: of a token that a step under way will sample
_STOP_IDS_WIDTH = 8

# Features that sequences ask for; a step does only the work of features that one of its sequences has.
SAMPLES = 1  # a temperature
LOGPROBS = 2
SCORES = 4  # logprobs of the prompt
STOPS = 8  # at tokens
MIN_TOKENS = 16  # not before so many
EDITS = 32  # of logits, of single tokens
FOLLOWS = 64  # edits that depend on the tokens so far: all must be known when a step is planned
NAMED_LOGPROBS = 128  # logprobs of tokens that the request names
EMBEDS = 256  # no token; hidden states of the prompt are pooled
GUIDED = 512  # by a grammar
MEDIA = 1024  # in the prompt
TYPES = 2048  # its prompt is a pair of texts, whose tokens have types


class Phase(IntEnum):
    """The phases of a slot."""

    FREE = 0
    PREFILL = 1  # its known tokens are being computed
    DECODE = 2  # one token a step
    RECEIVING = 3  # its blocks are being read from a producer
    BRANCH = 4  # its prompt is in another slot
    ENDING = 5  # the step that samples its last token was launched


class BatchState:
    """Arrays with one entry for each of `max_num_seqs` slots."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        guidance: Guidance | None = None,
        vocab_size: int = 0,
    ) -> None:
        """vocab_size: of the logits; 0: no request restricts its tokens."""
        self.slices: np.ndarray | None = None  # see `WholeBlocks.rows`
        self.guidance = guidance
        self.vocab_size = vocab_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_closed = 0  # slots freed so far
        max_blocks = -(-max_model_len // block_size)
        slots = max_num_seqs
        self.phase = np.zeros(slots, dtype=np.int8)
        self.serial = np.zeros(slots, dtype=np.int64)  # raised when a slot is freed: tells its sequences apart
        self.features = np.zeros(slots, dtype=np.uint16)
        self.tokens = np.zeros((slots, max_model_len + 1), dtype=np.int32)
        self.flat_tokens = self.tokens.reshape(-1)  # a view; a slot's tokens begin at `token_base`
        self.token_base = np.arange(slots) * (max_model_len + 1)
        self.length = np.zeros(slots, dtype=np.int32)
        self.computed = np.zeros(slots, dtype=np.int32)  # by steps that were launched
        self.done = np.zeros(slots, dtype=np.int32)  # by steps that are complete
        self.num_prompt = np.zeros(slots, dtype=np.int32)
        self.max_len = np.zeros(slots, dtype=np.int32)
        self.min_len = np.zeros(slots, dtype=np.int32)  # shorter ones must not stop
        self.block_table = np.zeros((slots, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(slots, dtype=np.int32)
        self.num_freed = np.zeros(slots, dtype=np.int32)  # leading blocks that were freed: no later token sees them
        self.unseen = np.zeros((slots, 0), dtype=np.int64)  # by group of layers after the first, see `parts.py`
        self.num_entered = np.zeros(slots, dtype=np.int32)  # leading blocks that were entered in the prefix cache
        self.num_ready = np.zeros(slots, dtype=np.int32)  # leading blocks whose nodes are ready
        self.num_announced = np.zeros(slots, dtype=np.int32)  # leading blocks announced to a consumer
        self.arrival = np.zeros(slots, dtype=np.float64)
        self.priority = np.zeros(slots, dtype=np.int32)  # lower ones are served sooner
        self.deadline = np.zeros(slots, dtype=np.float64)
        self.gateway = np.zeros(slots, dtype=np.uint64)
        self.handle = np.zeros(slots, dtype=np.uint32)
        self.cached = np.full(slots, -1, dtype=np.int32)  # to be reported with the first row; -1: reported
        self.temperature = np.zeros(slots, dtype=np.float32)
        self.top_k = np.zeros(slots, dtype=np.int32)
        self.top_p = np.ones(slots, dtype=np.float32)
        self.min_p = np.zeros(slots, dtype=np.float32)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.num_logprobs = np.full(slots, -1, dtype=np.int32)
        self.logprob_ids: list[tuple[int, ...]] = [()] * slots  # alternatives to report; none: the likeliest
        self.num_prompt_logprobs = np.full(slots, -1, dtype=np.int32)  # -1: the prompt is not scored
        self.stop_ids = np.full(
            (slots, _STOP_IDS_WIDTH), -1, dtype=np.int32
        )  # EOS and stop tokens; widened when needed
        self.edits: list[SequenceEdits | None] = [None] * slots
        self.pools: list[PromptPool | None] = [None] * slots  # of prompts to be embedded
        self.requests: list[Request | None] = [None] * slots
        self._free = list(range(slots))[::-1]
        self.num_with_media = 0  # slots with MEDIA; to be read by others
        self._num_following = 0
        self._slots_in: dict[Phase, np.ndarray] = {}  # by phase: asked for since a phase changed

    @property
    def num_free_slots(self) -> int:
        """Slots that `open` could occupy now."""
        return len(self._free)

    @property
    def any_follows(self) -> bool:
        """True when some sequence's logits depend on the tokens that it has so far."""
        return self._num_following > 0

    def slots_in(self, phase: Phase) -> np.ndarray:
        """Returns the slots in a phase, int64[n], ascending. It is the same array as long as no phase changes."""
        slots = self._slots_in.get(phase)
        if slots is None:
            slots = self._slots_in[phase] = np.flatnonzero(self.phase == phase)
        return slots

    def set_phase(self, slots: int | np.ndarray, phase: Phase) -> None:
        """Moves one slot or several to a phase."""
        self.phase[slots] = phase
        self._slots_in = {}

    def request(self, slot: int) -> Request:
        """Returns the request in a slot that is not free."""
        request = self.requests[slot]
        assert request is not None
        return request

    def ask_grammar(self, request: Request) -> bool:
        """Asks for the compilation of a request's grammar, if it has one; False: too many grammars wait for that."""
        if text := request.capsule.sampling.grammar:
            assert self.guidance is not None
            request.grammar = self.guidance.grammars.ask(text, request.party)
            return request.grammar is not None
        return True

    def is_guided(self, request: Request) -> bool:
        """False while the grammar of a request's answer is being compiled."""
        if request.grammar is None:
            return True
        assert self.guidance is not None
        return self.guidance.ready(request.grammar)

    def leave_grammar(self, request: Request) -> None:
        """Withdraws the demand of a request that is over for the compilation of its grammar."""
        if request.grammar is not None:
            assert self.guidance is not None
            self.guidance.grammars.leave(request.grammar, request.party)

    def open(self, request: Request, blocks: np.ndarray, stop_ids: tuple[int, ...]) -> int:
        """Puts a request with int32[n] blocks into a free slot, and returns it; the caller sets phase and counters."""
        slot = self._free.pop()
        capsule, sampling = request.capsule, request.capsule.sampling
        length = len(capsule.token_ids)
        self.requests[slot] = request
        self.tokens[slot, :length] = capsule.token_ids
        self.length[slot] = length
        self.num_prompt[slot] = capsule.num_prompt
        self.max_len[slot] = min(capsule.max_len, self.max_model_len)
        self.min_len[slot] = capsule.num_prompt + sampling.min_tokens
        self.block_table[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        self.arrival[slot] = request.arrival
        self.priority[slot] = capsule.priority
        self.deadline[slot] = request.deadline
        self.gateway[slot] = request.id.gateway
        self.handle[slot] = request.id.handle
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed
        self.num_logprobs[slot] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self.num_prompt_logprobs[slot] = (sampling.num_prompt_logprobs or 0) if request.scores_prompt else -1
        self.logprob_ids[slot] = sampling.logprob_token_ids
        self._set_stop_ids(slot, stop_ids)
        self.edits[slot] = edits_of(sampling, capsule.num_prompt, self.guidance, request.grammar, self.vocab_size)
        self.pools[slot] = None if capsule.pooling is None else PromptPool(capsule.pooling, length)
        self.features[slot] = features = self._features_of(slot)
        self._num_following += bool(features & FOLLOWS)
        self.num_with_media += bool(features & MEDIA)
        return slot

    def _features_of(self, slot: int) -> int:
        request, edits = self.request(slot), self.edits[slot]
        return int(
            (self.temperature[slot] > 0) * SAMPLES
            | (self.num_logprobs[slot] >= 0) * LOGPROBS
            | request.scores_prompt * SCORES
            | (self.stop_ids[slot, 0] >= 0) * STOPS
            | (request.capsule.sampling.min_tokens > 0) * MIN_TOKENS
            | (edits is not None and (edits.names_tokens or edits.allowed is not None)) * EDITS
            | (edits is not None and edits.guided is not None) * GUIDED
            | (edits is not None and edits.follows_tokens) * FOLLOWS
            | bool(self.logprob_ids[slot]) * NAMED_LOGPROBS
            | (self.pools[slot] is not None) * EMBEDS
            | bool(request.capsule.media) * MEDIA
            | bool(request.capsule.second_text) * TYPES
        )

    def close(self, slot: int) -> None:
        """Frees a slot; the caller frees its blocks."""
        self._num_following -= bool(self.features[slot] & FOLLOWS)
        self.num_with_media -= bool(self.features[slot] & MEDIA)
        self.num_closed += 1
        self.serial[slot] += 1
        self.requests[slot] = None
        self.edits[slot] = None
        self.pools[slot] = None
        self.features[slot] = 0
        self.set_phase(slot, Phase.FREE)
        self.block_table[slot, : self.num_blocks[slot]] = 0
        self.num_blocks[slot] = 0
        self.num_freed[slot] = 0
        self.unseen[slot] = 0
        self._free.append(slot)

    def blocks(self, slot: int) -> list[int]:
        """Returns the blocks of one slot, in the order of its table."""
        blocks: list[int] = self.table(slot).tolist()
        return blocks

    def table(self, slot: int) -> np.ndarray:
        """Returns the blocks of one slot as int32[n], a copy."""
        table: np.ndarray = self.block_table[slot, self.num_freed[slot] : self.num_blocks[slot]].copy()
        return table

    def known_tokens(self, slot: int) -> np.ndarray:
        """Returns a view of one slot's tokens, int32[length]."""
        return self.tokens[slot, : self.length[slot]]

    def ends(self, slot: int) -> np.ndarray:
        """Returns the tokens that end one slot's sequence, int32[n]."""
        stop_ids = self.stop_ids[slot]
        ends: np.ndarray = stop_ids[stop_ids >= 0]
        return ends

    def is_producing(self, slot: int) -> bool:
        """True when the slot's sequence is handed off after its first token."""
        return self.request(slot).kind is Kind.PRODUCE

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(stop_ids) > width:
            wider = np.full((self.max_num_seqs, len(stop_ids)), -1, dtype=np.int32)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
