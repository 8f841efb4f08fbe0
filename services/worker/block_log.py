"""Names the changes of the local prefix cache for the shared index: chain hashes, in numbered messages.

The engine knows nodes; here they get their hashes, away from the engine thread and in slices short enough not to hold
the interpreter lock against it.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from services.engine.prefix_cache import ROOT_NODE, CacheEvent, NodeAdded
from services.protocol.block_hash import BlockHash, child_hash, root_hash
from services.protocol.messages import BlockEvents

_SLICE = 32  # events hashed at a stretch: about 50 µs


class BlockLog:
    """What this worker's cache holds, by hash. Lives on the event loop."""

    def __init__(self, fingerprint: str, publish: Callable[[list[BlockHash], list[BlockHash]], None]) -> None:
        self._hashes: dict[int, BlockHash] = {ROOT_NODE: root_hash(fingerprint)}
        self._publish = publish
        self._backlog: deque[CacheEvent] = deque()
        self._scheduled = False

    def append(self, events: list[CacheEvent]) -> None:
        """Takes note of changes, in order; publishes them from the loop's next turns."""
        self._backlog += events
        self._schedule()

    def snapshot(self) -> BlockEvents:
        """Everything published so far, as the first message of a stream."""
        held = [hash for node, hash in self._hashes.items() if node != ROOT_NODE]
        return BlockEvents(sequence=1, snapshot=True, added=held, evicted=[])

    def _schedule(self) -> None:
        if self._backlog and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run_slice)

    def _run_slice(self) -> None:
        self._scheduled = False
        added: dict[BlockHash, None] = {}  # a set in order
        evicted: list[BlockHash] = []
        for _ in range(min(_SLICE, len(self._backlog))):
            event = self._backlog.popleft()
            if isinstance(event, NodeAdded):
                self._hashes[event.node] = child_hash(self._hashes[event.parent], event.tokens)
                added[self._hashes[event.node]] = None
            else:
                gone = self._hashes.pop(event.node)
                added.pop(gone, None)  # readers take out first, and put in then
                evicted.append(gone)
        self._publish(list(added), evicted)
        self._schedule()
