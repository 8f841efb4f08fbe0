"""Outputs of the engine: tokens, reservations, announcements and failures, for the worker to pass on."""

from dataclasses import dataclass, field

import numpy as np

from kvtransfer.ids import AttemptId, GatewayId
from kvtransfer.messages import Announcement
from services.engine.runner.base import StepLogprobs
from services.protocol.alternatives import alternatives_of, arrays_of
from services.protocol.frames import Failure, TokenLogprobs
from services.protocol.outcomes import FinishReason


@dataclass(slots=True, eq=False)
class StepRows:
    """R rows with N tokens, sampled or of a scored prompt: those of a row follow each other in its sequence."""

    gateway: GatewayId | None  # of all rows; None: they have several
    gateways: np.ndarray  # uint64[R]
    handles: np.ndarray  # uint32[R]
    positions: np.ndarray  # uint32[R]: of the row's first token
    counts: np.ndarray  # uint32[R]: tokens of the row, at least 1
    tokens: np.ndarray  # int32[N]
    finish: np.ndarray  # uint8[R], FinishReason
    cached: np.ndarray  # int32[R]: cached prompt tokens in a request's first row, else -1
    widths: np.ndarray  # int32[R]: alternatives asked for; -1: no logprobs
    logprobs: StepLogprobs | None  # of the N tokens

    def first_token(self, row: int) -> int:
        """Returns the index of a row's first token among the N."""
        return int(self.counts[:row].sum())


@dataclass(frozen=True, slots=True)
class Reserved:
    """A sequence whose blocks are to be received was admitted; the first num_cached of their slices were cached."""

    id: AttemptId
    blocks: list[int]  # their slices
    num_cached: int


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that the engine failed; it has no blocks any more."""

    gateway: GatewayId
    failure: Failure

    @property
    def id(self) -> AttemptId:
        """The request's attempt."""
        return AttemptId(self.gateway, self.failure.handle)


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """The embedding of a prompt, whose request is finished; `cached` of its tokens were not computed for it."""

    id: AttemptId
    cached: int
    values: np.ndarray  # float32[embedding_size]


@dataclass(slots=True)
class EngineOutputs:
    """Everything that the engine has put out since the last `take`."""

    rows: list[StepRows] = field(default_factory=list)
    announcements: list[Announcement] = field(default_factory=list)
    finished_first: list[AttemptId] = field(default_factory=list)  # to hand off, but finished with the first token
    admitted: list[AttemptId] = field(default_factory=list)  # for the first time
    reserved: list[Reserved] = field(default_factory=list)
    failed: list[FailedRequest] = field(default_factory=list)
    embedded: list[Embedded] = field(default_factory=list)

    def take(self) -> "EngineOutputs":
        """Moves everything into the object that is returned, and leaves this one empty."""
        taken = EngineOutputs(
            self.rows,
            self.announcements,
            self.finished_first,
            self.admitted,
            self.reserved,
            self.failed,
            self.embedded,
        )
        self.rows, self.announcements, self.finished_first = [], [], []
        self.admitted, self.reserved, self.failed, self.embedded = [], [], [], []
        return taken


def sole_gateway(gateways: np.ndarray) -> GatewayId | None:
    """Returns the gateway of all uint64[N] rows, N above zero; None where there are several."""
    return GatewayId(int(gateways[0])) if (gateways == gateways[0]).all() else None


def row_logprobs(rows: StepRows, row: int, nth: int = 0) -> TokenLogprobs | None:
    """Returns the logprobs of a row's nth token as a value, for the few rows that travel alone."""
    width, token = int(rows.widths[row]), rows.first_token(row) + nth
    if rows.logprobs is None or width < 0:
        return None
    pairs = alternatives_of(*rows.logprobs.alternatives(token, width))
    rank = None if rows.logprobs.ranks is None else int(rows.logprobs.ranks[token])
    return TokenLogprobs(float(rows.logprobs.sampled[token]), pairs, rank)


def single_row(id: AttemptId, position: int, token: int, cached: int, logprobs: TokenLogprobs | None) -> StepRows:
    """Makes the row of a token that no step of this engine sampled: the first token of a received sequence."""
    packed = None
    if logprobs is not None:
        top_ids, top = arrays_of(logprobs.top)
        packed = StepLogprobs(np.array([logprobs.sampled], dtype=np.float32), top_ids[None], top[None])
    return StepRows(
        gateway=id.gateway,
        gateways=np.array([id.gateway], dtype=np.uint64),
        handles=np.array([id.handle], dtype=np.uint32),
        positions=np.array([position], dtype=np.uint32),
        counts=np.ones(1, dtype=np.uint32),
        tokens=np.array([token], dtype=np.int32),
        finish=np.array([FinishReason.NONE], dtype=np.uint8),
        cached=np.array([cached], dtype=np.int32),
        widths=np.array([-1 if logprobs is None else len(logprobs.top)], dtype=np.int32),
        logprobs=packed,
    )
