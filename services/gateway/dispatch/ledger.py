"""The ledger: one row for each choice of each request in flight, and the rules by which it goes on or ends.

Told what workers say (rows, failures, lost streams), it delivers each position of a sequence once and in order, gives
attempts up, and says what to send. It does no IO and never waits; an attempt that failed leaves its row without one,
and whoever owns the row starts the next. Every way out of a request goes through `close`.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from kvtransfer.ids import WorkerId
from services.gateway.api.generation import (
    Delta,
    Expired,
    Failed,
    GenerationError,
    GenerationRequest,
    TakeToken,
    Unavailable,
    never,
)
from services.gateway.dispatch.attempt import Attempt, Group, Phase
from services.gateway.dispatch.costs import CostModel
from services.gateway.dispatch.router import Plan, uncached_tokens
from services.protocol.block_hash import BlockHash
from services.protocol.capsule import Capsule
from services.protocol.frames import Failure, Row, TokenLogprobs
from services.protocol.messages import MAX_HANDLE, Abort, Command, HandTo, Submit, TakeFrom
from services.protocol.outcomes import FailureCode, FinishReason

MAX_ATTEMPTS = 4

# After a worker's "not now", how long before it is asked again: doubled with each refusal in a row.
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.05, 1.0


class LedgerObserver(Protocol):
    """Counts what the ledger sees."""

    def attempt_started(self) -> None:
        """A request was sent to its worker or pair."""

    def handoff_ended(self, outcome: str) -> None:
        """An attempt at a pair: "completed", "not_needed", "abandoned", or "failed_" and a failure's name."""

    def cached_tokens(self, predicted: int, actual: int) -> None:
        """What the index promised of a prompt, and what the worker found."""


@dataclass(slots=True, eq=False)
class LedgerRow:
    """A choice in flight, and what its reader has not taken yet."""

    request: GenerationRequest
    choice: int
    deadline: float  # on the ledger's clock
    on_news: Callable[["LedgerRow"], None]  # there is something for the reader
    take_token: TakeToken = never  # the reader's: a token that needs not wait for it
    broken: Exception | None = None  # what that raised, for the reader to raise
    start: int = field(init=False)  # length of its capsule
    num_prompt: int = field(init=False)
    max_len: int = field(init=False)  # of the sequence, where `max_tokens` is reached
    length: int = field(init=False)  # of the sequence so far: the index of its next token
    wants_logprobs: bool = field(init=False)  # a token counts as delivered only together with its logprobs
    only_tokens: bool = field(init=False)  # no logprobs are wanted, of the prompt neither
    generated: "array[int]" = field(default_factory=lambda: array("i"))  # delivered tokens
    untaken: list[int] = field(default_factory=list)  # the last of them
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the tokens not taken yet
    prompt_logprobs: list[TokenLogprobs] | None = field(init=False)  # None: not wanted, or taken
    attempt: Attempt | None = None
    attempts: int = 0  # that count against MAX_ATTEMPTS
    lost_with: Counter[WorkerId] = field(default_factory=Counter)  # of them: by whose stream, after their first token
    refusals: int = 0  # "not now" in a row
    avoid: dict[WorkerId, float] = field(default_factory=dict)  # until when
    larger_than: int = 0  # blocks of the largest worker that was too small
    cached_tokens: int | None = None
    finish: FinishReason = FinishReason.NONE
    error: GenerationError | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        capsule = self.request.capsules[self.choice]
        self.start = self.length = len(capsule.token_ids)
        self.num_prompt = capsule.num_prompt
        self.max_len = capsule.max_len
        self.wants_logprobs = capsule.sampling.num_logprobs is not None
        self.prompt_logprobs = None if capsule.sampling.num_prompt_logprobs is None else []
        self.only_tokens = not self.wants_logprobs and self.prompt_logprobs is None

    def capsule(self) -> Capsule:
        """What the next attempt starts from."""
        start = self.request.capsules[self.choice]
        sampling, token_ids = start.sampling, start.token_ids
        if sampling.num_prompt_logprobs is not None and not self.lacks_prompt:
            sampling = replace(sampling, num_prompt_logprobs=None)
        if self.generated:
            token_ids = np.concatenate([token_ids, np.frombuffer(self.generated.tobytes(), np.int32)])
        return Capsule(token_ids, start.num_prompt, sampling)

    @property
    def lacks_prompt(self) -> bool:
        """True while logprobs of the prompt are wanted and not all there; no token counts as delivered before."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    def wake(self) -> None:
        """Tells the reader that there is news."""
        self.on_news(self)

    def deliver(self, tokens: list[int]) -> None:
        """The next tokens."""
        self.generated.extend(tokens)
        self.untaken.extend(tokens)
        self.length += len(tokens)

    def goes_on(self, said: Row) -> bool:
        """Takes the usual row: the next tokens, which end nothing. False: it is another one, and nothing was taken."""
        _, position, tokens, finish, cached, _ = said
        usual = position == self.length < self.max_len - len(tokens) and cached < 0 and self.only_tokens
        if not usual or finish or not tokens:
            return False
        if len(tokens) == 1 and not self.untaken:
            try:
                if self.take_token(tokens[0]):
                    self.generated.append(tokens[0])
                    self.length += 1
                    return True
            except Exception as error:  # here it would hit whoever brought the token
                self.broken = error
        self.deliver(tokens)
        self.on_news(self)
        return True

    def still_avoided(self, now: float) -> frozenset[WorkerId]:
        """Workers that refused it and are not to be asked again yet; forgets those whose time is over."""
        self.avoid = {worker: until for worker, until in self.avoid.items() if until > now}
        return frozenset(self.avoid)

    def take(self) -> Delta | None:
        """All that came since the last call; None: nothing did."""
        if not self.only_tokens and self.lacks_prompt:
            return None
        tokens, self.untaken = self.untaken, []
        if not tokens and self.finish is FinishReason.NONE:
            return None
        cached = self.cached_tokens or 0
        if self.only_tokens:
            return Delta(tokens, None, self.finish, cached, self.choice)
        logprobs, self.logprobs = self.logprobs, []
        prompt, self.prompt_logprobs = self.prompt_logprobs, None
        return Delta(tokens, logprobs if self.wants_logprobs else None, self.finish, cached, self.choice, prompt)


class Ledger:
    """All choices in flight. `send` must not wait, and drops what is for a worker without a stream."""

    def __init__(
        self,
        send: Callable[[WorkerId, Command], None],
        clock: Callable[[], float],
        observer: LedgerObserver,
        costs: CostModel,
    ) -> None:
        """`costs` learns from what attempts take."""
        self._send = send
        self._clock = clock
        self._observer = observer
        self._costs = costs
        self._rows: dict[LedgerRow, None] = {}
        self._by_handle: dict[int, LedgerRow] = {}
        self._groups: dict[int, Group] = {}
        self.highest_handle = 0
        self.queued_tokens: Counter[WorkerId] = Counter()  # prompt tokens sent there and not answered
        self.queued_blocks: dict[WorkerId, set[BlockHash]] = {}  # the full blocks of those tokens
        self.assigned: Counter[WorkerId] = Counter()  # attempts that it generates for, or will
        self.generating: Counter[WorkerId] = Counter()  # those of them for which it has begun

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[LedgerRow]:
        return iter(list(self._rows))

    def open(self, request: GenerationRequest, choice: int, on_news: Callable[[LedgerRow], None]) -> LedgerRow:
        """A new row, without an attempt."""
        row = LedgerRow(request, choice, self._clock() + request.timeout_s, on_news)
        self._rows[row] = None
        return row

    def find(self, handle: int) -> list[LedgerRow]:
        """The rows whose attempts a handle names, as their own or as their group's; none: it was given up."""
        group = self._groups.get(handle)
        handles = {handle} if group is None else group.handles
        return [self._by_handle[one] for one in sorted(handles) if one in self._by_handle]

    def start(self, rows: Sequence[LedgerRow], plan: Plan, blocks: Sequence[BlockHash] = ()) -> None:
        """The next attempt of rows that have the same tokens: handles are allocated and sent in one step.

        blocks: full blocks of the prompt that `plan.computes` will have by it, and was not to have before.
        """
        assert self.highest_handle + handles_needed(len(rows)) <= MAX_HANDLE
        group = Group(self._allocate()) if len(rows) > 1 else None
        for row in rows:
            self._begin(row, plan, group)
        first = rows[0].attempt
        assert first is not None
        first.queued_blocks = blocks
        if blocks:
            self.queued_blocks.setdefault(plan.computes.id, set()).update(blocks)
        if group is None:
            self._submit(rows[0], plan, self.highest_handle)
        else:
            self._groups[group.handle] = group
            self._submit(rows[0], plan, group.handle, tuple(row.capsule().sampling.seed for row in rows))
        self._observer.attempt_started()

    def _begin(self, row: LedgerRow, plan: Plan, group: Group | None) -> None:
        assert row.attempt is None
        assert not row.closed
        if row.lacks_prompt:
            row.prompt_logprobs = []
        uncached, cached = uncached_tokens(plan.computes, row.length), None
        if group is None or not group.handles:
            cached = row.length - uncached
        else:
            uncached = 0  # computed once, for the first of the group
        to_compute = max(plan.computes.load.waiting_tokens, self.queued_tokens[plan.computes.id]) + uncached
        row.attempt = Attempt(self._allocate(), plan, uncached, cached, self._clock(), to_compute, group=group)
        row.attempts += 1
        if group is not None:
            group.handles.add(row.attempt.handle)
        self._by_handle[row.attempt.handle] = row
        self.queued_tokens[plan.computes.id] += uncached
        self.assigned[plan.generates.id] += 1

    def _allocate(self) -> int:
        self.highest_handle += 1
        return self.highest_handle

    def on_rows(self, worker: WorkerId, rows: Iterable[Row]) -> None:
        """Takes the rows of one frame; those of handles that were given up are dropped. Wakes each reader once."""
        for said in rows:
            row = self._by_handle.get(said.handle)
            if row is not None and (attempt := row.attempt) is not None:
                if attempt.decodes_at != worker or not row.goes_on(said):
                    self._on_row(worker, row, attempt, said)
            elif said.handle in self._groups:
                for row in self.find(said.handle):
                    self._deliver_prompt(row, said)

    def on_failure(self, worker: WorkerId, failure: Failure) -> None:
        """A worker gave a handle up."""
        for row in self.find(failure.handle):
            if row.attempt is not None and row.attempt.heeds(worker):
                self._fail(row, row.attempt, worker, failure.code)

    def on_lost(self, worker: WorkerId) -> None:
        """A worker's stream broke, and with it all that this gateway had there."""
        for row in self:
            if row.attempt is not None and row.attempt.heeds(worker):
                if row.attempt.phase is not Phase.PREFILL:
                    row.lost_with[worker] += 1
                self._give_up(row, "failed_worker_lost", over_at=worker)
                self._again(row, "its worker was lost")

    def on_return(self, worker: WorkerId) -> None:
        """A worker whose stream broke is still alive: requests that were getting on when it did lose no attempt by it.

        Those that were not may be why it broke, so it counts: four such attempts, not as many as the deadline allows.
        """
        for row in self:
            row.attempts -= row.lost_with.pop(worker, 0)

    def on_deadline(self, row: LedgerRow) -> None:
        """The request's time is over."""
        if row.attempt is None:
            self.close(row, Unavailable("no worker could take the request before its deadline"))
        else:
            self.close(row, Expired("the request's deadline passed"))

    def close(self, row: LedgerRow, error: GenerationError | None = None) -> None:
        """Ends a request, wherever it is. What was delivered can still be taken. Again is no change."""
        if row.closed:
            return
        row.closed = True
        if row.attempt is not None:
            self._give_up(row, "abandoned")
        del self._rows[row]
        row.error = error
        row.wake()

    def _submit(self, row: LedgerRow, plan: Plan, handle: int, seeds: tuple[int, ...] = ()) -> None:
        prefill, decode = plan.prefill, plan.decode
        timeout_s = max(0.0, row.deadline - self._clock())
        capsule, request_id = row.capsule(), row.request.request_id
        if prefill is not None:
            hand_to = HandTo(decode.id) if decode is not None else None
            self._send(prefill.id, Submit(handle, capsule, timeout_s, request_id, hand_to, seeds))
        if decode is not None:
            take_from = TakeFrom(prefill.address, prefill.id) if prefill is not None else None
            self._send(decode.id, Submit(handle, capsule, timeout_s, request_id, take_from, seeds))

    def _on_row(self, worker: WorkerId, row: LedgerRow, attempt: Attempt, said: Row) -> None:
        if said.cached >= 0:
            self._note_cached(worker, row, attempt, said.cached)
        if not attempt.heeds(worker):
            return
        if said.position < row.num_prompt:
            self._deliver_prompt(row, said)
            return
        if row.lacks_prompt and worker != attempt.plan.computes.id:
            self._fail(row, attempt, None, FailureCode.HANDOFF)  # decode's word came before prefill's
            return
        if attempt.phase is not Phase.DECODE:
            self._advance(worker, row, attempt)
        delivered = self._deliver(row, said)
        length = row.length
        if said.finish or length >= row.max_len or said.position > length:
            self._conclude(worker, row, attempt, said)
        elif delivered:
            row.wake()

    def _advance(self, worker: WorkerId, row: LedgerRow, attempt: Attempt) -> None:
        begun = attempt.phase
        if attempt.row_from(worker):
            self._observer.handoff_ended("completed")
        if attempt.phase is Phase.DECODE:
            self.generating[worker] += 1
        self._note_times(row, attempt, begun)
        self._settle_queue(attempt)
        row.refusals = 0

    def _note_times(self, row: LedgerRow, attempt: Attempt, begun: Phase) -> None:
        """Says what this took; not for a choice that another one's prompt was computed for."""
        if attempt.predicted_cached is None:
            return
        now, decode = self._clock(), attempt.plan.generates
        if attempt.first_token_at is not None:
            fetched = uncached_tokens(decode, row.length - 1)
            self._costs.note_handed_over(decode.id, fetched, now - attempt.first_token_at)
        elif begun is Phase.PREFILL and attempt.split != (attempt.phase is Phase.DECODE):
            attempt.first_token_at = now
            self._costs.note_first_token(attempt.plan.computes.role, attempt.to_compute, now - attempt.sent_at)

    def _deliver_prompt(self, row: LedgerRow, said: Row) -> None:
        if row.prompt_logprobs is not None and said.logprobs is not None:
            skip = len(row.prompt_logprobs) + 1 - said.position
            if skip >= 0:
                row.prompt_logprobs += said.logprobs[skip : row.num_prompt - said.position]
                if not row.lacks_prompt:
                    row.wake()

    def _deliver(self, row: LedgerRow, said: Row) -> bool:
        length = row.length
        skip = length - said.position
        if skip < 0 or (row.wants_logprobs and said.logprobs is None):
            return False
        stop = skip + row.max_len - length
        tokens = said.tokens[skip:stop]
        row.deliver(tokens)
        if row.wants_logprobs and said.logprobs is not None:
            row.logprobs.extend(said.logprobs[skip:stop])
        return bool(tokens)

    def _conclude(self, worker: WorkerId, row: LedgerRow, attempt: Attempt, said: Row) -> None:
        """The row ends the request, or does not fit to what was delivered."""
        end, length = said.position + len(said.tokens), row.length
        if said.finish and end == length:
            self._finish(row, attempt, worker, said.finish)
        elif length == row.max_len and end >= length:
            self._finish(row, attempt, worker, FinishReason.LENGTH, cut=not said.finish)
        else:
            # Tokens are missing between what was delivered and this row: not what was agreed, so begin again there.
            self._fail(row, attempt, None, FailureCode.HANDOFF)

    def _note_cached(self, worker: WorkerId, row: LedgerRow, attempt: Attempt, cached: int) -> None:
        if worker != attempt.plan.computes.id:
            return
        if attempt.predicted_cached is not None:
            self._observer.cached_tokens(attempt.predicted_cached, cached)
            attempt.to_compute += attempt.predicted_cached - cached
        if row.cached_tokens is None:
            row.cached_tokens = min(cached, row.num_prompt)

    def _finish(
        self, row: LedgerRow, attempt: Attempt, worker: WorkerId, reason: FinishReason, cut: bool = False
    ) -> None:
        row.finish = reason
        if cut:
            self._give_up(row, "not_needed")
        elif attempt.phase is Phase.DECODE:
            self._give_up(row, "completed", abort=False)
        else:
            self._give_up(row, "not_needed", over_at=worker)
        self.close(row)

    def _fail(self, row: LedgerRow, attempt: Attempt, worker: WorkerId | None, code: FailureCode) -> None:
        self._give_up(row, f"failed_{code.name.lower()}", over_at=worker)
        if code is FailureCode.DEADLINE:
            self.close(row, Expired("the request's deadline passed"))
        elif code is FailureCode.NOT_NOW and worker is not None:
            row.attempts -= 1
            row.avoid[worker] = self._clock() + min(FIRST_BACKOFF_S * 2**row.refusals, LONGEST_BACKOFF_S)
            row.refusals += 1
            row.wake()
        elif code is FailureCode.TOO_LARGE and worker is not None:
            row.attempts -= 1
            if attempt.group is None:  # a choice alone may fit where all of them do not
                row.larger_than = max(row.larger_than, attempt.candidate(worker).num_blocks)
            row.wake()
        else:
            self._again(row, f"the last one with {code.name}")

    def _again(self, row: LedgerRow, why: str) -> None:
        if row.attempts >= MAX_ATTEMPTS:
            self.close(row, Failed(f"{row.attempts} attempts failed, {why}"))
        else:
            row.wake()

    def _give_up(self, row: LedgerRow, outcome: str, *, over_at: WorkerId | None = None, abort: bool = True) -> None:
        """Ends the row's attempt, aborting it at every worker where it is not over already."""
        attempt = row.attempt
        assert attempt is not None
        row.attempt = None
        del self._by_handle[attempt.handle]
        self._settle_queue(attempt)
        _count_down(self.assigned, attempt.plan.generates.id, 1)
        if attempt.phase is Phase.DECODE:
            _count_down(self.generating, attempt.plan.generates.id, 1)
        handles, forked = [attempt.handle], attempt.phase is Phase.DECODE
        if (group := attempt.group) is not None:
            group.handles.remove(attempt.handle)
            if not group.handles:
                del self._groups[group.handle]
            forked = group.forked or bool(group.handles)  # the prompt goes on, or went on, for another choice
            handles += [] if forked else [group.handle]
        if attempt.split and not forked:
            self._observer.handoff_ended(outcome)
        for worker in attempt.workers():
            if abort and worker.id != over_at:
                for handle in handles:
                    self._send(worker.id, Abort(handle))

    def _settle_queue(self, attempt: Attempt) -> None:
        _count_down(self.queued_tokens, attempt.plan.computes.id, attempt.queued_tokens)
        attempt.queued_tokens = 0
        if (blocks := self.queued_blocks.get(attempt.plan.computes.id)) is not None:
            blocks.difference_update(attempt.queued_blocks)
            if not blocks:
                del self.queued_blocks[attempt.plan.computes.id]
        attempt.queued_blocks = ()


def handles_needed(num_choices: int) -> int:
    """For an attempt at so many choices of one prompt."""
    return 1 if num_choices == 1 else 1 + num_choices


def _count_down(counter: Counter[WorkerId], worker: WorkerId, by: int) -> None:
    counter[worker] -= by
    if not counter[worker]:
        del counter[worker]  # workers come and go; their names do not stay
