"""Pairs that fail are left alone, longer each time, and tried again one request at a time."""

from kvtransfer.ids import WorkerId
from services.gateway.dispatch.pair_health import PairHealth

PAIR, OTHER = (WorkerId(1), WorkerId(2)), (WorkerId(1), WorkerId(4))


def test_pauses_double_with_each_failure_in_a_row():
    health = PairHealth()
    now, pauses = 100.0, []
    for _ in range(8):
        health.note_failed(PAIR, began=now, now=now)
        step = next(step for step in range(1, 1000) if PAIR not in health.avoided(now + step / 10))
        pauses.append(step / 10)
        now += 1000
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


def test_failures_that_were_under_way_together_are_one():
    health = PairHealth()
    for _ in range(8):
        health.note_failed(PAIR, began=99.0, now=100.0)
    assert PAIR not in health.avoided(101.1)


def test_other_requests_wait_for_the_word_of_the_one_that_tries():
    health = PairHealth()
    health.note_failed(PAIR, began=100.0, now=100.0)
    assert not health.avoided(102.0)
    health.note_tried(PAIR, 102.0)
    assert health.avoided(102.0) == {PAIR}
    health.note_completed(PAIR)
    assert not health.avoided(102.0)


def test_a_try_without_a_word_is_not_waited_for_for_ever():
    health = PairHealth()
    health.note_failed(PAIR, began=100.0, now=100.0)
    health.note_tried(PAIR, 102.0)
    assert not health.avoided(133.0)


def test_a_pair_that_works_is_no_trial():
    health = PairHealth()
    health.note_tried(PAIR, 100.0)
    assert not health.avoided(100.0)


def test_a_worker_that_is_gone_is_forgotten():
    health = PairHealth()
    health.note_failed(PAIR, began=100.0, now=100.0)
    health.note_failed(OTHER, began=100.0, now=100.0)
    health.remove_worker(WorkerId(2))
    assert health.avoided(100.0) == {OTHER}
