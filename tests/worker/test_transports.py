"""Which transport two workers take, and that KV gets through it."""

import subprocess
import sys
from collections.abc import Callable

import grpc
import pytest
import structlog

from kvtransfer.layout import KV_PROTOCOL_VERSION
from kvtransfer.transports.base import Transport
from kvtransfer.transports.byte_stream import BlockSource, ByteStreamTransport, Dial
from kvtransfer.transports.memory import MemoryFabric, MemoryTransport
from kvtransfer.transports.parts import PartOffer, join_parts
from kvtransfer.transports.sealed import Seal
from protos import kv_pb2, kv_pb2_grpc
from services.config import WorkerRole
from services.protocol.messages import Abort
from services.worker.worker import MakeTransports
from tests.engine.harness import reference
from tests.worker.client import TestGateway
from tests.worker.conftest import make_worker, serving, worker_baseline


def having(fabric: MemoryFabric, *names: str) -> MakeTransports:
    """These transports, in this order. The memory transport stands for one whose reads are one-sided."""

    def make(source: BlockSource, dial: Dial) -> list[Transport]:
        each: dict[str, Callable[[], Transport]] = {
            "memory": lambda: MemoryTransport(fabric, source.worker_id, source.memory),
            "grpc": lambda: ByteStreamTransport(source, dial),
        }
        return [each[name]() for name in names]

    return make


@pytest.mark.parametrize(
    ("prefill_has", "decode_has", "taken"),
    [
        (("grpc",), ("grpc",), "grpc"),
        (("grpc",), ("memory", "grpc"), "grpc"),
        (("memory", "grpc"), ("memory", "grpc"), "memory"),
    ],
)
async def test_a_pair_takes_what_both_have_and_says_so(
    prefill_has: tuple[str, ...], decode_has: tuple[str, ...], taken: str
):
    fabric, gateway, prompt = MemoryFabric(), TestGateway(), list(range(200))
    prefill_worker = make_worker(WorkerRole.PREFILL, fabric, transports=having(fabric, *prefill_has))
    decode_worker = make_worker(WorkerRole.DECODE, fabric, transports=having(fabric, *decode_has))
    with structlog.testing.capture_logs() as logs:
        async with (
            serving(prefill_worker, decode_worker) as (prefill_port, decode_port),
            gateway.connect(prefill_port) as prefill,
            gateway.connect(decode_port) as decode,
        ):
            handle = await gateway.hand_off(prefill, decode, prompt, 12)
            await decode.until(lambda: decode.ended(handle))
            assert decode.tokens(handle) == reference(prompt, 12)
            assert decode.load.bytes_moved == 200 * 8  # K and V of a token: 8 bytes

            failed = await gateway.hand_off(prefill, decode, [7, *prompt], 5000)
            for stream in (prefill, decode):
                await stream.send(Abort(failed))
            for worker in (prefill_worker, decode_worker):
                await worker_baseline(worker)
    (choice,) = [log for log in logs if log["event"] == "reads from a worker"]
    assert choice["transport"] == taken
    assert choice["why"]


async def test_a_worker_without_a_transport_in_common_is_refused_in_words():
    fabric = MemoryFabric()
    worker = make_worker(WorkerRole.PREFILL, fabric, transports=having(fabric, "grpc"))
    async with serving(worker) as (port,), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        hello = kv_pb2.ConsumerHello(kv_protocol=KV_PROTOCOL_VERSION, fingerprint="simulated", transports=["nixl"])
        call = kv_pb2_grpc.KvControlStub(channel).Pair()
        await call.write(kv_pb2.ConsumerMessage(hello=hello))
        with pytest.raises(grpc.aio.AioRpcError, match="transport grpc are spoken here"):
            await call.read()


class _Offering(MemoryTransport):
    """Stands for NIXL in a worker that is a group of ranks."""

    name = "nixl"

    def __init__(self, fabric: MemoryFabric, source: BlockSource, offer: bytes) -> None:
        super().__init__(fabric, source.worker_id, source.memory)
        self._offer = offer

    def descriptor(self) -> bytes:
        """Says what consumers of some versions refuse."""
        return self._offer


REGIONS = Seal("nixl", b"BTNX", 4).close(bytes(40))
PARTS = join_parts([PartOffer("", REGIONS), PartOffer("10.0.0.2:7000", REGIONS)])


@pytest.mark.parametrize(
    ("offer", "reads_regions", "reads_parts", "offered"),
    [
        (REGIONS, True, False, ["nixl", "grpc"]),
        (REGIONS, False, False, ["grpc"]),
        (PARTS, True, True, ["nixl", "grpc"]),
        (PARTS, True, False, ["grpc"]),
    ],
)
async def test_a_group_of_ranks_offers_nothing_to_a_consumer_that_would_refuse_it(
    offer: bytes, reads_regions: bool, reads_parts: bool, offered: list[str]
):
    """A worker of a version before regions then reads over gRPC, and none of its handoffs fail."""
    fabric = MemoryFabric()

    def make(source: BlockSource, dial: Dial) -> list[Transport]:
        return [_Offering(fabric, source, offer), ByteStreamTransport(source, dial)]

    worker = make_worker(WorkerRole.PREFILL, fabric, transports=make)
    async with serving(worker) as (port,), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        hello = kv_pb2.ConsumerHello(
            kv_protocol=KV_PROTOCOL_VERSION,
            fingerprint="simulated",
            transports=["nixl", "grpc"],
            reads_regions=reads_regions,
            reads_parts=reads_parts,
        )
        call = kv_pb2_grpc.KvControlStub(channel).Pair()
        await call.write(kv_pb2.ConsumerMessage(hello=hello))
        answer = await call.read()
        assert [offer.transport for offer in answer.hello.offers] == offered
        assert answer.hello.serves_ranges
        call.cancel()


MAKES = """
import sys
import numpy as np
{prelude}
from kvtransfer.block_memory import HostBlocks
from kvtransfer.ids import WorkerId
from kvtransfer.transports.base import Memory
from kvtransfer.transports.byte_stream import BlockSource
from services.config import TransportName
from services.worker.transports import make_transports
memory = Memory(HostBlocks(np.zeros((4, 4096), np.uint8)), np.zeros(4, np.uint64))
made = make_transports(TransportName("{name}"))(BlockSource(WorkerId(1), memory), None)
print(*(transport.name for transport in made), "nixl loaded" if sys.modules.get("nixl") else "")
"""
NO_NIXL = 'sys.modules["nixl"] = None  # as where it is not installed: importing it raises ImportError'


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "prelude", "said"),
    [("auto", "", ["nixl grpc nixl loaded"]), ("grpc", "", ["grpc"]), ("auto", NO_NIXL, ["nixl", "grpc"])],
    ids=["auto", "grpc", "auto without nixl"],
)
def test_nixl_is_loaded_where_it_is_wanted_and_missed_in_words(name: str, prelude: str, said: list[str]):
    """Where it is missing, the log names it and grpc serves."""
    script = MAKES.format(name=name, prelude=prelude)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    *log, made = done.stdout.strip().splitlines()
    assert made.strip() == said[-1]
    assert all(word in "".join(log) for word in said[:-1])
