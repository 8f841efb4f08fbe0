"""Block reads over NIXL, between processes and hosts.

NIXL's own progress thread would keep a core busy, so it has none, and bytes move only inside `post` and `poll`: a
producer must poll too, or a first read of its memory cannot even connect. After that, a producer on the same host is
read without its help: UCX copies from its address space (`cma`, which needs both processes to belong to one user), the
read runs to its end inside `post`, and `post` releases the interpreter lock meanwhile. UCX chooses the wire, and its
environment (UCX_TLS) is respected.

A pool may be in device memory (NIXL's VRAM): on one host UCX then copies from device to device (CUDA IPC), and `poll`
sees the end. The generation words are in host memory wherever the pool is. A pool in device memory and one in host
memory do not read each other: UCX would have the producer send its bytes, and the `grpc` transport does that with less
to go wrong.

A block may be in several regions, on either side: it is read in as many pieces as it takes (`kvtransfer/regions.py`).
The regions of a producer may be in several processes. Each of them is an agent of its own, from which an agent here
reads what it has room for; so a read is as many transfers as there are agents to read from.

A read has two phases: first the data; then, posted only when all data has arrived, the generation words of the same
blocks, which part 0 of the producer has. The words go into a scratch buffer of this read. A buffer whose read failed is
never used again.

NIXL has no timeout. A read ends when NIXL says so, or when its producer, whose process is seen to be gone, is removed.

An agent that goes while NIXL works on its reads may take its process down (SIGSEGV). So a transport that is not closed
stays until the process ends, whoever drops it.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtransfer.block_memory import BlockMemory
from kvtransfer.ids import WorkerId
from kvtransfer.regions import Region, areas, cut_by
from kvtransfer.transports.base import BlockRead, Memory, Reach, ReadEnd, TransportError
from kvtransfer.transports.cuda_driver import CudaDriver
from kvtransfer.transports.nixl_agent import NixlAgent, TransferState
from kvtransfer.transports.nixl_descriptor import NixlDescriptor
from kvtransfer.transports.nixl_lists import PAGE_WORDS, MemoryPlace, block_rows, entries, page_rows
from kvtransfer.transports.one_sided import DevicePool, Here
from kvtransfer.transports.parts import parts_of

_not_closed: "set[NixlTransport]" = set()


@dataclass(frozen=True, slots=True, eq=False)
class _Scratch:
    """A buffer for the generation words of one read at a time; laid out like the producer's array."""

    words: np.ndarray  # uint64[num_blocks of the producer]
    registration: Any
    pages: Any  # prepared descriptor list


@dataclass(frozen=True, slots=True, eq=False)
class _RemotePart:
    """The bytes of a worker's blocks that one agent gives, prepared for reads by index."""

    num_cuts: int  # pieces of a block that are read one by one
    blocks: Any  # prepared descriptor list: for each cut, one entry for each block
    destinations: Any  # the same of this worker's pool


@dataclass(frozen=True, slots=True, eq=False)
class _RemoteWorker:
    """Another worker's memory, prepared for reads by index."""

    agent_names: tuple[str, ...]
    num_blocks: int
    parts: tuple[_RemotePart, ...]  # that have bytes for this pool
    pages: Any  # prepared descriptor list: one entry for each page of generation words
    free_scratch: list[_Scratch] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Transfer:
    """A transfer, and its state when it was last looked at."""

    handle: Any
    state: TransferState


@dataclass(slots=True, eq=False)
class _OpenRead:
    """A read that NIXL works on: its data or, once it has a scratch buffer, its generation words."""

    read: BlockRead
    worker: _RemoteWorker
    transfers: list[_Transfer]  # that are not over
    scratch: _Scratch | None = None
    failed: bool = False


class NixlTransport:
    """One NIXL agent with the UCX backend over one worker's memory. Used by one thread."""

    name = "nixl"

    def __init__(self, worker_id: WorkerId, memory: Memory, part: int = 0) -> None:
        """Registers the memory, whose addresses must not change. Raises TransportError.

        part: the number of this process among those of the worker; those above 0 have no generation words.
        """
        pool, generations = memory.blocks, memory.generations
        pool.bind_thread()
        self._pool, self._generations = pool, generations  # kept alive: they are registered
        self._part = part
        self._own: dict[tuple[Region, ...], Any] = {}  # prepared descriptor lists of the pool, by how it is cut
        self._workers: dict[WorkerId, _RemoteWorker] = {}
        self._open: dict[int, _OpenRead] = {}
        self._ends: list[ReadEnd] = []
        self._lost: list[object] = []  # transfers, and buffers in which bytes may still land; kept for good
        self._here = Here(os.environ, pool=_device_pool(pool))
        self._agent = NixlAgent(_agent_name(worker_id, part), device=pool.device is not None)
        with self._agent.translated("cannot set up NIXL"):
            place = MemoryPlace.of(pool.device)
            size = pool.num_blocks * pool.block_bytes
            self._registrations = [
                *(self._agent.register(*area, place) for area in areas(pool.regions, pool.block_bytes, 0, size)),
                *([self._agent.register(generations.ctypes.data, generations.nbytes)] if generations.size else []),
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
                agent_metadata=self._agent.metadata(),
            ).pack()
        _not_closed.add(self)

    def descriptor(self) -> bytes:
        """Returns agent metadata and addresses: some 700 bytes, 32 more for each region. It is a key to the pool."""
        return self._descriptor

    def reach(self, descriptor: bytes) -> Reach:
        """Tells by `one_sided` how reads would run: NIXL itself does not say which wire UCX takes."""
        parts = [NixlDescriptor.unpack(offer.descriptor) for offer in parts_of("", descriptor)]
        return Reach.of_all([self._here.reach(part.whereabouts) for part in parts])

    def add_worker(self, worker: WorkerId, address: str, descriptor: bytes) -> None:
        """Prepares the descriptor lists of a worker's whole pool, cut at the borders of both pools' regions.

        UCX chooses the wire. Raises TransportError.
        """
        if worker in self._workers:
            return
        parts = [NixlDescriptor.unpack(offer.descriptor) for offer in parts_of(address, descriptor)]
        for part in parts:
            self._check(worker, part, parts[0].num_blocks)
        try:
            regions = [part.regions for part in parts]
            cuts = cut_by(self._pool.regions, regions, self._pool.block_bytes, self._part % len(parts))
        except ValueError as error:
            raise TransportError(f"its blocks cannot be read: {error}") from error
        with self._agent.translated("cannot use a worker's descriptor"), ExitStack() as undo:
            names = tuple(self._add_agent(worker, number, part, undo) for number, part in enumerate(parts))
            found = tuple(
                self._prepare_part(name, part, pairs, undo)
                for name, part, pairs in zip(names, parts, cuts, strict=True)
                if pairs
            )
            pages = self._agent.prepare(page_rows(parts[0].generations_address, parts[0].num_blocks), of=names[0])
            undo.pop_all()
        self._workers[worker] = _RemoteWorker(names, parts[0].num_blocks, found, pages)

    def remove_worker(self, worker: WorkerId) -> None:
        """Removes the worker's agent. Bytes of open reads still land if the worker lives."""
        gone = self._workers.pop(worker, None)
        if gone is None:
            return
        for read_id in [read_id for read_id, open_read in self._open.items() if open_read.worker is gone]:
            self._abandon(self._open.pop(read_id))
            self._ends.append(ReadEnd(read_id, None))
        self._release_worker(gone)

    def _check(self, worker: WorkerId, part: NixlDescriptor, num_blocks: int) -> None:
        """Raises TransportError where a part is not one of the worker's, or its blocks are not like ours."""
        if part.worker_id != worker:
            raise TransportError(f"the descriptor is of {part.worker_id:016x}, not of {worker:016x}")
        if part.block_bytes != self._pool.block_bytes:
            raise TransportError(f"blocks of {part.block_bytes} bytes, ours have {self._pool.block_bytes}")
        if part.num_blocks != num_blocks:
            raise TransportError(f"{part.num_blocks} blocks in one part, {num_blocks} in another")
        place = MemoryPlace.of(part.whereabouts.device)
        if place.kind is not MemoryPlace.of(self._pool.device).kind:
            raise TransportError(f"its pool is in {place.kind}, ours is not, and UCX would need its help")

    def _add_agent(self, worker: WorkerId, number: int, part: NixlDescriptor, undo: ExitStack) -> str:
        name, wanted = self._agent.add_remote(part.agent_metadata), _agent_name(worker, number)
        if name != wanted:  # it stays: it may be that of a worker which is read
            raise TransportError(f"the descriptor's agent is {name!r}, not {wanted!r}")
        undo.callback(self._agent.remove_remote, name)
        return name

    def _prepare_part(
        self, agent_name: str, part: NixlDescriptor, cuts: Sequence[tuple[Region, Region]], undo: ExitStack
    ) -> _RemotePart:
        place = MemoryPlace.of(part.whereabouts.device)
        destinations = self._prepare_own(tuple(here for here, _ in cuts))
        blocks = self._agent.prepare(
            block_rows([there for _, there in cuts], part.num_blocks, place), place, agent_name
        )
        undo.callback(blocks.release)
        return _RemotePart(len(cuts), blocks, destinations)

    def post(self, read: BlockRead) -> None:
        """Starts a read. On one host it has usually ended on return; `poll` reports the end."""
        worker = self._workers.get(read.worker)
        if worker is None or not read.fits(worker.num_blocks, self._pool.num_blocks):
            self._ends.append(ReadEnd(read.read_id, None))
            return
        handles = [self._make_data(read, worker, part) for part in worker.parts]
        if None in handles:
            for handle in handles:
                if handle is not None:
                    self._agent.release(handle)
            self._ends.append(ReadEnd(read.read_id, None))
            return
        transfers = [_Transfer(handle, self._agent.start(handle)) for handle in handles]
        self._open[read.read_id] = open_read = _OpenRead(read, worker, transfers)
        self._advance(open_read)

    def abandon(self, read_id: int) -> None:
        """Lets the read run to its end: NIXL cannot take a posted read back."""

    def set_pace(self, poll_s: float) -> None:
        """Does nothing: there is no other process to be told."""

    def poll(self) -> list[ReadEnd]:
        """Returns the ends of reads since the last call; takes half a microsecond when there is nothing to do."""
        self._agent.progress()
        for open_read in list(self._open.values()):
            for transfer in open_read.transfers:
                transfer.state = self._agent.state(transfer.handle)
            self._advance(open_read)
        ends, self._ends = self._ends, []
        return ends

    def close(self) -> None:
        """Removes all workers and deregisters the memory. Raises TransportError while a read is open."""
        if self._open:
            raise TransportError(f"{len(self._open)} reads are open")
        with self._agent.translated("cannot close NIXL"):
            while self._workers:
                self._release_worker(self._workers.popitem()[1])
            for prepared in self._own.values():
                prepared.release()
            for registration in self._registrations:
                self._agent.deregister(registration)
        del self._agent
        _not_closed.remove(self)

    def _advance(self, open_read: _OpenRead) -> None:
        """Takes a read as far as it gets without waiting."""
        self._drop_what_is_over(open_read)
        if not open_read.transfers and open_read.scratch is None and not open_read.failed:
            self._start_words(open_read)
            self._drop_what_is_over(open_read)
        if open_read.transfers:
            return
        if open_read.failed:
            self._fail(open_read)
        else:
            self._finish(open_read)

    def _drop_what_is_over(self, open_read: _OpenRead) -> None:
        """Releases transfers that have ended. One that NIXL does not release stays open, and its blocks quarantined."""
        for transfer in list(open_read.transfers):
            if transfer.state is TransferState.DONE:
                transfer.handle.release()
            elif transfer.state is TransferState.FAILED:
                if not self._agent.release(transfer.handle):
                    continue
                self._lost.append(transfer.handle)
                open_read.failed = True
            else:
                continue
            open_read.transfers.remove(transfer)

    def _start_words(self, open_read: _OpenRead) -> None:
        """Starts the second phase: reads the pages with the generation words of the read's blocks."""
        worker = open_read.worker
        try:
            scratch = worker.free_scratch.pop() if worker.free_scratch else self._make_scratch(worker.num_blocks)
        except TransportError:
            open_read.failed = True
            return
        pages = np.unique(open_read.read.source // PAGE_WORDS)
        handle = self._agent.make_read(scratch.pages, pages, worker.pages, pages)
        if handle is None:
            worker.free_scratch.append(scratch)
            open_read.failed = True
            return
        open_read.scratch = scratch
        open_read.transfers.append(_Transfer(handle, self._agent.start(handle)))

    def _finish(self, open_read: _OpenRead) -> None:
        """Reports the words of a read whose phases have both ended, and keeps its scratch buffer for the next read."""
        read, scratch = open_read.read, open_read.scratch
        assert scratch is not None
        del self._open[read.read_id]
        self._ends.append(ReadEnd(read.read_id, scratch.words[read.source]))
        open_read.worker.free_scratch.append(scratch)

    def _fail(self, open_read: _OpenRead) -> None:
        """Reports a failed read, of which NIXL has released every transfer. Its buffer is kept for good."""
        del self._open[open_read.read.read_id]
        self._lost.append(open_read)
        self._ends.append(ReadEnd(open_read.read.read_id, None))

    def _abandon(self, open_read: _OpenRead) -> None:
        """Abandons a read of a removed worker. Its transfers and buffer are kept for good: bytes may still land."""
        self._lost.append(open_read)
        for transfer in open_read.transfers:
            self._agent.release(transfer.handle)

    def _make_data(self, read: BlockRead, worker: _RemoteWorker, part: _RemotePart) -> Any:
        """Makes the transfer of what one part of a worker has of a read's blocks; None when NIXL refuses."""
        here = entries(read.destination, self._pool.num_blocks, part.num_cuts)
        there = entries(read.source, worker.num_blocks, part.num_cuts)
        return self._agent.make_read(part.destinations, here, part.blocks, there)

    def _make_scratch(self, num_words: int) -> _Scratch:
        words = np.zeros(num_words, dtype=np.uint64)
        with self._agent.translated("cannot register a buffer for generation words"):
            registration = self._agent.register(words.ctypes.data, words.nbytes)
            return _Scratch(words, registration, self._agent.prepare(page_rows(words.ctypes.data, num_words)))

    def _release_worker(self, worker: _RemoteWorker) -> None:
        with self._agent.translated("cannot release a worker"):
            for scratch in worker.free_scratch:
                scratch.pages.release()
                self._agent.deregister(scratch.registration)
            for part in worker.parts:
                part.blocks.release()
            worker.pages.release()
            for name in worker.agent_names:
                self._agent.remove_remote(name)

    def _prepare_own(self, cuts: tuple[Region, ...]) -> Any:
        """Returns the descriptor list of the pool that is cut so; workers whose pools lie alike share it."""
        if cuts not in self._own:
            place = MemoryPlace.of(self._pool.device)
            self._own[cuts] = self._agent.prepare(block_rows(cuts, self._pool.num_blocks, place), place)
        return self._own[cuts]


def _agent_name(worker_id: WorkerId, part: int) -> str:
    """Returns the name of a process of a worker; that of part 0 is the one which versions before parts expect."""
    return f"{worker_id:016x}.{part}" if part else f"{worker_id:016x}"


def _device_pool(pool: BlockMemory) -> DevicePool | None:
    if pool.device is None:
        return None
    [region] = pool.regions  # a group's blocks are in host memory
    return DevicePool(CudaDriver(), pool.device, region.address)
