"""One transport of several processes: what it makes of reads that end, fail and wait in one of them.

The parts are two memory fabrics, each with a source of the same worker id; the second one is driven through messages.
"""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import pytest

from kvtransfer.transports.base import Memory, ReadEnd, TransportError
from kvtransfer.transports.group import GroupTransport
from kvtransfer.transports.memory import MemoryFabric, MemoryTransport
from kvtransfer.transports.part_messages import Ask, ChannelLostError, PartMessage, Tell
from kvtransfer.transports.part_server import PartServer
from kvtransfer.transports.remote import PartLink
from tests.kvtransfer.kv_source import CANARY, block_read, content, fill, new_memory, new_worker_id, wait_for_ends
from tests.kvtransfer.part_processes import DEADLINE_S, SocketChannel


@dataclass
class Part:
    """The wire of one part, its source and what it reads into."""

    fabric: MemoryFabric
    source: Memory
    memory: Memory


class World:
    """A consumer of two parts, and one producer."""

    def __init__(self) -> None:
        self.producer = new_worker_id()
        self.parts = [Part(MemoryFabric(), new_memory(), new_memory()) for _ in range(2)]
        reader = new_worker_id()
        for part in self.parts:
            fill(part.source, slice(None), 7)
            part.source.generations[:] = 1000 + np.arange(len(part.source.generations))
            descriptor = MemoryTransport(part.fabric, self.producer, part.source).descriptor()
        self.descriptor = descriptor
        own, other = (MemoryTransport(part.fabric, reader, part.memory) for part in self.parts)
        ours, theirs = map(SocketChannel, socket.socketpair())
        self.channel = theirs
        self.server = threading.Thread(target=PartServer(theirs, {"memory": (other, "10.0.0.2:7000")}).run)
        self.server.start()
        self.link = PartLink(1, ours, answer_s=DEADLINE_S)
        self.remote = self.link.transport("memory")
        self.transport = GroupTransport(own, [self.remote])
        self.transport.set_pace(0.0005)

    def add_producer(self) -> None:
        self.transport.add_worker(self.producer, "", self.descriptor)

    def post(self, read_id: int = 1) -> None:
        self.transport.post(block_read(read_id, self.producer, [2], [5]))

    def has_landed(self) -> list[bool]:
        return [bool((content(part.memory)[5] == 7).all()) for part in self.parts]

    def settle(self) -> None:
        """Waits until the other part has done what it was told."""
        self.remote.reach(self.descriptor)

    def close(self) -> None:
        self.link.close()
        self.server.join()
        self.channel.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.add_producer()
    yield world
    world.close()


def only_end(world: World) -> ReadEnd:
    end = wait_for_ends(world.transport, 1)[1]
    world.settle()
    assert world.transport.poll() == [], "a read ended twice"
    return end


def test_a_read_lands_in_all_parts(world: World) -> None:
    world.post()
    words = only_end(world).generations
    assert words is not None
    assert words.tolist() == [1002]
    assert world.has_landed() == [True, True]
    for part in world.parts:
        assert (np.delete(content(part.memory), 5, axis=0) == CANARY).all()
    world.transport.close()


@pytest.mark.parametrize("slow", [0, 1])
def test_a_read_has_not_ended_while_one_part_of_it_may_still_land(world: World, slow: int) -> None:
    """Not where it was abandoned, either."""
    world.parts[slow].fabric.hold(world.producer)
    world.post(1)
    world.post(2)
    world.transport.abandon(2)
    world.settle()
    assert world.transport.poll() == []
    assert world.has_landed()[slow] is False
    with pytest.raises(TransportError, match="2 reads are open"):
        world.transport.close()
    world.parts[slow].fabric.release(world.producer)
    assert wait_for_ends(world.transport, 2).keys() == {1, 2}
    assert world.has_landed() == [True, True]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_read_that_fails_in_one_part_fails_once_and_when_nothing_lands_in_the_other(
    world: World, failing: int
) -> None:
    other = world.parts[1 - failing]
    other.fabric.hold(world.producer)
    world.parts[failing].fabric.hold(world.producer)
    world.post()
    world.parts[failing].fabric.kill(world.producer)
    world.settle()
    assert world.transport.poll() == []
    other.fabric.release(world.producer)
    assert only_end(world).generations is None


@pytest.mark.parametrize("stale", [0, 1])
def test_words_that_differ_in_one_part_are_reported(world: World, stale: int) -> None:
    world.parts[stale].source.generations[2] = 5
    world.post()
    words = only_end(world).generations
    assert words is not None
    assert words.tolist() == [5]


def test_a_producer_that_one_part_cannot_read_is_added_to_none() -> None:
    world = World()
    other = world.parts[1]
    other.fabric.kill(world.producer)
    with pytest.raises(TransportError, match=r"rank 1: no worker .* on this fabric"):
        world.add_producer()
    world.post()
    assert only_end(world).generations is None
    assert world.has_landed() == [False, False]
    MemoryTransport(other.fabric, world.producer, other.source)
    world.add_producer()
    world.post()
    assert only_end(world).generations is not None
    world.close()


def test_a_producer_is_removed_everywhere(world: World) -> None:
    for part in world.parts:
        part.fabric.hold(world.producer)
    world.post()
    world.transport.remove_worker(world.producer)
    assert only_end(world).generations is None
    world.post()
    assert only_end(world).generations is None


def test_a_part_that_is_lost_ends_the_transport(world: World) -> None:
    """Its reads may still land there, and nobody would tell."""
    for part in world.parts:
        part.fabric.hold(world.producer)
    world.post()
    world.channel.close()
    world.server.join()
    with pytest.raises(TransportError, match="rank 1 is lost"):
        wait_for_ends(world.transport, 1)
    with pytest.raises(TransportError, match="rank 1 is lost"):
        world.remote.reach(world.descriptor)


def test_a_part_that_does_not_answer_is_not_waited_for() -> None:
    ours, theirs = map(SocketChannel, socket.socketpair())
    link = PartLink(1, ours, answer_s=0.05)
    with pytest.raises(TransportError, match=r"rank 1 does not answer for 0\.1 s"):
        link.hello(0.1)
    with pytest.raises(TransportError, match="rank 1 does not answer"):
        link.ask(Ask.CLOSE, 0)
    theirs.close()
    with pytest.raises(TransportError, match="rank 1 is lost"):
        link.hello(DEADLINE_S)
    link.close()


WRONG_HELLOS = [
    b"",
    b"[]",
    b"{}",
    b'{"offers": []}',
    b'{"offers": {"a": 1}}',
    b'{"offers": {}, "process": 1}',
    b"[" * 60_000,
]
WRONG_KINDS = [PartMessage(Tell.END), PartMessage(Ask.POST)]


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"abc",
        *(b"".join(message.pack()) for message in WRONG_KINDS),
        *(b"".join(PartMessage(Tell.HELLO, body=body).pack()) for body in WRONG_HELLOS),
    ],
)
def test_a_part_that_sends_what_no_part_sends_is_lost(wrong: bytes) -> None:
    """Both ends learn of it: the part too hears nothing more."""
    ours, theirs = map(SocketChannel, socket.socketpair())
    link = PartLink(1, ours, answer_s=DEADLINE_S)
    theirs.send([wrong])
    with pytest.raises(TransportError, match="rank 1 is lost"):
        link.hello(DEADLINE_S)
    with pytest.raises(ChannelLostError):
        theirs.receive()
    theirs.close()
    link.close()


def test_a_part_that_answers_a_question_twice_is_lost() -> None:
    ours, theirs = map(SocketChannel, socket.socketpair())
    link = PartLink(1, ours, answer_s=DEADLINE_S)
    asked = Future[PartMessage]()
    asked.set_result(PartMessage(Tell.ANSWER, number=1, flag=True))
    link._questions[1] = asked  # as it is until the thread that asked wakes
    theirs.send(PartMessage(Tell.ANSWER, number=1, flag=True).pack())
    with pytest.raises(TransportError, match="rank 1 is lost: a second answer to question 1"):
        link.hello(DEADLINE_S)
    theirs.close()
    link.close()


def test_a_part_that_is_sent_no_message_says_so() -> None:
    ours, theirs = map(SocketChannel, socket.socketpair())
    ours.send([b"abc"])
    with pytest.raises(TransportError, match="cannot be read: a message of 3 bytes"):
        PartServer(theirs, {}).run()
    ours.close()
    theirs.close()


def test_a_producer_is_removed_where_adding_it_failed_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a part adds it, and its answer comes too late. Where a part is lost, the others still remove it."""
    removed: list[str] = []
    other = new_worker_id()

    def late(*_: object) -> None:
        raise TransportError("rank 1 does not answer")

    def lost(_: int) -> None:
        removed.append("rank 1")
        raise TransportError("rank 1 is lost")

    own = world.transport._own
    monkeypatch.setattr(own, "add_worker", lambda *_: None)
    monkeypatch.setattr(own, "remove_worker", lambda _: removed.append("own"))
    monkeypatch.setattr(world.remote, "add_worker", late)
    monkeypatch.setattr(world.remote, "remove_worker", lost)
    with pytest.raises(TransportError, match="rank 1 does not answer"):
        world.transport.add_worker(other, "", world.descriptor)
    assert sorted(removed) == ["own", "rank 1"]
