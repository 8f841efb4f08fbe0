"""Workers tell gateways when an attempt reached what, once, with its first row or its failure."""

from kvtransfer.ids import WorkerId
from kvtransfer.moved import Moved
from kvtransfer.transports.memory import MemoryTransport
from services.protocol.messages import Abort, HandTo, TakeFrom
from services.worker.attempt_times import AttemptTimes
from services.worker.worker import Worker
from tests.worker.conftest import Pair

PROMPT = list(range(30, 130))


def times_of(worker: Worker) -> AttemptTimes:
    return worker.engine._core._state.times


async def test_both_workers_of_a_handoff_say_what_they_did_when(pair: Pair):
    handle = await pair.gateway.hand_off(pair.prefill, pair.decode, PROMPT, 4)
    await pair.decode.until(lambda: pair.decode.ended(handle))
    computed, received = pair.prefill.timings[handle], pair.decode.timings[handle]
    assert computed.announced_s is computed.ready_s is None
    assert computed.admitted_s is not None
    assert 0 < computed.admitted_s <= computed.sent_s < 60
    assert received.announced_s is not None
    assert received.admitted_s is not None
    assert received.ready_s is not None
    assert 0 < received.announced_s <= received.admitted_s <= received.ready_s <= received.sent_s < 60
    assert computed.moved == Moved()
    layout, moved = pair.workers[1].engine._core.engine.runner.layout, received.moved
    num_blocks = -(-len(PROMPT) // layout.block_size)
    assert (moved.transport, moved.num_bytes) == (MemoryTransport.name, num_blocks * layout.block_bytes)
    assert moved.why.startswith("no other is on both sides")
    assert 0 < moved.reading_s <= received.ready_s - received.admitted_s + 1e-3


async def test_choices_of_one_prompt_have_one_timing(pair: Pair):
    handle = await pair.gateway.hand_off(pair.prefill, pair.decode, PROMPT, 4, seeds=(3, 1, 4))
    await pair.decode.until(lambda: all(map(pair.decode.ended, range(handle + 1, handle + 4))))
    assert pair.prefill.timings.keys() == pair.decode.timings.keys() == {handle}
    assert len(times_of(pair.workers[0])) == len(times_of(pair.workers[1])) == 0


async def test_a_handoff_that_failed_says_how_far_it_came(pair: Pair):
    assert pair.decode.hello is not None
    source = TakeFrom(pair.prefill.address, WorkerId(999))
    handle = pair.gateway.submit(PROMPT, 5, handoff=HandTo(pair.decode.hello.worker_id)).handle
    await pair.decode.send(pair.gateway.submit(PROMPT, 5, handoff=source, handle=handle))
    await pair.decode.until(lambda: handle in pair.decode.failures)
    failed = pair.decode.timings[handle]
    assert failed.announced_s is failed.admitted_s is failed.ready_s is None
    assert failed.sent_s > 0


async def test_attempts_that_end_without_a_word_are_forgotten(pair: Pair):
    decode = pair.workers[1]
    for _ in range(20):
        assert pair.prefill.hello is not None
        source = TakeFrom(pair.prefill.address, pair.prefill.hello.worker_id)
        await pair.decode.send(submitted := pair.gateway.submit(PROMPT, 5, handoff=source))
        await pair.decode.send(Abort(submitted.handle))
    last = await pair.gateway.hand_off(pair.prefill, pair.decode, PROMPT, 4)
    await pair.decode.until(lambda: pair.decode.ended(last))
    heard = pair.decode.load
    await pair.decode.until(lambda: pair.decode.load is not heard)  # a heartbeat
    assert len(times_of(decode)) == 0
