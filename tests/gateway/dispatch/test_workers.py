"""Which workers the dispatch side knows and uses, and how it hears that one is gone."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest
import structlog

from services.config import HandoffMode, WorkerRole
from services.gateway.dispatch import links
from services.gateway.dispatch.dispatcher import Dispatcher, WorkerAccess
from services.gateway.dispatch.links import FIRST_BACKOFF_S, LinkLost, WorkerLink
from services.gateway.dispatch.router import Policy
from services.prefix_index.memory import MemoryPrefixIndex
from services.protocol.block_hash import block_hashes, root_hash
from services.protocol.frames import Load
from services.protocol.messages import BlockEvents
from services.tls.grpc_ends import Channels
from tests.gateway.dispatch_stack import (
    OTHER_DECODE,
    PROMPT,
    Counts,
    decode_worker,
    eventually,
    prefill_worker,
    read_all,
    request,
    running,
)
from tests.gateway.scripted_worker import (
    empty_frame,
    serving,
    worker_hello,
)


async def test_ready_when_a_decode_worker_is_there_and_every_address_was_tried():
    decode = decode_worker()
    async with running(decode, addresses=("127.0.0.1:1",)) as stack:
        await eventually(stack.dispatcher.ready)
        assert stack.dispatcher.max_model_len == 256
        decode.refuses = "gone for good"
        decode.break_stream()
        await eventually(lambda: not stack.dispatcher.ready())


@pytest.mark.parametrize(("protocol_minor", "sizes"), [(0, [1] * 6), (1, [4, 2])])
async def test_commands_that_wait_together_go_together_until_that_is_much(
    monkeypatch: pytest.MonkeyPatch, protocol_minor: int, sizes: list[int]
):
    """And one by one to a worker that knows no other way."""
    monkeypatch.setattr(links, "_ENOUGH_BYTES", 1000)
    decode = decode_worker()
    decode.hello = replace(decode.hello, protocol_minor=protocol_minor)
    prompts = [PROMPT, PROMPT[1:], PROMPT[2:], [1] * 250, PROMPT[3:], PROMPT[4:]]
    async with running(decode, handoff=HandoffMode.NEVER) as stack, AsyncExitStack() as generations:
        asked = [stack.dispatcher.generate(request(prompt=prompt)) for prompt in prompts]
        await asyncio.gather(*map(generations.enter_async_context, asked))
        await decode.submit(len(prompts))
        assert [submit.capsule.token_ids.tolist() for submit in decode.submits] == prompts
        assert decode.sizes == sizes


async def test_a_restarted_worker_is_a_new_one_and_its_old_cache_is_forgotten():
    decode, other = decode_worker(), decode_worker(OTHER_DECODE)
    chain = block_hashes(root_hash("f" * 32), np.array(PROMPT, np.int32), 4)
    decode.events_at_start = BlockEvents(0, True, chain, [])
    async with running(decode, other) as stack:
        for number in range(1, 4):
            async with stack.dispatcher.generate(request()):
                await decode.submit(number)
        assert other.submits == [], "the prefix is cached at the first worker, and it has no load"
        decode.hello = worker_hello(WorkerRole.DECODE, 0xD3)
        decode.events_at_start = BlockEvents(0, True, [], [])
        decode.break_stream()
        await eventually(
            lambda: {worker["incarnation"] for worker in stack.live} == {f"{0xD3:016x}", f"{OTHER_DECODE:016x}"}
        )
        for _ in range(4):
            async with stack.dispatcher.generate(request()):
                await asyncio.sleep(0.01)
        await eventually(lambda: len(decode.submits) + len(other.submits) == 7)
        assert len(other.submits) == 2


async def test_a_gap_in_block_events_makes_the_link_ask_for_a_new_snapshot():
    decode = decode_worker()
    async with running(decode) as stack:
        decode.say(BlockEvents(0, True, [], []))
        decode.say(BlockEvents(1, False, [], []))
        decode.say(BlockEvents(3, False, [], []))
        await decode.until(lambda: len(decode.hellos) == 2)
        await stack.connected(1)


async def test_workers_that_speak_another_major_version_are_not_used():
    decode = decode_worker(protocol_major=2)
    prefill = prefill_worker()
    prefill.refuses = "protocol 1 is too old for this worker"
    async with serving(decode), serving(prefill), running(addresses=(decode.address, prefill.address)) as stack:
        await decode.until(lambda: len(decode.hellos) >= 2)
        assert stack.live == []


async def test_a_message_that_makes_no_sense_costs_the_worker_its_stream():
    decode = decode_worker()
    async with running(decode):
        frame = empty_frame()
        frame.counts = np.array([3], np.uint32)
        decode.say(frame)
        await decode.until(lambda: len(decode.hellos) == 2)


async def test_bytes_moved_are_counted_from_a_workers_first_word_on_across_its_streams():
    decode = decode_worker()
    async with running(decode) as stack:
        for moved in (100, 150, 150):
            decode.say(empty_frame(load=Load(bytes_moved=moved, available_blocks=9)))
        await eventually(lambda: stack.counts.bytes_moved == 50)
        assert stack.counts.loads[decode.address].available_blocks == 9
        decode.break_stream()
        await eventually(lambda: len(decode.hellos) == 2)
        decode.say(empty_frame(load=Load(bytes_moved=170, available_blocks=9)))
        await eventually(lambda: stack.counts.bytes_moved == 70)


FROZEN_WORKER = """
import asyncio, sys
from services.config import WorkerRole
from tests.gateway.scripted_worker import ScriptedWorker, serving, worker_hello

async def main():
    async with serving(ScriptedWorker(worker_hello(WorkerRole.DECODE, 0xD9))) as worker:
        print(worker.address, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_stopped_worker_is_noticed_and_its_requests_go_on_elsewhere(monkeypatch: pytest.MonkeyPatch):
    """SIGSTOP: its sockets stay open and nothing answers, pings among it; it is not silent for long enough."""
    monkeypatch.setattr(links, "SILENCE_TIMEOUT_S", 3600.0)
    process = subprocess.Popen([sys.executable, "-c", FROZEN_WORKER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = await asyncio.to_thread(process.stdout.readline)
        decode = decode_worker()
        async with running(addresses=(address.strip(),)) as stack, serving(decode):
            await stack.connected(1)
            async with stack.dispatcher.generate(request()) as generation:
                reading = asyncio.create_task(read_all(generation))
                os.kill(process.pid, signal.SIGSTOP)
                await stack.connected(0)
                assert stack.rows[0]["phase"] == "waiting"
                reading.cancel()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def test_a_worker_of_another_model_is_not_taken():
    ours, theirs = decode_worker(model="ours"), decode_worker(OTHER_DECODE, model="theirs")
    async with serving(ours), serving(theirs):
        counts, addresses = Counts(), [ours.address, theirs.address]
        policy = Policy(HandoffMode.NEVER, 64)
        dispatcher = Dispatcher(addresses, policy, 9, MemoryPrefixIndex(), counts, WorkerAccess("ours"))
        task = asyncio.create_task(dispatcher.run())
        await eventually(dispatcher.ready)
        await theirs.until(lambda: len(theirs.hellos) > 1)  # refused, and tried again
        assert list(counts.loads) == [ours.address]
        why = "it serves model theirs, this gateway ours: their configuration or tokenizer differs"
        assert dispatcher.refused() == {theirs.address: why}
        theirs.hello = replace(theirs.hello, model="ours")
        await eventually(lambda: not dispatcher.refused())  # another worker at its address
        task.cancel()
        await asyncio.wait([task])


async def test_workers_without_a_transport_in_common_never_pair_and_the_log_says_so():
    prefill, decode = prefill_worker(transports=("nixl",)), decode_worker(transports=("grpc",))
    with structlog.testing.capture_logs() as logs:
        async with running(prefill, decode) as stack, stack.dispatcher.generate(request()):
            assert (await decode.submit()).handoff is None
    (warning,) = [log for log in logs if log["event"] == "two workers never pair"]
    assert f"{prefill.address} has nixl" in warning["reason"]
    assert f"{decode.address} has grpc" in warning["reason"]


async def test_a_live_worker_says_what_computes_its_steps():
    decode = decode_worker(kernels="avx512")
    async with running(decode) as stack:
        assert [worker["kernels"] for worker in stack.live] == ["avx512"]
        assert stack.counts.kernels == {decode.address: "avx512"}
        decode.refuses = "gone for good"
        decode.break_stream()
        await eventually(lambda: not stack.live)
        assert not stack.counts.kernels


async def test_addresses_come_and_go_but_a_live_stream_outlasts_the_list():
    decode, other = decode_worker(), decode_worker(OTHER_DECODE)
    async with running() as stack, serving(decode), serving(other):
        stack.dispatcher.set_addresses([decode.address, other.address])
        await stack.connected(2)
        stack.dispatcher.set_addresses([])
        other.refuses = "it is about to go"
        other.break_stream()
        await stack.connected(1)
        await asyncio.sleep(0)  # the link hears of it last
        stack.dispatcher.set_addresses([])
        other.refuses = ""
        await asyncio.sleep(3 * FIRST_BACKOFF_S)
        assert [worker["address"] for worker in stack.live] == [decode.address]
        assert len(other.hellos) == 1
        assert stack.dispatcher.ready()
        stack.dispatcher.set_addresses([other.address])
        await stack.connected(2)


@pytest.mark.parametrize("turns", range(8))
async def test_a_link_ends_when_told_to_in_the_moment_in_which_its_stream_breaks(turns: int):
    async with serving(decode_worker()) as decode:
        counts = Counts()
        dispatcher = Dispatcher([decode.address], Policy(HandoffMode.NEVER, 64), 9, MemoryPrefixIndex(), counts)
        task = asyncio.create_task(dispatcher.run())
        await eventually(lambda: bool(counts.loads))
        dispatcher._links[decode.address].reset("the test says so")
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=120)
        assert task.done()


async def test_a_link_ends_when_told_to_though_its_call_answers_that_with_an_error(monkeypatch: pytest.MonkeyPatch):
    """As gRPC does where the call ended in the same moment."""

    async def stream() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise LinkLost("it ended the stream") from None

    async with running() as stack:
        link = WorkerLink("127.0.0.1:1", stack.dispatcher, Channels())
        monkeypatch.setattr(link, "_run_stream", stream)
        task = asyncio.create_task(link.run())
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=120)
        assert done
        assert task.cancelled()


async def test_for_a_model_that_generates_nothing_prefill_workers_alone_are_ready():
    async with running(prefill_worker(), role=WorkerRole.PREFILL) as stack:
        assert stack.dispatcher.ready()
    async with running(prefill_worker()) as stack:
        assert not stack.dispatcher.ready()
