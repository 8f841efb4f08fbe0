"""The index in the gateway's own memory: one set of block hashes for each worker.

A (block, worker) pair costs the 56 bytes of its hash and its share of a set's table, 110 to 170 bytes in all. Dropping
a worker is dropping its set. A lookup asks each worker's set about 2 log2(depth) times.
"""

from collections.abc import Container, Sequence

from kvtransfer.ids import WorkerId
from services.protocol.block_hash import BlockHash
from services.protocol.messages import BlockEvents


class MemoryPrefixIndex:
    """A `PrefixIndex` fed by the block events of this gateway's own streams."""

    wants_block_events = True

    def __init__(self) -> None:
        self._cached: dict[WorkerId, set[BlockHash]] = {}

    def apply(self, worker: WorkerId, events: BlockEvents) -> None:
        """See PrefixIndex."""
        if events.snapshot:
            self._cached[worker] = set(events.added)
            return
        cached = self._cached.setdefault(worker, set())
        cached.difference_update(events.evicted)
        cached.update(events.added)

    def placed(self, worker: WorkerId, chain: Sequence[BlockHash]) -> None:
        """See PrefixIndex. Here the worker's own word comes soon enough."""

    def remove_worker(self, worker: WorkerId) -> None:
        """See PrefixIndex."""
        self._cached.pop(worker, None)

    async def depths(self, chain: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """See PrefixIndex."""
        depths = {worker: depth_of(chain, cached) for worker, cached in self._cached.items()}
        return {worker: depth for worker, depth in depths.items() if depth}


def depth_of(chain: Sequence[BlockHash], cached: Container[BlockHash]) -> int:
    """Length of the cached prefix: gallops past its end, then bisects."""
    step = 1
    while step <= len(chain) and chain[step - 1] in cached:
        step *= 2
    low, high = step // 2, min(step, len(chain) + 1)  # low blocks are cached; block number `high` is not, or is none
    while high - low > 1:
        middle = (low + high) // 2
        if chain[middle - 1] in cached:
            low = middle
        else:
            high = middle
    return low
