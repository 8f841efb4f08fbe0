"""The parts of the console that compute and do nothing else: rows, events, what is not as it should be."""

import gc
import json
import time
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry

from kvtransfer.messages import EndReason
from kvtransfer.moved import Moved
from services.config import WorkerRole
from services.gateway.api.errors import ApiError
from services.gateway.api.records.attempt_record import AttemptRecord, Ended
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.api.records.request_records import RequestRecords
from services.gateway.api.records.request_rows import GRPC_REFUSALS, Outcome, Phase, RequestRows, outcome_of, phase_of
from services.gateway.console import feed, tick
from services.gateway.console.feed import Feed
from services.gateway.console.fleet_events import KEPT_EVENTS, FleetEvents
from services.gateway.console.listener import Listener
from services.gateway.console.row_changes import RowChanges
from services.gateway.console.sources import RedisUsers, Sources
from services.gateway.console.unhealthy import unhealthy
from services.gateway.console.view import EVERYTHING, View
from services.gateway.grpc_api.servicer import CODE_OF_STATUS
from services.gateway.metrics import GatewayMetrics, PairHandoffs
from services.gateway.overview import AvoidedPair, BlockUse, DispatchOverview, WorkerOverview, WorkerState
from services.prefix_index.reachability import Reachability
from tests.gateway.console.scripted_fleet import ScriptedFleet, a_worker


def overview(*workers: WorkerOverview, **changes: Any) -> DispatchOverview:
    fields = {"gateway": "aa", "ready": True, "draining": False, "waiting": 0, "avoided": ()}
    return DispatchOverview(workers=workers, **{**fields, **changes})


@pytest.mark.parametrize(
    ("status", "error", "outcome"),
    [
        (200, None, Outcome.OK),
        ("OK", None, Outcome.OK),
        (200, "server_error", Outcome.FAILED),
        (500, "server_error", Outcome.FAILED),
        (503, "unavailable", Outcome.FAILED),
        ("UNAVAILABLE", "unavailable", Outcome.FAILED),
        (0, None, Outcome.FAILED),
        (400, "invalid_value", Outcome.REFUSED),
        (429, "server_overloaded", Outcome.REFUSED),
        ("RESOURCE_EXHAUSTED", "server_overloaded", Outcome.REFUSED),
        (499, None, Outcome.LEFT),
        ("CANCELLED", None, Outcome.LEFT),
    ],
)
def test_a_request_ends_in_one_of_four_ways(status: int | str, error: str | None, outcome: Outcome):
    assert outcome_of(RequestRecord("a", status=status, error=error)) is outcome


def test_grpc_refuses_with_the_codes_of_http_s_refusals():
    assert {code.name for status, code in CODE_OF_STATUS.items() if 400 <= status < 499} == GRPC_REFUSALS


def an_attempt(**changes: Any) -> AttemptRecord:
    workers = {WorkerRole.PREFILL: "p:1", WorkerRole.DECODE: "d:1"}
    attempt = AttemptRecord(1, [0], 10, workers, WorkerRole.PREFILL, {}, 0.0)
    for name, value in changes.items():
        setattr(attempt, name, value)
    return attempt


def test_a_request_in_flight_is_as_far_as_the_furthest_of_its_attempts():
    begun, generating = an_attempt(), an_attempt(first_token=1.0)
    over = an_attempt(first_token=1.0, ends=[Ended(0, "worker_lost", 1, 1.0)])
    assert phase_of([]) is Phase.WAITING
    assert phase_of([begun]) is Phase.PREFILL
    assert phase_of([generating]) is Phase.DECODE
    assert phase_of([over]) is Phase.WAITING
    assert phase_of([over, begun, over]) is Phase.PREFILL
    assert phase_of([generating, begun]) is phase_of([generating, over]) is Phase.DECODE


def ended(rows: RequestRows, **fields: Any) -> RequestRecord:
    record = RequestRecord(**{"request_id": "a", "status": 200, **fields})
    rows.begin(record)
    end(rows, record)
    return record


def end(rows: RequestRows, record: RequestRecord, took_s: float = 1.0) -> None:
    record.ended = record.arrived + took_s
    rows.end(record, record.attempts.last)
    rows.settle()


def numbers(rows: RequestRows, first: int, end: int) -> list[int]:
    return [json.loads(row)["n"] for _, row, _ in rows.ended_between(first, end)]


def test_the_rows_of_requests_that_ended_are_a_ring():
    rows = RequestRows(kept=4)
    for _ in range(6):
        ended(rows)
    assert (rows.num_begun, rows.num_ended, rows.oldest_kept, rows.in_flight) == (6, 6, 2, {})
    assert numbers(rows, 0, 6) == [6, 5, 4, 3]
    assert numbers(rows, 4, 6) == [6, 5]
    assert numbers(rows, 3, 5) == [5, 4]
    assert numbers(rows, 6, 6) == []
    assert rows.outcomes == {Outcome.OK: 6, Outcome.FAILED: 0, Outcome.REFUSED: 0, Outcome.LEFT: 0}


def test_rows_are_made_several_at_once_or_when_they_are_asked_for():
    rows = RequestRows()
    records = [RequestRecord(str(number), status=200, ended=1.0) for number in range(40)]
    for record in records:
        rows.begin(record)
        rows.end(record, None)
    assert rows.in_flight == {}
    assert 0 < rows.num_ended < 40
    rows.settle()
    assert (rows.num_ended, rows.outcomes[Outcome.OK]) == (40, 40)
    assert numbers(rows, 0, 40) == list(range(40, 0, -1))


@pytest.mark.long
def test_rows_leave_nothing_for_the_garbage_collector():
    rows = RequestRows()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1000):
        ended(rows)
    gc.collect()
    assert len(gc.get_objects()) - before < 20


def test_attainment_counts_requests_that_had_a_first_token_and_a_limit():
    rows = RequestRows()
    for ttft_s, slo_s in ((0.1, 0.2), (0.3, 0.2), (None, 0.2), (0.3, None)):
        record = RequestRecord("a", status=200, ttft_slo_s=slo_s)
        record.first_token = None if ttft_s is None else record.arrived + ttft_s
        rows.begin(record)
        end(rows, record)
    assert (rows.slo_met, rows.slo_total) == (1, 2)


def test_a_row_is_made_where_something_of_it_changed():
    rows, record = RequestRows(), RequestRecord("a", key_id="k")
    changes = RowChanges(rows)
    rows.begin(record)
    ((key_id, row, _),) = changes.take(1)
    assert (key_id, json.loads(row)["phase"]) == ("k", "waiting")
    assert changes.take(2) == []
    record.attempts.add(an_attempt())
    ((_, row, _),) = changes.take(3)
    assert (json.loads(row)["phase"], json.loads(row)["workers"]) == ("prefill", {"prefill": "p:1", "decode": "d:1"})
    end(rows, record, 2.0)
    ((_, row, _),) = changes.take(4)
    assert (json.loads(row)["state"], json.loads(row)["ms"]) == ("failed", 2000.0)
    assert changes.take(5) == []


def test_who_was_away_is_told_what_changed_meanwhile_and_no_more():
    rows = RequestRows()
    changes = RowChanges(rows)
    early, late = RequestRecord("early", key_id="k"), RequestRecord("late", key_id="other")
    rows.begin(early)
    changes.take(1)
    seen_ended = changes.ended
    rows.begin(late)
    ended(rows, request_id="short", key_id="k")
    changes.take(2)

    def ids(view: View, turn: int, place: int) -> list[str]:
        return [json.loads(row)["id"] for row in changes.missed(view, turn, place)]

    assert ids(EVERYTHING, 1, seen_ended) == ["late", "short"]
    assert ids(View("k"), 1, seen_ended) == ["short"]
    assert ids(EVERYTHING, 0, 0) == ["late", "early", "short"]
    assert ids(EVERYTHING, 2, changes.ended) == []
    ended(rows, request_id="after the turn")
    assert ids(EVERYTHING, 2, changes.ended) == []


def kinds(found: list[bytes]) -> list[tuple[str, str, str]]:
    return [(each["kind"], each["name"], each["text"]) for each in map(orjson.loads, found)]


def test_events_are_what_differs_from_the_last_look():
    events = FleetEvents()
    up = a_worker("d:1")
    assert kinds(events.look(overview(up), {}, None)) == [("worker_up", "d:1", "decode: connected")]
    assert events.look(overview(up), {}, None) == []
    gone = a_worker("d:1", WorkerState.GONE, why="killed", since=7.0)
    assert kinds(events.look(overview(gone), {}, None)) == [("worker_gone", "d:1", "killed")]
    back = a_worker("d:1", restarted=1)
    assert kinds(events.look(overview(back), {}, None)) == [("worker_up", "d:1", "decode: connected, for the 2. time")]
    unseen = a_worker("d:1", restarted=2)
    assert [kind for kind, _, _ in kinds(events.look(overview(unseen), {}, None))] == ["worker_gone", "worker_up"]
    drains = a_worker("d:1", WorkerState.DRAINING, restarted=2, since=9.0)
    (told,) = map(orjson.loads, events.look(overview(drains), {}, None))
    assert (told["kind"], told["at"]) == ("draining", 9.0)
    assert kinds(events.look(overview(), {}, "no route")) == [("redis_down", "redis", "it does not answer: no route")]
    assert [kind for kind, _, _ in kinds(events.look(overview(draining=True), {}, None))] == [
        "gateway_draining",
        "redis_up",
    ]
    assert len(events.since(0)) == events.num_events == 9
    assert kinds(events.since(events.num_events - 1))[0][0] == "redis_up"


def test_failed_handoffs_are_one_event_a_look():
    events, pairs, pair = FleetEvents(), PairHandoffs(), ("p:1", "d:1")

    def look() -> list[tuple[str, str, str]]:
        return kinds(events.look(overview(), pairs.take_failures(), None))

    pairs.note_failed(pair, EndReason.STALE)
    pairs.note_ended(pair, "failed_handoff")
    assert look() == [("handoff_failed", "p:1 → d:1", "a handoff failed, the last one with STALE")]
    assert look() == []
    for reason in (EndReason.STALE, EndReason.STALLED):
        pairs.note_failed(pair, reason)
        pairs.note_ended(pair, "failed_handoff")
    assert look() == [("handoff_failed", "p:1 → d:1", "2 handoffs failed, the last one with STALLED")]
    for _ in range(KEPT_EVENTS + 50):
        pairs.note_ended(pair, "failed_draining")
        look()
    assert len(events.since(0)) == KEPT_EVENTS


def test_a_handoff_that_fails_with_its_worker_is_an_event_though_the_pair_is_gone():
    events, pairs, pair = FleetEvents(), PairHandoffs(), ("p:1", "d:1")
    pairs.note_ended(pair, "failed_worker_lost")
    pairs.remove_worker("d:1")
    assert pairs.by_pair == {}
    text = "a handoff failed, the last one with worker_lost"
    assert kinds(events.look(overview(), pairs.take_failures(), None)) == [("handoff_failed", "p:1 → d:1", text)]


def test_a_rate_is_over_half_a_turn_or_more(monkeypatch: pytest.MonkeyPatch):
    """The turn of the first listener and the next one may be milliseconds apart."""
    now = [10.0]
    monkeypatch.setattr(tick, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ticks = tick.Ticks(_sources(), 0.5)

    def rate(computed_tokens: int) -> float | None:
        (worker,) = ticks._workers(overview(a_worker(computed_tokens=computed_tokens)))
        found: float | None = worker["tokens_per_s"]
        return found

    assert rate(100) is None
    now[0] += 0.002
    assert rate(120) is None, "it would be 10,000 a second"
    now[0] += 0.998
    assert rate(200) == 100.0
    now[0] += 1
    assert rate(250) == 50.0
    assert rate(260) is None
    ticks.stop()
    assert rate(270) is None


def test_consoles_of_tenants_have_a_limit_of_their_own():
    told = Feed(_sources())

    def listener(view: View) -> Listener:
        return Listener(exchange_stream, view, lambda: True, leaves_early=False)

    exchange_stream: Any = None  # nothing is written
    for number in range(feed.MAX_OF_TENANTS):
        told._listeners[listener(View(f"key {number}"))] = None
    with pytest.raises(ApiError, match="16 consoles that see the requests of one key listen already"):
        told._check_room(listener(View("another")))
    told._check_room(listener(EVERYTHING))


def _sources() -> Sources:
    metrics = GatewayMetrics(CollectorRegistry())
    return Sources(dispatch=ScriptedFleet(), records=RequestRecords(metrics), metrics=metrics, model_names=("m",))


def test_what_is_not_as_it_should_be_is_listed_worst_first():
    registry = Reachability(lambda: 50.0)
    registry.note_failure("no route")
    redis = RedisUsers(registry=registry, index=lambda: True, quotas=lambda: True)
    workers = [
        a_worker("ok:1"),
        a_worker("draining:1", WorkerState.DRAINING),
        a_worker("quarantine:1", blocks=BlockUse(1, 9, 2)),
        a_worker("connecting:1", WorkerState.CONNECTING, why="refused the connection"),
        a_worker("refused:1", WorkerState.REFUSED, why="another model"),
        a_worker("gone:1", WorkerState.GONE, why="killed"),
    ]
    state = overview(*workers, ready=False, avoided=(AvoidedPair("p:1", "d:1", "a handoff failed", 3.0),))
    found = unhealthy(state, redis, {"keys": 12.0, "tls": 0.0})
    assert [(each["what"], each["name"]) for each in found] == [
        ("gateway", "aa"),
        ("redis", "registry"),
        ("redis", "prefix index"),
        ("redis", "limits of keys"),
        ("worker", "gone:1"),
        ("worker", "refused:1"),
        ("worker", "connecting:1"),
        ("link", "p:1 → d:1"),
        ("keys", "files"),
        ("worker", "quarantine:1"),
        ("worker", "draining:1"),
    ]
    assert found[1]["since"] == 50.0
    assert time.time() - found[8]["since"] == pytest.approx(12, abs=1)
    assert unhealthy(overview(a_worker()), RedisUsers(registry=Reachability(), index=lambda: False), {}) == []


def test_reachability_says_since_when():
    now = [1.0]
    redis = Reachability(lambda: now[0])
    assert (redis.why, redis.since) == (None, None)
    redis.note_answer()
    now[0] = 2.0
    redis.note_answer()
    assert redis.since == 1.0
    for why in ("first", "second"):
        redis.note_failure(why)
        now[0] += 1
    assert (redis.why, redis.since) == ("second", 2.0)
    redis.note_answer()
    assert (redis.why, redis.since) == (None, 4.0)


def test_the_handoffs_of_a_pair_are_counted_until_one_of_its_workers_goes():
    pairs, pair = PairHandoffs(), ("p:1", "d:1")
    pairs.add(pair, Moved("nixl", "shared memory", 100, 0.5))
    pairs.add(pair, Moved("grpc", "another host", 50, 0.25))
    pairs.note_failed(pair, EndReason.STALE)
    for outcome in ("completed", "completed", "failed_handoff", "not_needed", "abandoned"):
        pairs.note_ended(pair, outcome)
    figures = pairs.by_pair[pair]
    assert (figures.completed, figures.failed, figures.last_failure) == (2, 1, "STALE")
    assert figures.moved == Moved("grpc", "another host", 150, 0.75)
    pairs.note_ended(pair, "failed_worker_lost")
    assert (figures.failed, figures.last_failure) == (2, "worker_lost")
    pairs.remove_worker("d:1")
    assert pairs.by_pair == {}
