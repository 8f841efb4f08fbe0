"""What a producer says of its process."""

import asyncio

import grpc
import numpy as np
import pytest

from kvtransfer.layout import KV_PROTOCOL_VERSION
from kvtransfer.process import ProcessIdentity
from kvtransfer.transports.byte_stream import ByteRequest
from kvtransfer.transports.memory import MemoryFabric
from protos import kv_pb2, kv_pb2_grpc
from services.config import WorkerRole
from services.protocol.wire import WireError
from services.worker.kv_wire import pack_read, parse_process, parse_read, parse_words
from tests.worker.conftest import make_worker, serving


async def test_a_producer_says_which_process_it_is():
    worker = make_worker(WorkerRole.PREFILL, MemoryFabric())
    async with serving(worker) as (port,), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        hello = kv_pb2.ConsumerHello(kv_protocol=KV_PROTOCOL_VERSION, fingerprint="simulated", transports=["memory"])
        call = kv_pb2_grpc.KvControlStub(channel).Pair()
        await call.write(kv_pb2.ConsumerMessage(hello=hello))
        answer = await call.read()
        assert isinstance(answer, kv_pb2.ProducerMessage)
        assert parse_process(answer.hello) == ProcessIdentity.own()
        call.cancel()


@pytest.mark.parametrize("hears", [True, False])
async def test_pulses_go_to_consumers_that_know_them_and_to_no_older_ones(hears: bool):
    """An older one would end its stream for a message that it does not know."""
    worker = make_worker(WorkerRole.PREFILL, MemoryFabric())
    async with serving(worker) as (port,), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        hello = kv_pb2.ConsumerHello(
            kv_protocol=KV_PROTOCOL_VERSION, fingerprint="simulated", transports=["memory"], hears_pulses=hears
        )
        call = kv_pb2_grpc.KvControlStub(channel).Pair()
        await call.write(kv_pb2.ConsumerMessage(hello=hello))
        answer = await call.read()
        assert isinstance(answer, kv_pb2.ProducerMessage)
        assert answer.hello.sends_pulses
        messages = asyncio.create_task(call.read())
        done, _ = await asyncio.wait([messages], timeout=120 if hears else 1.5)
        assert bool(done) is hears
        if hears:
            assert isinstance(message := messages.result(), kv_pb2.ProducerMessage)
            assert message.HasField("pulse")
        call.cancel()
        await asyncio.gather(messages, return_exceptions=True)


def test_an_older_producer_does_not_say():
    assert parse_process(kv_pb2.ProducerHello(incarnation=1)) is None


@pytest.mark.parametrize("pid", [0, 2**32 - 1])
def test_what_names_no_process_is_refused(pid: int):
    with pytest.raises(WireError, match="no process id"):
        parse_process(kv_pb2.ProducerHello(process=kv_pb2.Process(boot_id="x", pid=pid)))


BLOCKS, WORDS = np.array([4, 7], np.uint32), np.array([2**40, 5], np.uint64)


@pytest.mark.parametrize(
    ("ranges", "words"), [(None, True), (None, False), ((range(3, 70), range(80, 90)), False), ((), True)]
)
def test_what_is_read_of_each_block_goes_over_the_wire(ranges: tuple[range, ...] | None, words: bool):
    parsed = parse_read(pack_read(ByteRequest(b"key", BLOCKS, WORDS, ranges, words)))
    assert (parsed.key, parsed.ranges, parsed.words) == (b"key", ranges, words)
    assert np.array_equal(parsed.blocks, BLOCKS)
    assert np.array_equal(parsed.generations, WORDS)


@pytest.mark.parametrize(
    "wrong",
    [
        kv_pb2.ReadRequest(ranges=bytes(15)),
        kv_pb2.ReadRequest(ranges=np.array([7, 7], "<u8").tobytes()),
        kv_pb2.ReadRequest(ranges=np.array([7, 2**64 - 1], "<u8").tobytes()),
        kv_pb2.ReadRequest(ranges=np.array([7, 8], "<u8").tobytes(), no_data=True),
        kv_pb2.ReadRequest(no_data=True, no_words=True),
    ],
)
def test_ranges_that_no_consumer_asks_for_are_refused(wrong: kv_pb2.ReadRequest):
    with pytest.raises(WireError):
        parse_read(wrong)


def test_a_read_without_generation_words_ends_with_none():
    assert parse_words(kv_pb2.ReadPiece(over=True)).tolist() == []
