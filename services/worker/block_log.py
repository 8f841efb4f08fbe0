"""Names the changes of the local prefix cache for the world outside: chain hashes.

The engine knows nodes; here they get their hashes, away from the engine thread and in slices short enough not to hold
the interpreter lock against it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from services.engine.blocks.prefix_cache import ROOT_NODE, CacheEvents
from services.protocol.block_hash import BlockHash, child_hash, namespace_hash, top_hash
from services.protocol.contents import Namespace

_SLICE = 32  # events hashed at a stretch: about 50 µs

# Blocks that came and blocks that went, each with the first block of its chain. They went before others came.
Subscriber = Callable[[Mapping[BlockHash, BlockHash], Mapping[BlockHash, BlockHash]], None]


class BlockLog:
    """The blocks in this worker's cache, by hash. Lives on the event loop."""

    def __init__(self, fingerprint: str) -> None:
        self._top = top_hash(fingerprint)
        self._namespaces: dict[int, Namespace] = {}  # by node, of those in the backlog; see CacheEvents
        self._marks: dict[int, bytes] = {}  # likewise
        self._hashes: dict[int, BlockHash] = {}
        self._firsts: dict[int, BlockHash] = {}
        self._subscribers: list[Subscriber] = []
        self._backlog: deque[tuple[int, int, bytes | None]] = deque()  # node, parent, tokens; see CacheEvents
        self._scheduled = False

    def subscribe(self, subscriber: Subscriber) -> None:
        """Subscribes a function, which is called with every change from now on."""
        self._subscribers.append(subscriber)

    def append(self, events: CacheEvents) -> None:
        """Takes note of changes, in order; subscribers hear of them in the loop's next turns."""
        self._backlog += events
        self._namespaces |= events.namespaces
        self._marks |= events.marks
        self._schedule()

    def cached(self) -> list[BlockHash]:
        """All blocks that subscribers know of."""
        return list(self._hashes.values())

    @property
    def idle(self) -> bool:
        """True when subscribers know of all changes."""
        return not self._backlog

    def _schedule(self) -> None:
        if self._backlog and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run_slice)

    def _run_slice(self) -> None:
        self._scheduled = False
        added: dict[BlockHash, BlockHash] = {}
        evicted: dict[BlockHash, BlockHash] = {}
        for _ in range(min(_SLICE, len(self._backlog))):
            node, parent, tokens = self._backlog.popleft()
            if tokens is not None:
                hash = self._name(node, parent, tokens)
                added[hash] = self._firsts[node]
            else:
                gone, first = self._hashes.pop(node), self._firsts.pop(node)
                added.pop(gone, None)
                evicted[gone] = first
        for subscriber in self._subscribers:
            subscriber(added, evicted)
        self._schedule()

    def _name(self, node: int, parent: int, tokens: bytes) -> BlockHash:
        mark = self._marks.pop(node, b"") if self._marks else b""
        if parent == ROOT_NODE:
            namespace = self._namespaces.pop(node, None) if self._namespaces else None
            root = self._top if namespace is None else namespace_hash(self._top, namespace)
            hash = first = child_hash(root, tokens, mark)
        else:
            hash, first = child_hash(self._hashes[parent], tokens, mark), self._firsts[parent]
        self._hashes[node], self._firsts[node] = hash, first
        return hash
