"""The local prefix cache: an exact trie over blocks, in one dict.

A node is a block of tokens below a parent node; its key is the parent's node id and the block's raw token bytes, so
there is nothing to collide and nothing to hash. Node ids are never used twice. A node is *pending* while its block is
being computed or read: not a hit yet, but a reason to wait instead of doing the work again. A child is ready only after
its parent, and goes before it.

The trie names blocks and holds no references to them: that is the pool's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

NO_BLOCK = -1  # as a parent: the root
ROOT_NODE = 0


@dataclass(frozen=True, slots=True)
class Match:
    """What a lookup found: ready blocks, and whether the next one is pending."""

    blocks: list[int]
    next_is_pending: bool


@dataclass(slots=True)
class CacheEvents:
    """Nodes that became ready or are gone, in order, in parallel lists: an object for each would be work for nobody.

    Tokens and parent are enough to name a node outside: a chain hash over the parent's and these tokens.
    """

    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # nodes
    tokens: list[bytes | None] = field(default_factory=list)  # None: a node that was ready is gone

    def __len__(self) -> int:
        return len(self.nodes)

    def added(self, node: int, parent: int, tokens: bytes) -> None:
        """A node became ready."""
        self.nodes.append(node)
        self.parents.append(parent)
        self.tokens.append(tokens)

    def evicted(self, node: int) -> None:
        """A node that was ready is gone."""
        self.nodes.append(node)
        self.parents.append(ROOT_NODE)
        self.tokens.append(None)

    def __iter__(self) -> Iterator[tuple[int, int, bytes | None]]:
        return zip(self.nodes, self.parents, self.tokens, strict=True)


_NO_EVENTS = CacheEvents()  # for who takes them when there are none: another thread may look at them later


class PrefixCache:
    """Which block holds which prefix. All methods are in time linear in the blocks they are about."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.version = 0  # rises whenever a lookup may have another result
        self._block_by_key: dict[bytes, int] = {}
        self._node_ids = count(ROOT_NODE + 1)
        # By block id; meaningful where the block has a node.
        self._node = [ROOT_NODE] * num_blocks  # ROOT_NODE: the block has none
        self._key = [b""] * num_blocks
        self._parent = [NO_BLOCK] * num_blocks
        self._pending = [False] * num_blocks
        # A node's children are a list that runs through these: objects would be work for the garbage collector.
        self._first_child = [NO_BLOCK] * num_blocks
        self._next_sibling = [NO_BLOCK] * num_blocks
        self._previous_sibling = [NO_BLOCK] * num_blocks
        self._events = CacheEvents()

    def __len__(self) -> int:
        return len(self._block_by_key)

    def holds(self, block: int) -> bool:
        """True when the block has a node."""
        return self._node[block] != ROOT_NODE

    def is_pending(self, block: int) -> bool:
        """True when the block has a node that is not ready."""
        return self._pending[block]

    def match(self, token_ids: np.ndarray) -> Match:
        """The longest ready prefix of int32[n] token ids, at most ⌊(n - 1) / block_size⌋ blocks.

        So at least the last token is always computed, and its logits are there to sample from.
        """
        raw = token_ids.tobytes()
        step = self.block_size * 4
        blocks: list[int] = []
        node = ROOT_NODE
        for start in range(0, (len(token_ids) - 1) // self.block_size * step, step):
            block = self._block_by_key.get(node.to_bytes(8, "little") + raw[start : start + step])
            if block is None:
                break
            if self._pending[block]:
                return Match(blocks, True)
            blocks.append(block)
            node = self._node[block]
        return Match(blocks, False)

    def find(self, parent: int, tokens: bytes) -> int | None:
        """The block with these tokens below the parent block (NO_BLOCK: the root), ready or not."""
        return self._block_by_key.get(self._key_below(parent, tokens))

    def insert(self, parent: int, tokens: bytes, block: int, *, pending: bool) -> None:
        """Enters a block below its parent. No node is there yet; a ready one needs a ready parent."""
        key = self._key_below(parent, tokens)
        assert key not in self._block_by_key
        assert not self.holds(block)
        assert pending or parent == NO_BLOCK or not self._pending[parent]
        self._block_by_key[key] = block
        self._node[block] = next(self._node_ids)
        self._key[block] = key
        self._parent[block] = parent
        self._pending[block] = pending
        if parent != NO_BLOCK:
            self._link(block, parent)
        self._changed()
        if not pending:
            self._announce(block)

    def insert_filled(self, parents: list[int], blocks: list[int], tokens: bytes) -> list[int]:
        """Enters blocks that are ready, each below its own parent; `tokens` are theirs, one after the other.

        Returns the indices of those that were not entered, because a node with the same content is there. Below a
        parent that has no node there is nothing to enter either. As `insert`, for many, and every line counts.
        """
        step, nodes, known, events = self.block_size * 4, self._node, self._block_by_key, self._events
        there: list[int] = []
        for index, (parent, block) in enumerate(zip(parents, blocks, strict=True)):
            above = nodes[parent]
            if above == ROOT_NODE:
                continue
            own = tokens[index * step : (index + 1) * step]
            key = above.to_bytes(8, "little") + own
            if known.setdefault(key, block) != block:
                there.append(index)
                continue
            nodes[block] = node = next(self._node_ids)
            self._key[block] = key
            self._parent[block] = parent
            self._link(block, parent)
            events.added(node, above, own)
        self._changed()
        return there

    def make_ready(self, block: int) -> None:
        """The block's content is complete: from now on it is a hit."""
        assert self._pending[block]
        parent = self._parent[block]
        assert parent == NO_BLOCK or not self._pending[parent]
        self._pending[block] = False
        self._changed()
        self._announce(block)

    def remove(self, block: int) -> None:
        """Removes a leaf: the block was evicted, or its owner failed while it was pending."""
        assert self.holds(block)
        assert self._first_child[block] == NO_BLOCK
        if not self._pending[block]:
            self._events.evicted(self._node[block])
        del self._block_by_key[self._key[block]]
        if (parent := self._parent[block]) != NO_BLOCK:
            self._unlink(block, parent)
        self._node[block] = ROOT_NODE
        self._key[block] = b""
        self._pending[block] = False
        self._changed()

    def subtree(self, block: int) -> list[int]:
        """A block with a node and all blocks below it, children before their parents."""
        found = [block]
        for each in found:  # which grows meanwhile
            child = self._first_child[each]
            while child != NO_BLOCK:
                found.append(child)
                child = self._next_sibling[child]
        return found[::-1]

    def ancestors(self, block: int) -> list[int]:
        """The blocks above one that has a node, nearest first."""
        found: list[int] = []
        while (block := self._parent[block]) != NO_BLOCK:
            found.append(block)
        return found

    def take_events(self) -> CacheEvents:
        """What became ready or was evicted since the last call."""
        if not len(self._events):
            return _NO_EVENTS
        events, self._events = self._events, CacheEvents()
        return events

    def _link(self, block: int, parent: int) -> None:
        first = self._first_child[parent]
        self._first_child[parent] = block
        self._next_sibling[block] = first
        self._previous_sibling[block] = NO_BLOCK
        if first != NO_BLOCK:
            self._previous_sibling[first] = block

    def _unlink(self, block: int, parent: int) -> None:
        previous, following = self._previous_sibling[block], self._next_sibling[block]
        if previous == NO_BLOCK:
            self._first_child[parent] = following
        else:
            self._next_sibling[previous] = following
        if following != NO_BLOCK:
            self._previous_sibling[following] = previous

    def _key_below(self, parent: int, tokens: bytes) -> bytes:
        node = ROOT_NODE if parent == NO_BLOCK else self._node[parent]
        return node.to_bytes(8, "little") + tokens

    def _announce(self, block: int) -> None:
        parent = self._parent[block]
        parent_node = ROOT_NODE if parent == NO_BLOCK else self._node[parent]
        self._events.added(self._node[block], parent_node, self._key[block][8:])

    def _changed(self) -> None:
        self.version += 1
