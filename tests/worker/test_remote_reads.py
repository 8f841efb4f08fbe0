"""When a worker's transports are told to forget a producer: only once nothing of it can land."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvtransfer.process import ProcessIdentity
from kvtransfer.transports.base import ReadEnd
from kvtransfer.transports.memory import MemoryFabric, MemoryTransport
from services.worker.remote_reads import RemoteReads
from tests.kvtransfer.kv_source import InProcessSource, block_read, new_memory, new_worker_id

A_WHILE_S = 100.0


class Bench:
    """A worker's reads of one producer over the memory fabric, on a clock of their own."""

    def __init__(self) -> None:
        fabric = MemoryFabric()
        self.source = InProcessSource(fabric)
        self.reads = RemoteReads([MemoryTransport(fabric, new_worker_id(), new_memory())])
        self.now = 0.0

    def reach(self, process: ProcessIdentity | None = None) -> None:
        self.reads.add_worker(self.source.worker_id, "nowhere:0", {"memory": self.source.descriptor}, process)

    def lose(self) -> None:
        self.reads.worker_lost(self.source.worker_id)

    def post(self, read_id: int) -> None:
        self.reads.post(block_read(read_id, self.source.worker_id, [0], [0]))

    def post_and_hold(self, read_id: int) -> None:
        self.source.stop()
        self.post(read_id)

    def ends(self, seconds: float = 0.0) -> list[tuple[int, bool]]:
        """Reads that end meanwhile, and whether they went well."""
        ended: list[ReadEnd] = []
        for _ in range(10):
            self.now += seconds / 10
            ended += self.reads.poll(self.now)
        return [(end.read_id, end.generations is not None) for end in ended]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def child() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def identity(process: subprocess.Popen) -> ProcessIdentity:
    found = ProcessIdentity.of(process.pid)
    assert found is not None
    return found


def test_a_read_of_a_lost_producer_that_may_live_stays_open_until_it_ends(bench: Bench) -> None:
    bench.reach()
    bench.post_and_hold(1)
    bench.lose()
    bench.reads.abandon(1)
    assert bench.ends(A_WHILE_S) == []
    bench.source.go_on()
    assert bench.ends() == [(1, True)]
    bench.ends(A_WHILE_S)
    bench.post(2)
    assert bench.ends() == [(2, False)], "it was not forgotten, though nothing of it was open"


def test_a_read_of_a_lost_producer_ends_when_its_process_is_seen_gone(bench: Bench, child: subprocess.Popen) -> None:
    bench.reach(identity(child))
    bench.post_and_hold(1)
    bench.lose()
    assert bench.ends(A_WHILE_S) == []
    child.kill()
    child.wait()
    assert bench.ends(A_WHILE_S) == [(1, False)]


def test_what_a_process_had_sent_before_it_ended_has_time_to_land(bench: Bench, child: subprocess.Popen) -> None:
    bench.reach(identity(child))
    bench.post_and_hold(1)
    child.kill()
    child.wait()
    for _ in range(3):
        bench.lose()  # has it looked at at once
        assert bench.ends() == []
    bench.source.go_on()
    assert bench.ends() == [(1, True)]


def test_only_a_process_that_was_seen_alive_from_here_can_be_seen_gone(bench: Bench, child: subprocess.Popen) -> None:
    """No process has its id here: it may be on a copy of this machine."""
    living = identity(child)
    child.kill()
    child.wait()
    bench.reach(living)
    bench.post_and_hold(1)
    bench.lose()
    assert bench.ends(A_WHILE_S) == []


def test_a_producer_that_is_not_lost_is_not_looked_at(bench: Bench, child: subprocess.Popen) -> None:
    """A stream is up, or somebody tries to make one."""
    bench.reach(identity(child))
    bench.post_and_hold(1)
    child.kill()
    child.wait()
    assert bench.ends(A_WHILE_S) == []


def test_a_producer_that_is_reached_again_is_not_lost_any_more(bench: Bench) -> None:
    bench.reach()
    bench.post_and_hold(1)
    bench.lose()
    bench.reach()
    bench.source.go_on()
    assert bench.ends(A_WHILE_S) == [(1, True)]
    bench.post(2)
    assert bench.ends() == [(2, True)]


def test_a_lost_producer_without_open_reads_is_forgotten_and_can_be_added_again(bench: Bench) -> None:
    bench.reach()
    bench.lose()
    bench.ends()
    bench.post(1)
    assert bench.ends() == [(1, False)]
    bench.reach()
    bench.post(2)
    assert bench.ends() == [(2, True)]


def test_nobody_waits_for_a_read_that_was_given_up(bench: Bench) -> None:
    """So it does not keep the transfer thread busy, be it open for minutes."""
    bench.reach()
    bench.post_and_hold(1)
    assert bench.reads.has_wanted_reads
    bench.reads.abandon(1)
    assert not bench.reads.has_wanted_reads


def test_transports_are_told_how_often_they_are_polled_where_that_is_new() -> None:
    class Paced(MemoryTransport):
        def set_pace(self, poll_s: float) -> None:
            told.append(poll_s)

    told: list[float] = []
    reads = RemoteReads([Paced(MemoryFabric(), new_worker_id(), new_memory())])
    for poll_s in (0.02, 0.02, 0.0005, 0.0005, 0.02):
        reads.set_pace(poll_s)
    assert told == [0.02, 0.0005, 0.02]
