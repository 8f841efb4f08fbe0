"""Reads of blocks between groups of ranks of several sizes: the producer's and the consumer's, in turns.

One process has a group of each size that is read, this one has each that reads. A rank's pool is a mapping of its own,
with its share of every block: consecutive KV heads. All pairs of a round are measured one after the other.
Blocks are in no order, as in a pool that was used for a while, so that each is a read of its own, or several.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from multiprocessing.connection import Connection

import numpy as np

from kvtransfer.block_memory import BlockMemory, GroupBlocks, HostBlocks
from kvtransfer.ids import WorkerId
from kvtransfer.transports.base import Transport, TransportError
from kvtransfer.transports.byte_stream import BlockSource
from loadtest.children import child
from loadtest.micro.transport import (
    BLOCK_BYTES,
    GENERATION,
    NUM_BLOCKS,
    POLL_S,
    open_end,
    timed_read,
)
from loadtest.tables import Record, spread
from services.config import TransportName
from services.engine.kernels.cpu.huge_pages import allocate
from services.engine.runner.group.shared_pages import SharedPages
from services.engine.runner.memory import populate

_RANKS = (1, 2, 4)
_PAIRS = tuple(product(_RANKS, _RANKS))  # ranks of the producer, and of the consumer
_TRANSPORTS = (TransportName.NIXL, TransportName.GRPC)

_End = tuple[BlockSource, Transport, str]  # the last is the address
_Offer = tuple[WorkerId, str, bytes]  # worker id, address and descriptor


def measure(rounds: int) -> list[Record]:
    """Measures the bytes a second of reads of all blocks, and what they are of those between single ranks."""
    return [record for name in _TRANSPORTS for record in _records(name, rounds)]


def _records(name: TransportName, rounds: int) -> Iterator[Record]:
    try:
        seconds = _measure(name, rounds)
    except (TransportError, EOFError) as error:
        yield {"transport": name.value, "error": f"not here: {error or 'the source process ended'}"}
        return
    alone = float(np.median(seconds[1, 1]))
    for (of, to), found in seconds.items():
        rates = [NUM_BLOCKS * BLOCK_BYTES / value / 1e9 for value in found]
        yield {
            "transport": name.value,
            "from_ranks": of,
            "to_ranks": to,
            "blocks": NUM_BLOCKS,
            "block_kib": BLOCK_BYTES >> 10,
            "ms": float(np.median(found)) * 1e3,
            "unit": "GB/s",
            **spread(rates, (0, 50, 100)),
            "of_1_1": alone / float(np.median(found)),
        }


def _measure(name: TransportName, rounds: int) -> dict[tuple[int, int], list[float]]:
    """Returns the seconds of each pair's reads. The first ones, which connect, are left out."""
    blocks = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.uint32)
    seconds: dict[tuple[int, int], list[float]] = {pair: [] for pair in _PAIRS}
    with child(_serve, name) as producer, _ends(name, {to for _, to in _PAIRS}, 0) as readers:
        offers: dict[int, _Offer] = producer.pipe.recv()
        for number in range(rounds + 1):
            for pair in _PAIRS:
                (worker, address, descriptor), (source, transport, _) = offers[pair[0]], readers[pair[1]]
                transport.add_worker(worker, address, descriptor)
                source.memory.blocks.write(blocks, 0, bytes(NUM_BLOCKS * BLOCK_BYTES))
                spent = timed_read(transport, worker, number, blocks)
                arrived = source.memory.blocks.read(blocks, 0, NUM_BLOCKS * BLOCK_BYTES)
                assert (np.frombuffer(arrived, np.uint8) == GENERATION).all(), pair
                seconds[pair] += [spent] if number else []
        for _, transport, _ in readers.values():
            transport.close()
    return seconds


def _serve(pipe: Connection, name: TransportName) -> None:
    """Runs the groups that are read, which poll until nobody holds the pipe any more."""
    with _ends(name, {of for of, _ in _PAIRS}, GENERATION) as ends:
        offers = {size: (source.worker_id, address, end.descriptor()) for size, (source, end, address) in ends.items()}
        pipe.send(offers)
        while not pipe.poll(POLL_S):
            for _, transport, _ in ends.values():
                transport.poll()


@contextmanager
def _ends(
    name: TransportName, sizes: set[int], content: int
) -> Iterator[dict[int, tuple[BlockSource, Transport, str]]]:
    """Makes a worker's transport and address for a group of each size."""
    with ExitStack() as stack:
        yield {size: stack.enter_context(open_end(name, _blocks(size, content), content, None)) for size in sizes}


def _blocks(num_ranks: int, content: int) -> BlockMemory:
    """Allocates blocks as workers do, all bytes `content`: those of several ranks in memory that they share."""
    each = BLOCK_BYTES // num_ranks
    if num_ranks == 1:
        pools = [allocate(NUM_BLOCKS * each)]
    else:
        pools = [SharedPages.create("baton-kv", NUM_BLOCKS * each).array[: NUM_BLOCKS * each] for _ in range(num_ranks)]
    shaped = [pool.reshape(NUM_BLOCKS, each) for pool in pools]
    ranges = [[range(rank * each, (rank + 1) * each)] for rank in range(num_ranks)]
    blocks = HostBlocks(*shaped) if num_ranks == 1 else GroupBlocks(shaped, ranges)
    populate(blocks)
    for pool in pools:
        pool[:] = content
    return blocks
