"""The step loop: plan → launch → collect.

With a pipeline (depth 1) a step is planned and launched while the one before runs, so that the device never waits for
Python. The token that the running step samples is not known then: it has the id UNKNOWN, and the runner fills it in. A
sequence that turns out to have finished, or was aborted meanwhile, is in the step under way although it should not be:
its token is ignored, and its blocks are free when the step is complete.

One thread drives an engine. `step` does one round; the rest of the worker learns of it from `take_outputs`. Per step
the number of Python lines executed does not depend on how many sequences decode, only on how many of them fill a block
in it.
"""

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from kvtransfer.ids import AttemptId
from kvtransfer.messages import Announcement, FirstToken
from services.engine.blocks.block_pool import BlockPool
from services.engine.blocks.prefix_cache import PrefixCache
from services.engine.blocks.sliced_pool import SlicedPool
from services.engine.expert_imbalance import ExpertImbalance
from services.engine.launch import Launched, decode_step, mixed_step
from services.engine.runner.base import Runner, StepOutput, StepTokens
from services.engine.sampling.guidance import Guidance
from services.engine.schedulers.base import Scheduler, StepPlan
from services.engine.self_check import SelfCheck
from services.engine.sequences.batch_state import UNKNOWN, BatchState, Phase
from services.engine.sequences.outputs import Embedded, EngineOutputs, StepRows, row_logprobs, single_row, sole_gateway
from services.engine.sequences.request import Kind, Request
from services.engine.sequences.sequences import Sequences
from services.engine.token_rows import TokenRows
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FailureCode, FinishReason

_CHECKED_FOR = 5.0  # seconds


class Engine:
    """One model replica: its sequences, their blocks, and the runner that computes them.

    pipeline_depth: steps launched before the one under way is collected, 0 or 1. Where logits depend on the tokens so
    far (penalties, bad words, grammars) every step is collected before the next is planned.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        pipeline_depth: int = 0,
        guidance: Guidance | None = None,
    ) -> None:
        assert pipeline_depth in (0, 1)
        batch = BatchState(max_num_seqs, max_model_len, runner.layout.block_size, guidance, runner.vocab_size)
        pool = _make_pool(runner)
        self._outputs = EngineOutputs()
        self.sequences = Sequences(
            batch, pool, self._outputs, eos_token_ids, runner.window, whole_prompts=runner.whole_prompts
        )
        self.runner = runner
        self._scheduler = scheduler
        self._depth = pipeline_depth
        self._guides = guidance is not None
        self._under_way: deque[Launched] = deque()
        self._decoding = TokenRows(batch, batch.slots_in(Phase.DECODE))  # of the last step that only decoded
        self.computed_tokens = 0  # by all steps, of prompts and answers
        self.num_not_finite = 0  # requests that failed because something was not finite
        self.expert_imbalance = ExpertImbalance(runner.experts_of_ranks) if runner.has_experts else None
        self.check = SelfCheck(runner, max_model_len)  # repeated when something is not finite, if it has learned
        self._checked_until = -math.inf  # when a check that passed is too old
        self._expelled: list[Request] = []  # to be failed once the runner was checked
        self._sampled_at = np.zeros(max_num_seqs, dtype=np.int64)  # by slot: its index among the last step's tokens

    def submit(self, request: Request) -> None:
        """Takes a request, or fails it; its tokens and its failure are in the outputs."""
        if not self.runner.generates and request.kind is not Kind.EMBED:
            self.sequences.fail(request, FailureCode.UNSUPPORTED, "this model generates nothing")
        elif request.capsule.second_text and not self.runner.token_types:
            self.sequences.fail(request, FailureCode.UNSUPPORTED, "the tokens of this model have no types")
        elif request.capsule.sampling.grammar and not self._guides:
            self.sequences.fail(request, FailureCode.UNSUPPORTED, "this worker guides no answers")
        elif self._scheduler.accepts(request):
            self.sequences.submit(request)
        else:
            self.sequences.fail(request, FailureCode.UNSUPPORTED, "this role does not run such requests")

    def arrived(self, id: AttemptId, num_slices: int) -> None:
        """Makes the blocks of a received sequence usable that its first num_slices slices fill, which are here and
        checked.
        """
        slot = self._slot(id)
        batch = self.sequences.batch
        num_blocks = self.sequences.pool.parts.num_whole(num_slices, batch.unseen[slot])
        batch.computed[slot] = batch.done[slot] = num_blocks * batch.block_size
        self.sequences.nodes.make_ready(slot, num_blocks)

    def ready(self, id: AttemptId, first_tokens: tuple[FirstToken, ...]) -> None:
        """Starts the sequence over a received prompt, or its branches, from their first tokens: all blocks are here."""
        sequences, slot = self.sequences, self._slot(id)
        batch = sequences.batch
        batch.computed[slot] = batch.done[slot] = batch.length[slot]
        by_handle = {first.handle: first for first in first_tokens}
        for target in list(sequences.branches.of(slot)):
            own = batch.request(target).id
            if (first := by_handle.get(own.handle)) is not None:
                self._take_first(target, first)
            else:
                sequences.free(own)  # ended at its first token
        if sequences.requests.slot_of(id) is not None:
            self._start_decoding(slot)

    def _take_first(self, slot: int, first: FirstToken) -> None:
        batch, position = self.sequences.batch, int(self.sequences.batch.length[slot])
        batch.tokens[slot, position] = first.token
        batch.length[slot] = position + 1
        assert first.logprobs is None or isinstance(first.logprobs, TokenLogprobs)
        id, cached = batch.request(slot).id, int(batch.cached[slot])
        self._outputs.rows.append(single_row(id, position, first.token, cached, first.logprobs))
        batch.cached[slot] = -1

    def _start_decoding(self, slot: int) -> None:
        """Lets a complete prompt, or its branches, decode: it has its first token or tokens."""
        if self.sequences.batch.request(slot).branches:
            for source, destination in self.sequences.fork(slot):
                self.runner.copy_block(source, destination)
        else:
            self.sequences.batch.set_phase(slot, Phase.DECODE)

    def admit(self, now: float) -> None:
        """Admits requests that fit, ahead of the next step's plan."""
        self._scheduler.admit(self.sequences, now)

    def step(self, now: float, on_computing: Callable[[], None] | None = None) -> bool:
        """Plans and launches a step, and collects one: this one, or with a pipeline the one before.

        A step with drafts is collected at once. Returns False when there is nothing to compute, and nothing under way.

        on_computing: see `StepInput`. It is also called before the engine waits for a step that was launched earlier.

        Raises SelfCheckError if something was not finite and the runner is at fault; no output of this step is right.
        """
        depth = 0 if self.sequences.batch.any_follows else self._depth
        if len(self._under_way) <= depth:
            plan = self._scheduler.plan(self.sequences, now)
            if len(plan):
                launched = self._launch(plan, now, on_computing)
                if launched.inputs is None and len(self._under_way) <= depth:
                    return True
        if not self._under_way:
            return False
        if on_computing is not None:
            on_computing()
        self._collect()
        if self._expelled:
            self._fail_expelled(now)
        return True

    def _fail_expelled(self, now: float) -> None:
        """Fails the requests for which something was not finite, when the runner has shown that it computes right, now
        or a moment ago: a client that sends such requests one after the other stops nobody else.
        """
        if now >= self._checked_until:
            while self._under_way:  # whatever runs may have read the same; the runner is free then
                self._collect()
            self.check.repeat()
            self._checked_until = now + _CHECKED_FOR
        for request in self._expelled:
            self.sequences.fail(request, FailureCode.NOT_FINITE, "the model computed numbers that are not finite")
        self.num_not_finite += len(self._expelled)
        self._expelled = []

    def take_outputs(self) -> EngineOutputs:
        """Returns what happened since the last call."""
        return self._outputs.take()

    def _slot(self, id: AttemptId) -> int:
        slot = self.sequences.requests.slot_of(id)
        assert slot is not None
        return slot

    def _launch(self, plan: StepPlan, now: float, on_computing: Callable[[], None] | None) -> Launched:
        batch, slots = self.sequences.batch, plan.slots
        if plan.only_decodes:
            if self._decoding.slots is not slots:
                self._decoding = TokenRows(batch, slots)
            step, rows = decode_step(batch, self._decoding), self._decoding
        else:
            step, rows = mixed_step(batch, self.sequences.branches, plan)
        if self._under_way:
            self._carry(step.tokens, plan)
        step.on_computing = on_computing
        if self.expert_imbalance is not None:
            step.counts_experts = self.expert_imbalance.asks(now)
        self.runner.launch(step)
        self.computed_tokens += len(step.tokens.token_ids)
        launched = Launched.of(batch, plan, step, rows)
        batch.computed[slots] = step.tokens.seq_lens
        if launched.inputs is None:
            self._expect_tokens(launched)
        else:
            assert not self._under_way, "drafts follow tokens that are all known"
        self._under_way.append(launched)
        self.sequences.frees.step_launched()
        return launched

    def _carry(self, tokens: StepTokens, plan: StepPlan) -> None:
        """Says of tokens that the step under way samples which of them they are."""
        queries = np.flatnonzero(tokens.token_ids == UNKNOWN)
        if len(queries):
            tokens.token_ids[queries] = -1 - self._sampled_at[np.repeat(plan.slots, plan.counts)[queries]]

    def _expect_tokens(self, launched: Launched) -> None:
        """Counts the tokens that a launched step will sample as the last ones of its decoding sequences."""
        batch, slots, positions, is_last = (
            self.sequences.batch,
            launched.rows.slots,
            launched.positions,
            launched.is_last,
        )
        if not launched.only_decodes:
            decoding = batch.phase[slots] == Phase.DECODE
            slots, positions = slots[decoding], positions[decoding]
            is_last = None if is_last is None else is_last[decoding]
        batch.length[slots] = positions + 1
        if self._depth:
            batch.tokens[slots, positions] = UNKNOWN
            self._sampled_at[launched.rows.slots] = np.arange(len(launched.rows))
        if is_last is not None and is_last.any():
            batch.set_phase(slots[is_last], Phase.ENDING)

    def _collect(self) -> None:
        launched, output = self._under_way.popleft(), self.runner.collect()
        sequences, batch = self.sequences, self.sequences.batch
        sequences.frees.step_collected()
        if self.expert_imbalance is not None and output.expert_pairs is not None:
            self.expert_imbalance.note(output.expert_pairs)
        for row in output.not_finite.tolist():
            slot = int(launched.slots[row])
            if batch.serial[slot] == launched.serials[row]:
                self._expelled.append(sequences.expel(slot))
        for slot, serial, reason in launched.rows.lost(launched.edits):
            if batch.serial[slot] == serial:
                sequences.fail(batch.request(slot), FailureCode.UNSUPPORTED, reason)
        if batch.num_closed != launched.num_closed:
            launched, output = launched.without_closed(batch, output)
        slots = launched.slots
        if launched.inputs is not None:
            launched, output = launched.holding(batch, output)
            batch.computed[slots] = launched.ends
        batch.done[slots] = launched.ends
        if launched.only_decodes:
            sequences.nodes.enter_filled(slots)
        else:
            self._complete_blocks(launched)
            self._report_scores(launched, output)
            self._take_pooled(launched, output)
        rows = self._take_tokens(launched, output)
        if not launched.only_decodes:
            self._finish_prompts(launched, rows)
        for row in np.flatnonzero(rows.finish).tolist():
            slot = int(launched.rows.row_slots[row])
            if batch.phase[slot] in (Phase.DECODE, Phase.ENDING):
                sequences.free(batch.request(slot).id)

    def _complete_blocks(self, launched: Launched) -> None:
        sequences, batch, slots = self.sequences, self.sequences.batch, launched.slots
        computing = batch.phase[slots] == Phase.PREFILL
        for slot, end in zip(slots[computing].tolist(), launched.ends[computing].tolist(), strict=True):
            sequences.nodes.make_ready(slot, end // batch.block_size)
        if batch.slices is None:
            sequences.nodes.enter_filled(slots[~computing])
        else:  # a prompt gives cached blocks the parts that they have lost; blocks that were announced keep theirs
            sequences.nodes.enter_filled(slots[~computing | (batch.num_announced[slots] <= batch.num_entered[slots])])
            sequences.tables.free_passed(slots[computing])

    def _report_scores(self, launched: Launched, output: StepOutput) -> None:
        """Outputs the logprobs of prompt tokens that were scored."""
        scored = launched.scored
        if scored is None or not len(scored.slots):
            return
        gateways = self.sequences.batch.gateway[scored.slots]
        rows = StepRows(
            gateway=sole_gateway(gateways),
            gateways=gateways,
            handles=self.sequences.batch.handle[scored.slots],
            positions=scored.positions.astype(np.uint32),
            counts=np.ones(len(scored.slots), dtype=np.uint32),
            tokens=scored.tokens,
            finish=np.zeros(len(scored.slots), dtype=np.uint8),
            cached=np.full(len(scored.slots), -1, dtype=np.int32),
            widths=scored.num_logprobs,
            logprobs=output.scored,
        )
        self._outputs.rows.append(rows)

    def _take_pooled(self, launched: Launched, output: StepOutput) -> None:
        """Pools the hidden states of prompts, and finishes those that are complete with their embeddings."""
        if launched.embedded is None or output.pooled is None:
            return
        batch = self.sequences.batch
        for slot, hidden in zip(launched.embedded.tolist(), output.pooled, strict=True):
            request, pool = batch.request(slot), batch.pools[slot]
            assert pool is not None
            pool.add(hidden)
            if batch.done[slot] == batch.length[slot]:
                self._outputs.embedded.append(Embedded(request.id, int(batch.cached[slot]), pool.embedding()))
                self.sequences.free(request.id)

    def _take_tokens(self, launched: Launched, output: StepOutput) -> StepRows:
        """Appends the sampled tokens to their sequences, and outputs them; the rows say which sequences finished."""
        batch, rows, positions = self.sequences.batch, launched.rows, launched.positions
        batch.flat_tokens[rows.token_base + positions] = output.token_ids
        if not launched.only_decodes:
            batch.length[rows.slots] = np.maximum(batch.length[rows.slots], positions + 1)
        finish = rows.finish(output.token_ids, launched.is_last)
        report = rows.report(positions, output.token_ids, finish, output.logprobs)
        if len(rows):
            self._outputs.rows.append(report)
        return report

    def _finish_prompts(self, launched: Launched, rows: StepRows) -> None:
        """Hands off prompts, or lets them decode, once their first tokens are sampled."""
        batch = self.sequences.batch
        rows_of: dict[int, list[int]] = {}
        owners = launched.owners if launched.rows.firsts is None else launched.owners[launched.rows.firsts]
        for row, owner in enumerate(owners.tolist()):
            rows_of.setdefault(owner, []).append(row)
        computing = batch.phase[launched.slots] == Phase.PREFILL
        for slot in launched.slots[computing].tolist():
            if batch.is_producing(slot):
                self._hand_off(slot, rows, rows_of.get(slot, []))
            elif slot in rows_of:
                self._start_decoding(slot)

    def _hand_off(self, slot: int, rows: StepRows, sampled: list[int]) -> None:
        """Announces the blocks that the step completed; with the first tokens, all that are left."""
        batch, sequences = self.sequences.batch, self.sequences
        id = batch.request(slot).id
        unfinished = [row for row in sampled if rows.finish[row] == FinishReason.NONE]
        if sampled and not unfinished:
            self._outputs.finished_first.append(id)
            sequences.free(id)
            return
        first_index = int(batch.num_announced[slot])
        end = int(batch.num_blocks[slot]) if sampled else int(batch.done[slot]) // batch.block_size
        parts = sequences.pool.parts
        unseen = parts.unseen(len(batch.request(slot).capsule.token_ids))  # by the consumer's first token
        complete = parts.slices_of(batch.block_table[slot, first_index:end], first_index, unseen)
        blocks, generations = tuple(complete.tolist()), tuple(sequences.pool.generations[complete].tolist())
        first_tokens = tuple(
            FirstToken(int(rows.handles[row]), int(rows.tokens[rows.first_token(row)]), row_logprobs(rows, row))
            for row in unfinished
        )
        batch.num_announced[slot] = end
        first_slice = parts.num_slices(first_index, unseen)
        self._outputs.announcements.append(Announcement(id, first_slice, blocks, generations, first_tokens))
        if sampled:
            sequences.lease(slot)


def _make_pool(runner: Runner) -> BlockPool:
    layout = runner.layout
    if layout.groups is not None:
        return SlicedPool(runner.num_blocks, layout.block_size, layout.groups)
    return BlockPool(runner.num_blocks, PrefixCache(runner.num_blocks, layout.block_size))
