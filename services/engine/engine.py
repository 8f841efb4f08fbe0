"""The step loop: plan → launch → collect.

One thread drives an engine. `step` does one round; everything that the rest of the worker needs to know of it is in
`take_outputs`. Per step the number of Python lines executed does not depend on how many sequences decode.
"""

import numpy as np

from kvtransfer.messages import FirstToken, HandoffId
from services.engine.batch_state import BatchState, Phase
from services.engine.outputs import (
    Announced,
    EngineOutputs,
    StepRows,
    row_logprobs,
    single_row,
)
from services.engine.request import Request
from services.engine.runner.base import Runner, SamplingBatch, StepInput, StepOutput
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

    def ready(self, id: HandoffId, first_token: FirstToken) -> None:
        """All blocks of a received sequence are here: it joins the running batch at the next step."""
        batch, slot = self.sequences.batch, self._slot(id)
        position = int(batch.length[slot])
        batch.computed[slot] = position
        batch.tokens[slot, position] = first_token.token
        batch.length[slot] = position + 1
        batch.phase[slot] = Phase.DECODE
        logprobs = first_token.logprobs
        assert logprobs is None or isinstance(logprobs, TokenLogprobs)
        first = single_row(id, position, first_token.token, int(batch.cached[slot]), logprobs)
        batch.cached[slot] = -1
        self.sequences.outputs.rows.append(first)

    def step(self, now: float) -> bool:
        """Plans, launches and collects one step. False: there was nothing to compute."""
        plan = self._scheduler.plan(self.sequences, now)
        if not len(plan):
            return False
        step = self._launch(plan)
        self._collect(plan, step, self.runner.collect())
        return True

    def take_outputs(self) -> EngineOutputs:
        """What happened since the last call."""
        outputs, self.sequences.outputs = self.sequences.outputs, EngineOutputs()
        return outputs

    def _slot(self, id: HandoffId) -> int:
        slot = self.sequences.slot_of(id)
        assert slot is not None
        return slot

    def _launch(self, plan: Plan) -> StepInput:
        batch, slots, counts = self.sequences.batch, plan.slots, plan.counts
        starts = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        computed = batch.computed[slots]
        seq_lens = computed + counts
        positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(computed - starts[:-1], counts)
        num_blocks = -(-int(seq_lens.max()) // batch.block_size)
        sample_rows = np.flatnonzero(seq_lens == batch.length[slots]).astype(np.int32)
        step = StepInput(
            token_ids=batch.tokens[np.repeat(slots, counts), positions],
            positions=positions,
            query_starts=starts,
            seq_lens=seq_lens,
            block_tables=batch.block_table[slots, :num_blocks],
            sample_rows=sample_rows,
            sampling=self._sampling(slots[sample_rows]),
        )
        self.runner.launch(step)
        return step

    def _sampling(self, slots: np.ndarray) -> SamplingBatch:
        batch = self.sequences.batch
        length, temperature, num_logprobs = batch.length[slots], batch.temperature[slots], batch.num_logprobs[slots]
        may_not_stop = np.flatnonzero(length < batch.min_len[slots]).tolist()
        stop_ids = {row: batch.stop_ids[slots[row]] for row in may_not_stop}
        return SamplingBatch(
            temperature=temperature,
            top_k=batch.top_k[slots],
            top_p=batch.top_p[slots],
            min_p=batch.min_p[slots],
            seed=batch.seed[slots],
            position=length.astype(np.int64),
            num_logprobs=num_logprobs,
            banned={row: ids[ids >= 0] for row, ids in stop_ids.items()},
            all_greedy=not temperature.any(),
            any_logprobs=bool((num_logprobs >= 0).any()),
        )

    def _collect(self, plan: Plan, step: StepInput, output: StepOutput) -> None:
        batch = self.sequences.batch
        batch.computed[plan.slots] = step.seq_lens
        computing = plan.slots[batch.phase[plan.slots] == Phase.PREFILL]
        for slot in computing.tolist():
            self.sequences.make_ready(slot, int(batch.computed[slot]) // batch.block_size)
        rows = self._append(plan.slots[step.sample_rows], output)
        self._move_on(plan.slots[step.sample_rows], rows, computing)

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

    def _move_on(self, slots: np.ndarray, rows: StepRows, computing: np.ndarray) -> None:
        """Prompts whose computation ended change phase or are handed off; finished sequences leave."""
        batch, sequences = self.sequences.batch, self.sequences
        row_of = {slot: row for row, slot in enumerate(slots.tolist())} if len(computing) else {}
        for slot in computing.tolist():
            row = row_of.get(slot)
            if batch.is_producing(slot):
                self._hand_off(slot, rows, row)
            elif row is not None:
                batch.phase[slot] = Phase.DECODE
        for row in np.flatnonzero(rows.finish).tolist():
            if batch.phase[slots[row]] == Phase.DECODE:
                sequences.free(batch.request(int(slots[row])).id)

    def _hand_off(self, slot: int, rows: StepRows, row: int | None) -> None:
        """Announces what the step completed; with the first token, the rest."""
        batch, sequences = self.sequences.batch, self.sequences
        id = batch.request(slot).id
        if row is not None and rows.finish[row] != FinishReason.NONE:
            sequences.outputs.finished_first.append(id)
            sequences.free(id)
            return
        end = int(batch.computed[slot]) // batch.block_size if row is None else int(batch.num_blocks[slot])
        blocks = batch.block_table[slot, batch.num_announced[slot] : end].tolist()
        generations = sequences.pool.generations[blocks].tolist()
        first = FirstToken(int(rows.tokens[row]), row_logprobs(rows, row)) if row is not None else None
        batch.num_announced[slot] = end
        sequences.outputs.announced.append(Announced(id, blocks, generations, first))
        if row is not None:
            sequences.lease(slot)
