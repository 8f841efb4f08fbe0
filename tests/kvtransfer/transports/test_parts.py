"""Workers whose ranks are in several processes, on either side: every byte arrives, or the read fails once."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from kvtransfer.transports.base import ReadEnd
from tests.kvtransfer.kv_source import block_read, new_worker_id, wait_for_ends
from tests.kvtransfer.part_processes import SALT, Group, PartProcess
from tests.kvtransfer.ranks import LAYOUTS, PLAIN, group, some_content

SOURCE, DESTINATION = [4, 1, 2, 5], [0, 3, 4, 8]  # only 1 and 2 follow each other in both pools
# Ranks, and processes that they are in.
SIDES = [("1", 1), ("2", 2), ("4", 2), ("3", 3), ("stages of 2", 2), ("stages of 1", 2)]
PAIRS = [(of, to) for of, to in product(SIDES, SIDES) if of[1] > 1 or to[1] > 1]


@pytest.fixture(scope="module")
def processes() -> Iterator[list[PartProcess]]:
    """Two for each side."""
    started = [PartProcess() for _ in range(4)]
    yield started
    for process in started:
        process.close()


def check_read(of: Group, to: Group, content: np.ndarray, cut: list[np.ndarray]) -> None:
    """Reads some blocks, and looks at each rank's pool. cut: whole blocks, as the pools of the readers have them."""
    expected = to.pools()
    for pool, own in zip(expected, cut, strict=True):
        pool[DESTINATION] = own[SOURCE]
    to.transport.add_worker(of.worker, of.end.address, of.transport.descriptor())
    to.transport.post(block_read(1, of.worker, SOURCE, DESTINATION, salt=SALT))
    words = wait_for_ends(to.transport, 1, of.transport)[1].generations
    assert words is not None
    assert words.tolist() == [block + 1000 * SALT for block in SOURCE]
    for rank, (pool, wanted) in enumerate(zip(to.pools(), expected, strict=True)):
        assert np.array_equal(pool, wanted), f"rank {rank} has other bytes"


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", ["nixl", "grpc"])
@pytest.mark.parametrize(
    ("layout", "of", "to"),
    [
        (name, *pair)
        for pair in PAIRS
        for name, layout in LAYOUTS.items()
        if not (layout.groups and "stages" in pair[0][0] + pair[1][0])
    ],
)
def test_workers_of_several_processes_read_each_other(
    processes: list[PartProcess], kind: str, layout: str, of: tuple[str, int], to: tuple[str, int]
) -> None:
    from_ranks, to_ranks = group(LAYOUTS[layout], of[0]), group(LAYOUTS[layout], to[0])
    content = some_content(LAYOUTS[layout], seed=12)
    producer = Group(kind, from_ranks, processes[: of[1] - 1], content)
    consumer = Group(kind, to_ranks, processes[2 : 1 + to[1]])
    check_read(producer, consumer, content, to_ranks.cut(content))
    consumer.close()
    producer.close()


@pytest.fixture(params=["nixl", "grpc"])
def pair(request: pytest.FixtureRequest, processes: list[PartProcess]) -> Iterator[tuple[Group, Group]]:
    """Two workers of two processes each, and nothing has been read yet."""
    ranks = group(PLAIN, "2")
    producer = Group(request.param, ranks, processes[:1], some_content(PLAIN, seed=13))
    consumer = Group(request.param, ranks, processes[2:3])
    consumer.transport.add_worker(producer.worker, producer.end.address, producer.transport.descriptor())
    yield producer, consumer
    consumer.close()
    producer.close()


def read_one(pair: tuple[Group, Group], read_id: int, generation: int) -> ReadEnd:
    producer, consumer = pair
    consumer.transport.post(block_read(read_id, producer.worker, [2], [0], generations=[generation]))
    return wait_for_ends(consumer.transport, 1, producer.transport)[read_id]


def test_a_block_that_was_given_to_other_content_is_never_taken_for_what_was_announced(
    pair: tuple[Group, Group],
) -> None:
    producer, _ = pair
    assert words_of(read_one(pair, 1, 1002)) == [1002]
    producer.memory.generations[2] = 77
    assert words_of(read_one(pair, 2, 1002)) != [1002]
    assert words_of(read_one(pair, 3, 77)) == [77]


def words_of(end: ReadEnd) -> list[int]:
    assert end.generations is not None
    return list(end.generations.tolist())


def test_a_read_of_blocks_that_are_not_there_fails_once(pair: tuple[Group, Group]) -> None:
    producer, consumer = pair
    consumer.transport.post(block_read(1, producer.worker, [200], [0]))
    consumer.transport.post(block_read(2, new_worker_id(), [0], [0]))
    ends = wait_for_ends(consumer.transport, 2, producer.transport)
    assert [ends[1].generations, ends[2].generations] == [None, None]
    assert words_of(read_one(pair, 3, 1002)) == [1002]
    assert consumer.transport.poll() == []
