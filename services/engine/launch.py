"""Makes a runner's step of a step plan, and keeps what belongs to the step until it is collected."""

from dataclasses import dataclass

import numpy as np

from services.engine.runner.base import (
    NO_TYPES,
    LogitEdits,
    PooledTokens,
    ScoredTokens,
    StepInput,
    StepOutput,
    StepTokens,
)
from services.engine.schedulers.base import StepPlan
from services.engine.sequences.batch_state import EMBEDS, SCORES, TYPES, BatchState
from services.engine.sequences.branches import Branches
from services.engine.token_rows import TokenRows


def decode_step(batch: BatchState, rows: TokenRows) -> StepInput:
    """Makes the step that computes the next token of each of these decoding rows."""
    positions = batch.computed[rows.slots]
    seq_lens = positions + 1
    tokens = StepTokens(
        token_ids=batch.flat_tokens[rows.token_base + positions],
        positions=positions,
        query_starts=rows.starts,
        seq_lens=seq_lens,
        block_tables=_block_tables(batch, rows.slots, seq_lens),
        queries=rows.queries,
    )
    return StepInput(tokens, rows.queries, rows.sampling(seq_lens))


def mixed_step(batch: BatchState, branches: Branches, plan: StepPlan) -> tuple[StepInput, TokenRows]:
    """Makes the step of any plan, and the rows that get its tokens."""
    slots, counts = plan.slots, plan.counts
    starts = np.zeros(len(slots) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    computed = batch.computed[slots]
    seq_lens = computed + counts
    positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(computed - starts[:-1], counts)
    features = batch.features[slots]
    tokens = StepTokens(
        token_ids=batch.tokens[np.repeat(slots, counts), positions],
        positions=positions,
        query_starts=starts,
        seq_lens=seq_lens,
        block_tables=_block_tables(batch, slots, seq_lens),
        token_types=_token_types(batch, slots, counts, positions) if (features & TYPES).any() else NO_TYPES,
    )
    sampled, rows = _sampled(batch, branches, plan, tokens)
    step = StepInput.of(
        tokens,
        sampled,
        rows.sampling(positions[sampled] + 1),
        _scored(batch, slots, counts, positions) if (features & SCORES).any() else None,
        _pooled(batch, slots, seq_lens, starts) if (features & EMBEDS).any() else None,
    )
    return step, rows


def _sampled(batch: BatchState, branches: Branches, plan: StepPlan, tokens: StepTokens) -> tuple[np.ndarray, TokenRows]:
    """Finds the queries that are followed by a sampled token, int64[N]: each sequence's last known one, and drafts."""
    lengths = batch.length[plan.slots]
    complete = np.flatnonzero((tokens.seq_lens >= lengths) & (batch.features[plan.slots] & EMBEDS == 0))
    indices, slots = branches.sampled(plan.slots[complete])
    rows = complete[indices]
    last = tokens.query_starts[rows + 1].astype(np.int64) - 1
    num_drafts = (tokens.seq_lens - lengths)[rows]
    if not num_drafts.any():
        return last, TokenRows(batch, slots)
    ends = np.cumsum(num_drafts + 1)
    back = np.repeat(ends, num_drafts + 1) - 1 - np.arange(ends[-1])  # how far each query is before its row's last
    repeated = np.repeat(slots, num_drafts + 1)
    return np.repeat(last, num_drafts + 1) - back, TokenRows(batch, repeated, several=True)


def _block_tables(batch: BatchState, slots: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    num_blocks = -(-int(seq_lens.max()) // batch.block_size)
    tables: np.ndarray = batch.block_table[slots, :num_blocks]
    if batch.slices is None:
        return tables
    return np.concatenate(batch.slices[tables].transpose(2, 0, 1), axis=1)


def _token_types(batch: BatchState, slots: np.ndarray, counts: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns the types of a step's tokens, int32[T]: 1 from the first token of a second text on."""
    seconds = np.array([batch.request(slot).capsule.second_text for slot in slots.tolist()], dtype=np.int32)
    starts = np.repeat(seconds, counts)
    types: np.ndarray = ((starts > 0) & (positions >= starts)).astype(np.int32)
    return types


def _scored(batch: BatchState, slots: np.ndarray, counts: np.ndarray, positions: np.ndarray) -> ScoredTokens | None:
    """Finds the tokens of this step that have a successor in their prompt, where the prompt is to be scored."""
    owners = np.repeat(slots, counts)
    queries = np.flatnonzero((batch.num_prompt_logprobs[owners] >= 0) & (positions + 1 < batch.num_prompt[owners]))
    if not len(queries):
        return None
    owners = owners[queries]
    successors = batch.tokens[owners, positions[queries] + 1]
    return ScoredTokens(queries, successors, batch.num_prompt_logprobs[owners])


def _pooled(batch: BatchState, slots: np.ndarray, seq_lens: np.ndarray, starts: np.ndarray) -> PooledTokens:
    """Finds the tokens of this step whose hidden states are pooled, for each prompt that is to be embedded."""
    queries, ends = [], [0]
    for row in np.flatnonzero(batch.features[slots] & EMBEDS).tolist():
        pool, position = batch.pools[int(slots[row])], int(batch.computed[slots[row]])
        assert pool is not None
        wanted, offset = pool.wanted(position, int(seq_lens[row])), int(starts[row]) - position
        queries.append(np.arange(wanted.start, wanted.stop, dtype=np.int64) + offset)
        ends.append(ends[-1] + len(wanted))
    return PooledTokens(np.concatenate(queries), np.array(ends, dtype=np.int64))


@dataclass(slots=True, eq=False)
class ScoredRows:
    """The S tokens of prompts whose logprobs a step computes."""

    slots: np.ndarray  # int64[S]
    positions: np.ndarray  # int32[S]
    tokens: np.ndarray  # int32[S]
    num_logprobs: np.ndarray  # int32[S]

    def rows(self, which: np.ndarray) -> "ScoredRows":
        """Returns the rows that bool[S] `which` marks."""
        return ScoredRows(self.slots[which], self.positions[which], self.tokens[which], self.num_logprobs[which])


@dataclass(slots=True, eq=False)
class Launched:
    """A step over some slots that samples N tokens and was not collected yet."""

    only_decodes: bool
    num_closed: int  # slots that the batch had freed at the launch
    slots: np.ndarray  # int64[S]
    serials: np.ndarray  # int64[S]: which of their sequences was in them
    ends: np.ndarray  # int32[S]: tokens that have KV when the step is complete
    rows: TokenRows  # of the N tokens
    edits: LogitEdits | None  # of their logits
    owners: np.ndarray  # int64[N]: the slot whose tokens each new token follows; for a branch, its prompt's
    positions: np.ndarray  # int32[N], of the tokens
    is_last: np.ndarray | None  # bool[N]: its sequence reaches its greatest length with it; None: none does
    scored: ScoredRows | None
    embedded: np.ndarray | None  # int64[P], the slots of prompts that are pooled
    inputs: np.ndarray | None  # int32[N], the queries' own tokens; None: no row has several tokens

    @classmethod
    def of(cls, batch: BatchState, plan: StepPlan, step: StepInput, rows: TokenRows) -> "Launched":
        """Describes the step that is being launched."""
        tokens, owners = step.tokens, plan.slots
        positions = tokens.seq_lens
        if not plan.only_decodes:
            positions, owners = tokens.positions[step.sampled] + 1, owners[tokens.rows_of(step.sampled)]
        is_last = positions + 1 >= rows.max_len
        return cls(
            only_decodes=plan.only_decodes,
            num_closed=batch.num_closed,
            slots=plan.slots,
            serials=rows.serials if plan.only_decodes else batch.serial[plan.slots],
            ends=tokens.seq_lens,
            rows=rows,
            edits=step.sampling.edits,
            owners=owners,
            positions=positions,
            is_last=is_last if is_last.any() else None,
            scored=_scored_rows(plan, step),
            embedded=None if step.pooled is None else plan.slots[batch.features[plan.slots] & EMBEDS != 0],
            inputs=None if rows.firsts is None else tokens.token_ids[step.sampled],
        )

    def holding(self, batch: BatchState, output: StepOutput) -> tuple["Launched", StepOutput]:
        """Returns the step and its output without tokens that do not hold: after a wrong draft, or after the end."""
        assert self.inputs is not None
        finish = self.rows.finish(output.token_ids, self.is_last)
        holding = self.rows.holding(self.inputs, output.token_ids, finish, self.edits)
        left, output = self._part(batch, np.ones(len(self.slots), dtype=np.bool_), holding, output)
        ends = np.zeros(batch.max_num_seqs, dtype=np.int32)
        ends[self.slots] = self.ends
        ends[left.owners] = left.positions  # of each row's last token; what drafts beyond it left there is overwritten
        left.ends = ends[self.slots]
        return left, output

    def without_closed(self, batch: BatchState, output: StepOutput) -> tuple["Launched", StepOutput]:
        """Returns the part of the step, and of its output, that belongs to sequences which still have their slots."""
        here = batch.serial[self.slots] == self.serials
        return self._part(batch, here, batch.serial[self.rows.slots] == self.rows.serials, output)

    def _part(
        self, batch: BatchState, here: np.ndarray, tokens: np.ndarray, output: StepOutput
    ) -> tuple["Launched", StepOutput]:
        """Returns some slots, bool[S], and some tokens, bool[N], of the step and of its output."""
        scored = None if self.scored is None else np.isin(self.scored.slots, self.slots[here])
        embedded = None if self.embedded is None else np.isin(self.embedded, self.slots[here])
        launched = Launched(
            only_decodes=self.only_decodes,
            num_closed=batch.num_closed,
            slots=self.slots[here],
            serials=self.serials[here],
            ends=self.ends[here],
            rows=TokenRows(batch, self.rows.slots[tokens], several=self.inputs is not None),
            edits=None,  # looked at before
            owners=self.owners[tokens],
            positions=self.positions[tokens],
            is_last=None if self.is_last is None else self.is_last[tokens],
            scored=None if self.scored is None or scored is None else self.scored.rows(scored),
            embedded=None if self.embedded is None else self.embedded[embedded],
            inputs=None if self.inputs is None else self.inputs[tokens],
        )
        return launched, StepOutput(
            output.token_ids[tokens],
            None if output.logprobs is None else output.logprobs.rows(tokens),
            None if output.scored is None or scored is None else output.scored.rows(scored),
            None if output.pooled is None else output.pooled[embedded],
        )


def _scored_rows(plan: StepPlan, step: StepInput) -> ScoredRows | None:
    if step.scored is None:
        return None
    queries = step.scored.queries
    owners = np.repeat(plan.slots, plan.counts)[queries]
    return ScoredRows(owners, step.tokens.positions[queries] + 1, step.scored.successors, step.scored.num_logprobs)
