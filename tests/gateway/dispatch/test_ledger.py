"""The ledger's rules, without processes: what workers say goes in, what is sent and delivered comes out."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.ids import WorkerId
from kvtransfer.messages import EndReason
from kvtransfer.moved import Moved
from services.config import WorkerRole
from services.gateway.api.generation import Delta, Expired, Failed, GenerationRequest, TooLarge, Unavailable
from services.gateway.dispatch.costs import CostModel
from services.gateway.dispatch.ledger.entry import LedgerEntry
from services.gateway.dispatch.ledger.ledger import Ledger
from services.gateway.dispatch.retries import MAX_ATTEMPTS, MAX_DEATHS
from services.gateway.dispatch.router import Candidate, Plan
from services.protocol.capsule import Capsule
from services.protocol.frames import Failure, Load, Row, TokenLogprobs
from services.protocol.messages import Abort, Command, HandTo, Submit, TakeFrom
from services.protocol.outcomes import FailureCode, FinishReason
from services.protocol.sampling import SamplingParams

NONE, STOP, LENGTH = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH
PROMPT = [5, 6, 7]
TOKENS = [60, 61, 62, 63, 64, 65]  # what the model of the random orders says


def candidate(id: int, role: WorkerRole, num_blocks: int = 100) -> Candidate:
    return Candidate(
        id=WorkerId(id),
        address=f"w{id}:1",
        role=role,
        pairs_by=("f", 1),
        transports=frozenset({"nixl"}),
        block_size=16,
        num_blocks=num_blocks,
        max_model_len=1000,
        load=Load(),
    )


P = candidate(1, WorkerRole.PREFILL)
D = candidate(2, WorkerRole.DECODE)
PAIR, DECODE_ALONE, PREFILL_ALONE = Plan(P, D), Plan(None, D), Plan(P, None)


class Bench:
    """A ledger whose commands are kept, with a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[tuple[WorkerId, Command]] = []
        self.handoffs: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.transports: dict[tuple[str, str], str] = {}
        self.cached: list[tuple[int, int]] = []
        self.failed_handoffs: Counter[EndReason] = Counter()
        self.woken = 0
        self.costs = CostModel()
        self.ledger = Ledger(self.send, lambda: self.now, self, self.costs)

    def send(self, worker: WorkerId, command: Command) -> None:
        self.sent.append((worker, command))

    def attempt_started(self) -> None:
        pass

    def attempt_ended(self, reason: str) -> None:
        self.ends[reason] += 1

    def blocks_moved(self, prefill: str, decode: str, moved: Moved) -> None:
        self.transports[prefill, decode] = moved.transport

    def handoff_ended(self, outcome: str, pair: tuple[str, str]) -> None:
        self.handoffs[outcome] += 1

    def handoff_failed(self, reason: EndReason, pair: tuple[str, str]) -> None:
        self.failed_handoffs[reason] += 1

    def cached_tokens(self, predicted: int, actual: int) -> None:
        self.cached.append((predicted, actual))

    def on_news(self, entry: LedgerEntry) -> None:
        self.woken += 1

    def on_error(self, error: Exception) -> None:
        raise error

    def open(self, max_tokens: int = 5, logprobs: int | None = None) -> LedgerEntry:
        sampling = SamplingParams(max_tokens=max_tokens, num_logprobs=logprobs)
        request = GenerationRequest("r", (Capsule(np.array(PROMPT, np.int32), len(PROMPT), sampling),), 10.0)
        return self.ledger.open(request, 0, self)

    def started(self, plan: Plan = PAIR, **request: Any) -> LedgerEntry:
        entry = self.open(**request)
        self.ledger.start([entry], plan)
        self.sent.clear()
        return entry

    def say(self, worker: Candidate, handle: int, position: int, tokens: list[int], **rest: Any) -> None:
        row = Row(handle, position, tokens, **{"finish": NONE, "cached": -1, "logprobs": None, **rest})
        self.ledger.on_rows(worker.id, [row])

    def fail(self, worker: Candidate, handle: int, code: FailureCode) -> None:
        self.ledger.on_failure(worker.id, Failure(handle, code))

    def aborted(self) -> list[int]:
        """The workers that were sent an abort. Fails when anything else was sent."""
        assert all(isinstance(command, Abort) for _, command in self.sent)
        return [worker for worker, _ in self.sent]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def taken(entry: LedgerEntry) -> list[int]:
    delta = entry.take()
    return delta.tokens if delta else []


def test_an_attempt_is_sent_to_both_workers_in_one_step(bench: Bench):
    entry = bench.open()
    bench.now += 4
    bench.ledger.start([entry], PAIR)
    (to_prefill, first), (to_decode, second) = bench.sent
    assert (to_prefill, to_decode) == (P.id, D.id)
    assert isinstance(first, Submit)
    assert isinstance(second, Submit)
    assert (first.handle, second.handle) == (1, 1)
    assert (first.handoff, second.handoff) == (HandTo(D.id), TakeFrom("w1:1", P.id))
    assert first.timeout_s == 6.0


def test_a_worker_alone_hears_of_no_handoff(bench: Bench):
    entry = bench.open()
    bench.ledger.start([entry], DECODE_ALONE)
    ((_, submit),) = bench.sent
    assert isinstance(submit, Submit)
    assert submit.handoff is None


@pytest.mark.parametrize("order", [(P, D), (D, P)], ids=["prefill first", "decode first"])
def test_the_first_token_is_delivered_once_whoever_says_it_first(bench: Bench, order: tuple[Candidate, Candidate]):
    entry = bench.started()
    for worker in order:
        bench.say(worker, 1, 3, [50], cached=2 if worker is P else 0)
    assert entry.take() == Delta([50], None, NONE, 2)
    assert entry.take() is None
    assert bench.woken == 1


def test_a_row_that_repeats_and_goes_on_delivers_what_is_new(bench: Bench):
    entry = bench.started(DECODE_ALONE)
    bench.say(D, 1, 3, [50, 51])
    bench.say(D, 1, 4, [51, 52])
    assert taken(entry) == [50, 51, 52]


def test_rows_of_others_are_ignored(bench: Bench):
    """Rows of unknown handles, of a worker that has no part in the attempt, and of handles whose attempt ended."""
    entry = bench.started(DECODE_ALONE)
    bench.say(D, 9, 3, [1])
    bench.say(P, 1, 3, [1])
    bench.fail(D, 1, FailureCode.HANDOFF)
    bench.say(D, 1, 3, [1])
    assert entry.take() is None


def test_why_a_handoff_failed_is_counted_once_for_the_two_workers_that_report_it(bench: Bench):
    bench.started()
    for worker in (D, P):
        bench.ledger.on_failure(worker.id, Failure(1, FailureCode.HANDOFF, "", EndReason.STALE))
    assert bench.failed_handoffs == {EndReason.STALE: 1}
    assert bench.handoffs == {"failed_handoff": 1}


def test_a_token_counts_as_delivered_only_with_its_logprobs(bench: Bench):
    entry = bench.started(logprobs=0)
    bench.say(P, 1, 3, [50])
    assert entry.take() is None
    bench.say(D, 1, 3, [50], logprobs=[TokenLogprobs(-0.1, ())])
    assert entry.take() == Delta([50], [TokenLogprobs(-0.1, ())], NONE, 0)


def test_a_new_attempt_starts_from_what_was_delivered(bench: Bench):
    entry = bench.started()
    bench.say(P, 1, 3, [50])
    bench.say(D, 1, 3, [50, 51])
    bench.fail(D, 1, FailureCode.HANDOFF)
    assert entry.attempt is None
    bench.sent.clear()
    bench.ledger.start([entry], DECODE_ALONE)
    ((_, submit),) = bench.sent
    assert isinstance(submit, Submit)
    assert submit.handle == 2
    assert submit.capsule.token_ids.tolist() == [*PROMPT, 50, 51]
    assert submit.capsule.num_prompt == 3
    bench.say(D, 2, 5, [52, 53, 54], finish=LENGTH)
    assert entry.take() == Delta([50, 51, 52, 53, 54], None, LENGTH, 0)


def test_finish_at_the_first_token_aborts_decode(bench: Bench):
    entry = bench.started()
    bench.say(P, 1, 3, [2], finish=STOP)
    assert bench.aborted() == [D.id]
    assert entry.take() == Delta([2], None, STOP, 0)
    assert len(bench.ledger) == 0
    assert bench.handoffs == {"not_needed": 1}


def test_finish_at_decode_aborts_nobody(bench: Bench):
    entry = bench.started()
    bench.say(D, 1, 3, [50])
    bench.say(D, 1, 4, [51], finish=STOP)
    assert bench.sent == []
    assert entry.finish is STOP
    assert bench.handoffs == {"completed": 1}


def test_prefills_failure_before_decodes_first_row_ends_the_attempt(bench: Bench):
    entry = bench.started()
    bench.say(P, 1, 3, [50])
    bench.fail(P, 1, FailureCode.HANDOFF)
    assert entry.attempt is None
    assert bench.aborted() == [D.id]
    assert bench.handoffs == {"failed_handoff": 1}


def test_prefills_word_ends_with_decodes_first_row(bench: Bench):
    entry = bench.started()
    bench.say(D, 1, 3, [50])
    bench.fail(P, 1, FailureCode.HANDOFF)
    bench.ledger.on_lost(P.id)
    assert entry.attempt is not None
    assert bench.sent == []


def test_a_lost_decode_worker_means_an_abort_at_prefill_at_any_time(bench: Bench):
    entry = bench.started()
    bench.say(D, 1, 3, [50])
    bench.ledger.on_lost(D.id)
    assert entry.attempt is None
    assert bench.aborted() == [P.id]


def test_attempts_are_bounded(bench: Bench):
    entry = bench.open()
    for handle in range(1, MAX_ATTEMPTS + 1):
        assert entry.error() is None
        bench.ledger.start([entry], PAIR)
        bench.fail(D, handle, FailureCode.HANDOFF)
    assert isinstance(entry.error(), Failed)
    assert len(bench.ledger) == 0


def lose_stream(bench: Bench, entry: LedgerEntry, token: bool, returns: Candidate) -> None:
    """An attempt ends with decode's stream, after a token or before; then a worker's stream is there again."""
    assert entry.error() is None
    bench.ledger.start([entry], PAIR)
    if token:
        bench.say(D, bench.ledger.highest_handle, entry.length, [50])
    bench.ledger.on_lost(D.id)
    bench.ledger.on_return(returns.id)


def test_attempts_that_got_on_until_a_living_worker_s_stream_broke_do_not_count(bench: Bench):
    entry = bench.open(max_tokens=100)
    for _ in range(3 * MAX_ATTEMPTS):
        lose_stream(bench, entry, token=True, returns=D)
    assert entry.retries.attempts == 0
    assert len(taken(entry)) == 3 * MAX_ATTEMPTS


@pytest.mark.parametrize(("token", "returns", "most"), [(False, D, MAX_ATTEMPTS), (True, P, MAX_DEATHS)])
def test_attempts_that_may_be_why_a_stream_broke_or_that_a_worker_died_with_are_bounded(
    bench: Bench, token: bool, returns: Candidate, most: int
):
    entry = bench.open(max_tokens=100)
    for _ in range(most):
        lose_stream(bench, entry, token, returns)
    assert isinstance(entry.error(), Failed)


def test_a_choice_that_gets_on_in_each_attempt_outlives_any_number_of_workers(bench: Bench):
    entry = bench.open(max_tokens=100)
    for _ in range(3 * MAX_ATTEMPTS):
        bench.ledger.start([entry], DECODE_ALONE)
        for _ in range(2):
            bench.say(D, bench.ledger.highest_handle, entry.length, [50])
        bench.ledger.on_lost(D.id)
    assert entry.error() is None
    assert len(taken(entry)) == 6 * MAX_ATTEMPTS


def test_a_token_by_computing_the_prompt_is_no_progress(bench: Bench):
    """A choice whose decoding ends workers gains that token in each attempt."""
    entry = bench.open(max_tokens=100)
    for _ in range(MAX_DEATHS):
        assert entry.error() is None
        bench.ledger.start([entry], DECODE_ALONE)
        bench.say(D, bench.ledger.highest_handle, entry.length, [50])
        bench.ledger.on_lost(D.id)
    assert isinstance(entry.error(), Failed)
    assert "3 workers in a row ended" in str(entry.error())


def test_a_handoff_that_fails_counts_against_its_pair_until_one_arrives(bench: Bench):
    first, pair = bench.started(), (P.id, D.id)
    bench.ledger.on_failure(D.id, Failure(1, FailureCode.HANDOFF, "", EndReason.WORKER_LOST))
    assert bench.ledger.pairs.avoided(bench.now) == {pair}
    assert first.retries.failed_pairs == {pair}
    bench.now += 2
    assert not bench.ledger.pairs.avoided(bench.now)
    bench.started()
    bench.say(D, 2, 3, [50])
    bench.started()
    bench.ledger.on_failure(D.id, Failure(3, FailureCode.HANDOFF, "", EndReason.STALE))
    assert not bench.ledger.pairs.avoided(bench.now + 1.1), "the first failure in a row"


def test_a_handoff_that_the_gateway_aborted_says_nothing_of_its_pair(bench: Bench):
    bench.started()
    bench.ledger.on_failure(D.id, Failure(1, FailureCode.HANDOFF, "", EndReason.ABORTED))
    assert not bench.ledger.pairs.avoided(bench.now)


def test_what_was_delivered_before_an_error_can_still_be_taken(bench: Bench):
    entry = bench.started(DECODE_ALONE)
    bench.say(D, 1, 3, [50])
    bench.ledger.close(entry, Failed("it did"))
    assert taken(entry) == [50]
    assert entry.take() is None


def test_not_now_costs_no_attempt_and_is_left_alone_longer_each_time(bench: Bench):
    entry = bench.open()
    waits = []
    for handle in range(1, 9):
        bench.ledger.start([entry], DECODE_ALONE)
        bench.fail(D, handle, FailureCode.NOT_NOW)
        waits.append(entry.retries.avoid[D.id] - bench.now)
        assert entry.retries.still_avoided(bench.now) == {D.id}
        bench.now += waits[-1] + 0.001
        assert entry.retries.still_avoided(bench.now) == frozenset()
    assert entry.retries.attempts == 0
    assert waits == sorted(waits)
    assert waits[-1] == waits[-2] == 1.0
    bench.ledger.start([entry], DECODE_ALONE)
    bench.say(D, 9, 3, [50])
    assert not entry.retries.refusals.failing


def test_too_large_asks_for_a_larger_worker(bench: Bench):
    entry = bench.started()
    bench.fail(D, 1, FailureCode.TOO_LARGE)
    assert entry.retries.too_small == {D.size}
    assert entry.retries.attempts == 0
    assert entry.error() is None
    bench.ledger.close(entry, TooLarge("no worker is"))


def test_a_workers_deadline_is_the_requests(bench: Bench):
    entry = bench.started()
    bench.fail(P, 1, FailureCode.DEADLINE)
    assert isinstance(entry.error(), Expired)
    assert bench.aborted() == [D.id]


@pytest.mark.parametrize(("worker", "first_rows"), [(P, 0), (D, 1), (D, 3)], ids=["prefill", "first", "later"])
def test_what_is_not_finite_would_not_be_elsewhere_either(bench: Bench, worker: Candidate, first_rows: int):
    """The worker has checked that it computes right. What was delivered before can still be taken."""
    entry = bench.started()
    for position in range(first_rows):
        bench.say(D, 1, len(PROMPT) + position, [position])
    bench.fail(worker, 1, FailureCode.NOT_FINITE)
    assert isinstance(entry.error(), Failed)
    assert taken(entry) == list(range(first_rows))
    assert bench.ends == {"not_finite": 1}
    assert bench.aborted() == [(D if worker is P else P).id]


def test_a_deadline_says_whether_there_was_a_worker(bench: Bench):
    running, waiting = bench.started(), bench.open()
    bench.ledger.on_deadline(running)
    bench.ledger.on_deadline(waiting)
    assert isinstance(running.error(), Expired)
    assert isinstance(waiting.error(), Unavailable)


def test_closing_twice_is_closing_once(bench: Bench):
    entry = bench.started()
    bench.ledger.close(entry)
    bench.ledger.close(entry, Failed("too late"))
    assert bench.aborted() == [P.id, D.id]
    assert entry.error() is None


def test_more_tokens_than_allowed_are_cut_and_the_worker_is_stopped(bench: Bench):
    entry = bench.started(DECODE_ALONE, max_tokens=2)
    bench.say(D, 1, 3, [50, 51, 52])
    assert entry.take() == Delta([50, 51], None, LENGTH, 0)
    assert bench.aborted() == [D.id]


def test_tokens_missing_in_between_end_the_attempt(bench: Bench):
    entry = bench.started(DECODE_ALONE)
    bench.say(D, 1, 3, [50])
    bench.say(D, 1, 5, [52])
    assert entry.attempt is None
    assert bench.aborted() == [D.id]
    assert taken(entry) == [50]


def test_a_finish_without_tokens_ends_the_request(bench: Bench):
    entry = bench.started(DECODE_ALONE)
    bench.say(D, 1, 3, [50])
    bench.say(D, 1, 4, [], finish=LENGTH)
    assert entry.take() == Delta([50], None, LENGTH, 0)


def test_cached_tokens_are_those_that_no_attempt_computed(bench: Bench):
    entry = bench.started(DECODE_ALONE)
    bench.say(D, 1, 3, [50], cached=2)
    bench.ledger.on_lost(D.id)
    bench.ledger.start([entry], DECODE_ALONE)
    bench.say(D, 2, 4, [51], cached=0)
    assert entry.cached_tokens == 0  # the second attempt computed what the first one had found


def test_tokens_that_a_failed_attempt_computed_are_not_cached_for_the_next(bench: Bench):
    entry = bench.started()
    bench.fail(D, 1, FailureCode.HANDOFF)  # before prefill said what it had found
    bench.ledger.start([entry], PAIR)
    bench.say(P, 2, 3, [50], cached=2)
    assert entry.cached_tokens == 0


def test_an_attempt_that_a_worker_refused_computed_nothing(bench: Bench):
    entry = bench.started()
    bench.fail(P, 1, FailureCode.NOT_NOW)
    bench.ledger.start([entry], PAIR)
    bench.say(P, 2, 3, [50], cached=2)
    assert entry.cached_tokens == 2


def test_cached_tokens_are_those_of_the_worker_that_computed_the_prompt(bench: Bench):
    entry = bench.started()
    bench.say(D, 1, 3, [50], cached=0)
    bench.say(P, 1, 3, [50], cached=2)
    assert entry.cached_tokens == 2
    assert bench.cached == [(0, 2)]


def test_what_is_queued_at_a_worker_is_counted_until_it_answers(bench: Bench):
    entry = bench.started()
    assert bench.ledger.workload.queued_tokens == {P.id: 3}
    assert bench.ledger.workload.assigned == {D.id: 1}
    bench.say(P, 1, 3, [50])
    assert bench.ledger.workload.queued_tokens == {}
    bench.ledger.close(entry)
    assert bench.ledger.workload.assigned == {}


@pytest.mark.parametrize("code", FailureCode)
def test_every_failure_has_its_outcome(bench: Bench, code: FailureCode):
    bench.started()
    bench.fail(D, 1, code)
    assert bench.handoffs == {f"failed_{code.name.lower()}": 1}


class AnyOrder(RuleBasedStateMachine):
    """Workers whose streams are slow, break and reorder against each other: the client sees the sequence, once."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.entry = self.bench.open(max_tokens=len(TOKENS))
        self.got: list[int] = []
        self.streams: dict[int, list[Row]] = {P.id: [], D.id: []}

    @precondition(lambda self: self.entry.attempt is None and not self.entry.closed)
    @rule(plan=st.sampled_from([PAIR, DECODE_ALONE]))
    def start(self, plan: Plan) -> None:
        self.bench.ledger.start([self.entry], plan)
        assert self.entry.attempt is not None
        handle, start = self.entry.attempt.handle, len(self.entry.generated)
        last = len(TOKENS) - 1
        for at in range(start, last + 1):
            row = Row(handle, 3 + at, [TOKENS[at]], LENGTH if at == last else NONE, -1, None)
            self.streams[D.id].append(row)
            if at == start and plan.prefill is not None:
                self.streams[P.id].append(row)

    @rule(worker=st.sampled_from([P, D]), count=st.integers(1, 3))
    def speak(self, worker: Candidate, count: int) -> None:
        spoken, self.streams[worker.id] = self.streams[worker.id][:count], self.streams[worker.id][count:]
        self.bench.ledger.on_rows(worker.id, spoken)

    @rule(worker=st.sampled_from([P, D]))
    def lose(self, worker: Candidate) -> None:
        self.streams[worker.id].clear()
        self.bench.ledger.on_lost(worker.id)

    @rule(worker=st.sampled_from([P, D]), code=st.sampled_from([FailureCode.HANDOFF, FailureCode.NOT_NOW]))
    def fail(self, worker: Candidate, code: FailureCode) -> None:
        self.bench.fail(worker, self.bench.ledger.highest_handle, code)

    @rule()
    def read(self) -> None:
        self.got += taken(self.entry)

    @invariant()
    def delivered_is_a_prefix(self) -> None:
        assert self.entry.generated.tolist() == TOKENS[: len(self.entry.generated)]
        assert self.got == TOKENS[: len(self.got)]
        if self.entry.finish:
            assert self.entry.generated.tolist() == TOKENS

    @invariant()
    def an_ended_entry_leaves_nothing(self) -> None:
        ledger = self.bench.ledger
        if self.entry.closed:
            assert len(ledger) == 0
            assert not ledger.workload.queued_tokens
            assert not ledger.workload.assigned
            assert (self.entry.error() is None) == bool(self.entry.finish)


AnyOrder.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_what_attempts_take_is_learned(bench: Bench):
    """From sending to the first token on either side, and from there to decode's first row."""
    for _ in range(2):
        bench.started()
        handle = bench.ledger.highest_handle
        bench.now += 0.5
        bench.say(P, handle, 3, [50])
        bench.now += 0.25
        bench.say(D, handle, 3, [50])
    for _ in range(2):
        bench.started(DECODE_ALONE)
        bench.now += 2.0
        bench.say(D, bench.ledger.highest_handle, 3, [50])
    learned = bench.costs.figures()
    assert learned.prefill is not None
    assert learned.handoff is not None
    assert learned.alone is not None
    assert learned.prefill.at(3) == pytest.approx(0.5)
    assert learned.handoff.at(3) == pytest.approx(0.25)
    assert learned.alone.at(3) == pytest.approx(2.0)


def test_sequences_that_are_being_generated_are_counted(bench: Bench):
    entry = bench.started()
    handle = bench.ledger.highest_handle
    bench.say(P, handle, 3, [50])
    assert (bench.ledger.workload.assigned[D.id], bench.ledger.workload.generating[D.id]) == (1, 0)
    bench.say(D, handle, 3, [50])
    assert (bench.ledger.workload.assigned[D.id], bench.ledger.workload.generating[D.id]) == (1, 1)
    bench.ledger.close(entry)
    assert (bench.ledger.workload.assigned[D.id], bench.ledger.workload.generating[D.id]) == (0, 0)
