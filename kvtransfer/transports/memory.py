"""Block reads between workers of one process, for tests that decide themselves when bytes move.

A `MemoryFabric` stands for the wire and the hosts behind it. It owns every read in flight, so a read lands when the
fabric says so, even if its reader has removed the source. A read has two phases, as over a network: first the data,
then the generation words. Reads end at the reader's next `poll`, unless a test holds their source.
"""

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from kvtransfer.ids import WorkerId
from kvtransfer.transports.base import BlockRead, Memory, Reach, ReadEnd, TransportError

_DESCRIPTOR = struct.Struct("<8sQQQ")  # magic, worker id, blocks, bytes of a block
_MAGIC = b"BTMEMORY"


class _Gate(Enum):
    """The phase up to which reads of one source get."""

    OPEN = auto()
    DATA_ONLY = auto()
    HELD = auto()


@dataclass(slots=True, eq=False)
class _Flight:
    """A read in flight."""

    reader: "MemoryTransport"
    source: "MemoryTransport"
    read: BlockRead
    has_data: bool = False


class MemoryFabric:
    """Joins the memory transports of one process. Several threads may use it.

    A test drives it: `hold` and `release` a source, stop between the phases with `release_data`, `kill` a worker.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # also taken by the transports
        self._members: dict[WorkerId, MemoryTransport] = {}
        self._gates: dict[WorkerId, _Gate] = {}
        self._flights: list[_Flight] = []

    def hold(self, source: WorkerId) -> None:
        """Stops reads of this worker in their present phase, as when its process is stopped."""
        with self._lock:
            self._gates[source] = _Gate.HELD

    def release_data(self, source: WorkerId) -> None:
        """Lands the data of this worker's reads; their generation words are not read yet."""
        with self._lock:
            self._gates[source] = _Gate.DATA_ONLY
            self._advance(lambda flight: flight.source.worker_id == source)

    def release(self, source: WorkerId) -> None:
        """Lets reads of this worker end, now and later. Reads whose reader has removed this worker land too."""
        with self._lock:
            self._gates.pop(source, None)
            self._advance(lambda flight: flight.source.worker_id == source)

    def kill(self, worker_id: WorkerId) -> None:
        """Ends a worker: neither its own reads nor reads of its memory ever land; its readers learn that at `poll`."""
        with self._lock:
            self._members.pop(worker_id, None)
            self._gates.pop(worker_id, None)
            lost = [flight for flight in self._flights if flight.source.worker_id == worker_id]
            self._flights = [
                flight
                for flight in self._flights
                if worker_id not in (flight.source.worker_id, flight.reader.worker_id)
            ]
            for flight in lost:
                flight.reader._end(flight.read.read_id, None)

    def _join(self, transport: "MemoryTransport") -> None:
        with self._lock:
            if transport.worker_id in self._members:
                raise TransportError(f"worker {transport.worker_id:016x} is on this fabric already")
            self._members[transport.worker_id] = transport

    def _leave(self, transport: "MemoryTransport") -> None:
        with self._lock:
            if self._members.get(transport.worker_id) is transport:
                del self._members[transport.worker_id]

    def _member(self, worker_id: WorkerId) -> "MemoryTransport | None":
        with self._lock:
            return self._members.get(worker_id)

    def _send(self, flight: _Flight) -> None:
        with self._lock:
            if flight.source.worker_id in self._members:
                self._flights.append(flight)
            else:
                flight.reader._end(flight.read.read_id, None)

    def _progress(self, reader: "MemoryTransport") -> None:
        with self._lock:
            self._advance(lambda flight: flight.reader is reader)

    def _advance(self, chosen: Callable[[_Flight], bool]) -> None:
        """Moves the chosen flights as far as their source's gate lets them."""
        still = []
        for flight in self._flights:
            gate = self._gates.get(flight.source.worker_id, _Gate.OPEN)
            if not chosen(flight) or gate is _Gate.HELD:
                still.append(flight)
                continue
            _land_data(flight)
            if gate is _Gate.DATA_ONLY:
                still.append(flight)
            else:
                words = flight.source.memory.generations[flight.read.source]
                flight.reader._end(flight.read.read_id, words)
        self._flights = still


class MemoryTransport:
    """One worker's end of a `MemoryFabric`. Raises TransportError when the fabric has this worker id already."""

    name = "memory"

    def __init__(self, fabric: MemoryFabric, worker_id: WorkerId, memory: Memory) -> None:
        self.worker_id = worker_id
        self.memory = memory
        self._fabric = fabric
        self._workers: dict[WorkerId, MemoryTransport] = {}
        self._open: dict[int, WorkerId] = {}  # read id -> the worker that is read
        self._ends: list[ReadEnd] = []
        fabric._join(self)

    def descriptor(self) -> bytes:
        """Names this transport on its fabric."""
        return _DESCRIPTOR.pack(_MAGIC, self.worker_id, self.memory.blocks.num_blocks, self.memory.blocks.block_bytes)

    def reach(self, descriptor: bytes) -> Reach:
        """Tells that every read is one-sided: the fabric moves the bytes."""
        _unpack(descriptor)
        return Reach(one_sided=True, why="both are in one process")

    def add_worker(self, worker: WorkerId, address: str, descriptor: bytes) -> None:
        """Makes a worker of the same fabric readable. Raises TransportError."""
        if worker in self._workers:
            return
        worker_id, block_bytes = _unpack(descriptor)
        if worker_id != worker:
            raise TransportError(f"the descriptor is of {worker_id:016x}, not of {worker:016x}")
        if block_bytes != self.memory.blocks.block_bytes:
            raise TransportError(f"blocks of {block_bytes} bytes, ours have {self.memory.blocks.block_bytes}")
        source = self._fabric._member(worker)
        if source is None:
            raise TransportError(f"no worker {worker:016x} on this fabric")
        self._workers[worker] = source

    def remove_worker(self, worker: WorkerId) -> None:
        """Reports the worker's open reads as failed. Their bytes land nevertheless."""
        self._workers.pop(worker, None)
        with self._fabric._lock:
            for read_id in [read_id for read_id, source in self._open.items() if source == worker]:
                self._end(read_id, None)

    def post(self, read: BlockRead) -> None:
        """Passes a read to the fabric."""
        source = self._workers.get(read.worker)
        with self._fabric._lock:
            self._open[read.read_id] = read.worker
            if source is None or not read.fits(source.memory.blocks.num_blocks, self.memory.blocks.num_blocks):
                self._end(read.read_id, None)
            else:
                self._fabric._send(_Flight(self, source, read))

    def abandon(self, read_id: int) -> None:
        """Lets the read run: it ends when its bytes land."""

    def set_pace(self, poll_s: float) -> None:
        """Does nothing: there is no other process to be told."""

    def poll(self) -> list[ReadEnd]:
        """Returns the ends of reads since the last call."""
        with self._fabric._lock:
            if self._open:
                self._fabric._progress(self)
            ends, self._ends = self._ends, []
        return ends

    def close(self) -> None:
        """Leaves the fabric. Raises TransportError while a read is open."""
        if self._open:
            raise TransportError(f"{len(self._open)} reads are open")
        self._workers.clear()
        self._fabric._leave(self)

    def _end(self, read_id: int, generations: np.ndarray | None) -> None:
        """Notes a read's end once: a read that was reported as failed and lands later is not reported again."""
        if self._open.pop(read_id, None) is not None:
            self._ends.append(ReadEnd(read_id, generations))


def _unpack(descriptor: bytes) -> tuple[int, int]:
    """Reads the worker id and the bytes of a block. Raises TransportError."""
    if len(descriptor) != _DESCRIPTOR.size or not descriptor.startswith(_MAGIC):
        raise TransportError("not a descriptor of the memory transport")
    _, worker_id, _, block_bytes = _DESCRIPTOR.unpack(descriptor)
    return worker_id, block_bytes


def _land_data(flight: _Flight) -> None:
    if not flight.has_data:
        source, read = flight.source.memory.blocks, flight.read
        data = source.read(read.source, 0, read.source.size * source.block_bytes)
        flight.reader.memory.blocks.write(read.destination, 0, data)
        flight.has_data = True
