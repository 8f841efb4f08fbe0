"""The tokens that a step samples: their sequences, with those of their columns that do not change from step to step.

A row is what a sequence gets in a step: one token, or several, each of which follows a query of its own. Between known
tokens and sampled ones then lie drafts, which stand in `BatchState.tokens` after the sequence's length:

    tokens of a sequence     k k k k │ d₁ d₂ d₃
    queries of the step            q₀  q₁ q₂ q₃      q₀ is the last known token, the others are drafts
    sampled                        t₁  t₂ t₃ t₄      t₁ holds; t₂ does if d₁ = t₁, t₃ if d₂ = t₂ too, ...

A token is a function of logits, seed and position, so what holds is what would have come one by one (Leviathan et al.
2023, arXiv 2211.17192, for draws that are not).
"""

from functools import partial

import numpy as np

from services.engine.runner.base import LogitEdits, NamedLogprobs, SamplingBatch, StepLogprobs, TokenMasks
from services.engine.sampling.guidance import GuidedRow, GuidedSequence
from services.engine.sampling.logit_edits import gather_edits
from services.engine.sampling.token_masks import NONE_LEFT, is_any_left
from services.engine.sequences.batch_state import (
    EDITS,
    GUIDED,
    LOGPROBS,
    MIN_TOKENS,
    NAMED_LOGPROBS,
    SAMPLES,
    STOPS,
    BatchState,
)
from services.engine.sequences.outputs import StepRows, sole_gateway
from services.protocol.outcomes import FinishReason

_NO_TOKENS = np.zeros(0, dtype=np.int32)
_STOP, _LENGTH = np.uint8(FinishReason.STOP), np.uint8(FinishReason.LENGTH)


class TokenRows:
    """N tokens in R rows by their slots, and copies of their columns of the batch.

    Only a change of the sequences needs a new one.
    """

    def __init__(self, batch: BatchState, slots: np.ndarray, *, several: bool = False) -> None:
        """slots: int64[N], those of a row one after the other. several: rows may have more than one token."""
        self.slots = slots
        self.firsts = _firsts(slots) if several else None  # int64[R], each row's first token; None: it is its only one
        self.serials = batch.serial[slots]
        self.token_base = batch.token_base[slots]
        self.queries = np.arange(len(slots))  # of these tokens, in a step that computes nothing else
        self.starts = np.arange(len(slots) + 1, dtype=np.int32)  # of the rows' queries in such a step
        self.max_len = batch.max_len[slots]
        self.features = int(np.bitwise_or.reduce(batch.features[slots])) if len(slots) else 0
        self._batch = batch
        self._stop_ids = _columns(batch.stop_ids[slots]) if self.features & STOPS else None
        self._temperature = batch.temperature[slots]
        self._top_k = batch.top_k[slots]
        self._top_p = batch.top_p[slots]
        self._min_p = batch.min_p[slots]
        self._seed = batch.seed[slots]
        self._num_logprobs = batch.num_logprobs[slots]
        self._named = _named(batch, slots) if self.features & NAMED_LOGPROBS else None
        self.row_slots = slots if self.firsts is None else slots[self.firsts]  # int64[R]
        self._counts = _counts(self.firsts, len(slots))
        self._gateways = batch.gateway[self.row_slots]
        self._gateway = sole_gateway(self._gateways) if len(slots) else None
        self._handles = batch.handle[self.row_slots]
        self._going_on = np.zeros(len(slots), dtype=np.uint8)
        self._reported: np.ndarray | None = None  # `cached`, when all rows have reported theirs
        self._guided = _guided_rows(batch, slots) if self.features & GUIDED else []
        self._asked: list[GuidedRow] = []  # of the last step, for masks

    def __len__(self) -> int:
        return len(self.slots)

    def sampling(self, positions: np.ndarray) -> SamplingBatch:
        """Makes the sampling parameters of these rows' tokens at int32[N] positions."""
        return SamplingBatch(
            temperature=self._temperature,
            top_k=self._top_k,
            top_p=self._top_p,
            min_p=self._min_p,
            seed=self._seed,
            position=positions.astype(np.int64),
            num_logprobs=self._num_logprobs,
            edits=self._edits(positions) if self.features & (EDITS | GUIDED | MIN_TOKENS) else None,
            all_greedy=not self.features & SAMPLES,
            any_logprobs=bool(self.features & LOGPROBS),
            named=self._named,
        )

    def finish(self, tokens: np.ndarray, is_last: np.ndarray | None) -> np.ndarray:
        """Says why a sequence finishes with each token, uint8[N] FinishReason. is_last: bool[N], full with it."""
        stops = None if self._stop_ids is None else self._stop_ids == tokens
        if is_last is None and (stops is None or not stops.any()):
            return self._going_on
        finish = self._going_on.copy()
        if is_last is not None:
            finish[is_last] = _LENGTH
        if stops is not None:
            finish[stops.any(axis=0)] = _STOP
        return finish

    def lost(self, edits: LogitEdits | None) -> list[tuple[int, int, str]]:
        """Finds the slots whose sequence cannot go on after a step of these rows, each with its serial and the reason.

        edits: of the step, whose masks are computed.
        """
        if edits is None:
            return []
        stuck = [index for index in edits.stuck if self._is_first(index)]
        lost = [(int(self.slots[index]), int(self.serials[index]), NONE_LEFT) for index in stuck]
        return lost + [(slot, serial, guided.error) for _, slot, serial, _, guided in self._guided if guided.error]

    def holding(
        self, inputs: np.ndarray, tokens: np.ndarray, finish: np.ndarray, edits: LogitEdits | None
    ) -> np.ndarray:
        """Returns which tokens hold, bool[N]: those before which all drafts of their row hold, and none finished.

        inputs: int32[N], the queries' own tokens; edits: of the step.
        """
        assert self.firsts is not None
        fails = np.ones(len(tokens), dtype=np.bool_)
        fails[1:] = (inputs[1:] != tokens[:-1]) | (finish[:-1] != FinishReason.NONE)
        fails[[row.row for row in self._asked if row.barred]] = True
        if edits is not None:
            fails[list(edits.stuck)] = True
        fails[self.firsts] = False
        failed = np.cumsum(fails)
        holding: np.ndarray = failed == np.repeat(failed[self.firsts], self._counts)
        return holding

    def report(
        self, positions: np.ndarray, tokens: np.ndarray, finish: np.ndarray, logprobs: StepLogprobs | None
    ) -> StepRows:
        """Makes the rows that go to gateways. positions, tokens, finish: of each token."""
        widths, firsts = self._num_logprobs, self.firsts
        if firsts is not None:
            positions, widths = positions[firsts], widths[firsts]
            finish = finish[firsts + self._counts - 1]
        return StepRows(
            gateway=self._gateway,
            gateways=self._gateways,
            handles=self._handles,
            positions=positions.astype(np.uint32),
            counts=self._counts,
            tokens=tokens,
            finish=finish,
            cached=self._take_cached(),
            widths=widths,
            logprobs=logprobs,
        )

    def _is_first(self, index: int) -> bool:
        """True for the first token of a row."""
        return index == 0 or self.firsts is None or bool(self.slots[index] != self.slots[index - 1])

    def _take_cached(self) -> np.ndarray:
        if self._reported is not None:
            return self._reported
        cached: np.ndarray = self._batch.cached[self.row_slots]
        self._batch.cached[self.row_slots] = -1
        self._reported = np.full(len(self.row_slots), -1, dtype=np.int32)
        return cached

    def _edits(self, positions: np.ndarray) -> LogitEdits | None:
        batch, slots = self._batch, self.slots
        may_stop = positions >= batch.min_len[slots]
        edits = batch.features[slots] & EDITS != 0
        guided = batch.features[slots] & GUIDED != 0
        edited = np.flatnonzero(edits | ~(may_stop | guided))
        if not len(edited) and not self._guided:
            return None
        rows, stuck = [], []
        never: dict[int, np.ndarray] = {}  # tokens that a row must not choose in any case
        for row in edited.tolist():
            slot, edit = int(slots[row]), batch.edits[int(slots[row])]
            tokens = batch.tokens[slot, : positions[row]]
            if edit is not None and not self._is_first(row):
                edit = edit.apart()
            banned = never[row] = _NO_TOKENS if edit is None else edit.banned(tokens)
            if not guided[row]:  # of others, the masks say it
                banned = banned if may_stop[row] else np.concatenate([banned, batch.ends(slot)])
                leaves_any = partial(is_any_left, None) if edit is None else edit.leaves_any
                if not leaves_any(banned, batch.vocab_size):
                    stuck.append(row)
            rows.append((row, edit, tokens, banned))
        return gather_edits(rows, len(slots), self._masks(positions, may_stop, never), tuple(stuck))

    def _masks(self, positions: np.ndarray, may_stop: np.ndarray, never: dict[int, np.ndarray]) -> TokenMasks | None:
        """Begins to compute the masks of guided rows. They have what is banned as well, which `never` has by row."""
        self._asked = []
        if not self._guided:
            return None
        batch, may = self._batch, may_stop.tolist()
        ends = (self.token_base + batch.length[self.slots]).tolist()
        rows: list[GuidedRow] = []
        for row, slot, _serial, start, guided in self._guided:
            banned_now = _NO_TOKENS if may[row] else batch.ends(slot)
            if self._is_first(row):
                new_tokens, draft = batch.flat_tokens[start + guided.num_followed : ends[row]].tolist(), None
                guided.num_followed += len(new_tokens)
            else:
                new_tokens, draft = [], int(batch.tokens[slot, positions[row] - 1])
            rows.append(GuidedRow(row, guided, new_tokens, banned_now, never.get(row, _NO_TOKENS), draft))
        self._asked = rows
        return rows[0].sequence.guidance.masks(rows)


def _guided_rows(batch: BatchState, slots: np.ndarray) -> list[tuple[int, int, int, int, GuidedSequence]]:
    """Returns row, slot, its serial, where its answer begins in `flat_tokens`, and its sequence."""
    rows = []
    for row, slot in enumerate(slots.tolist()):
        edits = batch.edits[slot]
        if edits is not None and edits.guided is not None:
            start = int(batch.token_base[slot] + batch.num_prompt[slot])
            rows.append((row, slot, int(batch.serial[slot]), start, edits.guided))
    return rows


def _named(batch: BatchState, slots: np.ndarray) -> NamedLogprobs:
    rows = np.flatnonzero(batch.features[slots] & NAMED_LOGPROBS)
    named = [batch.logprob_ids[slot] for slot in slots[rows].tolist()]
    token_ids = np.zeros((len(rows), max(map(len, named))), dtype=np.int64)
    for row, ids in enumerate(named):
        token_ids[row, : len(ids)] = ids
    return NamedLogprobs(rows, token_ids)


def _firsts(slots: np.ndarray) -> np.ndarray:
    """Returns the index at which each run of one slot begins, int64[R]."""
    begins = np.ones(len(slots), dtype=np.bool_)
    begins[1:] = slots[1:] != slots[:-1]
    return np.flatnonzero(begins)


def _counts(firsts: np.ndarray | None, num_tokens: int) -> np.ndarray:
    """Returns the number of each row's tokens, uint32[R]."""
    if firsts is None:
        return np.ones(num_tokens, dtype=np.uint32)
    return np.diff(firsts, append=num_tokens).astype(np.uint32)


def _columns(stop_ids: np.ndarray) -> np.ndarray:
    """Transposes int32[N, ·] to int32[W, N]; W: the stop ids of the row that has most."""
    used = (stop_ids >= 0).any(axis=0)
    return np.ascontiguousarray(stop_ids[:, used].T)
