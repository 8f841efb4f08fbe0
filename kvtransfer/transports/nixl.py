"""Block reads over NIXL, between processes and hosts. The `nixl` package is imported here alone.

NIXL's own progress thread would keep a core busy, so bytes move only inside `post` and `poll`: a producer must poll
too, or a first read of its memory cannot even connect. After that, a producer on the same host is read without its
help: UCX copies from its address space (`cma`, which needs both processes to belong to one user), the read runs to its
end inside `post`, and `post` releases the interpreter lock meanwhile. UCX chooses the wire, and its environment
(UCX_TLS) is respected.

A pool may be in device memory (NIXL's VRAM): on one host UCX then copies from device to device (CUDA IPC), and `poll`
sees the end. The generation words are in host memory wherever the pool is. A pool in device memory and one in host
memory do not read each other: UCX would have the producer send its bytes, and the `grpc` transport does that with less
to go wrong.

A block may be in several regions, on either side: it is read in as many pieces as it takes (`kvtransfer/regions.py`).

A read has two phases: first the data; then, posted only when the data has arrived, the generation words of the same
blocks. The words go into a scratch buffer of this read. A buffer whose read failed is never used again.

NIXL has no timeout. A read ends when NIXL says so, or when its producer, whose process is seen to be gone, is removed.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from kvtransfer.block_memory import BlockMemory
from kvtransfer.ids import WorkerId
from kvtransfer.regions import Region, areas, cut
from kvtransfer.transports.base import BlockRead, Memory, Reach, ReadEnd, TransportError
from kvtransfer.transports.cuda_driver import CudaDriver
from kvtransfer.transports.nixl_descriptor import NixlDescriptor
from kvtransfer.transports.one_sided import DevicePool, Here

_PAGE_WORDS = 512  # generation words are read in pages of 4 KiB: about as fast as one word
_WORD_BYTES = 8
# Unless told otherwise, UCX reads by CUDA IPC only between devices that NVLink joins, and else has the producer send,
# even over TCP. Two workers may share one device, so CUDA IPC is allowed there too. The environment overrides this.
_DEVICE_CONFIG = "CUDA_IPC_ENABLE_GET_ZCOPY=on"
_LOCAL_SIDE = "NIXL_INIT_AGENT"


class _Kind(StrEnum):
    """NIXL's words for kinds of memory."""

    HOST = "DRAM"
    DEVICE = "VRAM"


@dataclass(frozen=True, slots=True)
class _Place:
    """The memory that an address belongs to."""

    kind: _Kind = _Kind.HOST
    device: int = 0  # NIXL's number; host memory has number 0

    @classmethod
    def of(cls, device: int | None) -> "_Place":
        return cls() if device is None else cls(_Kind.DEVICE, device)


_HOST = _Place()


class _State(StrEnum):
    """NIXL's words for the state of a transfer."""

    MOVING = "PROC"
    DONE = "DONE"
    FAILED = "ERR"


@dataclass(frozen=True, slots=True, eq=False)
class _Scratch:
    """A buffer for the generation words of one read at a time; laid out like the producer's array."""

    words: np.ndarray  # uint64[num_blocks of the producer]
    registration: Any
    pages: Any  # prepared descriptor list


@dataclass(frozen=True, slots=True, eq=False)
class _RemoteWorker:
    """Another worker's memory, prepared for reads by index."""

    agent_name: str
    num_blocks: int
    num_cuts: int  # pieces of a block that are read one by one
    blocks: Any  # prepared descriptor list: for each cut, one entry for each block
    destinations: Any  # the same of this worker's pool
    pages: Any  # prepared descriptor list: one entry for each page of generation words
    free_scratch: list[_Scratch] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _OpenRead:
    """A read that NIXL works on: its data or, once it has a scratch buffer, its generation words."""

    read: BlockRead
    worker: _RemoteWorker
    transfer: Any
    scratch: _Scratch | None = None


class NixlTransport:
    """One NIXL agent with the UCX backend over one worker's memory. Used by one thread."""

    name = "nixl"

    def __init__(self, worker_id: WorkerId, memory: Memory) -> None:
        """Registers the memory, whose addresses must not change. Raises TransportError."""
        pool, generations = memory.blocks, memory.generations
        pool.bind_thread()
        self._pool, self._generations = pool, generations  # kept alive: they are registered
        self._own: dict[tuple[Region, ...], Any] = {}  # prepared descriptor lists of the pool, by how it is cut
        self._workers: dict[WorkerId, _RemoteWorker] = {}
        self._open: dict[int, _OpenRead] = {}
        self._ends: list[ReadEnd] = []
        self._lost: list[object] = []  # transfers, and buffers in which bytes may still land; kept for good
        nixl = _import_nixl()
        self._here = Here(os.environ, pool=_device_pool(pool))
        self._errors = _error_types(nixl)
        with self._translated("cannot set up NIXL"):
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent = nixl.nixl_agent(_agent_name(worker_id), config)
            if "UCX" not in self._agent.get_plugin_list():
                raise TransportError("this NIXL has no UCX plugin")
            self._agent.create_backend("UCX", {} if pool.device is None else {"engine_config": _DEVICE_CONFIG})
            place = _Place.of(pool.device)
            size = pool.num_blocks * pool.block_bytes
            self._registrations = [
                *(self._register(*area, place) for area in areas(pool.regions, pool.block_bytes, 0, size)),
                self._register(generations.ctypes.data, generations.nbytes),
            ]
            self._prepare_own(pool.regions)
            # Made before any scratch buffer is registered: it gives access to the pool and its generations alone.
            self._descriptor = NixlDescriptor(
                worker_id=worker_id,
                num_blocks=pool.num_blocks,
                block_bytes=pool.block_bytes,
                regions=pool.regions,
                generations_address=generations.ctypes.data,
                whereabouts=self._here.whereabouts,
                agent_metadata=self._agent.get_agent_metadata(),
            ).pack()

    def descriptor(self) -> bytes:
        """Returns agent metadata and addresses: some 700 bytes, 32 more for each region. It is a key to the pool."""
        return self._descriptor

    def reach(self, descriptor: bytes) -> Reach:
        """Tells by `one_sided` how reads would run: NIXL itself does not say which wire UCX takes."""
        return self._here.reach(NixlDescriptor.unpack(descriptor).whereabouts)

    def add_worker(self, worker: WorkerId, address: str, descriptor: bytes) -> None:
        """Prepares the descriptor lists of a worker's whole pool, cut at the borders of both pools' regions.

        UCX chooses the wire. Raises TransportError.
        """
        if worker in self._workers:
            return
        remote = NixlDescriptor.unpack(descriptor)
        if remote.worker_id != worker:
            raise TransportError(f"the descriptor is of {remote.worker_id:016x}, not of {worker:016x}")
        if remote.block_bytes != self._pool.block_bytes:
            raise TransportError(f"blocks of {remote.block_bytes} bytes, ours have {self._pool.block_bytes}")
        place = _Place.of(remote.whereabouts.device)
        if place.kind is not _Place.of(self._pool.device).kind:
            raise TransportError(f"its pool is in {place.kind}, ours is not, and UCX would need its help")
        try:
            cuts = cut(self._pool.regions, remote.regions, remote.block_bytes)
        except ValueError as error:
            raise TransportError(f"its blocks cannot be read: {error}") from error
        with self._translated("cannot use a worker's descriptor"):
            agent_name = self._agent.add_remote_agent(remote.agent_metadata).decode(errors="replace")
            if agent_name != _agent_name(worker):
                raise TransportError(f"the descriptor's agent is {agent_name!r}, not {_agent_name(worker)!r}")
            destinations = self._prepare_own(tuple(here for here, _ in cuts))
            rows = _block_rows([there for _, there in cuts], remote.num_blocks, place)
            blocks = self._prepare(agent_name, rows, place)
            pages = self._prepare(agent_name, _page_rows(remote.generations_address, remote.num_blocks))
        self._workers[worker] = _RemoteWorker(agent_name, remote.num_blocks, len(cuts), blocks, destinations, pages)

    def remove_worker(self, worker: WorkerId) -> None:
        """Removes the worker's agent. Bytes of open reads still land if the worker lives."""
        gone = self._workers.pop(worker, None)
        if gone is None:
            return
        for read_id in [read_id for read_id, open_read in self._open.items() if open_read.worker is gone]:
            self._abandon(self._open.pop(read_id))
            self._ends.append(ReadEnd(read_id, None))
        self._release_worker(gone)

    def post(self, read: BlockRead) -> None:
        """Starts a read. On one host it has usually ended on return; `poll` reports the end."""
        worker = self._workers.get(read.worker)
        if worker is None or not read.fits(worker.num_blocks, self._pool.num_blocks):
            self._ends.append(ReadEnd(read.read_id, None))
            return
        here = _entries(read.destination, self._pool.num_blocks, worker.num_cuts)
        there = _entries(read.source, worker.num_blocks, worker.num_cuts)
        transfer = self._make(worker.destinations, here, worker.blocks, there)
        if transfer is None:
            self._ends.append(ReadEnd(read.read_id, None))
            return
        self._open[read.read_id] = open_read = _OpenRead(read, worker, transfer)
        self._advance(open_read, self._start(transfer))

    def abandon(self, read_id: int) -> None:
        """Lets the read run to its end: NIXL cannot take a posted read back."""

    def poll(self) -> list[ReadEnd]:
        """Returns the ends of reads since the last call; takes half a microsecond when there is nothing to do."""
        self._agent.get_new_notifs()  # no worker sends one, but this call makes UCX serve other workers' reads
        for open_read in list(self._open.values()):
            self._advance(open_read, self._state(open_read.transfer))
        ends, self._ends = self._ends, []
        return ends

    def close(self) -> None:
        """Removes all workers and deregisters the memory. Raises TransportError while a read is open."""
        if self._open:
            raise TransportError(f"{len(self._open)} reads are open")
        with self._translated("cannot close NIXL"):
            while self._workers:
                self._release_worker(self._workers.popitem()[1])
            for prepared in self._own.values():
                prepared.release()
            for registration in self._registrations:
                self._agent.deregister_memory(registration)
        del self._agent

    def _advance(self, open_read: _OpenRead, state: _State) -> None:
        """Takes a read as far as it gets without waiting; `state` is that of its current transfer."""
        if state is _State.DONE and open_read.scratch is None:
            state = self._start_words(open_read)
        if state is _State.DONE:
            self._finish(open_read)
        elif state is _State.FAILED:
            self._fail(open_read)

    def _start_words(self, open_read: _OpenRead) -> _State:
        """Starts the second phase: reads the pages with the generation words of the read's blocks."""
        worker = open_read.worker
        try:
            scratch = worker.free_scratch.pop() if worker.free_scratch else self._make_scratch(worker.num_blocks)
        except TransportError:
            return _State.FAILED
        pages = np.unique(open_read.read.source // _PAGE_WORDS)
        transfer = self._make(scratch.pages, pages, worker.pages, pages)
        if transfer is None:
            worker.free_scratch.append(scratch)
            return _State.FAILED
        open_read.transfer.release()
        open_read.transfer, open_read.scratch = transfer, scratch
        return self._start(transfer)

    def _finish(self, open_read: _OpenRead) -> None:
        """Reports the words of a read whose phases have both ended, and keeps its scratch buffer for the next read."""
        read, scratch = open_read.read, open_read.scratch
        assert scratch is not None
        del self._open[read.read_id]
        open_read.transfer.release()
        self._ends.append(ReadEnd(read.read_id, scratch.words[read.source]))
        open_read.worker.free_scratch.append(scratch)

    def _fail(self, open_read: _OpenRead) -> None:
        """Reports a failed read once NIXL has released it; until then it stays open, and its blocks quarantined."""
        try:
            open_read.transfer.release()
        except self._errors:
            return
        del self._open[open_read.read.read_id]
        self._lost.append(open_read)
        self._ends.append(ReadEnd(open_read.read.read_id, None))

    def _abandon(self, open_read: _OpenRead) -> None:
        """Abandons a read of a removed worker. Its transfer and buffer are kept for good: bytes may still land."""
        self._lost.append(open_read)
        with suppress(*self._errors):
            open_read.transfer.release()

    def _make(self, local: Any, local_index: np.ndarray, remote: Any, remote_index: np.ndarray) -> Any:
        """Makes a transfer between entries of two prepared lists; None when NIXL refuses, as for a worker that is gone.

        NIXL merges adjacent entries itself.
        """
        try:
            return self._agent.make_prepped_xfer(
                "READ", local, local_index.astype(np.int32), remote, remote_index.astype(np.int32)
            )
        except self._errors:
            return None

    def _start(self, transfer: Any) -> _State:
        try:
            return _State(self._agent.transfer(transfer))
        except self._errors:
            return _State.FAILED

    def _state(self, transfer: Any) -> _State:
        try:
            return _State(self._agent.check_xfer_state(transfer))
        except self._errors:
            return _State.FAILED

    def _make_scratch(self, num_words: int) -> _Scratch:
        words = np.zeros(num_words, dtype=np.uint64)
        with self._translated("cannot register a buffer for generation words"):
            registration = self._register(words.ctypes.data, words.nbytes)
            return _Scratch(words, registration, self._prepare(_LOCAL_SIDE, _page_rows(words.ctypes.data, num_words)))

    def _release_worker(self, worker: _RemoteWorker) -> None:
        with self._translated("cannot release a worker"):
            for scratch in worker.free_scratch:
                scratch.pages.release()
                self._agent.deregister_memory(scratch.registration)
            worker.blocks.release()
            worker.pages.release()
            self._agent.remove_remote_agent(worker.agent_name)

    def _register(self, address: int, num_bytes: int, place: _Place = _HOST) -> Any:
        return self._agent.register_memory([(address, num_bytes, place.device, "")], place.kind.value)

    def _prepare_own(self, cuts: tuple[Region, ...]) -> Any:
        """Returns the descriptor list of the pool that is cut so; workers whose pools lie alike share it."""
        if cuts not in self._own:
            place = _Place.of(self._pool.device)
            self._own[cuts] = self._prepare(_LOCAL_SIDE, _block_rows(cuts, self._pool.num_blocks, place), place)
        return self._own[cuts]

    def _prepare(self, agent_name: str, rows: np.ndarray, place: _Place = _HOST) -> Any:
        return self._agent.prep_xfer_dlist(agent_name, rows, place.kind.value)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransportError(f"{what}: {error}") from error


def _agent_name(worker_id: WorkerId) -> str:
    return f"{worker_id:016x}"


def _device_pool(pool: BlockMemory) -> DevicePool | None:
    if pool.device is None:
        return None
    [region] = pool.regions  # a group's blocks are in host memory
    return DevicePool(CudaDriver(), pool.device, region.address)


def _block_rows(cuts: Sequence[Region], num_blocks: int, place: _Place) -> np.ndarray:
    """Describes a pool by one strided row for each cut: uint64[cuts, 5] of address, length, device, stride, count."""
    rows = [(each.address, each.num_bytes, place.device, each.stride, num_blocks) for each in cuts]
    return np.array(rows, dtype=np.uint64)


def _entries(blocks: np.ndarray, num_blocks: int, num_cuts: int) -> np.ndarray:
    """Returns int[num_cuts * n], the entries of blocks (uint32[n]) in a list of these cuts: cut by cut, since NIXL
    merges entries that follow each other in memory.
    """
    if num_cuts == 1:
        return blocks
    first = np.arange(0, num_cuts * num_blocks, num_blocks)
    entries: np.ndarray = (first[:, None] + blocks).reshape(-1)
    return entries


def _page_rows(address: int, num_words: int) -> np.ndarray:
    """Describes generation words by page, the last one shorter: uint64[1 or 2, 5], columns as of `_block_rows`."""
    full, rest = divmod(num_words, _PAGE_WORDS)
    page_bytes, rest_bytes = _PAGE_WORDS * _WORD_BYTES, rest * _WORD_BYTES
    rows = [
        (address, page_bytes, _HOST.device, page_bytes, full),
        (address + full * page_bytes, rest_bytes, _HOST.device, rest_bytes, 1),
    ]
    return np.array([row for row in rows if row[1] and row[4]], dtype=np.uint64)


def _import_nixl() -> Any:
    try:
        import nixl
    except ImportError as error:
        raise TransportError(f"the nixl package is not usable here: {error}") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # at INFO, NIXL writes every agent's start to stdout
    return nixl


def _error_types(nixl: Any) -> tuple[type[Exception], ...]:
    """Lists NIXL's exceptions, which have no common base class, and those of its bindings for bad arguments."""
    own = tuple(error for name, error in vars(nixl._bindings).items() if name.endswith("Error"))
    return (*own, RuntimeError, ValueError)
