"""A request whose first token would come too late is refused before any work, with the time to wait until a retry."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.ids import WorkerId
from services.config import HandoffMode, WorkerRole
from services.gateway.api.generation import GenerationRequest, Overloaded, Refusal
from services.gateway.dispatch.costs import CostModel
from services.gateway.dispatch.ledger.entry import LedgerEntry
from services.gateway.dispatch.ledger.ledger import Ledger
from services.gateway.dispatch.overload import check_overload, expected_ttft_s
from services.gateway.dispatch.router import Candidate, Figures, Line, Plan
from services.protocol.capsule import Capsule
from services.protocol.frames import Load
from services.protocol.outcomes import FinishReason
from services.protocol.sampling import SamplingParams
from tests.gateway.dispatch_stack import Counts, decode_worker, read_all, request, running
from tests.gateway.scripted_worker import continuation, empty_frame

DECODE = Candidate(
    id=WorkerId(2),
    address="d:1",
    role=WorkerRole.DECODE,
    pairs_by=("f", 1),
    transports=frozenset({"grpc"}),
    block_size=16,
    num_blocks=1000,
    max_model_len=4096,
    load=Load(available_blocks=1000),
)
PREFILL = replace(DECODE, id=WorkerId(1), role=WorkerRole.PREFILL)
FIGURES = Figures(first_at_prefill=Line(0.0, 0.001), first_at_decode=Line(0.1, 0.002), slot_s=0.5)


def waiting(worker: Candidate, sequences: int, tokens: int) -> Candidate:
    return replace(worker, load=replace(worker.load, waiting=sequences, waiting_tokens=tokens))


def test_the_first_token_is_expected_after_the_tokens_in_the_queue_and_the_sequences_without_a_slot():
    assert expected_ttft_s(Plan(None, waiting(DECODE, 3, 400)), 100, FIGURES) == pytest.approx(0.1 + 500 * 0.002 + 1.5)
    assert expected_ttft_s(Plan(waiting(PREFILL, 3, 400), DECODE), 100, FIGURES) == pytest.approx(0.5)


def test_nothing_is_expected_of_a_worker_without_a_queue_or_before_something_was_learned():
    assert expected_ttft_s(Plan(None, DECODE), 100, FIGURES) is None
    assert expected_ttft_s(Plan(None, waiting(DECODE, 3, 400)), 100, Figures()) is None


class Entries:
    """A ledger with entries in flight, on a clock that stands at 0."""

    def __init__(self) -> None:
        self.ledger = Ledger(lambda *_: None, lambda: 0.0, Counts(), CostModel())

    def open(self, tenant: str = "", tokens: int = 10, slo_s: float | None = None, timeout_s: float = 10.0):
        capsule = Capsule(np.zeros(tokens, np.int32), tokens, SamplingParams(max_tokens=5))
        wanted = GenerationRequest("r", (capsule,), timeout_s, ttft_slo_s=slo_s, tenant=tenant)
        return self.ledger.open(wanted, 0, self)

    def start(self, tenant: str, tokens: int = 10) -> None:
        self.ledger.start([self.open(tenant, tokens)], Plan(None, DECODE))

    def refusal(self, expected_s: float, **wanted) -> tuple[Refusal, int] | None:
        try:
            check_overload(self.open(**wanted), self.ledger, expected_s, 0.0)
        except Overloaded as error:
            return error.refusal, error.retry_after_s
        return None

    def on_news(self, entry) -> None: ...

    def on_error(self, error: Exception) -> None:
        raise error


@pytest.mark.parametrize(
    ("expected_s", "slo_s", "refusal"),
    [
        (1.9, 2.0, None),
        (2.1, 2.0, (Refusal.SLO, 1)),
        (5.5, 2.0, (Refusal.SLO, 4)),
        (500.0, 2.0, (Refusal.SLO, 60)),
        (9.9, None, None),
        (12.5, None, (Refusal.DEADLINE, 3)),
        (12.5, 100.0, (Refusal.DEADLINE, 3)),
    ],
)
def test_what_would_come_too_late_is_refused(expected_s: float, slo_s: float | None, refusal: tuple | None):
    assert Entries().refusal(expected_s, slo_s=slo_s) == refusal


def test_a_tenant_with_more_than_its_share_leaves_room_for_the_others():
    entries = Entries()
    entries.start("a", 300)
    assert entries.refusal(1.5, tenant="a", slo_s=2.0) is None, "it is alone"
    entries.start("b", 100)
    assert entries.refusal(1.5, tenant="a", slo_s=2.0) == (Refusal.SHARE, 1)
    assert entries.refusal(0.9, tenant="a", slo_s=2.0) is None
    assert entries.refusal(1.5, tenant="b", slo_s=2.0) is None
    assert entries.refusal(1.5, tenant="c", slo_s=2.0) is None
    assert entries.refusal(2.1, tenant="b", slo_s=2.0) == (Refusal.SLO, 1)


def test_tenants_get_equal_shares_though_one_asks_five_times_as_often():
    """A server that does 100 tokens in each unit of time, and requests of 100 tokens that may wait ten units."""
    entries = Entries()
    served: Counter[str] = Counter()
    queue: list[tuple[str, LedgerEntry]] = []
    for unit in range(400):
        for tenant in ("a", "a", "a", "a", "a", "b"):
            entry = entries.open(tenant, 100, slo_s=10.0)
            try:
                check_overload(entry, entries.ledger, float(len(queue)), 0.0)
            except Overloaded:
                entries.ledger.close(entry)
            else:
                entries.ledger.start([entry], Plan(None, DECODE))
                queue.append((tenant, entry))
        tenant, entry = queue.pop(0)
        entries.ledger.close(entry)
        served[tenant] += unit >= 50
    assert served["b"] / served.total() > 0.45, served


async def test_a_refused_request_is_sent_nowhere_and_an_idle_worker_takes_any():
    decode = decode_worker()
    async with running(decode, handoff=HandoffMode.NEVER) as stack:
        costs = stack.dispatcher._costs
        for tokens in (100, 200):
            costs.note_first_token(WorkerRole.DECODE, tokens, tokens / 10)
        hasty = replace(request(), ttft_slo_s=0.5)
        async with stack.dispatcher.generate(hasty) as generation:
            reading = asyncio.create_task(read_all(generation))
            submit = await decode.submit()
            decode.say(empty_frame(load=Load(available_blocks=60, waiting=1, waiting_tokens=100)))
            while not stack.live[0]["waiting"]:
                await asyncio.sleep(0.001)
            with pytest.raises(Overloaded) as refused:
                async with stack.dispatcher.generate(hasty):
                    pass
            assert refused.value.refusal is Refusal.SLO
            assert 5 <= refused.value.retry_after_s <= 12
            async with stack.dispatcher.generate(request()):
                await decode.submit(2)
            decode.say_tokens(submit, continuation(list(range(100, 110)), 8), finish=FinishReason.LENGTH)
            await reading
        assert len(decode.submits) == 2
