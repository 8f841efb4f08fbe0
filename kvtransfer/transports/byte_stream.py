"""Block reads over a stream of bytes, which a `ByteChannel` carries: works wherever two workers can connect.

    consumer                                       producer
    ByteStreamTransport ── ByteRequest ──▶ ...  ──▶ BlockSource.open ─▶ Reading
        Landing         ◀── data, data, words ◀──      pieces, words

A producer may have several parts, each with a source of its own that has some ranges of every block, and so may a
reader: it asks each source for the ranges that it has room for, and then part 0 for the words.

The source copies a read's blocks piece by piece and reads their generation words afterwards. The request names the
generations, so the source stops at a block that has another content; the reader compares the words again, as for any
transport.

The reader itself writes the bytes that arrive into its pool. So a read that is abandoned is over at once, whatever its
source or the network do later, and none of its blocks is quarantined.

A request names the source's key, which is in the source's descriptor, and the generation of each block, which starts at
a random number of 62 bits in each life of a worker. A reader that did not get them by the control stream gets nothing.
A reader that got one block's generation could guess those of other blocks, so workers trust each other as with NIXL.
Sources of parts above 0 do not know generations: who has the key gets any of their blocks.
"""

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hmac import compare_digest
from typing import Protocol

import numpy as np

from kvtransfer.block_memory import BlockBytes
from kvtransfer.block_ranges import RangesOf
from kvtransfer.ids import WorkerId
from kvtransfer.regions import Region, cut_by, ranges_of
from kvtransfer.transports.base import BlockRead, Memory, Reach, ReadEnd, TransportError
from kvtransfer.transports.byte_descriptor import KEY_BYTES, ByteDescriptor
from kvtransfer.transports.byte_landing import Landing, LandingRead
from kvtransfer.transports.parts import parts_of

# Each piece is one message, whose cost hardly depends on its size, and one copy on either side's event loop, which
# does nothing else meanwhile: copying 256 KiB takes some 50 µs.
PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class ByteRequest:
    """The blocks that a reader asks a source for."""

    key: bytes
    blocks: np.ndarray  # uint32[n]
    generations: np.ndarray  # uint64[n]
    ranges: tuple[range, ...] | None = None  # of each block's bytes; None: all of them
    words: bool = True  # and the generation words, after the bytes


class ByteSink(Protocol):
    """Receiver of the answer to a request. One thread calls it, which may be any."""

    @property
    def wanted(self) -> bool:
        """False once nobody waits for the answer."""

    def take(self, data: bytes) -> bool:
        """Takes the next bytes; returns False when no more are wanted: the stream may end."""

    def end(self, generations: np.ndarray | None) -> None:
        """Ends the answer with its generation words, uint64[n], or without, uint64[0], where none were asked for.

        None: the stream broke. Again is no change.
        """


class ByteChannel(Protocol):
    """A connection to one worker. Its methods are called on the transfer thread and do not wait."""

    def read(self, request: ByteRequest, sink: ByteSink) -> None:
        """Sends the request; the thread that carries the bytes passes the answer to the sink, and always ends it."""

    def close(self) -> None:
        """Breaks the reads that are under way."""


Dial = Callable[[str], ByteChannel]  # makes a channel to the worker at host:port, which connects at its first read


class ReadRefused(Exception):
    """A request that no correct reader makes."""


class BlockSource:
    """A worker's memory, or a part of it, readable for workers that have its descriptor. Any thread may use it."""

    def __init__(self, worker_id: WorkerId, memory: Memory) -> None:
        self.worker_id = worker_id
        self.memory = memory
        self.ranges = ranges_of(memory.blocks.regions)
        self._key = secrets.token_bytes(KEY_BYTES)

    def descriptor(self) -> bytes:
        """Packs the size of this memory and its key."""
        blocks = self.memory.blocks
        return ByteDescriptor(self.worker_id, blocks.num_blocks, blocks.block_bytes, self._key, self.ranges).pack()

    def open(self, request: ByteRequest) -> "Reading":
        """Begins to answer a request. Raises ReadRefused."""
        if not compare_digest(request.key, self._key):
            raise ReadRefused("another worker's key")
        blocks, num_blocks = request.blocks, self.memory.blocks.num_blocks
        if not 0 < blocks.size == request.generations.size <= num_blocks:
            raise ReadRefused(f"{blocks.size} blocks and {request.generations.size} generations")
        if int(blocks.max()) >= num_blocks:
            raise ReadRefused("blocks outside the pool")
        if request.words and not self.memory.generations.size:
            raise ReadRefused("generation words of a part that has none")
        return Reading(self._bytes(request.ranges), self.memory.generations, request)

    def _bytes(self, ranges: tuple[range, ...] | None) -> BlockBytes:
        """Returns what is asked for of every block."""
        blocks = self.memory.blocks
        asked = (range(blocks.block_bytes),) if ranges is None else ranges
        if asked == self.ranges == (range(blocks.block_bytes),):
            return blocks
        if sum(map(len, asked)) > blocks.block_bytes:
            raise ReadRefused(f"more bytes than a block has, which is {blocks.block_bytes}")
        try:
            return RangesOf(blocks, asked)
        except ValueError as error:
            raise ReadRefused(str(error)) from error


class Reading:
    """One read, seen from its source."""

    def __init__(self, pool: BlockBytes, generations: np.ndarray, request: ByteRequest) -> None:
        """pool: what is asked for of every block. generations: of the pool's blocks, uint64[num_blocks] or [0]."""
        self._pool, self._generations = pool, generations
        self._blocks = request.blocks
        self._asked = request.generations
        self.has_words = request.words

    def pieces(self) -> Iterator[bytes]:
        """Yields the blocks' bytes, in order; stops before a block of another generation than was asked for."""
        block_bytes = self._pool.block_bytes
        num_bytes = self._blocks.size * block_bytes
        for start in range(0, num_bytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, num_bytes)
            if not self._holds(start // block_bytes, -(-end // block_bytes)):
                return
            yield self._pool.read(self._blocks, start, end)

    def words(self) -> np.ndarray:
        """Returns uint64[n] after the last piece: the generation asked for where the block has it, else its complement.

        The block's own generation is not sent: it would let the reader ask for content that it was not told of.
        """
        return np.where(self._generations[self._blocks] == self._asked, self._asked, ~self._asked)

    def _holds(self, first: int, end: int) -> bool:
        if not self._generations.size:
            return True
        blocks = self._blocks[first:end]
        return bool((self._generations[blocks] == self._asked[first:end]).all())


@dataclass(frozen=True, slots=True)
class _RemotePart:
    """A source of a worker."""

    channel: ByteChannel
    key: bytes
    ranges: tuple[range, ...] | None  # that are read from it; None: whole blocks
    landing: BlockBytes | None  # where they go; None: nothing is read from it


@dataclass(frozen=True, slots=True)
class _RemoteWorker:
    num_blocks: int
    first: _RemotePart  # which has the words
    giving: tuple[_RemotePart, ...]  # data

    @property
    def gives_words_with_data(self) -> bool:
        return self.giving == (self.first,)


class ByteStreamTransport:
    """One worker's memory, and channels to other workers. Baton's own gRPC carries the bytes, hence the name."""

    name = "grpc"

    def __init__(self, source: BlockSource, dial: Dial, part: int = 0) -> None:
        """part: the number of this process among those of the worker."""
        self._source = source
        self._dial = dial
        self._part = part
        self._workers: dict[WorkerId, _RemoteWorker] = {}
        self._open: dict[int, LandingRead] = {}
        self._ended: deque[Landing] = deque()  # filled by streams too
        self._ends: list[ReadEnd] = []

    def descriptor(self) -> bytes:
        """Returns `BlockSource.descriptor`."""
        return self._source.descriptor()

    def reach(self, descriptor: bytes) -> Reach:
        """Tells that the worker has to send the bytes."""
        for offer in parts_of("", descriptor):
            ByteDescriptor.unpack(offer.descriptor)
        return Reach(one_sided=False, why="it sends its blocks as bytes")

    def add_worker(self, worker: WorkerId, address: str, descriptor: bytes) -> None:
        """Adds a worker; connects to its parts with the first read. Raises TransportError."""
        if worker in self._workers:
            return
        offers = parts_of(address, descriptor)
        remotes = [ByteDescriptor.unpack(offer.descriptor) for offer in offers]
        for remote in remotes:
            self._check(worker, remote, remotes[0].num_blocks)
        memory = self._source.memory.blocks
        regions = [[Region(0, len(own), own.start, own.stop) for own in remote.ranges] for remote in remotes]
        try:
            cuts = cut_by(memory.regions, regions, memory.block_bytes, self._part % len(remotes))
        except ValueError as error:
            raise TransportError(f"its blocks cannot be read: {error}") from error
        parts = [
            self._remote_part(offer.address, remote.key, ranges_of(there for _, there in pairs))
            for number, (offer, remote, pairs) in enumerate(zip(offers, remotes, cuts, strict=True))
            if pairs or number == 0
        ]
        giving = tuple(part for part in parts if part.landing is not None)
        self._workers[worker] = _RemoteWorker(remotes[0].num_blocks, parts[0], giving)

    def remove_worker(self, worker: WorkerId) -> None:
        """Ends the worker's reads: nothing of them lands any more, even if the worker lives."""
        gone = self._workers.pop(worker, None)
        if gone is None:
            return
        for reading in self._open.values():
            if reading.read.worker == worker:
                reading.fail()
        _close(gone)

    def post(self, read: BlockRead) -> None:
        """Asks the worker's parts for the blocks."""
        worker = self._workers.get(read.worker)
        if worker is None or not read.fits(worker.num_blocks, self._source.memory.blocks.num_blocks):
            self._ends.append(ReadEnd(read.read_id, None))
            return
        reading = self._open[read.read_id] = LandingRead(read)
        for part in worker.giving:
            self._ask(reading, part, part.ranges, part.landing, words=worker.gives_words_with_data)

    def abandon(self, read_id: int) -> None:
        """Ends the read at once; its streams end when the next bytes arrive."""
        if (reading := self._open.get(read_id)) is not None:
            reading.fail()

    def set_pace(self, poll_s: float) -> None:
        """Does nothing: there is no other process to be told."""

    def poll(self) -> list[ReadEnd]:
        """Returns the ends of reads since the last call. Other workers read this memory without this thread's help."""
        while self._ended:
            landing = self._ended.popleft()
            reading = self._open[landing.read.read_id]
            reading.landing_ended(landing)
            if reading.lacks_words:
                self._ask(reading, self._workers[reading.read.worker].first, (), None, words=True)
            elif not reading.landings:
                del self._open[reading.read.read_id]
                self._ends.append(ReadEnd(reading.read.read_id, reading.result()))
        ends, self._ends = self._ends, []
        return ends

    def close(self) -> None:
        """Closes the channels to all workers. Raises TransportError while a read is open."""
        if self._open:
            raise TransportError(f"{len(self._open)} reads are open")
        while self._workers:
            _close(self._workers.popitem()[1])

    def _check(self, worker: WorkerId, part: ByteDescriptor, num_blocks: int) -> None:
        """Raises TransportError where a part is not one of the worker's, or its blocks are not like ours."""
        block_bytes = self._source.memory.blocks.block_bytes
        if part.worker_id != worker:
            raise TransportError(f"the descriptor is of {part.worker_id:016x}, not of {worker:016x}")
        if part.block_bytes != block_bytes:
            raise TransportError(f"blocks of {part.block_bytes} bytes, ours have {block_bytes}")
        if part.num_blocks != num_blocks:
            raise TransportError(f"{part.num_blocks} blocks in one part, {num_blocks} in another")

    def _remote_part(self, address: str, key: bytes, ranges: tuple[range, ...]) -> _RemotePart:
        memory = self._source.memory.blocks
        if ranges == (range(memory.block_bytes),):
            return _RemotePart(self._dial(address), key, None, memory)
        return _RemotePart(self._dial(address), key, ranges, RangesOf(memory, ranges) if ranges else None)

    def _ask(
        self,
        reading: LandingRead,
        part: _RemotePart,
        ranges: tuple[range, ...] | None,
        blocks: BlockBytes | None,
        *,
        words: bool,
    ) -> None:
        landing = Landing(reading.read, blocks, self._ended, words=words)
        reading.landings.append(landing)
        request = ByteRequest(part.key, reading.read.source, reading.read.generations, ranges, words)
        part.channel.read(request, landing)


def _close(worker: _RemoteWorker) -> None:
    for part in {id(part): part for part in (worker.first, *worker.giving)}.values():
        part.channel.close()
