"""A gateway's own memory of which prompts it sent where: what it routes by while the index does not answer."""

from collections import OrderedDict
from collections.abc import Sequence

from kvtransfer.ids import WorkerId
from services.prefix_index.memory import depth_of
from services.protocol.block_hash import BlockHash

_MAX_BLOCKS = 50_000  # of each worker: some 8 MB


class RecentPrefixes:
    """The blocks last sent to each worker. It hears of no eviction, so it may promise too much."""

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._sent: dict[WorkerId, OrderedDict[BlockHash, None]] = {}  # by worker; oldest first

    def note(self, worker: WorkerId, chain: Sequence[BlockHash]) -> None:
        """A prompt with these blocks goes to `worker`."""
        sent = self._sent.setdefault(worker, OrderedDict())
        for hash in reversed(chain):  # a parent is younger than its children and so is removed after them
            sent[hash] = None
            sent.move_to_end(hash)
        while len(sent) > self._max_blocks:
            sent.popitem(last=False)

    def remove_worker(self, worker: WorkerId) -> None:
        """Removes a worker. An unknown one is no error."""
        self._sent.pop(worker, None)

    def depths(self, chain: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Returns how many leading blocks of `chain` were sent to each worker; workers with none are left out."""
        depths = {worker: depth_of(chain, sent) for worker, sent in self._sent.items()}
        return {worker: depth for worker, depth in depths.items() if depth}
