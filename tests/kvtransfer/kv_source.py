"""Workers to read from: in this process over the memory fabric, or in a process of their own over NIXL or gRPC.

`InProcessSource` and `ProcessSource` answer to the same calls, so that a contract test need not know which it has.
"""

import asyncio
import os
import secrets
import signal
import threading
import time
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch

from kvtransfer.block_memory import BlockMemory, GroupBlocks, HostBlocks
from kvtransfer.ids import WorkerId
from kvtransfer.transports.base import BlockRead, Memory, ReadEnd, Transport
from kvtransfer.transports.byte_stream import BlockSource, ByteStreamTransport
from kvtransfer.transports.memory import MemoryFabric, MemoryTransport
from kvtransfer.transports.nixl import NixlTransport
from protos import kv_pb2_grpc
from services.engine.runner.gpu.device_blocks import DeviceBlocks
from services.tls.grpc_ends import Channels
from services.worker.kv_bytes import GrpcByteChannel, KvBytesServicer
from tests.forkserver import FORKSERVER

NUM_BLOCKS = 24
BLOCK_BYTES = 4096 + 512  # no multiple of a page
CANARY = 0xA5
_DEADLINE_S = 300.0


def new_worker_id() -> WorkerId:
    return WorkerId(secrets.randbits(64))


class Place(Enum):
    """Where a pool is."""

    HOST = auto()
    TENSOR = auto()  # on the CPU: what is done for device memory, without a device
    DEVICE = auto()
    GROUP = auto()  # two ranks' pools on the CPU, which share bytes in the middle of a block


def new_memory(
    block_bytes: int = BLOCK_BYTES, num_blocks: int = NUM_BLOCKS, *, place: Place = Place.HOST, canary: int = CANARY
) -> Memory:
    """A pool of canaries."""
    array = np.full((num_blocks, block_bytes), canary, dtype=np.uint8)
    return Memory(make_blocks(array, place), np.zeros(num_blocks, dtype=np.uint64))


def make_blocks(array: np.ndarray, place: Place) -> BlockMemory:
    """A pool that begins with what the array holds."""
    if place is Place.HOST:
        return HostBlocks(array)
    if place is Place.GROUP:
        return two_ranks(array)
    tensor = torch.from_numpy(array)
    return DeviceBlocks(tensor.cuda() if place is Place.DEVICE else tensor)


def two_ranks(array: np.ndarray) -> GroupBlocks:
    """Two thirds of each block for one rank, from a third on for the other."""
    size = array.shape[1]
    ranges = [[range(max(1, 2 * size // 3))], [range(size // 3, size)]]
    return GroupBlocks([array[:, own.start : own.stop].copy() for [own] in ranges], ranges)


def content(memory: Memory) -> np.ndarray:
    """uint8[num_blocks, block_bytes]: a copy of what the pool holds now."""
    blocks = memory.blocks
    if isinstance(blocks, HostBlocks):
        return blocks.array.copy()
    if isinstance(blocks, GroupBlocks):
        return content_of_all(blocks)
    assert isinstance(blocks, DeviceBlocks)
    copied: np.ndarray = blocks.pool.cpu().numpy().copy()
    return copied


def content_of_all(blocks: GroupBlocks) -> np.ndarray:
    """uint8[num_blocks, block_bytes]: what all ranks' pools hold now. They agree where several have a byte."""
    whole = np.full((blocks.num_blocks, blocks.block_bytes), -1, dtype=np.int16)
    for pool, own in zip(blocks.pools, blocks.ranges, strict=True):
        at = 0
        for place in own:
            here, known = pool[:, at : at + len(place)], whole[:, place.start : place.stop]
            assert ((known == here) | (known < 0)).all(), "two ranks have other bytes in the same place"
            known[:] = here
            at += len(place)
    assert (whole >= 0).all()
    return whole.astype(np.uint8)


def fill(memory: Memory, blocks: slice, values: int | np.ndarray) -> None:
    """Puts these bytes, uint8[n, block_bytes] or one for all, into some blocks."""
    if isinstance(memory.blocks, HostBlocks):
        memory.blocks.array[blocks] = values
        return
    if isinstance(memory.blocks, GroupBlocks):
        before = content(memory)
        before[blocks] = values
        every = np.arange(memory.blocks.num_blocks, dtype=np.uint32)
        memory.blocks.write(every, 0, before.tobytes())
        return
    assert isinstance(memory.blocks, DeviceBlocks)
    pool = memory.blocks.pool
    pool[blocks] = torch.as_tensor(values, dtype=torch.uint8, device=pool.device)
    if pool.is_cuda:
        torch.cuda.synchronize()  # as a step is complete when its blocks are announced


def pattern(block: int, salt: int) -> np.ndarray:
    """Bytes that tell a block, and where in it one looks."""
    return ((np.arange(BLOCK_BYTES) * 31 + block * 7 + salt) % 251).astype(np.uint8)


def block_read(
    read_id: int,
    worker: WorkerId,
    source: list[int],
    destination: list[int],
    *,
    salt: int = 1,
    generations: list[int] | None = None,
) -> BlockRead:
    """A read of blocks as `fill` left them, unless other generations are named."""
    words = [block + salt * 1000 for block in source] if generations is None else generations
    return BlockRead(
        read_id,
        worker,
        np.array(source, dtype=np.uint32),
        np.array(destination, dtype=np.uint32),
        np.array(words, dtype=np.uint64),
    )


@dataclass
class End:
    """A transport, and where its worker listens."""

    transport: Transport
    address: str = "nowhere:0"

    def close(self) -> None:
        """Ends what carries its bytes."""


class GrpcEnd(End):
    """A worker's end of byte streams: a server, and the loop that carries what this worker reads."""

    def __init__(self, worker_id: WorkerId, memory: Memory, part: int = 0) -> None:
        self.source = BlockSource(worker_id, memory)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server, port = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(_DEADLINE_S)
        super().__init__(ByteStreamTransport(self.source, self.dial, part), f"127.0.0.1:{port}")

    def dial(self, address: str) -> GrpcByteChannel:
        return GrpcByteChannel(address, self._loop, Channels())

    async def _serve(self) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()  # without the pings of a worker's, which take a busy machine for a stopped reader
        kv_pb2_grpc.add_KvBytesServicer_to_server(KvBytesServicer(self.source), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        await self._server.stop(None)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def make_end(kind: str, worker_id: WorkerId, memory: Memory, part: int = 0) -> End:
    """Of a transport between processes."""
    return GrpcEnd(worker_id, memory, part) if kind == "grpc" else End(NixlTransport(worker_id, memory, part))


def wait_for_ends(
    transport: Transport, num_ends: int, *others: Transport, deadline_s: float = _DEADLINE_S
) -> dict[int, ReadEnd]:
    """Polls until so many reads ended; `others` live in this process and need polling too."""
    ends: dict[int, ReadEnd] = {}
    deadline = time.monotonic() + deadline_s
    while len(ends) < num_ends:
        assert time.monotonic() < deadline, f"{len(ends)} of {num_ends} reads ended"
        for other in others:
            other.poll()
        for end in transport.poll():
            assert end.read_id not in ends, "a read ended twice"
            ends[end.read_id] = end
        time.sleep(0.0002)
    return ends


class Worker:
    """One worker's memory and transport, and what a test asks of them."""

    def __init__(self, transport: Transport, memory: Memory) -> None:
        self.transport = transport
        self.memory = memory

    def fill(self, salt: int) -> None:
        """Gives each block its pattern and each generation word a value of its own."""
        fill(self.memory, slice(None), np.stack([pattern(block, salt) for block in range(NUM_BLOCKS)]))
        self.memory.generations[:] = np.arange(NUM_BLOCKS) + salt * 1000

    def ping(self) -> None:
        """Answers, and so shows that it runs."""

    def set_generation(self, block: int, generation: int) -> None:
        self.memory.generations[block] = generation

    def read_all(self, worker: WorkerId, address: str, descriptor: bytes, generation: int) -> np.ndarray | None:
        """Reads the worker's whole pool to the same ids here; returns the generation words."""
        self.transport.add_worker(worker, address, descriptor)
        every = list(range(NUM_BLOCKS))
        self.transport.post(block_read(1, worker, every, every, generations=[generation] * NUM_BLOCKS))
        return wait_for_ends(self.transport, 1)[1].generations

    def content(self) -> np.ndarray:
        return content(self.memory)


class InProcessSource:
    """A worker over the memory fabric."""

    address = "nowhere:0"

    def __init__(self, fabric: MemoryFabric, place: Place = Place.HOST) -> None:
        self.worker_id = new_worker_id()
        self._fabric = fabric
        memory = new_memory(place=place)
        self._worker = Worker(MemoryTransport(fabric, self.worker_id, memory), memory)
        self.descriptor = self._worker.transport.descriptor()

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)

    def stop(self) -> None:
        self._fabric.hold(self.worker_id)

    def go_on(self) -> None:
        self._fabric.release(self.worker_id)

    def kill(self) -> None:
        self._fabric.kill(self.worker_id)


class ProcessSource:
    """A worker over NIXL or gRPC in a process of its own."""

    def __init__(self, kind: str, place: Place = Place.HOST) -> None:
        self.worker_id = new_worker_id()
        self._pipe, theirs = FORKSERVER.Pipe()
        self._process = FORKSERVER.Process(target=_serve, args=(theirs, kind, place, self.worker_id), daemon=True)
        self._process.start()
        theirs.close()
        self._hello: tuple[str, bytes] | None = None

    @property
    def address(self) -> str:
        return self._said()[0]

    @property
    def descriptor(self) -> bytes:
        return self._said()[1]

    def _said(self) -> tuple[str, bytes]:
        """Waits for the process on first use, so that several can start side by side."""
        if self._hello is None:
            self._hello = self._receive()
        return self._hello

    def call(self, method: str, *arguments: Any) -> Any:
        self._said()
        self._pipe.send((method, arguments))
        return self._receive()

    def stop(self) -> None:
        """SIGSTOP, and waits until every thread has stopped."""
        os.kill(self._pid, signal.SIGSTOP)
        while not all("State:\tT" in status.read_text() for status in Path(f"/proc/{self._pid}/task").glob("*/status")):
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and waits until it is dead."""
        self._process.kill()
        self._process.join(_DEADLINE_S)

    def close(self) -> None:
        """Lets the process close its transport and exit."""
        self._pipe.send(None)
        self._process.join(_DEADLINE_S)
        assert self._process.exitcode == 0

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _receive(self) -> Any:
        assert self._pipe.poll(_DEADLINE_S), "the source process does not answer"
        return self._pipe.recv()


Source = InProcessSource | ProcessSource


def _serve(pipe: Connection, kind: str, place: Place, worker_id: WorkerId) -> None:
    """Answers calls, and polls in between as a worker's transfer thread does."""
    memory = new_memory(place=place)
    end = make_end(kind, worker_id, memory)
    worker = Worker(end.transport, memory)
    pipe.send((end.address, end.transport.descriptor()))
    while True:
        end.transport.poll()
        if not pipe.poll(0.0005):
            continue
        call = pipe.recv()
        if call is None:
            break
        method, arguments = call
        pipe.send(getattr(worker, method)(*arguments))
    end.transport.close()
    end.close()
