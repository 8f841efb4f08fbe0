"""A frame: all that one engine step has to say to one gateway, as parallel arrays.

    rows     handles  positions  counts  finish  cached       one entry a row
    tokens   ───────  ▲ index in the sequence of the row's first token
             int32[sum(counts)], rows one after the other

Embeddings have no rows: each is the end of its request.

Logprobs, for the rows that asked (widths >= 0), keep the same order: `sampled` has one entry for each of their tokens,
and so have `ranks`, where there are any; `top_ids` and `top` have width entries for each of their tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice, repeat
from typing import Any, NamedTuple

import numpy as np

from kvtransfer.ids import WorkerId
from kvtransfer.messages import EndReason
from kvtransfer.moved import Moved
from services.protocol.alternatives import alternatives_of
from services.protocol.outcomes import FailureCode, FinishReason
from services.protocol.sampling import FEW_ALTERNATIVES

_FINISH = tuple(FinishReason)  # by number


@dataclass(slots=True, eq=False)
class PackedLogprobs:
    """Log-probabilities under the model's raw distribution."""

    widths: np.ndarray  # int32[rows]; -1: the row has none
    sampled: np.ndarray  # float32[tokens of rows with logprobs]
    top_ids: np.ndarray  # int32[sum(width * count)]
    top: np.ndarray  # float32, beside top_ids
    ranks: np.ndarray | None = None  # int32[tokens of rows with logprobs], see TokenLogprobs; 0: not counted


@dataclass(slots=True, eq=False)
class Embeddings:
    """The embeddings of some prompts, as pooled: neither shortened nor normalized."""

    handles: np.ndarray  # uint32[prompts]
    cached: np.ndarray  # int32[prompts]: cached prompt tokens
    values: np.ndarray  # float32[prompts, size]


@dataclass(frozen=True, slots=True)
class Failure:
    """A handle that failed, and the reason."""

    handle: int
    code: FailureCode
    detail: str = ""
    end_reason: EndReason | None = None  # why its handoff ended, where that is what failed it


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's load, for the router."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    available_blocks: int = 0
    quarantined_blocks: int = 0
    avoid: tuple[WorkerId, ...] = ()  # producers that should not be paired with this consumer now
    bytes_moved: int = 0
    gc_collections: int = 0  # garbage collections of the worker's process in this life
    gc_pause_us: int = 0  # their total duration
    draining: bool = False  # it takes no new work, and ends soon
    computed_tokens: int = 0  # by the engine's steps in this life, of prompts and answers
    not_finite: int = 0  # requests in this life that failed because the model computed numbers that are not finite
    evicted_blocks: int = 0  # cached blocks in this life whose room was needed; 0 also where a worker does not tell
    # Tokens of a layer's busiest expert over the mean of its experts, in the last minute: of the layer where it is
    # highest, and over the layers. None: no experts, or not known.
    worst_expert_imbalance: float | None = None
    mean_expert_imbalance: float | None = None
    # The same between ranks that have whole experts: pairs of the busiest rank over the mean of the ranks.
    worst_rank_imbalance: float | None = None
    mean_rank_imbalance: float | None = None
    # Of a model on several ranks: the one that the others waited for in the last minute of steps, and the share of
    # these for which they did. None: one rank, or not known.
    slowest_rank: int | None = None
    waited_for_slowest_rank: float | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of an attempt at one worker, in seconds after that worker got it. None: not reached, or no part of it."""

    handle: int  # of the group where there are several choices
    announced_s: float | None = None  # its producer announced the first blocks
    admitted_s: float | None = None  # the engine gave it slots and blocks
    ready_s: float | None = None  # all blocks of its handoff are here
    sent_s: float = 0.0  # its first row, or its failure, left
    moved: Moved = field(default_factory=Moved)  # how the blocks of its handoff came


@dataclass(slots=True, eq=False)
class Frame:
    """Rows, failures and load of one step for one gateway."""

    handles: np.ndarray  # uint32[rows]
    positions: np.ndarray  # uint32[rows]
    counts: np.ndarray  # uint32[rows]
    tokens: np.ndarray  # int32[sum(counts)]
    finish: np.ndarray  # uint8[rows], FinishReason
    cached: np.ndarray  # int32[rows]: cached prompt tokens in a request's first row, else -1
    logprobs: PackedLogprobs | None = None
    failures: list[Failure] = field(default_factory=list)
    load: Load | None = None
    timings: list[Timing] = field(default_factory=list)  # of attempts whose first row, embedding or failure is in here
    embeddings: Embeddings | None = None

    def rows(self) -> Iterator["Row"]:
        """Returns an iterator over the frame's rows."""
        columns = (
            self.handles.tolist(),
            self.positions.tolist(),
            self._tokens_of_rows(),
            map(_FINISH.__getitem__, self.finish.tolist()),
            self.cached.tolist(),
            repeat(None) if self.logprobs is None else _row_logprobs(self, self.logprobs),
        )
        return map(_as_row, zip(*columns, strict=False))  # `repeat` has no end

    def _tokens_of_rows(self) -> list[list[int]]:
        counts, tokens = self.counts.tolist(), self.tokens.tolist()
        if counts.count(1) == len(counts):
            return [[token] for token in tokens]
        return [tokens[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability and its alternatives: the best first, or those that were asked for by name.

    rank: 1 for the likeliest token; of tokens with equal logits the last one's. None: not counted. Only tokens of
    prompts have one, and only where the worker is of a version that counts.
    """

    sampled: float
    top: Sequence[tuple[int, float]]  # (token id, log-probability)
    rank: int | None = None


class Row(NamedTuple):
    """Consecutive tokens of one sequence."""

    handle: int
    position: int
    tokens: list[int]
    finish: FinishReason
    cached: int
    logprobs: list[TokenLogprobs] | None  # one for each token, when asked for


_as_row: Callable[[Iterable[Any]], Row] = partial(tuple.__new__, Row)  # saves a call in Python for each row


def _row_logprobs(frame: Frame, packed: PackedLogprobs) -> Iterator[list[TokenLogprobs] | None]:
    if packed.widths.max(initial=0) > FEW_ALTERNATIVES:
        yield from _row_many_logprobs(frame, packed)
        return
    sampled, top_ids, top = packed.sampled.tolist(), packed.top_ids.tolist(), packed.top.tolist()
    ranks = repeat(None) if packed.ranks is None else (rank or None for rank in packed.ranks.tolist())
    token_at = top_at = 0
    for width, count in zip(packed.widths.tolist(), frame.counts.tolist(), strict=True):
        if width < 0:
            yield None
            continue
        row: list[TokenLogprobs] = []
        for _ in range(count):
            pairs = zip(top_ids[top_at : top_at + width], top[top_at : top_at + width], strict=True)
            row.append(TokenLogprobs(sampled[token_at], tuple(pairs), next(ranks)))
            token_at += 1
            top_at += width
        yield row


def _row_many_logprobs(frame: Frame, packed: PackedLogprobs) -> Iterator[list[TokenLogprobs] | None]:
    """Does the same where a row has many alternatives, which stay in arrays."""
    widths, counts = packed.widths.tolist(), frame.counts.tolist()
    ranks = np.zeros(len(packed.sampled), np.int32) if packed.ranks is None else packed.ranks
    of_tokens, top_at = zip(packed.sampled.tolist(), ranks.tolist(), strict=True), 0
    for width, count in zip(widths, counts, strict=True):
        if width < 0:
            yield None
            continue
        row: list[TokenLogprobs] = []
        for sampled, rank in islice(of_tokens, count):
            here = slice(top_at, top_at + width)
            top_at += width
            row.append(TokenLogprobs(sampled, alternatives_of(packed.top_ids[here], packed.top[here]), rank or None))
        yield row
