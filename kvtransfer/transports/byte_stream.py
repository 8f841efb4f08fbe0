"""Block reads over a stream of bytes, which a `ByteChannel` carries: works wherever two workers can connect.

    consumer                                       producer
    ByteStreamTransport ── ByteRequest ──▶ ...  ──▶ BlockSource.open ─▶ Reading
        Landing         ◀── data, data, words ◀──      pieces, words

The source copies a read's blocks piece by piece and reads their generation words afterwards. The request names the
generations, so the source stops at a block that has another content; the reader compares the words again, as for any
transport.

The reader itself writes the bytes that arrive into its pool. So a read that is abandoned is over at once, whatever its
source or the network do later, and none of its blocks is quarantined.

A request names the source's key, which is in the source's descriptor, and the generation of each block, which starts at
a random number of 62 bits in each life of a worker. A reader that did not get them by the control stream gets nothing.
A reader that got one block's generation could guess those of other blocks, so workers trust each other as with NIXL.
"""

import secrets
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hmac import compare_digest
from threading import Lock
from typing import ClassVar, Protocol

import numpy as np

from kvtransfer.ids import WorkerId
from kvtransfer.transports.base import BlockRead, Memory, Reach, ReadEnd, TransportError
from kvtransfer.transports.sealed import Seal

# Each piece is one message, whose cost hardly depends on its size, and one copy on either side's event loop, which
# does nothing else meanwhile: copying 256 KiB takes some 50 µs.
PIECE_BYTES = 1 << 18
_KEY_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class ByteRequest:
    """The blocks that a reader asks a source for."""

    key: bytes
    blocks: np.ndarray  # uint32[n]
    generations: np.ndarray  # uint64[n]


class ByteSink(Protocol):
    """Receiver of the answer to a request. One thread calls it, which may be any."""

    @property
    def wanted(self) -> bool:
        """False once nobody waits for the answer."""

    def take(self, data: bytes) -> bool:
        """Takes the next bytes; returns False when no more are wanted: the stream may end."""

    def end(self, generations: np.ndarray | None) -> None:
        """Ends the answer with its generation words, uint64[n]; None where the stream broke. Again is no change."""


class ByteChannel(Protocol):
    """A connection to one worker. Its methods are called on the transfer thread and do not wait."""

    def read(self, request: ByteRequest, sink: ByteSink) -> None:
        """Sends the request; the thread that carries the bytes passes the answer to the sink, and always ends it."""

    def close(self) -> None:
        """Breaks the reads that are under way."""


Dial = Callable[[str], ByteChannel]  # makes a channel to the worker at host:port, which connects at its first read


class ReadRefused(Exception):
    """A request that no correct reader makes."""


@dataclass(frozen=True, slots=True)
class _Descriptor:
    """All that a reader must know of a source."""

    worker_id: WorkerId
    num_blocks: int
    block_bytes: int
    key: bytes

    _SEAL: ClassVar = Seal("grpc", b"BTBS", 1)
    _BODY: ClassVar = struct.Struct(f"<QQQ{_KEY_BYTES}s")

    def pack(self) -> bytes:
        return self._SEAL.close(self._BODY.pack(self.worker_id, self.num_blocks, self.block_bytes, self.key))

    @classmethod
    def unpack(cls, packed: bytes) -> "_Descriptor":
        """Reads what `pack` made. Raises TransportError for anything else."""
        worker_id, *others = cls._BODY.unpack_from(cls._SEAL.open(packed, cls._BODY.size))
        return cls(WorkerId(worker_id), *others)


class BlockSource:
    """A worker's memory, readable for workers that have its descriptor. Any thread may use it."""

    def __init__(self, worker_id: WorkerId, memory: Memory) -> None:
        self.worker_id = worker_id
        self.memory = memory
        self._key = secrets.token_bytes(_KEY_BYTES)

    def descriptor(self) -> bytes:
        """Packs the size of this memory and its key."""
        blocks = self.memory.blocks
        return _Descriptor(self.worker_id, blocks.num_blocks, blocks.block_bytes, self._key).pack()

    def open(self, request: ByteRequest) -> "Reading":
        """Begins to answer a request. Raises ReadRefused."""
        if not compare_digest(request.key, self._key):
            raise ReadRefused("another worker's key")
        blocks, num_blocks = request.blocks, self.memory.blocks.num_blocks
        if not 0 < blocks.size == request.generations.size <= num_blocks:
            raise ReadRefused(f"{blocks.size} blocks and {request.generations.size} generations")
        if int(blocks.max()) >= num_blocks:
            raise ReadRefused("blocks outside the pool")
        return Reading(self.memory, request)


class Reading:
    """One read, seen from its source."""

    def __init__(self, memory: Memory, request: ByteRequest) -> None:
        self._memory = memory
        self._blocks = request.blocks
        self._asked = request.generations

    def pieces(self) -> Iterator[bytes]:
        """Yields the blocks' bytes, in order; stops before a block of another generation than was asked for."""
        pool, block_bytes = self._memory.blocks, self._memory.blocks.block_bytes
        num_bytes = self._blocks.size * block_bytes
        for start in range(0, num_bytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, num_bytes)
            if not self._holds(start // block_bytes, -(-end // block_bytes)):
                return
            yield pool.read(self._blocks, start, end)

    def words(self) -> np.ndarray:
        """Returns uint64[n] after the last piece: the generation asked for where the block has it, else its complement.

        The block's own generation is not sent: it would let the reader ask for content that it was not told of.
        """
        return np.where(self._memory.generations[self._blocks] == self._asked, self._asked, ~self._asked)

    def _holds(self, first: int, end: int) -> bool:
        blocks = self._blocks[first:end]
        return bool((self._memory.generations[blocks] == self._asked[first:end]).all())


class Landing:
    """One read, seen from its reader: bytes that arrive go into the pool until the read is over.

    The stream's thread and the transfer thread both use it. Once `end` has returned, nothing lands any more.
    """

    def __init__(self, read: BlockRead, memory: Memory, ended: "deque[ReadEnd]") -> None:
        self.read = read
        self._memory = memory
        self._num_bytes = read.destination.size * memory.blocks.block_bytes
        self._arrived = 0
        self._ended = ended
        self._over = False
        self._lock = Lock()

    @property
    def wanted(self) -> bool:
        """See `ByteSink.wanted`."""
        return not self._over

    def take(self, data: bytes) -> bool:
        """See `ByteSink.take`."""
        with self._lock:
            if self._over or self._arrived + len(data) > self._num_bytes:
                return False
            self._memory.blocks.write(self.read.destination, self._arrived, data)
            self._arrived += len(data)
            return True

    def end(self, generations: np.ndarray | None) -> None:
        """See `ByteSink.end`. The read fails where the words are as asked for, but bytes are missing."""
        with self._lock:
            if self._over:
                return
            self._over = True
            if generations is not None and not self._is_sound(generations):
                generations = None
            self._ended.append(ReadEnd(self.read.read_id, generations))

    def _is_sound(self, generations: np.ndarray) -> bool:
        if generations.size != self.read.generations.size:
            return False
        return self._arrived == self._num_bytes or not np.array_equal(generations, self.read.generations)


@dataclass(frozen=True, slots=True)
class _RemoteWorker:
    num_blocks: int
    key: bytes
    channel: ByteChannel


class ByteStreamTransport:
    """One worker's memory, and channels to other workers. Baton's own gRPC carries the bytes, hence the name."""

    name = "grpc"

    def __init__(self, source: BlockSource, dial: Dial) -> None:
        self._source = source
        self._dial = dial
        self._workers: dict[WorkerId, _RemoteWorker] = {}
        self._open: dict[int, Landing] = {}
        self._ended: deque[ReadEnd] = deque()  # filled by streams too

    def descriptor(self) -> bytes:
        """Returns `BlockSource.descriptor`."""
        return self._source.descriptor()

    def reach(self, descriptor: bytes) -> Reach:
        """Tells that the worker has to send the bytes."""
        _Descriptor.unpack(descriptor)
        return Reach(one_sided=False, why="it sends its blocks as bytes")

    def add_worker(self, worker: WorkerId, address: str, descriptor: bytes) -> None:
        """Adds a worker; connects to it with the first read. Raises TransportError."""
        if worker in self._workers:
            return
        remote, block_bytes = _Descriptor.unpack(descriptor), self._source.memory.blocks.block_bytes
        if remote.worker_id != worker:
            raise TransportError(f"the descriptor is of {remote.worker_id:016x}, not of {worker:016x}")
        if remote.block_bytes != block_bytes:
            raise TransportError(f"blocks of {remote.block_bytes} bytes, ours have {block_bytes}")
        self._workers[worker] = _RemoteWorker(remote.num_blocks, remote.key, self._dial(address))

    def remove_worker(self, worker: WorkerId) -> None:
        """Ends the worker's reads: nothing of them lands any more, even if the worker lives."""
        gone = self._workers.pop(worker, None)
        if gone is None:
            return
        for landing in self._open.values():
            if landing.read.worker == worker:
                landing.end(None)
        gone.channel.close()

    def post(self, read: BlockRead) -> None:
        """Asks the worker for the blocks."""
        worker = self._workers.get(read.worker)
        if worker is None or not read.fits(worker.num_blocks, self._source.memory.blocks.num_blocks):
            self._ended.append(ReadEnd(read.read_id, None))
            return
        landing = self._open[read.read_id] = Landing(read, self._source.memory, self._ended)
        worker.channel.read(ByteRequest(worker.key, read.source, read.generations), landing)

    def abandon(self, read_id: int) -> None:
        """Ends the read at once; its stream ends when the next bytes arrive."""
        if (landing := self._open.get(read_id)) is not None:
            landing.end(None)

    def poll(self) -> list[ReadEnd]:
        """Returns the ends of reads since the last call. Other workers read this memory without this thread's help."""
        ends = []
        while self._ended:
            ends.append(end := self._ended.popleft())
            self._open.pop(end.read_id, None)
        return ends

    def close(self) -> None:
        """Closes the channels to all workers. Raises TransportError while a read is open."""
        if self._open:
            raise TransportError(f"{len(self._open)} reads are open")
        while self._workers:
            self._workers.popitem()[1].channel.close()
