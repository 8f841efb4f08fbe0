"""Two workers over real streams: handoffs, aborts, broken streams, block events."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import pytest
import structlog

from kvtransfer.ids import GatewayId, WorkerId
from kvtransfer.transports.memory import MemoryFabric
from services.config import WorkerRole
from services.engine.runner.simulated import SimulatedRunner
from services.protocol.block_hash import block_hashes, root_hash
from services.protocol.messages import Abort, Commands, GatewayHello, HandTo, TakeFrom
from services.protocol.outcomes import FailureCode, FinishReason
from services.worker.worker import Worker
from tests.engine.harness import reference
from tests.worker.client import TestGateway
from tests.worker.conftest import BLOCK_SIZE, Pair, make_worker, serving, worker_baseline

LONG = 5000  # tokens that nobody waits for


async def test_a_request_goes_through_prefill_handoff_and_decode(pair: Pair):
    prompt = list(range(30, 60))
    handle = await pair.gateway.hand_off(pair.prefill, pair.decode, prompt, 12, num_logprobs=2)
    await pair.decode.until(lambda: pair.decode.ended(handle))
    expected = reference(prompt, 12)
    (first,) = pair.prefill.rows[handle]
    assert (first.position, first.tokens, first.cached) == (30, expected[:1], 0)
    assert pair.decode.tokens(handle) == expected
    assert pair.decode.rows[handle][0].position == 30
    assert pair.decode.rows[handle][0].logprobs == first.logprobs
    assert pair.decode.rows[handle][-1].finish is FinishReason.LENGTH
    await pair.baseline()


async def test_a_ready_worker_says_what_computes_its_steps():
    """In its log and to gateways."""
    parts = replace(make_worker(WorkerRole.DECODE, MemoryFabric())._parts, kernels="avx2")
    gateway = TestGateway()
    with structlog.testing.capture_logs() as logs:
        async with serving(Worker(parts)) as (port,), gateway.connect(port) as stream:
            await stream.until(lambda: stream.hello is not None)
            assert stream.hello is not None
            assert stream.hello.kernels == "avx2"
    (ready,) = [log for log in logs if log["event"] == "ready"]
    assert ready["kernels"] == "avx2"


async def test_the_next_turn_is_cached_on_both_sides_and_moves_only_new_blocks(pair: Pair):
    prompt = list(range(30, 60))
    first = await pair.gateway.hand_off(pair.prefill, pair.decode, prompt, 12)
    await pair.decode.until(lambda: pair.decode.ended(first))
    moved = pair.decode.load.bytes_moved
    turn = prompt + pair.decode.tokens(first) + [1, 2, 3, 4, 5]
    second = await pair.gateway.hand_off(pair.prefill, pair.decode, turn, 3)
    await pair.decode.until(lambda: pair.decode.ended(second))
    assert pair.prefill.rows[second][0].cached == 30 // BLOCK_SIZE * BLOCK_SIZE
    held = (30 + 12 - 1) // BLOCK_SIZE
    assert pair.decode.rows[second][0].cached == held * BLOCK_SIZE
    block_bytes = moved / -(-30 // BLOCK_SIZE)
    assert pair.decode.load.bytes_moved - moved == (-(-len(turn) // BLOCK_SIZE) - held) * block_bytes
    assert pair.decode.tokens(second) == reference(turn, 3)
    await pair.baseline()


async def test_prompts_together_over_one_cold_prefix_compute_and_move_it_once(pair: Pair):
    prefix = list(range(100, 180))
    prompts = [[*prefix, 300 + index] for index in range(32)]
    handles = [await pair.gateway.hand_off(pair.prefill, pair.decode, prompt, 4) for prompt in prompts]
    await pair.decode.until(lambda: all(pair.decode.ended(handle) for handle in handles))
    assert sorted(pair.prefill.rows[handle][0].cached for handle in handles) == [0] + [80] * 31
    assert sorted(pair.decode.rows[handle][0].cached for handle in handles) == [0] + [80] * 31
    for handle, prompt in zip(handles, prompts, strict=True):
        assert pair.decode.tokens(handle) == reference(prompt, 4)
    await pair.baseline()


async def test_a_request_that_ends_at_its_first_token_is_not_handed_over(pair: Pair):
    prompt = list(range(10))
    stop = reference(prompt, 1)[0]
    handle = await pair.gateway.hand_off(pair.prefill, pair.decode, prompt, 9, stop_token_ids=(stop,))
    await pair.prefill.until(lambda: pair.prefill.ended(handle))
    assert pair.prefill.rows[handle][0].finish is FinishReason.STOP
    await pair.baseline()
    assert pair.decode.load.bytes_moved == 0


async def test_choices_over_one_prompt_compute_and_move_it_once(pair: Pair):
    """One of them is given up before decode has the prompt, and one ends at its first token."""
    prompt, seeds = list(range(30, 60)), (3, 1, 4, 1)
    stop = reference(prompt, 1, seed=seeds[1], temperature=1.0)[0]
    expected = [reference(prompt, 9, seed=seed, temperature=1.0, stop_token_ids=(stop,)) for seed in seeds]
    handle = await pair.gateway.hand_off(
        pair.prefill, pair.decode, prompt, 9, seeds=seeds, temperature=1.0, stop_token_ids=(stop,)
    )
    for stream in (pair.prefill, pair.decode):
        await stream.send(Abort(handle + 3))
    await pair.decode.until(lambda: pair.decode.ended(handle + 1))
    assert pair.prefill.tokens(handle + 1) == expected[0][:1]
    assert pair.decode.tokens(handle + 1) == expected[0]
    for choice in (handle + 2, handle + 4):
        assert pair.prefill.rows[choice][0].finish is FinishReason.STOP
        assert pair.decode.tokens(choice) == []
    assert pair.decode.load.bytes_moved == -(-30 // BLOCK_SIZE) * SimulatedRunner(1, BLOCK_SIZE).layout.block_bytes
    await pair.baseline()


async def test_decode_serves_alone(pair: Pair):
    await pair.decode.send(pair.gateway.submit([1, 2, 3], 5))
    await pair.decode.until(lambda: pair.decode.ended(1))
    assert pair.decode.tokens(1) == reference([1, 2, 3], 5)
    await pair.baseline()


async def test_commands_in_one_message_are_taken_one_after_the_other(pair: Pair):
    first, refused, aborted, last = (
        pair.gateway.submit(prompt, length) for prompt, length in (([1], 5), ([5000], 5), ([2], LONG), ([3], 5))
    )
    await pair.decode.send(Commands((first, refused, aborted, Abort(aborted.handle), last)))
    await pair.decode.until(lambda: pair.decode.ended(first.handle) and pair.decode.ended(last.handle))
    for submit in (first, last):
        assert pair.decode.tokens(submit.handle) == reference(submit.capsule.token_ids.tolist(), 5)
    assert refused.handle in pair.decode.failures
    await pair.baseline()


async def test_an_abort_frees_everything_wherever_the_request_is(pair: Pair):
    pair.slow_down(0.005)
    for wait_s in (0, 0.005, 0.02, 0.05, 0.1):
        before = pair.decode_steps
        handle = await pair.gateway.hand_off(pair.prefill, pair.decode, list(range(200)), LONG)
        await asyncio.sleep(wait_s)
        for stream in (pair.prefill, pair.decode):
            await stream.send(Abort(handle))
        await pair.baseline()
        assert pair.decode_steps - before < LONG


async def test_a_broken_gateway_stream_ends_its_requests(pair: Pair):
    other = TestGateway(id=78)
    ports = [stream.address.rpartition(":")[2] for stream in (pair.prefill, pair.decode)]
    async with AsyncExitStack() as stack:
        prefill, decode = [await stack.enter_async_context(other.connect(int(port))) for port in ports]
        before = pair.decode_steps
        await other.hand_off(prefill, decode, list(range(200)), LONG)
        mine = await pair.gateway.hand_off(pair.prefill, pair.decode, [9] * 20, 40)
    await pair.decode.until(lambda: pair.decode.ended(mine))
    assert pair.decode.tokens(mine) == reference([9] * 20, 40)
    await pair.baseline()
    assert pair.decode_steps - before < LONG


async def test_a_newer_stream_ends_the_older_one_and_its_old_handles_are_over(pair: Pair):
    port = int(pair.decode.address.rpartition(":")[2])
    await pair.decode.send(pair.gateway.submit([1] * 10, 300))
    await pair.decode.until(lambda: pair.decode.rows[1])
    pair.gateway.highest = 5
    async with pair.gateway.connect(port) as newer:
        await worker_baseline(pair.workers[1])
        await newer.send(pair.gateway.submit([1] * 10, 3, handle=4))  # allocated before the hello: over
        await newer.send(pair.gateway.submit([1] * 10, 3, handle=6))
        await newer.until(lambda: newer.ended(6))
        assert not newer.rows[4]


async def test_a_handoff_with_another_life_of_the_producer_fails_on_both_sides(pair: Pair):
    assert pair.decode.hello is not None
    prompt = list(range(20))
    source = TakeFrom(pair.prefill.address, worker=WorkerId(12345))
    handle = pair.gateway.submit(prompt, 5, handoff=HandTo(pair.decode.hello.worker_id)).handle
    await pair.decode.send(pair.gateway.submit(prompt, 5, handoff=source, handle=handle))
    await pair.decode.until(lambda: handle in pair.decode.failures)
    assert pair.decode.failures[handle].code is FailureCode.HANDOFF
    await pair.baseline()


async def test_block_events_name_what_the_cache_holds(pair: Pair):
    prompt = list(range(30, 60))
    handle = await pair.gateway.hand_off(pair.prefill, pair.decode, prompt, 12)
    await pair.decode.until(lambda: pair.decode.ended(handle))
    await pair.baseline()
    root = root_hash("simulated")
    turn = pair.gateway.submit(prompt + pair.decode.tokens(handle)[:-1], 1).capsule.token_ids
    expected = {
        pair.prefill: block_hashes(root, turn[:30], BLOCK_SIZE),
        pair.decode: block_hashes(root, turn, BLOCK_SIZE),
    }
    for stream, hashes in expected.items():
        await stream.until(lambda stream=stream, hashes=hashes: stream.held_hashes() == set(hashes))
    port = int(pair.decode.address.rpartition(":")[2])
    async with TestGateway(id=79).connect(port) as late:
        assert late.events[0].snapshot
        assert late.held_hashes() == set(expected[pair.decode])


async def test_evictions_are_published():
    from kvtransfer.transports.memory import MemoryFabric

    worker = make_worker(WorkerRole.DECODE, MemoryFabric(), num_blocks=20)
    gateway = TestGateway()
    async with serving(worker) as (port,), gateway.connect(port) as decode:
        for index in range(10):
            await decode.send(gateway.submit([index] * 30, 3))
        await decode.until(lambda: all(decode.ended(handle) for handle in range(1, 11)))
        await worker_baseline(worker)
        await decode.until(lambda: len(decode.held_hashes()) <= 20)
        assert any(event.evicted for event in decode.events)


async def test_a_wrong_first_message_and_another_major_version_are_refused_in_words(pair: Pair):
    gateway, port = TestGateway(id=80), pair.decode.address.rpartition(":")[2]
    for message, words in (
        (gateway.submit([1], 1), "hello"),
        (GatewayHello(GatewayId(80), 0, protocol_major=9), "speaks protocol"),
    ):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            from services.protocol.wire import serialize_gateway_message

            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/baton.v1.Worker/Connect")()
            await call.write(serialize_gateway_message(message))
            with pytest.raises(grpc.aio.AioRpcError, match=words):
                await call.read()


async def test_what_no_gateway_sends_is_refused_and_harms_nobody(pair: Pair):
    for prompt, temperature in (([1, 5000], 0.0), ([1, -2], 0.0), ([1], float("nan"))):
        submit = pair.gateway.submit(prompt, 5, temperature=temperature)
        await pair.decode.send(submit)
        await pair.decode.until(lambda handle=submit.handle: handle in pair.decode.failures)
    handle = await pair.gateway.hand_off(pair.prefill, pair.decode, [1, 2, 3], 5)
    await pair.decode.until(lambda: pair.decode.ended(handle))
    await pair.baseline()
