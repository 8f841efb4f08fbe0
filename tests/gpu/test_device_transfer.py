"""Blocks between pools in GPU memory, and between those and host memory. Sources are processes of their own."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from kvtransfer.transports.base import Memory, TransportError
from tests.kvtransfer.kv_source import (
    BLOCK_BYTES,
    CANARY,
    NUM_BLOCKS,
    End,
    Place,
    ProcessSource,
    block_read,
    content,
    make_end,
    new_memory,
    new_worker_id,
    pattern,
    wait_for_ends,
)
from tests.machine import GPU, needs

pytestmark = needs(GPU)

EVERY = list(range(NUM_BLOCKS))
PLACES = {"host": Place.HOST, "device": Place.DEVICE}
MakeSource = Callable[[str, Place], ProcessSource]


@pytest.fixture
def make_source() -> Iterator[MakeSource]:
    sources: list[ProcessSource] = []

    def make(kind: str, place: Place) -> ProcessSource:
        sources.append(ProcessSource(kind, place))
        return sources[-1]

    yield make
    for source in sources:
        source.kill()


@pytest.fixture
def make_reader() -> Iterator[Callable[[str, Place], tuple[End, Memory]]]:
    ends: list[End] = []

    def make(kind: str, place: Place) -> tuple[End, Memory]:
        memory = new_memory(place=place)
        ends.append(make_end(kind, new_worker_id(), memory))
        return ends[-1], memory

    yield make
    for end in ends:
        end.transport.close()
        end.close()


@pytest.mark.parametrize(
    ("kind", "source_place", "reader_place"),
    [
        ("nixl", "device", "device"),
        ("grpc", "device", "device"),
        ("grpc", "host", "device"),
        ("grpc", "device", "host"),
    ],
)
def test_blocks_arrive_in_their_places_and_nowhere_else(kind, source_place, reader_place, make_source, make_reader):
    source = make_source(kind, PLACES[source_place])
    end, memory = make_reader(kind, PLACES[reader_place])
    source.call("fill", 3)
    end.transport.add_worker(source.worker_id, source.address, source.descriptor)
    source_ids, destination_ids = [9, 2, 23, 0, 10, 11], [1, 22, 7, 3, 15, 16]
    end.transport.post(block_read(7, source.worker_id, source_ids, destination_ids, salt=3))
    generations = wait_for_ends(end.transport, 1)[7].generations

    expected = np.full((NUM_BLOCKS, BLOCK_BYTES), CANARY, dtype=np.uint8)
    for source_id, destination_id in zip(source_ids, destination_ids, strict=True):
        expected[destination_id] = pattern(source_id, 3)
    assert np.array_equal(content(memory), expected)
    assert generations is not None
    assert generations.tolist() == [block + 3000 for block in source_ids]


def test_nixl_reads_device_memory_of_this_host_without_its_source_s_help(make_source, make_reader):
    """Connecting takes messages of both sides that may outlast the first reads, so some reads may have to wait."""
    source = make_source("nixl", Place.DEVICE)
    end, memory = make_reader("nixl", Place.DEVICE)
    reach = end.transport.reach(source.descriptor)
    assert reach.one_sided, reach.why
    assert "CUDA IPC" in reach.why
    source.call("fill", 1)
    end.transport.add_worker(source.worker_id, source.address, source.descriptor)
    for read_id in range(10):
        source.call("ping")
        end.transport.post(block_read(read_id, source.worker_id, EVERY, EVERY))
        assert wait_for_ends(end.transport, 1)[read_id].generations is not None
    source.call("fill", 2)
    source.stop()
    try:
        end.transport.post(block_read(99, source.worker_id, EVERY, EVERY, salt=2))
        assert wait_for_ends(end.transport, 1, deadline_s=10)[99].generations is not None
    finally:
        source.go_on()
    assert np.array_equal(content(memory)[NUM_BLOCKS - 1], pattern(NUM_BLOCKS - 1, 2))


@pytest.mark.parametrize("ours", PLACES.values(), ids=PLACES)
def test_nixl_makes_no_pair_of_device_and_host_memory(ours, make_source, make_reader):
    (theirs,) = set(PLACES.values()) - {ours}
    source, (end, _) = make_source("nixl", theirs), make_reader("nixl", ours)
    assert not end.transport.reach(source.descriptor).one_sided
    with pytest.raises(TransportError, match=r"VRAM|DRAM"):
        end.transport.add_worker(source.worker_id, source.address, source.descriptor)


@pytest.mark.parametrize("kind", ["nixl", "grpc"])
def test_a_killed_source_fails_its_reads_and_the_device_serves_on(kind, make_source, make_reader):
    source, other = make_source(kind, Place.DEVICE), make_source(kind, Place.DEVICE)
    end, memory = make_reader(kind, Place.DEVICE)
    for worker in (source, other):
        worker.call("fill", 1)
        end.transport.add_worker(worker.worker_id, worker.address, worker.descriptor)
        end.transport.post(block_read(1, worker.worker_id, [0], [0]))
        assert wait_for_ends(end.transport, 1)[1].generations is not None
    source.kill()
    end.transport.remove_worker(source.worker_id)
    post = partial(block_read, source=EVERY, destination=EVERY)
    end.transport.post(post(2, source.worker_id))
    assert wait_for_ends(end.transport, 1)[2].generations is None
    end.transport.post(post(3, other.worker_id))
    assert wait_for_ends(end.transport, 1)[3].generations is not None
    assert np.array_equal(content(memory)[5], pattern(5, 1))
