"""The dispatch side's records of attempts: what was decided, what happened when, and how each ended."""

import asyncio
from dataclasses import replace
from typing import Any

from kvtransfer.messages import EndReason
from kvtransfer.moved import Moved
from services.config import HandoffMode, WorkerRole
from services.gateway.api.records.attempt_record import MAX_KEPT, AttemptRecord
from services.protocol.frames import Failure, Load, Timing
from services.protocol.outcomes import FailureCode
from tests.gateway.dispatch_stack import (
    OTHER_DECODE,
    PROMPT,
    decode_worker,
    eventually,
    prefill_worker,
    read_all,
    request,
    running,
)
from tests.gateway.scripted_worker import continuation, empty_frame, row_frame

TOKENS = continuation(PROMPT, 3)


def verdicts(record: AttemptRecord) -> dict[str, str]:
    assert record.decision is not None
    listed: list[dict[str, Any]] = record.decision.describe()["candidates"]  # type: ignore[assignment]
    return {each["worker"]: each["verdict"] for each in listed}


async def test_a_handoff_s_record_has_both_workers_in_the_order_of_what_happened():
    prefill, decode, busy = prefill_worker(), decode_worker(), decode_worker(OTHER_DECODE)
    async with running(prefill, decode, busy) as stack:
        busy.say(empty_frame(load=Load(running=5)))
        await eventually(lambda: stack.counts.loads[busy.address].running == 5)
        wanted = request(max_tokens=3)
        async with stack.dispatcher.generate(wanted) as generation:
            submit = await prefill.submit()
            await decode.submit()
            first = row_frame(submit.handle, len(PROMPT), TOKENS[:1], cached=4)
            prefill.say(replace(first, timings=[Timing(submit.handle, None, 1e-6, None, 3e-6)]))
            await generation.next()
            rest = row_frame(submit.handle, len(PROMPT), TOKENS, cached=8)
            timing = Timing(submit.handle, 1e-6, 2e-6, 3e-6, 4e-6, Moved("memory", "near", 8192, 2e-6))
            decode.say(replace(rest, timings=[timing]))
            await read_all(generation)
        (record,) = wanted.attempts
    assert (record.number, list(record.choices), record.num_tokens) == (1, [0], len(PROMPT))
    assert record.workers == {WorkerRole.PREFILL: prefill.address, WorkerRole.DECODE: decode.address}
    assert record.predicted == {WorkerRole.PREFILL: 0, WorkerRole.DECODE: 0}
    assert record.found == {WorkerRole.PREFILL: 4, WorkerRole.DECODE: 8}
    there, then = record.at[WorkerRole.PREFILL], record.at[WorkerRole.DECODE]
    assert record.look_up_began is not None
    assert record.looked_up is not None
    assert record.first_token is not None
    assert record.second_worker is not None
    assert there.admitted is not None
    assert then.announced is not None
    assert then.admitted is not None
    assert then.ready is not None
    moments = [record.look_up_began, record.looked_up, record.sent_at, there.received, there.admitted, there.sent]
    assert sorted(moments) == moments
    moments = [there.sent, record.first_token, record.second_worker, record.ends[0].at]
    assert sorted(moments) == moments
    moments = [record.sent_at, then.received, then.announced, then.admitted, then.ready, then.sent]
    assert sorted(moments) == moments
    assert [(end.choice, end.reason, end.tokens) for end in record.ends] == [(0, "finished", 3)]
    assert verdicts(record) == {prefill.address: "chosen", decode.address: "chosen", busy.address: "costs more"}
    assert stack.counts.transports == {(prefill.address, decode.address): "memory"}
    assert stack.counts.ends == {"finished": 1}


async def test_an_attempt_that_failed_says_why_and_the_next_one_s_record_follows():
    prefill, decode, other = prefill_worker(), decode_worker(), decode_worker(OTHER_DECODE)
    async with running(prefill, decode, other) as stack:
        wanted = request(max_tokens=3)
        async with stack.dispatcher.generate(wanted) as generation:
            submit = await prefill.submit()
            await eventually(lambda: bool(decode.submits or other.submits))
            failing, standing = (decode, other) if decode.submits else (other, decode)
            failed = [Failure(submit.handle, FailureCode.HANDOFF, "STALE", EndReason.STALE)]
            failing.say(replace(empty_frame(failed), timings=[Timing(submit.handle, 0.001, sent_s=0.002)]))
            reading = asyncio.create_task(read_all(generation))
            again = await prefill.submit(2)
            await standing.submit()
            prefill.say_tokens(again, TOKENS[:1], cached=0)
            standing.say_tokens(again, TOKENS, cached=0)
            await reading
        first, second = wanted.attempts
    assert [end.reason for end in first.ends] == ["handoff"]
    assert first.failure == "HANDOFF: STALE"
    assert first.at[WorkerRole.DECODE].announced is not None
    assert first.at[WorkerRole.DECODE].admitted is None
    assert second.number == 2
    assert second.workers[WorkerRole.DECODE] == standing.address
    assert verdicts(second)[failing.address] == "no handoff with the other worker that was chosen"
    assert stack.counts.ends["handoff"] == 1


async def test_of_a_request_of_many_prompts_the_first_attempts_are_kept_and_all_are_counted():
    decode = decode_worker(num_blocks=1000)
    many = MAX_KEPT + 5
    wanted = replace(request(), capsules=request().capsules * many)
    async with running(decode, handoff=HandoffMode.NEVER) as stack, stack.dispatcher.generate(wanted):
        await decode.submit(many)
    assert wanted.attempts.number == many
    kept = list(wanted.attempts)
    assert [each.choices for each in kept] == [[choice] for choice in range(MAX_KEPT)]
    assert all(each.decision is not None for each in kept)
