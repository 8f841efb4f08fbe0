"""Reads of blocks between two processes of this host, as decode reads from prefill, over each transport that works.

Over gRPC also with TLS and the checks of certificates that workers make."""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import numpy as np

from kvtransfer.block_memory import BlockMemory, HostBlocks
from kvtransfer.ids import WorkerId
from kvtransfer.transports.base import BlockRead, Memory, ReadEnd, Transport, TransportError
from kvtransfer.transports.byte_stream import BlockSource
from loadtest.children import child
from loadtest.tables import Record, spread
from protos import kv_pb2_grpc
from services.config import TransportName, WorkerRole
from services.launcher import certificates
from services.protocol.grpc_options import SERVER_OPTIONS
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.grpc_ends import Channels, open_port
from services.tls.role_check import RoleInterceptor
from services.worker.callers import CALLERS
from services.worker.kv_bytes import GrpcByteChannel, KvBytesServicer
from services.worker.transports import make_transports

NUM_BLOCKS, BLOCK_BYTES = 256, 192 << 10  # a 4k prompt of a small model: 48 MiB
_READS = 12
POLL_S = 0.0005  # as the transfer thread's
GENERATION = 1

Read = Callable[[int], float]  # reads a number of blocks, and returns the seconds
MakeBlocks = Callable[
    [int, int, int], BlockMemory
]  # from num_blocks, block_bytes, and the content of each byte; pickled


def measure() -> list[Record]:
    """Measures the bytes a second of reads of all blocks; the first read, which connects, is left out."""
    sizes: Record = {"blocks": NUM_BLOCKS, "block_kib": BLOCK_BYTES >> 10, "unit": "GB/s"}
    with TemporaryDirectory(prefix="baton-") as directory:
        certificates.make(Path(directory), "127.0.0.1")
        ways: dict[str, tuple[TransportName, Path | None]] = {
            "nixl": (TransportName.NIXL, None),
            "grpc": (TransportName.GRPC, None),
            "grpc, TLS": (TransportName.GRPC, Path(directory)),
        }
        return [{"transport": name, **sizes, **_rate(*way)} for name, way in ways.items()]


def _rate(name: TransportName, mtls: Path | None) -> Record:
    try:
        with reading(name, NUM_BLOCKS, BLOCK_BYTES, mtls=mtls) as read:
            seconds = [read(NUM_BLOCKS) for _ in range(_READS)][1:]
    except (TransportError, EOFError) as error:
        return {"error": f"not here: {error or 'the source process ended'}"}
    return spread([NUM_BLOCKS * BLOCK_BYTES / value / 1e9 for value in seconds], (0, 50, 100))


def host_blocks(num_blocks: int, block_bytes: int, content: int) -> HostBlocks:
    """Allocates blocks in host memory, all bytes `content`."""
    return HostBlocks(np.full((num_blocks, block_bytes), content, dtype=np.uint8))


@contextmanager
def reading(
    name: TransportName,
    num_blocks: int,
    block_bytes: int,
    make_blocks: MakeBlocks = host_blocks,
    mtls: Path | None = None,
) -> Iterator[Read]:
    """Yields a function that reads blocks of another process's pool and returns the seconds it took.

    mtls: certificates of each role; None: plain text. Raises TransportError, and EOFError where that process ends.
    """
    with child(_serve, name, num_blocks, block_bytes, make_blocks, _tls(mtls, WorkerRole.PREFILL)) as producer:
        worker_id, address, descriptor = producer.pipe.recv()
        tls = _tls(mtls, WorkerRole.DECODE)
        with open_end(name, make_blocks(num_blocks, block_bytes, 0), 0, tls) as (source, transport, _):
            transport.add_worker(worker_id, address, descriptor)
            ids = count()

            def read(wanted: int) -> float:
                number = next(ids)
                first = (
                    number * wanted % (num_blocks - wanted + 1)
                )  # other blocks, which are in no cache, if there are enough
                blocks = np.arange(first, first + wanted, dtype=np.uint32)
                seconds = timed_read(transport, worker_id, number, blocks)
                arrived = source.memory.blocks.read(blocks, 0, wanted * block_bytes)
                assert (np.frombuffer(arrived, np.uint8) == GENERATION).all()
                return seconds

            yield read
            transport.close()


def _tls(mtls: Path | None, role: WorkerRole) -> CertificatePaths | None:
    return None if mtls is None else CertificatePaths.in_directory(mtls / role)


def _serve(
    pipe: Connection,
    name: TransportName,
    num_blocks: int,
    block_bytes: int,
    make_blocks: MakeBlocks,
    tls: CertificatePaths | None,
) -> None:
    """Runs the producer, which polls until nobody holds the pipe any more."""
    blocks = make_blocks(num_blocks, block_bytes, GENERATION)
    with open_end(name, blocks, GENERATION, tls) as (source, transport, address):
        pipe.send((source.worker_id, address, transport.descriptor()))
        while not pipe.poll(POLL_S):
            transport.poll()


def timed_read(transport: Transport, worker: WorkerId, read_id: int, blocks: np.ndarray) -> float:
    generations = np.full(len(blocks), GENERATION, dtype=np.uint64)
    start = time.perf_counter()
    transport.post(BlockRead(read_id, worker, blocks, blocks, generations))
    ends: list[ReadEnd] = transport.poll()
    while not ends:
        time.sleep(POLL_S)
        ends = transport.poll()
    spent = time.perf_counter() - start
    if ends[0].generations is None:
        raise TransportError("a read failed")
    return spent


@contextmanager
def open_end(
    name: TransportName, blocks: BlockMemory, generation: int, tls: CertificatePaths | None
) -> Iterator[tuple[BlockSource, Transport, str]]:
    """Makes one worker's transport and address, with its event loop on a thread, as in a worker."""
    memory = Memory(blocks, np.full(blocks.num_blocks, generation, dtype=np.uint64))
    source = BlockSource(WorkerId(secrets.randbits(64)), memory)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    files = None if tls is None else CertificateFiles(tls)
    server, port = asyncio.run_coroutine_threadsafe(_listen(source, files), loop).result()
    (transport,) = make_transports(name)(source, lambda address: GrpcByteChannel(address, loop, Channels(files)))
    try:
        yield source, transport, f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _listen(source: BlockSource, files: CertificateFiles | None) -> tuple[grpc.aio.Server, int]:
    interceptors = [] if files is None else [RoleInterceptor(CALLERS)]
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=interceptors)
    kv_pb2_grpc.add_KvBytesServicer_to_server(KvBytesServicer(source), server)
    port = open_port(server, "127.0.0.1:0", files)
    await server.start()
    return server, port
