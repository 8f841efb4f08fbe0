"""What every transport must do. Sources are real processes; the memory transport's alone live in this one."""

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.block_memory import HostBlocks
from kvtransfer.ids import WorkerId
from kvtransfer.transports.base import Memory, ReadEnd, Transport, TransportError
from kvtransfer.transports.byte_stream import PIECE_BYTES, BlockSource, ByteRequest
from kvtransfer.transports.memory import MemoryFabric, MemoryTransport
from kvtransfer.transports.nixl import NixlTransport
from kvtransfer.transports.nixl_descriptor import NixlDescriptor
from tests.kvtransfer.kv_source import (
    BLOCK_BYTES,
    CANARY,
    NUM_BLOCKS,
    End,
    GrpcEnd,
    InProcessSource,
    Place,
    ProcessSource,
    Source,
    block_read,
    content,
    fill,
    make_end,
    new_memory,
    new_worker_id,
    pattern,
    wait_for_ends,
)

EVERY = list(range(NUM_BLOCKS))
NUM_FRESH_PROCESSES = {"nixl": 4, "grpc": 4}  # as many as tests below ask for sources that they may kill


@dataclass
class World:
    """One transport's way to make readers and sources."""

    make_end: Callable[[WorkerId, Memory], End]
    source: Source  # outlives the test
    fresh_source: Callable[[], Source]  # the test may kill it
    place: Place  # of the readers' pools


@dataclass
class Reader:
    end: End
    memory: Memory
    worker_id: WorkerId

    @property
    def transport(self) -> Transport:
        return self.end.transport

    def close(self) -> None:
        self.transport.close()
        self.end.close()


@pytest.fixture(scope="module")
def nixl_processes() -> Iterator[list[ProcessSource]]:
    yield from started("nixl")


@pytest.fixture(scope="module")
def grpc_processes() -> Iterator[list[ProcessSource]]:
    yield from started("grpc")


def started(kind: str) -> Iterator[list[ProcessSource]]:
    """Source processes that start side by side; the first is the shared one."""
    processes = [ProcessSource(kind) for _ in range(1 + NUM_FRESH_PROCESSES[kind])]
    yield processes
    for process in processes:
        process.kill()


@pytest.fixture(
    params=["memory", "memory to tensor", "memory to group", "nixl", "nixl to group", "grpc", "grpc to tensor"]
)
def world(request: pytest.FixtureRequest) -> World:
    kind, _, place = request.param.partition(" to ")
    place = Place[place.upper() or "HOST"]
    if kind == "memory":
        fabric = MemoryFabric()
        return World(
            lambda worker_id, memory: End(MemoryTransport(fabric, worker_id, memory)),
            InProcessSource(fabric, place),
            lambda: InProcessSource(fabric, place),
            place,
        )
    return _process_world(kind, request.getfixturevalue(f"{kind}_processes"), place)


@pytest.fixture
def nixl_world(nixl_processes: list[ProcessSource]) -> World:
    return _process_world("nixl", nixl_processes)


@pytest.fixture
def grpc_world(grpc_processes: list[ProcessSource]) -> World:
    return _process_world("grpc", grpc_processes)


def _process_world(kind: str, processes: list[ProcessSource], place: Place = Place.HOST) -> World:
    """Its sources' pools are in host memory: two workers that read each other read both ways between the places."""
    return World(partial(make_end, kind), processes[0], lambda: processes.pop(), place)


@pytest.fixture
def reader(world: World) -> Iterator[Reader]:
    reader = make_reader(world)
    yield reader
    reader.close()


def make_reader(world: World, memory: Memory | None = None) -> Reader:
    memory, worker_id = memory or new_memory(place=world.place), new_worker_id()
    return Reader(world.make_end(worker_id, memory), memory, worker_id)


def add_worker(reader: Reader, source: Source) -> None:
    reader.transport.add_worker(source.worker_id, source.address, source.descriptor)


def connect(reader: Reader, source: Source, salt: int = 1) -> None:
    """Fills the source and reads a block of it, so that the connection is up.

    Both sides then settle: NIXL's connecting outlasts the first read.
    """
    source.call("fill", salt)
    add_worker(reader, source)
    reader.transport.post(block_read(0, source.worker_id, [0], [0], salt=salt))
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
    add_worker(reader, world.source)
    reader.transport.post(block_read(7, world.source.worker_id, source_ids, destination_ids, salt=3))
    end = wait_for_ends(reader.transport, 1)[7]

    expected = np.full((NUM_BLOCKS, BLOCK_BYTES), CANARY, dtype=np.uint8)
    for source_id, destination_id in zip(source_ids, destination_ids, strict=True):
        expected[destination_id] = pattern(source_id, 3)
    assert np.array_equal(content(reader.memory), expected)
    assert words(end) == [block + 3000 for block in source_ids]
    assert not reader.memory.generations.any(), "the reader's own words were touched"


def test_reads_of_several_requests_run_at_once(world, reader):
    world.source.call("fill", 4)
    add_worker(reader, world.source)
    for block in EVERY:
        destination = [NUM_BLOCKS - 1 - block]
        reader.transport.post(block_read(100 + block, world.source.worker_id, [block], destination, salt=4))
    ends = wait_for_ends(reader.transport, NUM_BLOCKS)

    for block in EVERY:
        assert words(ends[100 + block]) == [block + 4000]
        assert np.array_equal(content(reader.memory)[NUM_BLOCKS - 1 - block], pattern(block, 4))
    assert reader.transport.poll() == []


def test_two_workers_read_each_other(world, reader):
    connect(reader, world.source, salt=5)
    fill(reader.memory, slice(None), 77)
    reader.memory.generations[:] = 99
    ours = (reader.worker_id, reader.end.address, reader.transport.descriptor())
    if isinstance(world.source, ProcessSource):
        with polling(reader.transport):
            words = world.source.call("read_all", *ours, 99)
    else:
        words = world.source.call("read_all", *ours, 99)
    assert words.tolist() == [99] * NUM_BLOCKS
    assert (world.source.call("content") == 77).all()


def test_two_workers_of_one_process_read_each_other(world):
    one, two = make_reader(world), make_reader(world)
    fill(one.memory, slice(None), 11)
    fill(two.memory, slice(None), 22)
    one.transport.add_worker(two.worker_id, two.end.address, two.transport.descriptor())
    two.transport.add_worker(one.worker_id, one.end.address, one.transport.descriptor())
    one.transport.post(block_read(1, two.worker_id, [0], [1], generations=[0]))
    two.transport.post(block_read(1, one.worker_id, [2], [3], generations=[0]))
    with polling(two.transport) as ends_of_two:
        assert wait_for_ends(one.transport, 1)[1].generations is not None
        ends_of_one = poll_for(one.transport, 0.1)
    assert ends_of_one == []
    assert [end.read_id for end in ends_of_two] == [1]
    assert (content(one.memory)[1] == 22).all()
    assert (content(two.memory)[3] == 11).all()
    one.close()
    two.close()


def test_generation_words_are_those_of_the_time_of_the_read(world, reader):
    connect(reader, world.source)
    world.source.call("set_generation", 6, 123456789012345)
    reader.transport.post(block_read(1, world.source.worker_id, [6], [6], generations=[123456789012345]))
    assert words(wait_for_ends(reader.transport, 1)[1]) == [123456789012345]


def test_blocks_that_were_given_to_other_content_are_never_taken_for_what_was_announced(world, reader):
    connect(reader, world.source)
    world.source.call("set_generation", 6, 123456789012345)
    reader.transport.post(block_read(1, world.source.worker_id, [5, 6, 7], [5, 6, 7]))
    found = words(wait_for_ends(reader.transport, 1)[1])
    assert (found[0], found[2]) == (1005, 1007)
    assert found[1] != 1006


def test_generation_words_are_read_after_the_data():
    """Data that is newer than its word would pass for what was announced."""
    fabric = MemoryFabric()
    source = InProcessSource(fabric)
    memory = new_memory()
    transport = MemoryTransport(fabric, new_worker_id(), memory)
    transport.add_worker(source.worker_id, source.address, source.descriptor)
    source.call("fill", 1)
    source.stop()
    transport.post(block_read(1, source.worker_id, [2], [2]))
    fabric.release_data(source.worker_id)
    assert transport.poll() == []
    source.call("fill", 2)
    source.go_on()

    assert words(transport.poll()[0]) == [2002]
    assert np.array_equal(content(memory)[2], pattern(2, 1))


def test_nixl_reads_generation_words_after_the_data():
    """A writer raises a block's word, then writes the same number all over the block, while reads run."""
    memory = new_memory(block_bytes=1 << 18, num_blocks=2)
    source_memory = new_memory(block_bytes=1 << 18, num_blocks=2, canary=0)
    assert isinstance(source_memory.blocks, HostBlocks)
    written = source_memory.blocks.array[1].view(np.uint64)
    reader, source = new_worker_id(), new_worker_id()
    transport, source_transport = NixlTransport(reader, memory), NixlTransport(source, source_memory)
    transport.add_worker(source, "nowhere:0", source_transport.descriptor())
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            source_memory.generations[1] += 1
            written[:] = source_memory.generations[1]

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = []
        for read_id in range(150):
            transport.post(block_read(read_id, source, [1], [0]))
            [word] = words(wait_for_ends(transport, 1, source_transport)[read_id])
            seen.append(word)
            assert int(content(memory)[0].view(np.uint64).max()) <= word
    finally:
        over.set()
        writer.join()
    transport.close()
    source_transport.close()
    assert seen[0] < seen[-1], "nothing was written meanwhile"


def test_a_read_of_an_unknown_peer_fails(world, reader):
    reader.transport.post(block_read(1, new_worker_id(), [0], [0]))
    assert wait_for_ends(reader.transport, 1)[1].generations is None


@pytest.mark.parametrize(("source_ids", "destination_ids"), [([NUM_BLOCKS], [0]), ([0], [NUM_BLOCKS]), ([0, 1], [2])])
def test_a_read_outside_the_pools_fails_and_lands_nowhere(world, reader, source_ids, destination_ids):
    connect(reader, world.source)
    before = content(reader.memory)
    reader.transport.post(block_read(1, world.source.worker_id, source_ids, destination_ids))
    assert wait_for_ends(reader.transport, 1)[1].generations is None
    assert np.array_equal(content(reader.memory), before)


def test_a_garbled_descriptor_is_refused(world, reader):
    good = world.source.descriptor
    flipped = [good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :] for at in range(0, 16)]
    for descriptor in (b"", b"x", good[:-1], good[: len(good) // 2], b"\0" * len(good), os.urandom(400), *flipped):
        with pytest.raises(TransportError):
            reader.transport.add_worker(world.source.worker_id, world.source.address, descriptor)
    connect(reader, world.source)


def test_a_descriptor_of_another_worker_is_refused(world, reader):
    with pytest.raises(TransportError):
        reader.transport.add_worker(new_worker_id(), world.source.address, world.source.descriptor)
    connect(reader, world.source)


def test_nixl_makes_no_pair_of_device_and_host_memory(nixl_world):
    """A descriptor of a pool on a device, as a worker with a GPU makes it."""
    reader = make_reader(nixl_world)
    host = NixlDescriptor.unpack(nixl_world.source.descriptor)
    device = replace(host, whereabouts=replace(host.whereabouts, device=0)).pack()
    reach = reader.transport.reach(device)
    assert not reach.one_sided
    assert "device memory" in reach.why
    with pytest.raises(TransportError, match="VRAM"):
        reader.transport.add_worker(nixl_world.source.worker_id, nixl_world.source.address, device)
    connect(reader, nixl_world.source)
    reader.close()


def test_blocks_of_another_size_are_refused(world):
    reader = make_reader(world, new_memory(block_bytes=512))
    with pytest.raises(TransportError, match="512"):
        add_worker(reader, world.source)
    reader.close()


def test_adding_a_peer_again_changes_nothing(world, reader):
    connect(reader, world.source)
    add_worker(reader, world.source)
    reader.transport.add_worker(world.source.worker_id, world.source.address, b"not even looked at")
    reader.transport.post(block_read(1, world.source.worker_id, [1], [1]))
    assert wait_for_ends(reader.transport, 1)[1].generations is not None


def test_a_killed_peer_fails_its_reads_and_a_restarted_one_serves(world, reader):
    old, new = world.fresh_source(), world.source
    connect(reader, old, salt=1)
    before = content(reader.memory)
    old.kill()
    assert leaked_shared_memory() <= LEAKED_BEFORE
    for read_id in (1, 2):
        reader.transport.post(block_read(read_id, old.worker_id, [5], [6]))
    ends = wait_for_ends(reader.transport, 2)
    assert [ends[1].generations, ends[2].generations] == [None, None]
    assert np.array_equal(content(reader.memory), before)

    connect(reader, new, salt=2)
    reader.transport.remove_worker(old.worker_id)
    reader.transport.post(block_read(3, old.worker_id, [3], [3]))
    reader.transport.post(block_read(4, new.worker_id, [3], [4], salt=2))
    ends = wait_for_ends(reader.transport, 2)
    assert ends[3].generations is None
    assert words(ends[4]) == [2003]
    assert (content(reader.memory)[3] == CANARY).all()
    assert np.array_equal(content(reader.memory)[4], pattern(3, 2))


def test_a_peer_killed_during_a_read_can_be_forgotten(world, reader):
    """The source stops before it could take the reader's connection, so the read cannot run."""
    source = world.fresh_source()
    add_worker(reader, source)
    source.stop()
    reader.transport.post(block_read(1, source.worker_id, EVERY, EVERY))
    assert poll_for(reader.transport, 0.05) == []
    source.kill()
    reader.transport.remove_worker(source.worker_id)
    ends = poll_for(reader.transport, 0.05)
    assert [(end.read_id, end.generations) for end in ends] == [(1, None)]
    assert (content(reader.memory) == CANARY).all()
    connect(reader, world.source)


def test_a_read_of_a_stopped_peer_ends_when_it_goes_on(world, reader):
    source = world.source
    source.call("fill", 8)
    add_worker(reader, source)
    source.stop()
    reader.transport.post(block_read(1, source.worker_id, EVERY, EVERY, salt=8))
    try:
        assert poll_for(reader.transport, 0.05) == []
        with pytest.raises(TransportError, match="open"):
            reader.transport.close()
    finally:
        source.go_on()
    assert wait_for_ends(reader.transport, 1)[1].generations is not None
    assert np.array_equal(content(reader.memory)[9], pattern(9, 8))


def test_a_connected_peer_on_the_same_host_is_read_without_its_help(nixl_world):
    """Connecting takes messages of both sides that may outlast the first reads, so a read or two may have to wait."""
    reader, source = make_reader(nixl_world), nixl_world.source
    connect(reader, source, salt=2)
    for read_id in range(1, 6):
        source.stop()
        try:
            reader.transport.post(block_read(read_id, source.worker_id, EVERY, EVERY))
            ended_in_post = bool(reader.transport.poll())
        finally:
            source.go_on()
        if ended_in_post:
            break
        wait_for_ends(reader.transport, 1)
    assert ended_in_post
    assert np.array_equal(content(reader.memory)[NUM_BLOCKS - 1], pattern(NUM_BLOCKS - 1, 2))
    reader.close()


def test_when_a_read_that_was_given_up_has_ended_nothing_of_it_lands_any_more(world, reader):
    source = world.source
    source.call("fill", 8)
    add_worker(reader, source)
    source.stop()
    try:
        reader.transport.post(block_read(1, source.worker_id, EVERY, EVERY, salt=8))
        reader.transport.abandon(1)
        early = poll_for(reader.transport, 0.05)
    finally:
        source.go_on()
    if not early:
        wait_for_ends(reader.transport, 1)
    before = content(reader.memory)
    assert poll_for(reader.transport, 0.2) == []
    assert np.array_equal(content(reader.memory), before)
    connect(reader, source, salt=9)


def test_a_byte_stream_ends_a_read_that_is_given_up_whatever_its_source_does(grpc_world):
    """So nothing of it waits in quarantine for a source that is frozen."""
    reader, source = make_reader(grpc_world), grpc_world.source
    connect(reader, source, salt=8)
    before = content(reader.memory)
    source.stop()
    try:
        reader.transport.post(block_read(1, source.worker_id, EVERY, EVERY, salt=8))
        reader.transport.abandon(1)
        assert [(end.read_id, end.generations) for end in reader.transport.poll()] == [(1, None)]
    finally:
        source.go_on()
    assert poll_for(reader.transport, 0.2) == []
    assert np.array_equal(content(reader.memory), before)
    reader.close()


def test_a_byte_stream_gives_nothing_to_who_was_not_told_the_generation(grpc_world):
    """Neither the bytes nor the generation."""
    reader, source = make_reader(grpc_world), grpc_world.source
    connect(reader, source)
    before = content(reader.memory)
    reader.transport.post(block_read(1, source.worker_id, EVERY, EVERY, generations=[5] * NUM_BLOCKS))
    found = words(wait_for_ends(reader.transport, 1)[1])
    assert not set(found) & {block + 1000 for block in EVERY}
    assert np.array_equal(content(reader.memory), before)
    reader.close()


class Collected:
    """A sink that keeps what it gets."""

    wanted = True

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.ended: Future[np.ndarray | None] = Future()

    def take(self, data: bytes) -> bool:
        self.data.append(data)
        return True

    def end(self, generations: np.ndarray | None) -> None:
        if not self.ended.done():
            self.ended.set_result(generations)


@pytest.mark.parametrize("wrong", ["key", "block", "nothing", "too many"])
def test_a_byte_stream_refuses_what_no_reader_asks_for(grpc_world, wrong):
    reader = make_reader(grpc_world)
    end = reader.end
    assert isinstance(end, GrpcEnd)
    blocks = {"block": [NUM_BLOCKS], "nothing": [], "too many": EVERY + EVERY}.get(wrong, [0])
    key = b"guessed" if wrong == "key" else end.source._key
    request = ByteRequest(key, np.array(blocks, dtype=np.uint32), np.zeros(len(blocks), dtype=np.uint64))
    channel, sink = end.dial(end.address), Collected()
    channel.read(request, sink)
    assert sink.ended.result(120) is None
    assert sink.data == []
    channel.close()
    reader.close()


@pytest.mark.parametrize("place", [Place.HOST, Place.TENSOR])
@pytest.mark.parametrize("changed_after", [0, 1, 2, 5])
def test_a_byte_stream_never_vouches_for_a_torn_block(changed_after, place):
    """A block of five pieces is given to other content after so many of them were copied."""
    memory = new_memory(block_bytes=5 * PIECE_BYTES - 1, num_blocks=2, place=place)
    memory.generations[:] = 7
    source = BlockSource(new_worker_id(), memory)
    asked = ByteRequest(source._key, np.array([1], dtype=np.uint32), np.array([7], dtype=np.uint64))
    reading = source.open(asked)
    pieces = reading.pieces()
    copied = [next(pieces) for _ in range(changed_after)]
    memory.generations[1] = 8
    fill(memory, slice(1, 2), 0)
    assert list(pieces) == []
    assert all(set(piece) == {CANARY} for piece in copied)
    assert reading.words() != asked.generations


def test_a_forgotten_read_may_still_land():
    """What quarantine is for: its source was not dead, only stopped."""
    fabric = MemoryFabric()
    source, memory = InProcessSource(fabric), new_memory()
    transport = MemoryTransport(fabric, new_worker_id(), memory)
    source.call("fill", 1)
    transport.add_worker(source.worker_id, source.address, source.descriptor)
    source.stop()
    transport.post(block_read(1, source.worker_id, [2], [3]))
    transport.remove_worker(source.worker_id)
    assert [(end.read_id, end.generations) for end in transport.poll()] == [(1, None)]
    assert (content(memory) == CANARY).all()
    source.go_on()
    assert np.array_equal(content(memory)[3], pattern(2, 1))
    assert transport.poll() == []


def test_a_read_of_a_killed_peer_never_lands():
    fabric = MemoryFabric()
    source, memory = InProcessSource(fabric), new_memory()
    transport = MemoryTransport(fabric, new_worker_id(), memory)
    transport.add_worker(source.worker_id, source.address, source.descriptor)
    source.call("fill", 1)
    source.stop()
    transport.post(block_read(1, source.worker_id, [2], [3]))
    source.kill()
    source.go_on()
    assert [end.generations for end in transport.poll()] == [None]
    assert (content(memory) == CANARY).all()


def test_forgetting_an_unknown_peer_is_no_change(world, reader):
    reader.transport.remove_worker(new_worker_id())
    assert reader.transport.poll() == []


def test_an_idle_poll_does_not_wait(world, reader):
    """A thread that waits goes to sleep, which the system counts."""
    connect(reader, world.source)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for _ in range(1000):
        reader.transport.poll()
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 500


def test_nixl_leaves_no_shared_memory_behind(nixl_world):
    reader = make_reader(nixl_world)
    connect(reader, nixl_world.source)
    reader.close()
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
