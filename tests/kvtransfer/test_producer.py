"""The producer's side by direct calls: every edge of a handoff that it has to stand."""

import pytest

from kvtransfer.actions import FailHandoff, FreeBlocks, SendToConsumer, StopComputing
from kvtransfer.handles import HandleMarks
from kvtransfer.ids import AttemptId, GatewayId, StreamId, WorkerId
from kvtransfer.messages import Announcement, Ended, EndReason, FirstToken, Open
from kvtransfer.producer import Producer, ProducerLimits

ID = AttemptId(gateway=GatewayId(1), handle=5)
OLDER = AttemptId(gateway=GatewayId(1), handle=4)
OURS, OTHERS = WorkerId(77), WorkerId(78)
S1, S2 = StreamId(1), StreamId(2)
FIRST = (FirstToken(ID.handle, 42, None),)
LIMITS = ProducerLimits(grace_s=3.0, open_wait_s=5.0, max_early_opens=2)
DEADLINE = 100.0


@pytest.fixture
def marks() -> HandleMarks:
    return HandleMarks()


@pytest.fixture
def producer(marks: HandleMarks) -> Producer:
    return Producer(OURS, marks, LIMITS)


def submit(producer: Producer, marks: HandleMarks, id: AttemptId = ID) -> None:
    assert marks.admit(id)
    producer.submit(id, DEADLINE)


def open_on(producer: Producer, stream: StreamId, now: float = 0.0, id: AttemptId = ID) -> None:
    producer.open(stream, Open(id, OURS), now)


def ended(reason: EndReason, stream: StreamId = S1, id: AttemptId = ID) -> SendToConsumer:
    return SendToConsumer(stream, Ended(id, reason))


def announced(
    first_index: int, blocks: list[int], first: tuple[FirstToken, ...] = (), stream: StreamId = S1
) -> SendToConsumer:
    return SendToConsumer(stream, announcement(first_index, blocks, first))


def announcement(first_index: int, blocks: list[int], first: tuple[FirstToken, ...] = ()) -> Announcement:
    return Announcement(ID, first_index, tuple(blocks), tuple(block + 100 for block in blocks), first)


def announce(producer: Producer, first_index: int, blocks: list[int], first: tuple[FirstToken, ...] = ()) -> None:
    producer.announce(announcement(first_index, blocks, first))


def nothing(producer: Producer) -> bool:
    return producer.take_actions() == []


def test_submit_before_open_announces_at_the_open_what_is_there(producer: Producer, marks: HandleMarks) -> None:
    submit(producer, marks)
    announce(producer, 0, [3, 4])
    assert nothing(producer)
    open_on(producer, S1)
    assert producer.take_actions() == [announced(0, [3, 4])]


def test_open_before_submit_waits_for_it(producer: Producer, marks: HandleMarks) -> None:
    open_on(producer, S1)
    assert nothing(producer)
    assert not producer.idle
    submit(producer, marks)
    assert producer.take_actions() == [announced(0, [])]
    announce(producer, 0, [3])
    assert producer.take_actions() == [announced(0, [3])]


def test_a_second_open_is_answered_again_with_all_so_far(producer: Producer, marks: HandleMarks) -> None:
    submit(producer, marks)
    open_on(producer, S1)
    announce(producer, 0, [3])
    announce(producer, 1, [4], FIRST)
    producer.take_actions()
    open_on(producer, S1)
    assert producer.take_actions() == [announced(0, [3, 4], FIRST)]


def test_two_early_opens_are_one(producer: Producer, marks: HandleMarks) -> None:
    open_on(producer, S1)
    open_on(producer, S1)
    submit(producer, marks)
    assert producer.take_actions() == [announced(0, [])]
    assert producer.open_ids == {ID}


def test_a_second_submit_is_dropped_by_the_mark(marks: HandleMarks) -> None:
    assert marks.admit(ID)
    assert not marks.admit(ID)
    assert not marks.admit(OLDER)


def test_an_abort_that_comes_first_makes_the_submit_and_the_open_late(producer: Producer, marks: HandleMarks) -> None:
    marks.raise_to(ID.gateway, ID.handle)
    producer.abort(ID)
    assert not marks.admit(ID)
    open_on(producer, S1)
    assert producer.take_actions() == [ended(EndReason.OVER)]


def test_an_abort_ends_an_early_open(producer: Producer, marks: HandleMarks) -> None:
    open_on(producer, S1)
    producer.abort(ID)
    assert producer.take_actions() == [ended(EndReason.ABORTED)]
    assert producer.idle


def test_an_abort_before_the_open_frees_at_once(producer: Producer, marks: HandleMarks) -> None:
    submit(producer, marks)
    announce(producer, 0, [3])
    producer.abort(ID)
    assert producer.take_actions() == [FreeBlocks(ID)]
    assert producer.idle


def test_an_abort_after_the_open_keeps_the_blocks_until_release(producer: Producer, marks: HandleMarks) -> None:
    submit(producer, marks)
    open_on(producer, S1)
    producer.take_actions()
    producer.abort(ID)
    assert producer.take_actions() == [StopComputing(ID), ended(EndReason.ABORTED)]
    assert producer.open_ids == {ID}
    producer.abort(ID)
    announce(producer, 0, [3])
    assert nothing(producer)
    producer.release(ID)
    assert producer.take_actions() == [FreeBlocks(ID)]


def test_an_open_after_the_abort_of_an_opened_handoff_is_told_so(producer: Producer, marks: HandleMarks) -> None:
    submit(producer, marks)
    open_on(producer, S1)
    producer.abort(ID)
    producer.take_actions()
    open_on(producer, S2)
    assert producer.take_actions() == [ended(EndReason.ABORTED, S2)]


def test_another_incarnation_is_refused_even_for_a_known_handle(producer: Producer, marks: HandleMarks) -> None:
    submit(producer, marks)
    producer.open(S1, Open(ID, OTHERS), 0.0)
    assert producer.take_actions() == [ended(EndReason.WRONG_WORKER)]
    producer.abort(ID)
    assert producer.take_actions() == [FreeBlocks(ID)], "the lease is still the gateway's"


def test_an_unknown_handle_that_is_over_is_refused_at_once(producer: Producer, marks: HandleMarks) -> None:
    marks.raise_to(ID.gateway, ID.handle)
    open_on(producer, S1, id=OLDER)
    assert producer.take_actions() == [ended(EndReason.OVER, id=OLDER)]


def test_handles_of_another_gateway_say_nothing(producer: Producer, marks: HandleMarks) -> None:
    marks.raise_to(GatewayId(2), 1000)
    open_on(producer, S1)
    assert nothing(producer)


def test_an_early_open_waits_only_so_long(producer: Producer, marks: HandleMarks) -> None:
    open_on(producer, S1, now=1.0)
    producer.tick(5.9)
    assert nothing(producer)
    producer.tick(6.0)
    assert producer.take_actions() == [ended(EndReason.OVER)]
    assert producer.idle


def test_early_opens_are_bounded(producer: Producer, marks: HandleMarks) -> None:
    ids = [AttemptId(GatewayId(1), handle) for handle in (1, 2, 3)]
    for id in ids:
        open_on(producer, S1, id=id)
    assert producer.take_actions() == [ended(EndReason.OVER, id=ids[2])]


def test_an_open_on_a_new_stream_moves_the_lease(producer: Producer, marks: HandleMarks) -> None:
    submit(producer, marks)
    open_on(producer, S1)
    announce(producer, 0, [3])
    producer.take_actions()
    open_on(producer, S2)
    assert producer.take_actions() == [announced(0, [3], stream=S2)]
    producer.stream_lost(S1, 10.0)
    producer.tick(20.0)
    assert nothing(producer)
    announce(producer, 1, [4], FIRST)
    assert producer.take_actions() == [announced(1, [4], FIRST, stream=S2)]


def test_a_lease_outlives_its_stream_by_the_grace(producer: Producer, marks: HandleMarks) -> None:
    submit(producer, marks)
    open_on(producer, S1)
    producer.take_actions()
    producer.stream_lost(S1, 10.0)
    announce(producer, 0, [3])
    producer.tick(12.9)
    assert nothing(producer), "there is nobody to tell, and the lease lasts"
    producer.tick(13.0)
    assert producer.take_actions() == [FreeBlocks(ID), FailHandoff(ID, EndReason.WORKER_LOST)]


def test_an_open_within_the_grace_saves_the_lease(producer: Producer, marks: HandleMarks) -> None:
    submit(producer, marks)
    open_on(producer, S1)
    producer.stream_lost(S1, 10.0)
    announce(producer, 0, [3])
    producer.take_actions()
    open_on(producer, S2, now=12.0)
    assert producer.take_actions() == [announced(0, [3], stream=S2)]
    producer.tick(50.0)
    assert nothing(producer)


def test_an_aborted_handoff_without_its_stream_ends_after_the_grace_unreported(
    producer: Producer, marks: HandleMarks
) -> None:
    submit(producer, marks)
    open_on(producer, S1)
    producer.abort(ID)
    producer.take_actions()
    producer.stream_lost(S1, 10.0)
    producer.tick(13.0)
    assert producer.take_actions() == [FreeBlocks(ID)]


def test_a_lost_stream_forgets_its_early_opens(producer: Producer, marks: HandleMarks) -> None:
    open_on(producer, S1)
    producer.stream_lost(S1, 1.0)
    assert producer.idle
    submit(producer, marks)
    announce(producer, 0, [3])
    assert nothing(producer)


def test_a_second_release_changes_nothing(producer: Producer, marks: HandleMarks) -> None:
    submit(producer, marks)
    open_on(producer, S1)
    producer.release(ID)
    producer.take_actions()
    producer.release(ID)
    producer.release(OLDER)
    assert nothing(producer)


def test_a_release_in_the_middle_ends_the_computation(producer: Producer, marks: HandleMarks) -> None:
    submit(producer, marks)
    open_on(producer, S1)
    announce(producer, 0, [3])
    producer.take_actions()
    producer.release(ID)
    assert producer.take_actions() == [FreeBlocks(ID)]
    announce(producer, 1, [4], FIRST)
    assert nothing(producer)


def test_a_sequence_that_ends_at_its_first_token_is_not_handed_off(producer: Producer, marks: HandleMarks) -> None:
    submit(producer, marks)
    open_on(producer, S1)
    producer.take_actions()
    producer.finish(ID, 0.0)
    assert producer.take_actions() == [ended(EndReason.FINISHED), FreeBlocks(ID)]


def test_an_open_that_comes_after_the_end_hears_how_it_ended(producer: Producer, marks: HandleMarks) -> None:
    """It raced a sequence that ended at its first token, or the stream broke before it was told."""
    submit(producer, marks)
    producer.finish(ID, 1.0)
    assert producer.take_actions() == [FreeBlocks(ID)]
    assert producer.idle
    open_on(producer, S1, now=1.5)
    assert producer.take_actions() == [ended(EndReason.FINISHED)]
    producer.tick(6.0)
    open_on(producer, S1, now=6.0)
    assert producer.take_actions() == [ended(EndReason.OVER)]


def test_what_the_engine_gives_up_is_told_to_the_consumer_alone(producer: Producer, marks: HandleMarks) -> None:
    """The engine told the gateway itself."""
    submit(producer, marks)
    open_on(producer, S1)
    producer.take_actions()
    producer.fail(ID, 0.0)
    assert producer.take_actions() == [ended(EndReason.FAILED), FreeBlocks(ID)]


def test_a_lease_ends_with_the_deadline(producer: Producer, marks: HandleMarks) -> None:
    submit(producer, marks)
    open_on(producer, S1)
    producer.take_actions()
    producer.tick(DEADLINE - 0.1)
    assert nothing(producer)
    producer.tick(DEADLINE)
    assert producer.take_actions() == [
        ended(EndReason.EXPIRED),
        FreeBlocks(ID),
        FailHandoff(ID, EndReason.EXPIRED),
    ]


def test_a_lost_gateway_aborts_its_handoffs_and_no_others(producer: Producer, marks: HandleMarks) -> None:
    unopened, early, other = AttemptId(GatewayId(1), 6), AttemptId(GatewayId(1), 7), AttemptId(GatewayId(2), 1)
    submit(producer, marks)
    open_on(producer, S1)
    submit(producer, marks, unopened)
    open_on(producer, S1, id=early)
    submit(producer, marks, other)
    producer.take_actions()
    producer.gateway_lost(GatewayId(1))
    assert producer.take_actions() == [
        StopComputing(ID),
        ended(EndReason.ABORTED),
        FreeBlocks(unopened),
        ended(EndReason.ABORTED, id=early),
    ]
    assert producer.open_ids == {ID, other}
