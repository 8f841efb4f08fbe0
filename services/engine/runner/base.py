"""The seam between the step loop and the runner that executes a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np

from kvtransfer.block_memory import BlockMemory
from kvtransfer.layout import KvLayout
from services.protocol.sampling import FEW_ALTERNATIVES

NO_ROWS = np.zeros(0, dtype=np.int64)
NO_TYPES = np.zeros(0, dtype=np.int32)
NOT_FINITE = -1  # in the place of a token
_MANY_PROMPT_TOKENS = 64


def _nothing() -> None:
    """Begins masks that are there already."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """The tokens that M rows may choose.

    A runner begins the masks and takes their bits; or it settles the tokens that would come without masks, and takes
    the masks of those rows alone for which that fails.

    begin: starts the computation of the masks, while the model runs.
    bits: waits for them, and returns uint32[M, ceil(vocab / 32)], lowest bit first; 1: may.
    settle: gets the likeliest of all tokens for each row, int[M]. Where a row may choose one token only, it puts that
    one in its place. Returns masks of the rows whose token must not come, or None where all tokens may come. Masks that
    cannot be settled have no `settle`: their bits have to be taken.
    """

    rows: np.ndarray  # int64[M]
    bits: Callable[[], np.ndarray]
    begin: Callable[[], None] = _nothing
    settle: "Callable[[np.ndarray], TokenMasks | None] | None" = None


@dataclass(slots=True, eq=False)
class LogitEdits:
    """Changes to logits before a token is chosen, for N rows: first the B biases, then the C penalties, then masks.

    A token that a row's answer has `c` times (0 if only its prompt has it) with the logit z gets the logit z /
    repetition (z * repetition if z is negative) - c * frequency - (c > 0) * presence, as in CTRL (Keskar et al. 2019)
    and OpenAI's API.
    """

    bias_rows: np.ndarray  # int64[B]
    bias_tokens: np.ndarray  # int64[B]
    bias: np.ndarray  # float32[B], added to logits; -inf: the token must not be chosen
    count_rows: np.ndarray  # int64[C]
    count_tokens: np.ndarray  # int64[C], no token twice in a row
    counts: np.ndarray  # float32[C]
    repetition: np.ndarray  # float32[N]
    frequency: np.ndarray  # float32[N]
    presence: np.ndarray  # float32[N]
    masks: TokenMasks | None = None  # None: each row may choose any token
    stuck: tuple[int, ...] = ()  # rows that may choose no token, of those without a grammar; what they get is ignored

    @property
    def only_masks(self) -> bool:
        """True when there are neither biases nor penalties."""
        return not len(self.bias_rows) and not len(self.count_rows)


@dataclass(slots=True, eq=False)
class NamedLogprobs:
    """The alternatives of M rows that name theirs, which are reported instead of the likeliest tokens."""

    rows: np.ndarray  # int64[M]
    token_ids: np.ndarray  # int64[M, K]; a row with fewer alternatives has zeros at its end


@dataclass(slots=True, eq=False)
class SamplingBatch:
    """Parameters of the N tokens that a step samples; arrays are parallel. A row of these, and of edits, is a token."""

    temperature: np.ndarray  # float32[N]; 0: greedy
    top_k: np.ndarray  # int32[N]; -1: off
    top_p: np.ndarray  # float32[N]
    min_p: np.ndarray  # float32[N]
    seed: np.ndarray  # uint64[N]
    position: np.ndarray  # int64[N]: index in its sequence of the token to be sampled
    num_logprobs: np.ndarray  # int32[N]: alternatives wanted; -1: no logprobs
    edits: LogitEdits | None  # None: no row has any
    all_greedy: bool
    any_logprobs: bool
    named: "NamedLogprobs | None" = None  # None: all alternatives are the likeliest

    @property
    def only_likeliest(self) -> bool:
        """True when each row gets the likeliest of the tokens that it may choose, and no other number is wanted."""
        return self.all_greedy and not self.any_logprobs and (self.edits is None or self.edits.only_masks)

    @property
    def settles(self) -> bool:
        """True when tokens are chosen first, and masks are taken only for rows that must not have theirs."""
        masks = None if self.edits is None else self.edits.masks
        return self.only_likeliest and masks is not None and masks.settle is not None

    def begin_masks(self) -> None:
        """Starts the computation of the masks, if there are any, while the model runs."""
        if self.edits is not None and self.edits.masks is not None:
            self.edits.masks.begin()

    @classmethod
    def greedy(cls, num_rows: int, num_logprobs: int = -1) -> "SamplingBatch":
        """Returns parameters with which so many rows get their likeliest token."""
        ones = np.ones(num_rows, dtype=np.float32)
        return cls(
            temperature=0 * ones,
            top_k=np.full(num_rows, -1, dtype=np.int32),
            top_p=ones,
            min_p=0 * ones,
            seed=np.zeros(num_rows, dtype=np.uint64),
            position=np.zeros(num_rows, dtype=np.int64),
            num_logprobs=np.full(num_rows, num_logprobs, dtype=np.int32),
            edits=None,
            all_greedy=True,
            any_logprobs=num_logprobs >= 0,
        )


@dataclass(slots=True, eq=False)
class ScoredTokens:
    """S tokens of prompts that are computed in this step, for each of which its successor's probability is wanted."""

    queries: np.ndarray  # int64[S]: among the step's T query tokens
    successors: np.ndarray  # int32[S]: token ids
    num_logprobs: np.ndarray  # int32[S]: alternatives wanted, at least 0


@dataclass(slots=True, eq=False)
class PooledTokens:
    """Q tokens of P prompts that are computed in this step, whose hidden states are added up for each prompt."""

    queries: np.ndarray  # int64[Q]: among the step's T query tokens
    starts: np.ndarray  # int64[P + 1]: prompt p has the queries from starts[p] to starts[p + 1]; maybe none


@dataclass(slots=True, eq=False)
class StepTokens:
    """The tokens that a step computes: T query tokens of R rows (sequences), as plain arrays.

    A forward pass needs nothing else of a step. Rows are packed one after the other: row r's query tokens are
    query_starts[r] to query_starts[r + 1], and are the last ones of its seq_lens[r] tokens. Their KV is written before
    attention reads it.
    """

    token_ids: np.ndarray  # int32[T]; -1 - n: the n-th token that the step launched before samples, for a runner to put
    positions: np.ndarray  # int32[T]
    query_starts: np.ndarray  # int32[R + 1]
    seq_lens: np.ndarray  # int32[R], this step's tokens included
    # int32[R, B]; entries past a row's blocks, or of blocks freed behind a window, are 0. Where blocks have S slices,
    # int32[R, S * B]: the table of each slice after that of the one before.
    block_tables: np.ndarray
    queries: np.ndarray = field(default_factory=lambda: NO_ROWS)  # int64[Q]: of which hidden states are wanted
    # int32[T], where the model tells tokens of a first text, 0, from those of a second one, 1; empty: all have type 0.
    token_types: np.ndarray = field(default_factory=lambda: NO_TYPES)

    @property
    def computes_prompts(self) -> bool:
        """True when there are so many tokens of prompts that they make the step much longer."""
        return len(self.token_ids) - len(self.seq_lens) >= _MANY_PROMPT_TOKENS

    def rows_of(self, queries: np.ndarray) -> np.ndarray:
        """Returns the rows that these query tokens belong to, int64[n]."""
        rows: np.ndarray = np.searchsorted(self.query_starts, queries, side="right") - 1
        return rows

    def to_bytes(self) -> bytes:
        """Returns the arrays as bytes, for `from_bytes` in another process of the same byte order."""
        tables = self.block_tables
        sizes = np.array([len(self.token_ids), *tables.shape, len(self.queries), len(self.token_types)], dtype=np.int64)
        numbers = (self.token_ids, self.positions, self.query_starts, self.seq_lens, tables, self.token_types)
        arrays = (self.queries, *numbers)
        return b"".join(array.tobytes() for array in (sizes, *arrays))

    @classmethod
    def from_bytes(cls, packed: bytes | bytearray) -> "StepTokens":
        """Returns the tokens of `to_bytes`. The arrays are views of the bytes."""
        num_tokens, num_rows, num_blocks, num_queries, num_types = np.frombuffer(packed, np.int64, 5).tolist()
        queries = np.frombuffer(packed, np.int64, num_queries, offset=40)
        sizes = (num_tokens, num_tokens, num_rows + 1, num_rows, num_rows * num_blocks, num_types)
        numbers = np.frombuffer(packed, np.int32, sum(sizes), offset=40 + queries.nbytes)
        ids, positions, starts, lens, tables, types = np.split(numbers, list(accumulate(sizes[:-1])))
        return cls(ids, positions, starts, lens, tables.reshape(num_rows, num_blocks), queries, types)


@dataclass(slots=True, eq=False)
class StepInput:
    """One step: the tokens that it computes, and what becomes of their hidden states.

    `tokens.queries` are those of `sampled`, `scored`, `pooled` and `watched`, in this order. The arrays belong to the
    engine and do not change until the step is collected.
    """

    tokens: StepTokens
    sampled: np.ndarray  # int64[N]: query tokens that are followed by a sampled one; those of a row one after the other
    sampling: SamplingBatch
    watched: np.ndarray = field(default_factory=lambda: NO_ROWS)  # int64[W]: the last query of each row without a token
    scored: ScoredTokens | None = None
    pooled: PooledTokens | None = None
    # Called in `launch`, at most once, when the runner has done most of what it needs Python for.
    on_computing: Callable[[], None] | None = None
    counts_experts: bool = False  # its output says how many pairs each expert has got; only where the model has experts

    @classmethod
    def of(
        cls,
        tokens: StepTokens,
        sampled: np.ndarray,
        sampling: SamplingBatch,
        scored: ScoredTokens | None = None,
        pooled: PooledTokens | None = None,
    ) -> "StepInput":
        """Makes a step of tokens without `queries`, which it sets."""
        gets_none = np.ones(len(tokens.seq_lens), dtype=np.bool_)
        gets_none[tokens.rows_of(sampled)] = False
        watched = tokens.query_starts[1:][gets_none].astype(np.int64) - 1
        others = [part.queries for part in (scored, pooled) if part is not None]
        tokens.queries = np.concatenate([sampled, *others, watched])
        return cls(tokens, sampled, sampling, watched, scored, pooled)

    @property
    def samples_all(self) -> bool:
        """True when each query token is followed by a sampled one, in their order, and nothing else is wanted."""
        return self.scored is None and np.array_equal(self.sampled, np.arange(len(self.tokens.token_ids)))

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """The numbers of queries of `sampled`, `scored`, `pooled` and `watched`."""
        scored = 0 if self.scored is None else len(self.scored.queries)
        pooled = 0 if self.pooled is None else len(self.pooled.queries)
        return len(self.sampled), scored, pooled, len(self.watched)


def common_width(widths: np.ndarray) -> int:
    """Returns how many alternatives every row gets in a step's arrays, where rows ask for int32[N] of them: as many as
    the widest row, up to FEW_ALTERNATIVES.
    """
    return min(int(widths.max(initial=0)), FEW_ALTERNATIVES)


def wide_rows(widths: np.ndarray) -> list[tuple[int, int]]:
    """Returns the rows that ask for more than FEW_ALTERNATIVES, and how many each asks for."""
    rows = np.flatnonzero(widths > FEW_ALTERNATIVES)
    return list(zip(rows.tolist(), widths[rows].tolist(), strict=True))


@dataclass(slots=True, eq=False)
class StepLogprobs:
    """Log-probabilities under the raw distribution, for N tokens; K is the `common_width` of the step."""

    sampled: np.ndarray  # float32[N]
    top_ids: np.ndarray  # int32[N, K], best first
    top: np.ndarray  # float32[N, K]
    ranks: np.ndarray | None = None  # int32[N]: tokens of which each has at least this one's logit; None: not counted
    # All alternatives of the `wide_rows`, by row: int32[width] and float32[width]. In arrays of one width for all rows,
    # one row of a whole vocabulary would make thousands of others as wide.
    wide: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def alternatives(self, row: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids and the logprobs of a row's alternatives: int32[width], float32[width]."""
        return self.wide.get(row) or (self.top_ids[row, :width], self.top[row, :width])

    @classmethod
    def joined(cls, parts: "Sequence[StepLogprobs]") -> "StepLogprobs":
        """Joins parts, one after the other; all of them have ranks, or none has."""
        sampled, top_ids, top = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("sampled", "top_ids", "top")
        )
        ranks = [part.ranks for part in parts if part.ranks is not None]
        starts = accumulate((len(part.sampled) for part in parts), initial=0)
        wide = {start + row: own for start, part in zip(starts, parts, strict=False) for row, own in part.wide.items()}
        return cls(sampled, top_ids, top, np.concatenate(ranks) if ranks else None, wide)

    def rows(self, which: np.ndarray) -> "StepLogprobs":
        """Returns the rows that bool[N] `which` marks."""
        ranks = None if self.ranks is None else self.ranks[which]
        wide = {int(which[:row].sum()): own for row, own in self.wide.items() if which[row]}
        return StepLogprobs(self.sampled[which], self.top_ids[which], self.top[which], ranks, wide)


@dataclass(slots=True, eq=False)
class StepOutput:
    """The tokens that a step sampled, in the order of `StepInput.sampled`. The arrays belong to the engine and do not
    change later.
    """

    token_ids: np.ndarray  # int32[N]; NOT_FINITE: the logits, before edits, are not all finite
    logprobs: StepLogprobs | None
    scored: StepLogprobs | None = None  # for the S successors; NaN: logits are not all finite
    pooled: np.ndarray | None = None  # float32[P, embedding_size]: sums of hidden states, after the last norm
    not_finite: np.ndarray = field(default_factory=lambda: NO_ROWS)  # int64[M], rows of the step: see `not_finite.py`
    # int64[layers with experts, experts]: pairs of a token and an expert so far, this step's included, where asked for.
    expert_pairs: np.ndarray | None = None


CHECK_TOKENS = 112  # of a runner's self-check: a prompt for the kernels of many tokens, and some to decode


def spare_blocks(num_blocks: int, block_size: int, num_slices: int = 1) -> range:
    """Returns the ids of a runner's spare blocks, or slices, which have room for the self-check."""
    return range(num_blocks, num_blocks + -(-CHECK_TOKENS // block_size) * num_slices)


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A model's weights in memory."""

    num_bytes: int
    not_shared: str | None  # why other workers of this host cannot map them; None: they can

    def told(self) -> dict[str, str]:
        """Returns what a worker's log says of them when it starts."""
        shared = "shared with workers of this host" if self.not_shared is None else f"not shared: {self.not_shared}"
        return {"weights": f"{self.num_bytes / 2**20:,.0f} MiB, {shared}"}


class Runner(Protocol):
    """Executes steps over a pool of KV blocks that it owns."""

    layout: KvLayout
    num_blocks: int  # or slices, where the layout has groups of layers
    spare_blocks: range  # ids of blocks beside these, for `SelfCheck` alone; none: nothing is computed
    vocab_size: int
    embedding_size: int  # numbers that come of a prompt that is pooled: hidden states after the last norm, or a score
    generates: bool  # False: the model makes embeddings or scores alone
    window: int | None  # positions that a token sees, its own included; earlier blocks are not read. None: all
    token_types: bool  # the model tells tokens of a pair's second text from those of the first
    whole_prompts: bool  # every prompt is in one step, and nothing of it is kept: its tokens see all of it
    has_experts: bool  # its layers have experts, whose pairs it counts
    experts_of_ranks: tuple[range, ...]  # the experts of each rank that has whole ones; empty: no rank has

    def kv_memory(self) -> BlockMemory:
        """Returns the pool, num_blocks of layout.block_bytes each, for transports: the same object each time."""

    def copy_block(self, source: int, destination: int) -> None:
        """Copies one block's KV after all steps launched so far. Returns when the copy is complete."""

    def launch(self, step: StepInput) -> None:
        """Starts a step. At most one more may be launched before it is collected; that one runs after this one."""

    def collect(self) -> StepOutput:
        """Waits for the oldest launched step. Raises the error that made it fail; the worker process then ends."""


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """The rank that the others wait for."""

    rank: int
    waited: float  # share of the time of steps for which the others waited, on average, beyond what it waited itself


class RankGroup(Protocol):
    """The processes that share a model, as the worker of the first sees them."""

    @property
    def slowest_rank(self) -> SlowestRank | None:
        """Returns the rank that the others waited for in the last minute of steps; None: not known so far."""

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Sets who is told of the loss of a rank, in words, on a thread of its own: the group is over then."""

    def close(self) -> None:
        """Ends the other processes, once there are no more steps. A second call changes nothing."""
