"""The step loop: plan → launch → collect.

One thread drives an engine. `step` does one round; everything that the rest of the worker needs to know of it is in
`take_outputs`. Per step the number of Python lines executed does not depend on how many sequences decode, only on how
many of them fill a block in it.
"""

import numpy as np

from kvtransfer.messages import FirstToken, HandoffId
from services.engine.batch_state import BatchState, Phase
from services.engine.logit_edits import gather_edits
from services.engine.outputs import (
    Announced,
    EngineOutputs,
    StepRows,
    row_logprobs,
    single_row,
)
from services.engine.request import Request
from services.engine.runner.base import LogitEdits, Runner, SamplingBatch, ScoredTokens, StepInput, StepOutput
from services.engine.scheduler import Plan, Scheduler
from services.engine.sequences import Sequences
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FailureCode, FinishReason


class Engine:
    """One model replica: its sequences, their blocks, and the runner that computes them."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        batch = BatchState(max_num_seqs, max_model_len, runner.layout.block_size)
        self.sequences = Sequences(batch, runner.num_blocks, eos_token_ids, runner.window)
        self.runner = runner
        self._scheduler = scheduler

    def submit(self, request: Request) -> None:
        """Takes a request; whatever becomes of it is in the outputs."""
        if self._scheduler.accepts(request):
            self.sequences.submit(request)
        else:
            self.sequences.give_up(request, FailureCode.UNSUPPORTED, "this role does not run such requests")

    def arrived(self, id: HandoffId, num_blocks: int) -> None:
        """The first num_blocks blocks of a received sequence are here and checked."""
        slot = self._slot(id)
        self.sequences.batch.computed[slot] = num_blocks * self.sequences.batch.block_size
        self.sequences.make_ready(slot, num_blocks)

    def ready(self, id: HandoffId, first_tokens: tuple[FirstToken, ...]) -> None:
        """All blocks of a received prompt are here: what follows it joins the running batch at the next step."""
        sequences, slot = self.sequences, self._slot(id)
        batch = sequences.batch
        batch.computed[slot] = batch.length[slot]
        by_handle = {first.handle: first for first in first_tokens}
        for target in list(sequences.branches_of(slot)):
            own = batch.request(target).id
            if (first := by_handle.get(own.handle)) is not None:
                self._take_first(target, first)
            else:
                sequences.free(own)  # ended at its first token
        if sequences.slot_of(id) is not None:
            self._go_on(slot)

    def _take_first(self, slot: int, first: FirstToken) -> None:
        batch, position = self.sequences.batch, int(self.sequences.batch.length[slot])
        batch.tokens[slot, position] = first.token
        batch.length[slot] = position + 1
        assert first.logprobs is None or isinstance(first.logprobs, TokenLogprobs)
        id, cached = batch.request(slot).id, int(batch.cached[slot])
        self.sequences.outputs.rows.append(single_row(id, position, first.token, cached, first.logprobs))
        batch.cached[slot] = -1

    def _go_on(self, slot: int) -> None:
        """A prompt is complete and has its first token or tokens: from now on there is decoding."""
        if self.sequences.batch.request(slot).branches:
            for source, destination in self.sequences.fork(slot):
                self.runner.copy_block(source, destination)
        else:
            self.sequences.batch.phase[slot] = Phase.DECODE

    def step(self, now: float) -> bool:
        """Plans, launches and collects one step. False: there was nothing to compute."""
        plan = self._scheduler.plan(self.sequences, now)
        if not len(plan):
            return False
        step, sampled = self._launch(plan)
        self._collect(plan, step, sampled, self.runner.collect())
        return True

    def take_outputs(self) -> EngineOutputs:
        """What happened since the last call."""
        outputs, self.sequences.outputs = self.sequences.outputs, EngineOutputs()
        return outputs

    def _slot(self, id: HandoffId) -> int:
        slot = self.sequences.slot_of(id)
        assert slot is not None
        return slot

    def _launch(self, plan: Plan) -> tuple[StepInput, np.ndarray]:
        """The step, and int64[N] the slots that get its tokens."""
        batch, slots, counts = self.sequences.batch, plan.slots, plan.counts
        starts = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        computed = batch.computed[slots]
        seq_lens = computed + counts
        positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(computed - starts[:-1], counts)
        num_blocks = -(-int(seq_lens.max()) // batch.block_size)
        complete = np.flatnonzero(seq_lens == batch.length[slots])
        indices, sampled = self.sequences.sampled(slots[complete])
        step = StepInput(
            token_ids=batch.tokens[np.repeat(slots, counts), positions],
            positions=positions,
            query_starts=starts,
            seq_lens=seq_lens,
            block_tables=batch.block_table[slots, :num_blocks],
            sample_rows=complete[indices].astype(np.int32),
            sampling=self._sampling(sampled),
            scored=self._scored(slots, starts, positions),
        )
        self.runner.launch(step)
        return step, sampled

    def _sampling(self, slots: np.ndarray) -> SamplingBatch:
        batch = self.sequences.batch
        length, temperature, num_logprobs = batch.length[slots], batch.temperature[slots], batch.num_logprobs[slots]
        return SamplingBatch(
            temperature=temperature,
            top_k=batch.top_k[slots],
            top_p=batch.top_p[slots],
            min_p=batch.min_p[slots],
            seed=batch.seed[slots],
            position=length.astype(np.int64),
            num_logprobs=num_logprobs,
            edits=self._edits(slots),
            all_greedy=not temperature.any(),
            any_logprobs=bool((num_logprobs >= 0).any()),
        )

    def _scored(self, slots: np.ndarray, starts: np.ndarray, positions: np.ndarray) -> ScoredTokens | None:
        """The prompts' tokens of this step that have a successor in the prompt, where it is to be scored."""
        batch = self.sequences.batch
        if (batch.num_prompt_logprobs[slots] < 0).all():
            return None
        owners = np.repeat(slots, np.diff(starts))
        queries = np.flatnonzero((batch.num_prompt_logprobs[owners] >= 0) & (positions + 1 < batch.num_prompt[owners]))
        if not len(queries):
            return None
        owners = owners[queries]
        successors = batch.tokens[owners, positions[queries] + 1]
        return ScoredTokens(queries, successors, batch.num_prompt_logprobs[owners])

    def _edits(self, slots: np.ndarray) -> LogitEdits | None:
        batch = self.sequences.batch
        may_stop = batch.length[slots] >= batch.min_len[slots]
        edited = np.flatnonzero(batch.is_edited[slots] | ~may_stop)
        if not len(edited):
            return None
        rows = []
        for row in edited.tolist():
            slot = int(slots[row])
            stop_ids = batch.stop_ids[slot]
            banned = stop_ids[(stop_ids >= 0) & ~may_stop[row]]
            rows.append((row, batch.edits[slot], batch.known_tokens(slot), banned))
        return gather_edits(rows, len(slots))

    def _collect(self, plan: Plan, step: StepInput, sampled: np.ndarray, output: StepOutput) -> None:
        batch = self.sequences.batch
        batch.computed[plan.slots] = step.seq_lens
        computing = plan.slots[batch.phase[plan.slots] == Phase.PREFILL]
        for slot in computing.tolist():
            self.sequences.make_ready(slot, int(batch.computed[slot]) // batch.block_size)
        self.sequences.enter_filled(plan.slots[batch.phase[plan.slots] == Phase.DECODE])
        self._report_scores(plan, step, output)
        rows = self._append(sampled, output)
        if len(computing):
            self._finish_prompts(computing, plan.slots[step.sample_rows], rows)
        for row in np.flatnonzero(rows.finish).tolist():
            if batch.phase[sampled[row]] == Phase.DECODE:
                self.sequences.free(batch.request(int(sampled[row])).id)

    def _report_scores(self, plan: Plan, step: StepInput, output: StepOutput) -> None:
        """Rows for tokens of prompts: those that were scored."""
        scored = step.scored
        if scored is None:
            return
        batch = self.sequences.batch
        owners = np.repeat(plan.slots, plan.counts)[scored.queries]
        rows = StepRows(
            gateways=batch.gateway[owners],
            handles=batch.handle[owners],
            positions=(step.positions[scored.queries] + 1).astype(np.uint32),
            tokens=scored.successors,
            finish=np.zeros(len(owners), dtype=np.uint8),
            cached=np.full(len(owners), -1, dtype=np.int32),
            widths=scored.num_logprobs,
            logprobs=output.scored,
        )
        self.sequences.outputs.rows.append(rows)

    def _append(self, slots: np.ndarray, output: StepOutput) -> StepRows:
        """Appends the sampled tokens to their sequences, and says which of these ended."""
        batch, tokens = self.sequences.batch, output.token_ids
        positions = batch.length[slots]
        batch.tokens[slots, positions] = tokens
        batch.length[slots] = positions + 1
        stopped = (batch.stop_ids[slots] == tokens[:, None]).any(axis=1)
        full = positions + 1 >= batch.max_len[slots]
        rows = StepRows(
            gateways=batch.gateway[slots],
            handles=batch.handle[slots],
            positions=positions.astype(np.uint32),
            tokens=tokens,
            finish=np.where(stopped, FinishReason.STOP, np.where(full, FinishReason.LENGTH, 0)).astype(np.uint8),
            cached=batch.cached[slots],
            widths=batch.num_logprobs[slots],
            logprobs=output.logprobs,
        )
        batch.cached[slots] = -1
        if len(slots):
            self.sequences.outputs.rows.append(rows)
        return rows

    def _finish_prompts(self, computing: np.ndarray, owners: np.ndarray, rows: StepRows) -> None:
        """Prompts whose computation ended change phase or are handed off. `owners`: by row, the slot of its prompt."""
        rows_of: dict[int, list[int]] = {}
        for row, owner in enumerate(owners.tolist()):
            rows_of.setdefault(owner, []).append(row)
        for slot in computing.tolist():
            if self.sequences.batch.is_producing(slot):
                self._hand_off(slot, rows, rows_of.get(slot, []))
            elif slot in rows_of:
                self._go_on(slot)

    def _hand_off(self, slot: int, rows: StepRows, sampled: list[int]) -> None:
        """Announces what the step completed; with the first tokens, the rest."""
        batch, sequences = self.sequences.batch, self.sequences
        id = batch.request(slot).id
        going_on = [row for row in sampled if rows.finish[row] == FinishReason.NONE]
        if sampled and not going_on:
            sequences.outputs.finished_first.append(id)
            sequences.free(id)
            return
        end = int(batch.num_blocks[slot]) if sampled else int(batch.computed[slot]) // batch.block_size
        blocks = batch.block_table[slot, batch.num_announced[slot] : end].tolist()
        generations = sequences.pool.generations[blocks].tolist()
        first_tokens = tuple(
            FirstToken(int(rows.handles[row]), int(rows.tokens[row]), row_logprobs(rows, row)) for row in going_on
        )
        batch.num_announced[slot] = end
        sequences.outputs.announced.append(Announced(id, blocks, generations, first_tokens))
        if sampled:
            sequences.lease(slot)
