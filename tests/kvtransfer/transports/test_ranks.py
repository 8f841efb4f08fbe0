"""Reads between groups of ranks of any sizes: every byte arrives in each pool that has it, and nowhere else."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from kvtransfer import regions
from kvtransfer.block_memory import GroupBlocks
from kvtransfer.ids import WorkerId
from kvtransfer.regions import Region
from kvtransfer.transports import nixl
from kvtransfer.transports.base import Memory, Transport, TransportError
from kvtransfer.transports.memory import MemoryFabric, MemoryTransport
from kvtransfer.transports.nixl import NixlTransport
from kvtransfer.transports.nixl_lists import HOST, MemoryPlace
from kvtransfer.transports.parts import PartOffer, join_parts
from tests.forkserver import FORKSERVER
from tests.kvtransfer.kv_source import End, block_read, make_end, new_worker_id, wait_for_ends
from tests.kvtransfer.ranks import LAYOUTS, PLAIN, Ranks, group, pools_of, some_content

SIZES = ("1", "2", "3", "4")
PAIRS = list(product(SIZES, SIZES))
PIPELINES = [("stages of 1", "1"), ("2", "stages of 1"), ("stages of 2", "4"), ("3", "stages of 2")]
PIPELINES += [("stages of 2", "stages of 2"), ("stages of 2", "stages of 1"), ("1", "stages of 2")]
SOURCE, DESTINATION = [4, 1, 2, 5], [0, 3, 4, 8]  # only 1 and 2 follow each other in both pools
SALT = 1  # of the generations that `block_read` asks for
_DEADLINE_S = 300.0


@dataclass
class Producer:
    """A group whose blocks are read."""

    worker: WorkerId
    address: str
    descriptor: bytes
    content: np.ndarray  # of whole blocks


def check_read(reader: Transport, memory: Memory, to: Ranks, producer: Producer, *others: Transport) -> None:
    """Reads some blocks, and looks at each rank's pool. others: transports of this process that must be polled."""
    expected = pools_of(memory)
    for pool, own in zip(expected, to.cut(producer.content), strict=True):
        pool[DESTINATION] = own[SOURCE]
    reader.add_worker(producer.worker, producer.address, producer.descriptor)
    reader.post(block_read(1, producer.worker, SOURCE, DESTINATION, salt=SALT))
    words = wait_for_ends(reader, 1, *others)[1].generations
    assert words is not None
    assert words.tolist() == [block + 1000 * SALT for block in SOURCE]
    for rank, (pool, wanted) in enumerate(zip(pools_of(memory), expected, strict=True)):
        assert np.array_equal(pool, wanted), f"rank {rank} has other bytes"
    assert not memory.generations.any(), "the reader's own words were touched"


def filled(ranks: Ranks, seed: int) -> tuple[Memory, np.ndarray]:
    content = some_content(ranks.layout, seed)
    memory = ranks.new_memory(content)
    memory.generations[:] = np.arange(len(content)) + 1000 * SALT
    return memory, content


def read_in_process(make: Callable[[WorkerId, Memory], Transport], of: Ranks, to: Ranks) -> None:
    """Both groups' transports are in this process."""
    worker, memory = new_worker_id(), to.new_memory()
    source_memory, content = filled(of, seed=worker % 1000)
    source, reader = make(worker, source_memory), make(new_worker_id(), memory)
    try:
        check_read(reader, memory, to, Producer(worker, "nowhere:0", source.descriptor(), content), source)
    finally:
        reader.close()
        source.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_any_sizes_read_each_other(layout: str) -> None:
    fabric = MemoryFabric()
    pairs = PAIRS if LAYOUTS[layout].groups else PAIRS + PIPELINES
    for of, to in pairs:
        read_in_process(
            lambda worker, memory: MemoryTransport(fabric, worker, memory),
            group(LAYOUTS[layout], of),
            group(LAYOUTS[layout], to),
        )


class ProducerProcess:
    """A process that has one group after the other."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._pipe, theirs = FORKSERVER.Pipe()
        self._process = FORKSERVER.Process(target=_serve, args=(theirs, kind), daemon=True)
        self._process.start()
        theirs.close()

    def become(self, ranks: Ranks, seed: int) -> Producer:
        self._pipe.send((ranks, seed))
        assert self._pipe.poll(_DEADLINE_S), "the producer does not answer"
        worker, address, descriptor = self._pipe.recv()
        return Producer(worker, address, descriptor, some_content(ranks.layout, seed))

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(_DEADLINE_S)
        assert self._process.exitcode == 0


def _serve(pipe: Connection, kind: str) -> None:
    """Polls as a transfer thread does."""
    end: End | None = None
    while True:
        if end is not None:
            end.transport.poll()
        if not pipe.poll(0.0005):
            continue
        asked = pipe.recv()
        if end is not None:
            end.transport.close()
            end.close()
        if asked is None:
            return
        worker = new_worker_id()
        end = make_end(kind, worker, filled(*asked)[0])
        pipe.send((worker, end.address, end.transport.descriptor()))


@pytest.fixture(scope="module", params=["nixl", "grpc"])
def producer(request: pytest.FixtureRequest) -> Iterator[ProducerProcess]:
    process = ProducerProcess(request.param)
    yield process
    process.close()


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("layout", "of", "to"),
    [
        (name, *pair)
        for pair in [*PAIRS, *PIPELINES]
        for name, layout in LAYOUTS.items()
        if pair in PAIRS or not layout.groups
    ],
)
def test_groups_of_two_processes_read_each_other(producer: ProducerProcess, layout: str, of: str, to: str) -> None:
    ranks = group(LAYOUTS[layout], to)
    memory, worker = ranks.new_memory(), new_worker_id()
    end = make_end(producer.kind, worker, memory)
    try:
        check_read(end.transport, memory, ranks, producer.become(group(LAYOUTS[layout], of), seed=11))
        end.transport.close()
    finally:
        end.close()


def cuts_of(of: str, to: str) -> tuple[int, NixlTransport]:
    """The reads that one block takes, and the reader."""
    source_memory, _ = filled(group(PLAIN, of), 1)
    worker = new_worker_id()
    source = NixlTransport(worker, source_memory)
    reader = NixlTransport(new_worker_id(), group(PLAIN, to).new_memory())
    reader.add_worker(worker, "nowhere:0", source.descriptor())
    [part] = reader._workers[worker].parts
    return part.num_cuts, reader


@pytest.mark.parametrize(
    ("of", "to", "cuts"), [("1", "1", 1), ("2", "2", 2), ("1", "2", 2), ("4", "1", 4), ("3", "2", 3)]
)
def test_nixl_reads_a_block_in_no_more_pieces_than_the_regions_of_both_sides_need(of: str, to: str, cuts: int) -> None:
    assert cuts_of(of, to)[0] == cuts


def test_nixl_prepares_its_pool_once_for_all_producers_that_lie_alike() -> None:
    reader = NixlTransport(new_worker_id(), group(PLAIN, "2").new_memory())
    sources = []
    for of in ("1", "2", "2", "4", "4"):
        worker = new_worker_id()
        sources.append(NixlTransport(worker, filled(group(PLAIN, of), 1)[0]))
        reader.add_worker(worker, "nowhere:0", sources[-1].descriptor())
    assert len(reader._own) == 2  # of halves of a block, for the first three, and of quarters


def test_nixl_keeps_nothing_of_a_producer_of_which_it_cannot_use_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, ranks = new_worker_id(), group(PLAIN, "2")
    sources = [NixlTransport(worker, ranks.new_part(range(part, part + 1)), part) for part in range(2)]
    reader = NixlTransport(new_worker_id(), ranks.new_memory())
    prepare, prepared = reader._agent.prepare, []

    def fails_at_the_second(rows: np.ndarray, place: MemoryPlace = HOST, of: str = "") -> Any:
        if of.endswith(".1"):
            raise ValueError("no list")
        prepared.append(prepare(rows, place, of) if of else prepare(rows, place))
        return prepared[-1]

    monkeypatch.setattr(reader._agent, "prepare", fails_at_the_second)
    descriptor = join_parts([PartOffer("", source.descriptor()) for source in sources])
    with pytest.raises(TransportError, match="no list"):
        reader.add_worker(worker, "nowhere:0", descriptor)
    agent = reader._agent._agent
    assert not any(agent.check_remote_metadata(name) for name in (f"{worker:016x}", f"{worker:016x}.1"))
    own = list(reader._own.values())
    others = [each for each in prepared if each not in own]
    assert [each._released for each in others] == [True]
    monkeypatch.undo()
    reader.add_worker(worker, "nowhere:0", descriptor)
    for transport in (reader, *sources):
        transport.close()


Parts = Sequence[Sequence[Region]]
Pairs = list[list[tuple[Region, Region]]]


def cut_without_offset(local: Sequence[Region], parts: Parts, block_bytes: int, first: int) -> Pairs:
    """Reads from where the other side's region begins."""
    [remote], [pairs] = parts, regions.cut_by(local, parts, block_bytes, first)
    begins = {each.end: each.address for each in regions.cover(remote, block_bytes)}
    return [
        [
            (here, Region(begins.get(there.end, there.address), there.stride, there.start, there.end))
            for here, there in pairs
        ]
    ]


def cut_once(local: Sequence[Region], parts: Parts, block_bytes: int, first: int) -> Pairs:
    """Writes what several ranks have to one of them."""
    return regions.cut_by(regions.cover(local, block_bytes), parts, block_bytes, first)


@pytest.mark.parametrize(("bug", "layout"), [(cut_without_offset, "4 heads"), (cut_once, "one head")])
def test_a_wrong_cut_is_noticed(monkeypatch: pytest.MonkeyPatch, bug: Callable[..., object], layout: str) -> None:
    of, to = group(LAYOUTS[layout], "1"), group(LAYOUTS[layout], "2")
    read_in_process(NixlTransport, of, to)
    monkeypatch.setattr(nixl, "cut_by", bug)
    with pytest.raises(AssertionError, match="has other bytes"):
        read_in_process(NixlTransport, of, to)


def test_a_head_that_is_written_to_one_of_its_ranks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, of, to = MemoryFabric(), group(LAYOUTS["one head"], "1"), group(LAYOUTS["one head"], "4")

    def make(worker: WorkerId, memory: Memory) -> Transport:
        assert isinstance(memory.blocks, GroupBlocks)
        monkeypatch.setattr(memory.blocks, "_written_to", memory.blocks._read_from)
        return MemoryTransport(fabric, worker, memory)

    with pytest.raises(AssertionError, match="rank 1 has other bytes"):
        read_in_process(make, of, to)
