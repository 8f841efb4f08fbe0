"""The consumer's side by direct calls: every edge of a handoff that it has to stand."""

from typing import NamedTuple

import numpy as np
import pytest

from kvtransfer.actions import (
    AbandonRead,
    Arrived,
    ConsumerAction,
    Enqueue,
    FailHandoff,
    FreeQuarantined,
    FreeSequence,
    PostRead,
    Ready,
    SendToProducer,
)
from kvtransfer.consumer import Consumer, ConsumerLimits
from kvtransfer.ids import AttemptId, GatewayId, StreamId, WorkerId
from kvtransfer.messages import Announcement, Ended, EndReason, FirstToken, Open, Release
from kvtransfer.moved import Moved
from kvtransfer.transports.base import BlockRead, ReadEnd

ID = AttemptId(gateway=GatewayId(1), handle=5)
OTHER = AttemptId(gateway=GatewayId(2), handle=1)
PRODUCER = WorkerId(77)
S1, S2 = StreamId(1), StreamId(2)
FIRST = (FirstToken(ID.handle, 42, None),)
DEADLINE = 100.0
BLOCK_BYTES = 4096
OPEN, RELEASE = SendToProducer(S1, Open(ID, PRODUCER)), SendToProducer(S1, Release(ID))


@pytest.fixture
def consumer() -> Consumer:
    """Connected to the producer."""
    consumer = Consumer(ConsumerLimits(grace_s=3.0), BLOCK_BYTES)
    consumer.stream_up(PRODUCER, S1)
    return consumer


def announcement(first_index: int, blocks: list[int], first: tuple[FirstToken, ...] = ()) -> Announcement:
    return Announcement(ID, first_index, tuple(blocks), tuple(block + 100 for block in blocks), first)


def announce(consumer: Consumer, first_index: int, blocks: list[int], first: tuple[FirstToken, ...] = ()) -> None:
    consumer.announcement(S1, announcement(first_index, blocks, first), 0.0)


def read_end(read_id: int, blocks: list[int]) -> ReadEnd:
    generations = np.array([block + 100 for block in blocks], dtype=np.uint64)
    return ReadEnd(read_id, generations, "memory", "near")


def reading(consumer: Consumer, source: list[int], destination: list[int], num_cached: int = 0) -> int:
    """A handoff whose first blocks are being read; returns the read's id."""
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    announce(consumer, 0, source)
    consumer.reserved(ID, destination, num_cached, 0.0)
    posted = consumer.take_actions()[-1]
    assert isinstance(posted, PostRead)
    return posted.read.read_id


class Posted(NamedTuple):
    """A posted read as values that can be compared."""

    read_id: int
    worker: WorkerId
    source: tuple[int, ...]
    destination: tuple[int, ...]
    generations: tuple[int, ...]

    @classmethod
    def of(cls, read: BlockRead) -> "Posted":
        dtypes = (read.source.dtype.name, read.destination.dtype.name, read.generations.dtype.name)
        assert dtypes == ("uint32", "uint32", "uint64")
        columns = (tuple(column.tolist()) for column in (read.source, read.destination, read.generations))
        return cls(read.read_id, read.worker, *columns)


def actions(consumer: Consumer) -> list[ConsumerAction | Posted]:
    return [Posted.of(action.read) if isinstance(action, PostRead) else action for action in consumer.take_actions()]


def test_a_handoff_from_open_to_release(consumer: Consumer) -> None:
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    assert actions(consumer) == [OPEN]
    announce(consumer, 0, [])
    assert actions(consumer) == []
    announce(consumer, 0, [3])
    assert actions(consumer) == [Enqueue(ID, 1)]
    announce(consumer, 1, [4], FIRST)
    consumer.reserved(ID, [8, 9, 7], 0, 0.0)
    assert actions(consumer) == [Enqueue(ID, 2), Posted(1, PRODUCER, (3, 4), (8, 9), (103, 104))]
    consumer.read_ended(read_end(1, [3, 4]), 0.0)
    assert actions(consumer) == [
        Arrived(ID, 2),
        RELEASE,
        Ready(ID, FIRST, Moved("memory", "near", 2 * BLOCK_BYTES, 0.0)),
    ]
    assert consumer.open_ids == set()


def test_what_is_announced_later_is_read_at_once(consumer: Consumer) -> None:
    reading(consumer, [3], [8, 9])
    announce(consumer, 1, [4], FIRST)
    assert actions(consumer) == [Enqueue(ID, 2), Posted(2, PRODUCER, (4,), (9,), (104,))]


def test_the_time_of_reading_has_no_pause_in_it_and_counts_reads_beside_each_other_once(consumer: Consumer) -> None:
    """Reads from 10 to 11.5 s, two of them at once, and from 20 to 20.25 s."""
    consumer.submit(ID, PRODUCER, DEADLINE, 9.0)
    consumer.announcement(S1, announcement(0, [3]), 9.5)
    consumer.reserved(ID, [7, 8, 9], 0, 10.0)
    consumer.announcement(S1, announcement(1, [4]), 10.5)
    consumer.read_ended(read_end(1, [3]), 11.0)
    consumer.read_ended(read_end(2, [4]), 11.5)
    consumer.announcement(S1, announcement(2, [5], FIRST), 20.0)
    consumer.read_ended(read_end(3, [5]), 20.25)
    assert actions(consumer)[-1] == Ready(ID, FIRST, Moved("memory", "near", 3 * BLOCK_BYTES, 1.75))


def test_a_handoff_without_a_read_names_no_transport(consumer: Consumer) -> None:
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    announce(consumer, 0, [3], FIRST)
    consumer.reserved(ID, [1], 1, 0.0)
    assert actions(consumer)[-1] == Ready(ID, FIRST, Moved())


def test_blocks_that_decode_holds_are_not_read(consumer: Consumer) -> None:
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    announce(consumer, 0, [3, 4, 5], FIRST)
    consumer.reserved(ID, [1, 2, 9], 2, 0.0)
    assert actions(consumer)[-1] == Posted(1, PRODUCER, (5,), (9,), (105,))


def test_more_may_be_held_than_was_announced(consumer: Consumer) -> None:
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    announce(consumer, 0, [3])
    consumer.reserved(ID, [1, 2, 9], 2, 0.0)
    announce(consumer, 1, [4])
    assert not any(isinstance(action, Posted) for action in actions(consumer))
    announce(consumer, 2, [5], FIRST)
    assert actions(consumer) == [Enqueue(ID, 3), Posted(1, PRODUCER, (5,), (9,), (105,))]


def test_an_announcement_that_comes_twice_is_read_once(consumer: Consumer) -> None:
    read_id = reading(consumer, [3], [8, 9])
    announce(consumer, 0, [3])
    assert actions(consumer) == []
    announce(consumer, 0, [3, 4], FIRST)
    assert actions(consumer) == [Enqueue(ID, 2), Posted(read_id + 1, PRODUCER, (4,), (9,), (104,))]


def test_a_gap_in_the_announcements_fails_the_handoff(consumer: Consumer) -> None:
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    announce(consumer, 0, [3])
    actions(consumer)
    announce(consumer, 2, [5])
    assert actions(consumer) == [FreeSequence(ID, ()), RELEASE, FailHandoff(ID, EndReason.STALE)]


def test_an_announcement_that_contradicts_an_older_one_fails_the_handoff(consumer: Consumer) -> None:
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    announce(consumer, 0, [3])
    actions(consumer)
    consumer.announcement(S1, Announcement(ID, 0, (3,), (999,)), 0.0)
    assert actions(consumer)[-1] == FailHandoff(ID, EndReason.STALE)


@pytest.mark.parametrize("late", [announcement(0, [3]), Ended(ID, EndReason.ABORTED)])
def test_late_news_of_a_handoff_that_is_over_is_answered_by_a_release(
    consumer: Consumer, late: Announcement | Ended
) -> None:
    """So the producer lets go even where an earlier release was lost."""
    if isinstance(late, Announcement):
        consumer.announcement(S1, late, 0.0)
    else:
        consumer.ended(S1, late, 0.0)
    assert actions(consumer) == [RELEASE]


def test_another_generation_fails_the_handoff_and_frees_its_blocks(consumer: Consumer) -> None:
    read_id = reading(consumer, [3, 4], [8, 9])
    consumer.read_ended(read_end(read_id, [3, 999]), 0.0)
    assert actions(consumer) == [FreeSequence(ID, ()), RELEASE, FailHandoff(ID, EndReason.STALE)]
    assert consumer.reads.quarantine.num_blocks == 0


def test_a_failed_read_fails_the_handoff(consumer: Consumer) -> None:
    read_id = reading(consumer, [3], [8, 9])
    consumer.read_ended(ReadEnd(read_id, None), 0.0)
    assert actions(consumer) == [FreeSequence(ID, ()), RELEASE, FailHandoff(ID, EndReason.READ_FAILED)]


def test_a_failed_read_leaves_the_others_in_quarantine(consumer: Consumer) -> None:
    failed = reading(consumer, [3], [7, 8, 9])
    announce(consumer, 1, [4, 5], FIRST)
    actions(consumer)
    consumer.read_ended(ReadEnd(failed, None), 0.0)
    assert actions(consumer)[0] == FreeSequence(ID, (8, 9))
    assert consumer.avoid() == {PRODUCER}
    consumer.read_ended(read_end(failed + 1, [4, 5]), 0.0)
    assert actions(consumer) == [FreeQuarantined((8, 9))]
    assert consumer.avoid() == set()


def test_blocks_count_as_arrived_only_in_order(consumer: Consumer) -> None:
    first = reading(consumer, [3], [7, 8, 9])
    announce(consumer, 1, [4])
    announce(consumer, 2, [5], FIRST)
    actions(consumer)
    consumer.read_ended(read_end(first + 2, [5]), 0.0)
    consumer.read_ended(read_end(first + 1, [4]), 0.0)
    assert actions(consumer) == []
    consumer.read_ended(read_end(first, [3]), 0.0)
    ready = Ready(ID, FIRST, Moved("memory", "near", 3 * BLOCK_BYTES, 0.0))
    assert actions(consumer) == [Arrived(ID, 3), RELEASE, ready]


def test_an_abort_holds_back_what_is_being_read(consumer: Consumer) -> None:
    read_id = reading(consumer, [3, 4], [7, 8, 9])
    consumer.abort(ID, 1.0)
    assert actions(consumer) == [FreeSequence(ID, (7, 8)), AbandonRead(read_id), RELEASE]
    assert consumer.reads.quarantine.producers == {PRODUCER}
    consumer.abort(ID, 2.0)
    assert actions(consumer) == []
    consumer.read_ended(read_end(read_id, [3, 4]), 3.0)
    assert actions(consumer) == [FreeQuarantined((7, 8))]
    assert len(consumer.reads) == 0


def test_an_abort_before_anything_was_reserved(consumer: Consumer) -> None:
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    actions(consumer)
    consumer.abort(ID, 0.0)
    assert actions(consumer) == [FreeSequence(ID, ()), RELEASE]


def test_a_sequence_that_ended_at_its_first_token_is_no_failure(consumer: Consumer) -> None:
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    actions(consumer)
    consumer.ended(S1, Ended(ID, EndReason.FINISHED), 0.0)
    assert actions(consumer) == [FreeSequence(ID, ()), RELEASE]


@pytest.mark.parametrize("reason", [EndReason.OVER, EndReason.WRONG_WORKER, EndReason.ABORTED])
def test_an_end_that_the_producer_tells_is_reported(consumer: Consumer, reason: EndReason) -> None:
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    actions(consumer)
    consumer.ended(S1, Ended(ID, reason), 0.0)
    assert actions(consumer)[-1] == FailHandoff(ID, reason)


def test_a_handoff_without_a_stream_is_opened_when_there_is_one() -> None:
    consumer = Consumer()
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    assert actions(consumer) == []
    consumer.stream_up(PRODUCER, S1)
    assert actions(consumer) == [OPEN]


def test_a_new_stream_opens_all_handoffs_with_that_producer_again(consumer: Consumer) -> None:
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    consumer.submit(OTHER, WorkerId(PRODUCER + 1), DEADLINE, 0.0)
    actions(consumer)
    consumer.stream_lost(PRODUCER, S1, 1.0)
    consumer.stream_up(PRODUCER, S2)
    assert actions(consumer) == [SendToProducer(S2, Open(ID, PRODUCER))]
    consumer.tick(10.0)
    assert consumer.open_ids == {ID}, "the one without a stream is over, the other goes on"


def test_a_handoff_outlives_its_stream_by_the_grace(consumer: Consumer) -> None:
    read_id = reading(consumer, [3], [8, 9])
    consumer.stream_lost(PRODUCER, S1, 10.0)
    consumer.tick(12.9)
    assert actions(consumer) == []
    consumer.tick(13.0)
    assert actions(consumer) == [
        FreeSequence(ID, (8,)),
        AbandonRead(read_id),
        FailHandoff(ID, EndReason.WORKER_LOST),
    ]


def test_the_loss_of_an_older_stream_changes_nothing(consumer: Consumer) -> None:
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    consumer.stream_up(PRODUCER, S2)
    consumer.stream_lost(PRODUCER, S1, 1.0)
    actions(consumer)
    consumer.tick(50.0)
    consumer.submit(OTHER, PRODUCER, DEADLINE, 50.0)
    assert actions(consumer) == [SendToProducer(S2, Open(OTHER, PRODUCER))]


def test_a_lost_producer_ends_its_handoffs_at_once_and_none_of_its_reads(consumer: Consumer) -> None:
    read_id = reading(consumer, [3], [8, 9])
    consumer.producer_lost(PRODUCER, 1.0)
    assert FreeSequence(ID, (8,)) in (done := actions(consumer))
    assert done[-1] == FailHandoff(ID, EndReason.WORKER_LOST)
    assert consumer.avoid() == {PRODUCER}
    consumer.read_ended(ReadEnd(read_id, None), 2.0)
    assert actions(consumer) == [FreeQuarantined((8,))]


def test_a_handoff_ends_with_its_deadline(consumer: Consumer) -> None:
    read_id = reading(consumer, [3], [8, 9])
    consumer.tick(DEADLINE)
    report = FailHandoff(ID, EndReason.EXPIRED)
    assert actions(consumer) == [FreeSequence(ID, (8,)), AbandonRead(read_id), RELEASE, report]


def test_a_refusal_of_our_engine_releases_the_producer(consumer: Consumer) -> None:
    """The engine told the gateway itself."""
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    announce(consumer, 0, [3])
    actions(consumer)
    consumer.abort(ID, 0.0)
    assert actions(consumer) == [FreeSequence(ID, ()), RELEASE]


def test_a_lost_gateway_ends_its_handoffs_and_no_others(consumer: Consumer) -> None:
    read_id = reading(consumer, [3], [8, 9])
    consumer.submit(OTHER, PRODUCER, DEADLINE, 0.0)
    actions(consumer)
    consumer.gateway_lost(ID.gateway, 1.0)
    assert actions(consumer) == [FreeSequence(ID, (8,)), AbandonRead(read_id), RELEASE]
    assert consumer.open_ids == {OTHER}


def test_a_producer_that_is_busy_is_not_avoided_however_long_an_open_waits() -> None:
    """Its engine is in a long step; its event loop sends pulses."""
    consumer = Consumer()
    consumer.stream_up(PRODUCER, S1, pulses=True)
    consumer.submit(ID, PRODUCER, 1000.0, 0.0)
    actions(consumer)
    for second in range(60):
        assert pass_time(consumer, float(second), 1.0) == []
        consumer.pulse(S1)
        assert consumer.avoid() == set()


def test_a_silent_producer_is_avoided_and_then_stalls_what_waits_for_it() -> None:
    consumer = Consumer()
    consumer.tick(0.0)
    consumer.stream_up(PRODUCER, S1, pulses=True)
    consumer.submit(ID, PRODUCER, 1000.0, 0.0)
    actions(consumer)
    assert pass_time(consumer, 0.0, 2.9) == []
    assert consumer.avoid() == set()
    assert pass_time(consumer, 2.9, 7.0) == []
    assert consumer.avoid() == {PRODUCER}
    assert pass_time(consumer, 9.9, 0.3) == [FreeSequence(ID, ()), RELEASE, FailHandoff(ID, EndReason.STALLED)]
    consumer.pulse(S1)
    assert consumer.avoid() == {PRODUCER}, "for a while"
    pass_time(consumer, 10.2, 2.0)
    consumer.pulse(S1)
    pass_time(consumer, 12.2, 2.5)
    assert consumer.avoid() == {PRODUCER}
    consumer.pulse(S1)
    pass_time(consumer, 14.7, 1.0)
    assert consumer.avoid() == set()


def test_the_silence_of_a_producer_that_sends_no_pulses_says_nothing() -> None:
    """An older one."""
    consumer = Consumer()
    consumer.stream_up(PRODUCER, S1)
    consumer.submit(ID, PRODUCER, 1000.0, 0.0)
    actions(consumer)
    assert pass_time(consumer, 0.0, 60.0) == []
    assert consumer.avoid() == set()


def test_a_producer_without_a_stream_for_the_grace_is_avoided_for_a_while(consumer: Consumer) -> None:
    consumer.submit(ID, PRODUCER, DEADLINE, 0.0)
    consumer.stream_lost(PRODUCER, S1, 0.0)
    consumer.tick(0.0)
    assert FailHandoff(ID, EndReason.WORKER_LOST) in pass_time(consumer, 0.0, 3.1)
    assert consumer.avoid() == {PRODUCER}
    pass_time(consumer, 3.1, 5.1)
    assert consumer.avoid() == set()


def pass_time(consumer: Consumer, start: float, seconds: float) -> list[ConsumerAction | Posted]:
    """The consumer looks at the clock as often as a worker does; returns what it wants meanwhile."""
    for tick in range(1, round(seconds * 10) + 1):
        consumer.tick(start + tick / 10)
    return actions(consumer)


def has_read(consumer: Consumer, seconds: float) -> float:
    """One block has been read in so many seconds; returns the time after it."""
    read_id = reading(consumer, [3], [8, 9])
    consumer.tick(0.0)
    pass_time(consumer, 0.0, seconds)
    consumer.read_ended(read_end(read_id, [3]), seconds)
    consumer.abort(ID, seconds)
    actions(consumer)
    return seconds


def connected(block_bytes: int) -> Consumer:
    consumer = Consumer(block_bytes=block_bytes)
    consumer.stream_up(PRODUCER, S1)
    return consumer


def test_a_read_that_stands_still_fails_its_handoff_and_its_blocks_are_quarantined() -> None:
    """The deadline is far away, the control stream lives."""
    consumer = connected(block_bytes=1)
    now = has_read(consumer, 0.1)
    read_id = reading(consumer, [3, 4], [7, 8, 9])
    assert pass_time(consumer, now, 4.9) == []
    report = FailHandoff(ID, EndReason.STALLED)
    assert pass_time(consumer, now + 4.9, 0.3) == [FreeSequence(ID, (7, 8)), AbandonRead(read_id), RELEASE, report]
    assert consumer.avoid() == {PRODUCER}


def test_the_first_read_of_a_producer_may_take_longer() -> None:
    consumer = connected(block_bytes=1)
    consumer.tick(0.0)
    reading(consumer, [3], [8, 9])
    assert pass_time(consumer, 0.0, 14.9) == []
    assert pass_time(consumer, 14.9, 0.3)[-1] == FailHandoff(ID, EndReason.STALLED)


def test_a_read_may_take_four_times_what_its_bytes_took_before() -> None:
    """10 MB took 2 s, so twice as much may take 5 s and four times 4 s."""
    consumer = connected(block_bytes=10_000_000)
    now = has_read(consumer, 2.0)
    reading(consumer, [3, 4], [7, 8, 9])
    assert pass_time(consumer, now, 20.8) == []
    assert pass_time(consumer, now + 20.8, 0.4)[-1] == FailHandoff(ID, EndReason.STALLED)


def test_bytes_that_are_read_beside_it_give_a_read_more_time() -> None:
    consumer = connected(block_bytes=10_000_000)
    now = has_read(consumer, 2.0)
    reading(consumer, [3], [6, 7, 8, 9])
    announce(consumer, 1, [4, 5], FIRST)
    actions(consumer)
    assert pass_time(consumer, now, 28.8) == []
    assert pass_time(consumer, now + 28.8, 0.4)[-1] == FailHandoff(ID, EndReason.STALLED)


def test_time_at_which_nobody_looked_makes_no_read_older() -> None:
    """A stopped machine, or a step that took a minute: the end of the read may be there, unseen."""
    consumer = connected(block_bytes=1)
    now = has_read(consumer, 0.1)
    reading(consumer, [3], [8, 9])
    for leap in range(1, 4):
        consumer.tick(now + 20.0 * leap)
    assert actions(consumer) == []


def test_a_producer_whose_read_stood_still_is_tried_again_by_one_handoff_and_then_avoided_for_longer() -> None:
    consumer = connected(block_bytes=1)
    now = has_read(consumer, 0.1)
    stuck = reading(consumer, [3], [8, 9])
    pass_time(consumer, now, 5.2)
    consumer.read_ended(ReadEnd(stuck, None), now + 5.2)
    assert consumer.avoid() == {PRODUCER}, "for a while, also where the transport ended the read"
    now += 5.2
    pass_time(consumer, now, 5.1)
    assert consumer.avoid() == set()
    now += 5.1
    again = reading(consumer, [3], [8, 9])
    assert consumer.avoid() == {PRODUCER}, "while the trial is under way"
    assert pass_time(consumer, now, 5.2)[-1] == FailHandoff(ID, EndReason.STALLED)
    now += 5.2
    consumer.read_ended(ReadEnd(again, None), now)
    pass_time(consumer, now, 9.5)
    assert consumer.avoid() == {PRODUCER}, "twice as long"
    pass_time(consumer, now + 9.5, 0.6)
    assert consumer.avoid() == set()


def test_a_trial_whose_blocks_come_ends_the_matter() -> None:
    consumer = connected(block_bytes=1)
    now = has_read(consumer, 0.1)
    stuck = reading(consumer, [3], [8, 9])
    pass_time(consumer, now, 5.2)
    consumer.read_ended(read_end(stuck, [3]), now + 5.2)
    pass_time(consumer, now + 5.2, 5.1)
    trial = reading(consumer, [3], [8, 9])
    consumer.read_ended(read_end(trial, [3]), now + 10.4)
    assert consumer.open_ids == {ID}, "the last announcement is still to come"
    assert consumer.avoid() == set()
