"""What every transport must do. NIXL's sources are real processes; the memory transport's live in this one."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.transports.base import Incarnation, Memory, ReadEnd, Transport, TransportError
from kvtransfer.transports.memory import MemoryFabric, MemoryTransport
from kvtransfer.transports.nixl import NixlTransport
from tests.contract.kv_source import (
    CANARY,
    NUM_BLOCKS,
    InProcessSource,
    ProcessSource,
    Source,
    block_read,
    new_incarnation,
    new_memory,
    pattern,
    wait_for_ends,
)

EVERY = list(range(NUM_BLOCKS))
NUM_FRESH_PROCESSES = 2  # as many as tests below ask for sources that they may kill


@dataclass
class World:
    """One transport's way to make readers and sources."""

    make_transport: Callable[[Memory, Incarnation], Transport]
    source: Source  # outlives the test
    fresh_source: Callable[[], Source]  # the test may kill it


@dataclass
class Reader:
    transport: Transport
    memory: Memory
    incarnation: Incarnation


@pytest.fixture(scope="module")
def processes() -> Iterator[list[ProcessSource]]:
    """Source processes that start side by side; the first is the shared one."""
    started = [ProcessSource() for _ in range(1 + NUM_FRESH_PROCESSES)]
    yield started
    for process in started:
        process.kill()


@pytest.fixture(params=["memory", "nixl"])
def world(request: pytest.FixtureRequest) -> World:
    if request.param == "memory":
        fabric = MemoryFabric()
        return World(
            lambda memory, incarnation: MemoryTransport(fabric, incarnation, memory),
            InProcessSource(fabric),
            lambda: InProcessSource(fabric),
        )
    return _nixl_world(request.getfixturevalue("processes"))


@pytest.fixture
def nixl_world(processes: list[ProcessSource]) -> World:
    return _nixl_world(processes)


def _nixl_world(processes: list[ProcessSource]) -> World:
    return World(lambda memory, incarnation: NixlTransport(incarnation, memory), processes[0], lambda: processes.pop())


@pytest.fixture
def reader(world: World) -> Iterator[Reader]:
    reader = make_reader(world)
    yield reader
    reader.transport.close()


def make_reader(world: World) -> Reader:
    memory, incarnation = new_memory(), new_incarnation()
    return Reader(world.make_transport(memory, incarnation), memory, incarnation)


def connect(reader: Reader, source: Source, salt: int = 1) -> None:
    """Fills the source and reads a block of it, so that the connection is up.

    Both sides then settle: NIXL's connecting outlasts the first read.
    """
    source.call("fill", salt)
    reader.transport.add_peer(source.incarnation, source.descriptor)
    reader.transport.post(block_read(0, source.incarnation, [0], [0]))
    assert wait_for_ends(reader.transport, 1)[0].generations is not None
    for _ in range(5):  # whoever answered a call has polled
        source.call("ping")
        assert reader.transport.poll() == []


@contextmanager
def polling(transport: Transport) -> Iterator[list[ReadEnd]]:
    """Polls a transport on a thread of its own, as a worker does, and collects the ends."""
    over, ends = threading.Event(), list[ReadEnd]()

    def run() -> None:
        while not over.wait(0.0005):
            ends.extend(transport.poll())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ends
    finally:
        over.set()
        thread.join()


def words(end: ReadEnd) -> list[int]:
    """The generation words of a read that went well."""
    assert end.generations is not None
    assert end.generations.dtype == np.uint64
    return [int(word) for word in end.generations]


def poll_for(transport: Transport, seconds: float) -> list[ReadEnd]:
    ends = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ends += transport.poll()
        time.sleep(0.001)
    return ends


@pytest.mark.parametrize(
    ("source_ids", "destination_ids"),
    [
        ([3], [5]),
        (EVERY, EVERY),
        (EVERY, EVERY[::-1]),
        ([4, 5, 6, 7], [10, 11, 12, 13]),
        ([9, 2, 23, 0], [1, 22, 7, 3]),
    ],
    ids=["one", "all", "all reversed", "contiguous", "scattered"],
)
def test_blocks_arrive_in_their_places_and_nowhere_else(world, reader, source_ids, destination_ids):
    world.source.call("fill", 3)
    reader.transport.add_peer(world.source.incarnation, world.source.descriptor)
    reader.transport.post(block_read(7, world.source.incarnation, source_ids, destination_ids))
    end = wait_for_ends(reader.transport, 1)[7]

    expected = np.full_like(reader.memory.blocks, CANARY)
    for source_id, destination_id in zip(source_ids, destination_ids, strict=True):
        expected[destination_id] = pattern(source_id, 3)
    assert np.array_equal(reader.memory.blocks, expected)
    assert words(end) == [block + 3000 for block in source_ids]
    assert not reader.memory.generations.any(), "the reader's own words were touched"


def test_reads_of_several_requests_run_at_once(world, reader):
    world.source.call("fill", 4)
    reader.transport.add_peer(world.source.incarnation, world.source.descriptor)
    for block in EVERY:
        reader.transport.post(block_read(100 + block, world.source.incarnation, [block], [NUM_BLOCKS - 1 - block]))
    ends = wait_for_ends(reader.transport, NUM_BLOCKS)

    for block in EVERY:
        assert words(ends[100 + block]) == [block + 4000]
        assert np.array_equal(reader.memory.blocks[NUM_BLOCKS - 1 - block], pattern(block, 4))
    assert reader.transport.poll() == []


def test_two_workers_read_each_other(world, reader):
    connect(reader, world.source, salt=5)
    reader.memory.blocks[:] = 77
    reader.memory.generations[:] = 99
    if isinstance(world.source, ProcessSource):
        with polling(reader.transport):
            words = world.source.call("read_all", reader.incarnation, reader.transport.descriptor())
    else:
        words = world.source.call("read_all", reader.incarnation, reader.transport.descriptor())
    assert words.tolist() == [99] * NUM_BLOCKS
    assert (world.source.call("blocks") == 77).all()


def test_two_workers_of_one_process_read_each_other(world):
    one, two = make_reader(world), make_reader(world)
    one.memory.blocks[:], two.memory.blocks[:] = 11, 22
    one.transport.add_peer(two.incarnation, two.transport.descriptor())
    two.transport.add_peer(one.incarnation, one.transport.descriptor())
    one.transport.post(block_read(1, two.incarnation, [0], [1]))
    two.transport.post(block_read(1, one.incarnation, [2], [3]))
    with polling(two.transport) as ends_of_two:
        assert wait_for_ends(one.transport, 1)[1].generations is not None
        ends_of_one = poll_for(one.transport, 0.1)
    assert ends_of_one == []
    assert [end.read_id for end in ends_of_two] == [1]
    assert (one.memory.blocks[1] == 22).all()
    assert (two.memory.blocks[3] == 11).all()


def test_generation_words_are_those_of_the_time_of_the_read(world, reader):
    connect(reader, world.source)
    world.source.call("set_generation", 6, 123456789012345)
    reader.transport.post(block_read(1, world.source.incarnation, [6], [6]))
    assert words(wait_for_ends(reader.transport, 1)[1]) == [123456789012345]


def test_generation_words_are_read_after_the_data():
    """Data that is newer than its word would pass for what was announced."""
    fabric = MemoryFabric()
    source = InProcessSource(fabric)
    memory = new_memory()
    transport = MemoryTransport(fabric, new_incarnation(), memory)
    transport.add_peer(source.incarnation, source.descriptor)
    source.call("fill", 1)
    source.stop()
    transport.post(block_read(1, source.incarnation, [2], [2]))
    fabric.release_data(source.incarnation)
    assert transport.poll() == []
    source.call("fill", 2)
    source.go_on()

    assert words(transport.poll()[0]) == [2002]
    assert np.array_equal(memory.blocks[2], pattern(2, 1))


def test_nixl_reads_generation_words_after_the_data():
    """A writer raises a block's word, then writes the same number all over the block, while reads run."""
    memory = new_memory(block_bytes=1 << 18, num_blocks=2)
    source_memory = new_memory(block_bytes=1 << 18, num_blocks=2)
    source_memory.blocks[:] = 0
    reader, source = new_incarnation(), new_incarnation()
    transport, source_transport = NixlTransport(reader, memory), NixlTransport(source, source_memory)
    transport.add_peer(source, source_transport.descriptor())
    over = threading.Event()

    def write() -> None:
        content = source_memory.blocks[1].view(np.uint64)
        while not over.is_set():
            source_memory.generations[1] += 1
            content[:] = source_memory.generations[1]

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = []
        for read_id in range(150):
            transport.post(block_read(read_id, source, [1], [0]))
            [word] = words(wait_for_ends(transport, 1, source_transport)[read_id])
            seen.append(word)
            assert int(memory.blocks[0].view(np.uint64).max()) <= word
    finally:
        over.set()
        writer.join()
    transport.close()
    source_transport.close()
    assert seen[0] < seen[-1], "nothing was written meanwhile"


def test_a_read_of_an_unknown_peer_fails(world, reader):
    reader.transport.post(block_read(1, new_incarnation(), [0], [0]))
    assert wait_for_ends(reader.transport, 1)[1].generations is None


@pytest.mark.parametrize(("source_ids", "destination_ids"), [([NUM_BLOCKS], [0]), ([0], [NUM_BLOCKS]), ([0, 1], [2])])
def test_a_read_outside_the_pools_fails_and_lands_nowhere(world, reader, source_ids, destination_ids):
    connect(reader, world.source)
    before = reader.memory.blocks.copy()
    reader.transport.post(block_read(1, world.source.incarnation, source_ids, destination_ids))
    assert wait_for_ends(reader.transport, 1)[1].generations is None
    assert np.array_equal(reader.memory.blocks, before)


def test_a_garbled_descriptor_is_refused(world, reader):
    good = world.source.descriptor
    flipped = [good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :] for at in range(0, 16)]
    for descriptor in (b"", b"x", good[:-1], good[: len(good) // 2], b"\0" * len(good), os.urandom(400), *flipped):
        with pytest.raises(TransportError):
            reader.transport.add_peer(world.source.incarnation, descriptor)
    connect(reader, world.source)


def test_a_descriptor_of_another_worker_is_refused(world, reader):
    with pytest.raises(TransportError):
        reader.transport.add_peer(new_incarnation(), world.source.descriptor)
    connect(reader, world.source)


def test_blocks_of_another_size_are_refused(world):
    transport = world.make_transport(new_memory(block_bytes=512), new_incarnation())
    with pytest.raises(TransportError, match="512"):
        transport.add_peer(world.source.incarnation, world.source.descriptor)


def test_adding_a_peer_again_changes_nothing(world, reader):
    connect(reader, world.source)
    reader.transport.add_peer(world.source.incarnation, world.source.descriptor)
    reader.transport.add_peer(world.source.incarnation, b"not even looked at")
    reader.transport.post(block_read(1, world.source.incarnation, [1], [1]))
    assert wait_for_ends(reader.transport, 1)[1].generations is not None


def test_a_killed_peer_fails_its_reads_and_a_restarted_one_serves(world, reader):
    old, new = world.fresh_source(), world.source
    connect(reader, old, salt=1)
    before = reader.memory.blocks.copy()
    old.kill()
    assert leaked_shared_memory() <= LEAKED_BEFORE
    for read_id in (1, 2):
        reader.transport.post(block_read(read_id, old.incarnation, [5], [6]))
    ends = wait_for_ends(reader.transport, 2)
    assert [ends[1].generations, ends[2].generations] == [None, None]
    assert np.array_equal(reader.memory.blocks, before)

    connect(reader, new, salt=2)
    reader.transport.forget_peer(old.incarnation)
    reader.transport.post(block_read(3, old.incarnation, [3], [3]))
    reader.transport.post(block_read(4, new.incarnation, [3], [4]))
    ends = wait_for_ends(reader.transport, 2)
    assert ends[3].generations is None
    assert words(ends[4]) == [2003]
    assert (reader.memory.blocks[3] == CANARY).all()
    assert np.array_equal(reader.memory.blocks[4], pattern(3, 2))


def test_a_peer_killed_during_a_read_can_be_forgotten(world, reader):
    """The source stops before it could take the reader's connection, so the read cannot run."""
    source = world.fresh_source()
    reader.transport.add_peer(source.incarnation, source.descriptor)
    source.stop()
    reader.transport.post(block_read(1, source.incarnation, EVERY, EVERY))
    assert poll_for(reader.transport, 0.05) == []
    source.kill()
    reader.transport.forget_peer(source.incarnation)
    ends = poll_for(reader.transport, 0.05)
    assert [(end.read_id, end.generations) for end in ends] == [(1, None)]
    assert (reader.memory.blocks == CANARY).all()
    connect(reader, world.source)


def test_a_read_of_a_stopped_peer_ends_when_it_goes_on(world, reader):
    source = world.source
    source.call("fill", 8)
    reader.transport.add_peer(source.incarnation, source.descriptor)
    source.stop()
    reader.transport.post(block_read(1, source.incarnation, EVERY, EVERY))
    try:
        assert poll_for(reader.transport, 0.05) == []
        with pytest.raises(TransportError, match="open"):
            reader.transport.close()
    finally:
        source.go_on()
    assert wait_for_ends(reader.transport, 1)[1].generations is not None
    assert np.array_equal(reader.memory.blocks[9], pattern(9, 8))


def test_a_connected_peer_on_the_same_host_is_read_without_its_help(nixl_world):
    """Connecting takes messages of both sides that may outlast the first reads, so a read or two may have to wait."""
    reader, source = make_reader(nixl_world), nixl_world.source
    connect(reader, source, salt=2)
    for read_id in range(1, 6):
        source.stop()
        try:
            reader.transport.post(block_read(read_id, source.incarnation, EVERY, EVERY))
            ended_in_post = bool(reader.transport.poll())
        finally:
            source.go_on()
        if ended_in_post:
            break
        wait_for_ends(reader.transport, 1)
    assert ended_in_post
    assert np.array_equal(reader.memory.blocks[NUM_BLOCKS - 1], pattern(NUM_BLOCKS - 1, 2))
    reader.transport.close()


def test_a_forgotten_read_may_still_land():
    """What quarantine is for: its source was not dead, only stopped."""
    fabric = MemoryFabric()
    source, memory = InProcessSource(fabric), new_memory()
    transport = MemoryTransport(fabric, new_incarnation(), memory)
    source.call("fill", 1)
    transport.add_peer(source.incarnation, source.descriptor)
    source.stop()
    transport.post(block_read(1, source.incarnation, [2], [3]))
    transport.forget_peer(source.incarnation)
    assert [(end.read_id, end.generations) for end in transport.poll()] == [(1, None)]
    assert (memory.blocks == CANARY).all()
    source.go_on()
    assert np.array_equal(memory.blocks[3], pattern(2, 1))
    assert transport.poll() == []


def test_a_read_of_a_killed_peer_never_lands():
    fabric = MemoryFabric()
    source, memory = InProcessSource(fabric), new_memory()
    transport = MemoryTransport(fabric, new_incarnation(), memory)
    transport.add_peer(source.incarnation, source.descriptor)
    source.call("fill", 1)
    source.stop()
    transport.post(block_read(1, source.incarnation, [2], [3]))
    source.kill()
    source.go_on()
    assert [end.generations for end in transport.poll()] == [None]
    assert (memory.blocks == CANARY).all()


def test_forgetting_an_unknown_peer_is_no_change(world, reader):
    reader.transport.forget_peer(new_incarnation())
    assert reader.transport.poll() == []


def test_an_idle_poll_is_cheap(world, reader):
    connect(reader, world.source)
    started = time.perf_counter()
    for _ in range(1000):
        reader.transport.poll()
    assert time.perf_counter() - started < 5  # 5 ms each: it must not wait; 1 µs is usual


def test_nixl_leaves_no_shared_memory_behind(nixl_world):
    reader = make_reader(nixl_world)
    connect(reader, nixl_world.source)
    reader.transport.close()
    assert leaked_shared_memory() <= LEAKED_BEFORE


def leaked_shared_memory() -> set[str]:
    """UCX's segments, without those of other processes that live: other tests may run beside this one."""
    present = {name for name in os.listdir("/dev/shm") if "ucx" in name}
    for maps in Path("/proc").glob("[0-9]*/maps") if present else ():
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if maps.parent.name != str(os.getpid()):
                mapped = maps.read_text()
                present = {name for name in present if name not in mapped}
    return present


LEAKED_BEFORE = leaked_shared_memory()  # by processes of other programs, killed some time ago
