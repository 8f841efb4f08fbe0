"""The ledger: one entry for each choice of each request in flight, and the rules by which it goes on or ends.

Told what workers say (rows, failures, lost streams), it delivers each position of a sequence once and in order, ends
attempts, and says what to send. It does no IO and never waits. An attempt that failed leaves its entry without one, and
the entry's reader starts the next. Every way out of the ledger goes through `close`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic
from typing import Protocol

from kvtransfer.ids import WorkerId
from kvtransfer.messages import EndReason
from kvtransfer.moved import Moved
from services.config import WorkerRole
from services.gateway.api.generation import (
    Expired,
    Failed,
    GenerationError,
    GenerationRequest,
    Unavailable,
    Unsupported,
)
from services.gateway.api.records.attempt_record import AttemptRecord, AtWorker, Ended
from services.gateway.dispatch.costs import CostModel
from services.gateway.dispatch.ledger.attempt import Attempt, AttemptPhase, Group, HandoffOutcome
from services.gateway.dispatch.ledger.entry import EntryListener, LedgerEntry
from services.gateway.dispatch.ledger.workload import Workload
from services.gateway.dispatch.pair_health import PairHealth
from services.gateway.dispatch.router import Plan, uncached_tokens
from services.protocol.block_hash import BlockHash
from services.protocol.frames import Embeddings, Failure, Row, Timing
from services.protocol.messages import MAX_HANDLE, Abort, Command, HandTo, Submit, TakeFrom
from services.protocol.outcomes import FailureCode, FinishReason

# A worker that ends an attempt so has computed nothing of it.
_NOTHING_COMPUTED = (HandoffOutcome.FAILED_TOO_LARGE, HandoffOutcome.FAILED_NOT_NOW, HandoffOutcome.FAILED_UNSUPPORTED)


class LedgerObserver(Protocol):
    """Counts attempts, and how they end."""

    def attempt_started(self) -> None:
        """Counts an attempt, or a group of them, that was sent to its worker or pair."""

    def attempt_ended(self, reason: str) -> None:
        """Counts the end of an attempt at one choice: "finished", or a HandoffOutcome without `failed_`."""

    def blocks_moved(self, prefill: str, decode: str, moved: Moved) -> None:
        """Notes how a handoff between two workers, named by their addresses, moved its blocks."""

    def handoff_ended(self, outcome: HandoffOutcome, pair: tuple[str, str]) -> None:
        """Counts the end of an attempt on a pair: the addresses of its prefill and its decode worker."""

    def handoff_failed(self, reason: EndReason, pair: tuple[str, str]) -> None:
        """Counts a handoff of a pair that a worker reported as failed, for this reason."""

    def cached_tokens(self, predicted: int, actual: int) -> None:
        """Counts the prompt tokens that the index predicted as cached, and those that the worker found."""


class Ledger:
    """All choices in flight. `send` must not wait, and discards commands to a worker without a stream."""

    def __init__(
        self,
        send: Callable[[WorkerId, Command], None],
        clock: Callable[[], float],
        observer: LedgerObserver,
        costs: CostModel,
    ) -> None:
        """`costs` learns how long attempts take."""
        self._send = send
        self._clock = clock
        self._observer = observer
        self._costs = costs
        self._entries: dict[LedgerEntry, None] = {}
        self._by_handle: dict[int, LedgerEntry] = {}
        self._groups: dict[int, Group] = {}
        self.highest_handle = 0
        self.workload = Workload()
        self.pairs = PairHealth()
        self.suspects: set[LedgerEntry] = set()  # that have an attempt

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LedgerEntry]:
        return iter(list(self._entries))

    def now(self) -> float:
        """The time on the ledger's clock, in seconds."""
        return self._clock()

    def open(self, request: GenerationRequest, choice: int, listener: EntryListener) -> LedgerEntry:
        """Returns a new entry, without an attempt."""
        entry = LedgerEntry(request, choice, self._clock() + request.timeout_s, listener)
        self._entries[entry] = None
        return entry

    def find(self, handle: int) -> list[LedgerEntry]:
        """The entries whose attempts a handle names, as their own or as their group's; none after they ended."""
        group = self._groups.get(handle)
        handles = {handle} if group is None else group.handles
        return [self._by_handle[one] for one in sorted(handles) if one in self._by_handle]

    def start(self, entries: Sequence[LedgerEntry], plan: Plan, blocks: Sequence[BlockHash] = ()) -> AttemptRecord:
        """Starts the next attempt of entries that have the same tokens: allocates handles and sends them in one step.

        blocks: full blocks of the prompt that the worker `plan.computes` computes for this attempt. Blocks that it
        computes for an earlier attempt are not among them.
        Returns the attempt's record, which the request has too.
        """
        assert self.highest_handle + handles_needed(len(entries)) <= MAX_HANDLE
        group = Group(self._allocate_handle()) if len(entries) > 1 else None
        record = _new_record(entries, plan)
        entries[0].request.attempts.add(record)
        attempts = [self._begin(entry, plan, group, record) for entry in entries]
        self.workload.queue_blocks(attempts[0], blocks)
        if group is None:
            self._submit(entries[0], plan, attempts[0].handle)
        else:
            self._groups[group.handle] = group
            self._submit(entries[0], plan, group.handle, tuple(entry.capsule().sampling.seed for entry in entries))
        self._observer.attempt_started()
        return record

    def _begin(self, entry: LedgerEntry, plan: Plan, group: Group | None, record: AttemptRecord) -> Attempt:
        assert entry.attempt is None
        assert not entry.closed
        if entry.lacks_prompt:
            entry.prompt_logprobs = []
        uncached, cached = uncached_tokens(plan.computes, entry.length), None
        if group is None or not group.handles:
            cached = entry.length - uncached
        else:
            uncached = 0  # computed once, for the first of the group
        queued = self.workload.queued_tokens[plan.computes.id]
        to_compute = max(plan.computes.load.waiting_tokens, queued) + uncached
        handle = self._allocate_handle()
        attempt = Attempt(
            handle=handle,
            plan=plan,
            queued_tokens=uncached,
            predicted_cached=cached,
            sent_at=self._clock(),
            to_compute=to_compute,
            start=entry.length,
            suspect=entry.retries.suspect,
            record=record,
            group=group,
        )
        entry.attempt = attempt
        if attempt.suspect:
            self.suspects.add(entry)
        entry.retries.begin()
        if group is not None:
            group.handles.add(handle)
        self._by_handle[handle] = entry
        self.workload.add(attempt)
        return attempt

    def _allocate_handle(self) -> int:
        self.highest_handle += 1
        return self.highest_handle

    def _submit(self, entry: LedgerEntry, plan: Plan, handle: int, seeds: tuple[int, ...] = ()) -> None:
        prefill, decode = plan.prefill, plan.decode
        timeout_s = max(0.0, entry.deadline - self._clock())
        capsule, request_id = entry.capsule(), entry.request.request_id
        if prefill is not None:
            hand_to = HandTo(decode.id) if decode is not None else None
            self._send(prefill.id, Submit(handle, capsule, timeout_s, request_id, hand_to, seeds))
        if decode is not None:
            take_from = TakeFrom(prefill.address, prefill.id) if prefill is not None else None
            self._send(decode.id, Submit(handle, capsule, timeout_s, request_id, take_from, seeds))

    # Reports of workers

    def on_rows(self, worker: WorkerId, rows: Iterable[Row]) -> None:
        """Takes the rows of one frame; ignores those of handles whose attempts have ended."""
        for row in rows:
            entry = self._by_handle.get(row.handle)
            if entry is not None and (attempt := entry.attempt) is not None:
                if attempt.decodes_at != worker or not entry.deliver_if_plain(row):
                    self._on_row(worker, entry, attempt, row)
            elif row.handle in self._groups:
                for entry in self.find(row.handle):
                    self._deliver_prompt(entry, row)

    def on_embeddings(self, worker: WorkerId, embeddings: Embeddings) -> None:
        """Takes the embeddings of one frame; ignores those of handles whose attempts have ended."""
        columns = (embeddings.handles.tolist(), embeddings.cached.tolist(), embeddings.values)
        for handle, cached, values in zip(*columns, strict=True):
            entry = self._by_handle.get(handle)
            attempt = None if entry is None else entry.attempt
            if entry is None or attempt is None or not entry.embeds or not attempt.heeds(worker):
                continue
            attempt.record.found[attempt.candidate(worker).role] = cached
            self._note_cached(worker, entry, attempt, cached)
            self._advance(worker, entry, attempt)
            entry.embedding = values
            self._finish(entry, attempt, worker, FinishReason.LENGTH)

    def on_timings(self, worker: WorkerId, timings: Iterable[Timing]) -> None:
        """Records when attempts reached what at a worker, which says so with their first rows, or their failures."""
        for timing in timings:
            attempt = next((entry.attempt for entry in self.find(timing.handle)), None)
            if attempt is not None:
                record, role = attempt.record, attempt.candidate(worker).role
                record.at[role] = AtWorker.from_timing(timing, record.sent_at, monotonic())
                if timing.moved.transport and attempt.split:
                    prefill, decode = record.workers[WorkerRole.PREFILL], record.workers[WorkerRole.DECODE]
                    self._observer.blocks_moved(prefill, decode, timing.moved)

    def on_failure(self, worker: WorkerId, failure: Failure) -> None:
        """A worker failed the attempts that a handle names."""
        attempts = ((entry, entry.attempt) for entry in self.find(failure.handle))
        failed = [(entry, attempt) for entry, attempt in attempts if attempt is not None and attempt.heeds(worker)]
        if failed and failure.end_reason is not None:
            self._observer.handoff_failed(failure.end_reason, failed[0][1].plan.pair_names)
        for entry, attempt in failed:
            attempt.record.failure = f"{failure.code.name}: {failure.detail}"
            pair = attempt.plan.pair
            if pair is not None and failure.code is FailureCode.HANDOFF and failure.end_reason is not EndReason.ABORTED:
                entry.retries.failed_pairs.add(pair)
                self.pairs.note_failed(pair, attempt.sent_at, self._clock())
            self._fail(entry, attempt, worker, failure.code)

    def on_lost(self, worker: WorkerId) -> None:
        """A worker's stream broke, and all attempts of this gateway at that worker ended with it."""
        for entry in self:
            if entry.attempt is not None and entry.attempt.heeds(worker):
                if not entry.has_progress:
                    entry.retries.lose(worker, had_token=entry.attempt.phase is not AttemptPhase.PREFILL)
                self._end_attempt(entry, HandoffOutcome.FAILED_WORKER_LOST, over_at=worker)
                self._retry_or_close(entry, "its worker was lost")

    def on_return(self, worker: WorkerId) -> None:
        """A worker whose stream broke is still alive: attempts that had a token when it broke no longer count.

        Attempts without a token may be why the stream broke, so they count: four of them, not as many as the deadline
        allows.
        """
        for entry in self:
            entry.retries.find_alive(worker)

    def on_deadline(self, entry: LedgerEntry) -> None:
        """The request's time is over."""
        if entry.attempt is None:
            self.close(entry, Unavailable("no worker could take the request before its deadline"))
        else:
            self.close(entry, Expired("the request's deadline passed"))

    def close(self, entry: LedgerEntry, error: GenerationError | None = None) -> None:
        """Ends a choice in whatever state. Its reader can still take delivered tokens. Again is no change."""
        if entry.closed:
            return
        entry.close(error)
        if entry.attempt is not None:
            self._end_attempt(entry, HandoffOutcome.ABANDONED)
        del self._entries[entry]
        entry.wake()

    def _on_row(self, worker: WorkerId, entry: LedgerEntry, attempt: Attempt, row: Row) -> None:
        if row.cached >= 0:
            attempt.record.found[attempt.candidate(worker).role] = row.cached
            self._note_cached(worker, entry, attempt, row.cached)
        if not attempt.heeds(worker):
            return
        if row.position < entry.num_prompt:
            self._deliver_prompt(entry, row)
            return
        if entry.lacks_prompt and worker != attempt.plan.computes.id:
            attempt.early_rows.append(row)  # prefill's stream is the slower one
            return
        if entry.lacks_prompt and row.finish:
            self._fail(entry, attempt, None, FailureCode.HANDOFF)  # the worker left out a part of the prompt
            return
        if attempt.phase is not AttemptPhase.DECODE:
            self._advance(worker, entry, attempt)
        delivered = entry.deliver(row)
        length = entry.length
        if row.finish or length >= entry.max_len or row.position > length:
            self._conclude(worker, entry, attempt, row)
        elif delivered:
            entry.wake()

    def _deliver_prompt(self, entry: LedgerEntry, row: Row) -> None:
        """Delivers logprobs of the prompt, and with the last of them the rows that came before them."""
        entry.deliver_prompt(row)
        attempt = entry.attempt
        if attempt is None or entry.lacks_prompt:
            return
        early, attempt.early_rows = attempt.early_rows, []
        for row in early:
            if entry.attempt is attempt:
                self._on_row(attempt.plan.generates.id, entry, attempt, row)

    def _advance(self, worker: WorkerId, entry: LedgerEntry, attempt: Attempt) -> None:
        before = attempt.phase
        attempt.record.note_first(attempt.candidate(worker).role, monotonic())
        if attempt.note_row_from(worker):
            self._observer.handoff_ended(HandoffOutcome.COMPLETED, attempt.plan.pair_names)
            if attempt.plan.pair is not None:
                self.pairs.note_completed(attempt.plan.pair)
        if attempt.phase is AttemptPhase.DECODE:
            self.workload.note_generating(attempt)
        self._note_times(entry, attempt, before)
        self.workload.note_computed(attempt)
        entry.retries.refusals.reset()

    def _note_times(self, entry: LedgerEntry, attempt: Attempt, before: AttemptPhase) -> None:
        """Tells the cost model how long the phase before this row took.

        Of a group only the first attempt counts, since the prompt is computed for that one.
        """
        if attempt.predicted_cached is None:
            return
        now, decode = self._clock(), attempt.plan.generates
        if attempt.first_token_at is not None:
            fetched = uncached_tokens(decode, entry.length - 1)
            self._costs.note_handed_over(decode.id, fetched, now - attempt.first_token_at)
        elif before is AttemptPhase.PREFILL and attempt.split != (attempt.phase is AttemptPhase.DECODE):
            attempt.first_token_at = now
            worker, took_s = attempt.plan.computes, now - attempt.sent_at
            had_slot = not worker.load.waiting
            self._costs.note_first_token(worker.role, attempt.to_compute, took_s, had_slot=had_slot)

    def _note_cached(self, worker: WorkerId, entry: LedgerEntry, attempt: Attempt, cached: int) -> None:
        if worker != attempt.plan.computes.id:
            return
        if attempt.predicted_cached is not None:
            self._observer.cached_tokens(attempt.predicted_cached, cached)
            attempt.to_compute += attempt.predicted_cached - cached
        attempt.said_cached = True
        entry.note_uncomputed(cached)

    # How attempts end

    def _conclude(self, worker: WorkerId, entry: LedgerEntry, attempt: Attempt, row: Row) -> None:
        """Ends the choice with this row, or the attempt where the row does not fit to the delivered tokens."""
        end, length = row.position + len(row.tokens), entry.length
        if entry.embeds:
            self._fail(entry, attempt, None, FailureCode.HANDOFF)  # it is no token that is wanted
        elif row.finish and end == length:
            self._finish(entry, attempt, worker, row.finish)
        elif length == entry.max_len and end >= length:
            self._finish(entry, attempt, worker, FinishReason.LENGTH, cut=not row.finish)
        else:
            # Tokens are missing between the delivered ones and this row. The next attempt begins before the gap.
            self._fail(entry, attempt, None, FailureCode.HANDOFF)

    def _finish(
        self, entry: LedgerEntry, attempt: Attempt, worker: WorkerId, reason: FinishReason, cut: bool = False
    ) -> None:
        entry.finish = reason
        if cut:
            self._end_attempt(entry, HandoffOutcome.NOT_NEEDED)
        elif attempt.phase is AttemptPhase.DECODE:
            self._end_attempt(entry, HandoffOutcome.COMPLETED, abort=False)
        else:
            self._end_attempt(entry, HandoffOutcome.NOT_NEEDED, over_at=worker)
        self.close(entry)

    def _fail(self, entry: LedgerEntry, attempt: Attempt, worker: WorkerId | None, code: FailureCode) -> None:
        self._end_attempt(entry, HandoffOutcome.failed_with(code), over_at=worker)
        retries = entry.retries
        if code is FailureCode.DEADLINE:
            self.close(entry, Expired("the request's deadline passed"))
        elif code is FailureCode.NOT_FINITE:
            self.close(entry, Failed("the model computed numbers that are not finite"))  # it would anywhere
        elif code is FailureCode.UNSUPPORTED:
            restricted = entry.request.capsules[entry.choice].sampling.restricts_tokens
            self.close(entry, Unsupported(f"a worker refused it: {attempt.record.failure}", restricted=restricted))
        elif code is FailureCode.NOT_NOW and worker is not None:
            retries.refuse(worker, self._clock())
            entry.wake()
        elif code is FailureCode.DRAINING:
            retries.refund()
            entry.wake()
        elif code is FailureCode.TOO_LARGE and worker is not None:
            retries.refund()
            if attempt.group is None:  # a choice alone may fit where all of them do not
                retries.too_small.add(attempt.candidate(worker).size)
            entry.wake()
        else:
            self._retry_or_close(entry, f"the last one with {code.name}")

    def _retry_or_close(self, entry: LedgerEntry, why: str) -> None:
        entry.retries.failed = entry.retries.attempts > 0
        if (exhausted := entry.retries.exhausted) is not None:
            self.close(entry, Failed(f"{exhausted}, {why}"))
        else:
            entry.wake()

    def _end_attempt(
        self,
        entry: LedgerEntry,
        outcome: HandoffOutcome,
        *,
        over_at: WorkerId | None = None,
        abort: bool = True,
    ) -> None:
        """Ends the entry's attempt, and aborts it at every worker but `over_at`, where it has ended already."""
        attempt = entry.attempt
        assert attempt is not None
        if entry.has_progress:
            entry.retries.note_progress()
        if not attempt.said_cached and outcome not in _NOTHING_COMPUTED:
            # Its worker may have computed all that it was not expected to find, and the next attempt may find that.
            entry.note_uncomputed(attempt.start - uncached_tokens(attempt.plan.computes, attempt.start))
        reason = "finished" if entry.finish else outcome.value.removeprefix("failed_")
        attempt.record.ends.append(Ended(entry.choice, reason, entry.length - attempt.start, monotonic()))
        self._observer.attempt_ended(reason)
        entry.attempt = None
        self.suspects.discard(entry)
        del self._by_handle[attempt.handle]
        self.workload.remove(attempt)
        ended, handoff_over = self._handles_ended_with(attempt)
        if attempt.split and not handoff_over:
            self._observer.handoff_ended(outcome, attempt.plan.pair_names)
        for worker in attempt.workers():
            if abort and worker.id != over_at:
                for handle in ended:
                    self._send(worker.id, Abort(handle))

    def _handles_ended_with(self, attempt: Attempt) -> tuple[list[int], bool]:
        """The handles that end with an attempt, and whether its handoff was over before, or goes on for its group.

        A group's handle ends with its last attempt, unless the prompt was forked.
        """
        if (group := attempt.group) is None:
            return [attempt.handle], attempt.phase is AttemptPhase.DECODE
        group.handles.remove(attempt.handle)
        if not group.handles:
            del self._groups[group.handle]
        if group.forked or group.handles:
            return [attempt.handle], True
        return [attempt.handle, group.handle], False


def _new_record(entries: Sequence[LedgerEntry], plan: Plan) -> AttemptRecord:
    length = entries[0].length
    return AttemptRecord(
        number=entries[0].retries.number + 1,
        choices=[entry.choice for entry in entries],
        num_tokens=length,
        workers={worker.role: worker.address for worker in plan.workers()},
        computes=plan.computes.role,
        predicted={worker.role: length - uncached_tokens(worker, length) for worker in plan.workers()},
        sent_at=monotonic(),
    )


def handles_needed(num_choices: int) -> int:
    """The number of handles for an attempt at so many choices of one prompt."""
    return 1 if num_choices == 1 else 1 + num_choices
