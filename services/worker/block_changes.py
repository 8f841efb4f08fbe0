"""Changes of the prefix cache that a gateway is still to hear of: a newer one replaces an older one of the same block.

So they take the memory of the blocks that changed, however often they did and however slowly a gateway reads.
"""

from collections.abc import Collection
from itertools import islice

from services.protocol.block_hash import BlockHash
from services.protocol.messages import BlockEvents

_MAX_EVENTS = 1024  # blocks in one message


class BlockChanges:
    """The changes for one stream, since its snapshot."""

    def __init__(self) -> None:
        self._sequence = 1  # of the snapshot
        self._added: dict[BlockHash, None] = {}
        self._evicted: dict[BlockHash, None] = {}

    def __len__(self) -> int:
        return len(self._added) + len(self._evicted)

    def note(self, added: Collection[BlockHash], evicted: Collection[BlockHash]) -> None:
        """Takes note of blocks that went, and of others that came after them."""
        for hash in evicted:
            self._added.pop(hash, None)
            self._evicted[hash] = None
        self._added.update(dict.fromkeys(added))

    def take(self) -> BlockEvents:
        """Takes the next message; evictions come first, so that a block which came back is there in the end."""
        evicted = _take(self._evicted, _MAX_EVENTS)
        added = _take(self._added, _MAX_EVENTS - len(evicted))
        self._sequence += 1
        return BlockEvents(self._sequence, False, added, evicted)


def _take(blocks: dict[BlockHash, None], count: int) -> list[BlockHash]:
    taken = list(islice(blocks, count))
    for hash in taken:
        del blocks[hash]
    return taken
