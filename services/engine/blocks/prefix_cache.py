"""The local prefix cache: an exact trie over blocks, in one dict.

A node is a block of contents below a parent node; its key is the parent's node id and the block's raw token bytes, so
there is nothing to collide and nothing to hash. Below the root, the root's hash of the request's namespace is in the
place of the parent's node id; a block in which media begin has its mark at the end of its key. So two blocks have one
node if and only if they have one name (protocol/block_hash.py). Node ids are never used twice.

A node is *pending* while its block is being computed or read: it is no hit yet, but a request waits for it instead of
doing the work again. A child becomes ready only after its parent, and is removed before it. `insert` enters all nodes;
`check` says what is true of them at any time.

The trie names blocks and has no references to them; the pool counts those.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from services.protocol.block_hash import namespace_hash, top_hash
from services.protocol.contents import COMMON, NO_MARKS, Contents, Namespace

NO_BLOCK = -1  # as a parent: the root
ROOT_NODE = 0
_TOP = top_hash("")  # one fingerprint holds for all of a worker's blocks, and names none of them apart
_NO_NODE = -1  # of a block without one


_FIRST_GUESS = 8  # blocks; see PrefixCache.match


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The result of a look-up: ready blocks, and the next one where that is pending."""

    blocks: np.ndarray  # int32[n]
    pending: int = NO_BLOCK

    @property
    def next_is_pending(self) -> bool:
        """True when the block behind the ready ones is being computed or read."""
        return self.pending != NO_BLOCK


NO_MATCH = Match(np.zeros(0, dtype=np.int32))


@dataclass(slots=True)
class CacheEvents:
    """Nodes that became ready or were removed, in order, in parallel lists: objects would be work for the collector.

    Others name a node by a chain hash over its parent's hash, its tokens and its mark.
    """

    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # nodes
    tokens: list[bytes | None] = field(default_factory=list)  # None: a node that was ready was removed
    namespaces: dict[int, Namespace] = field(default_factory=dict)  # of nodes below the root; none: COMMON
    marks: dict[int, bytes] = field(default_factory=dict)  # of nodes that have one

    def __len__(self) -> int:
        return len(self.nodes)

    def added(self, node: int, parent: int, tokens: bytes) -> None:
        """Adds a node that became ready."""
        self.nodes.append(node)
        self.parents.append(parent)
        self.tokens.append(tokens)

    def evicted(self, node: int) -> None:
        """Adds the removal of a node that was ready."""
        self.nodes.append(node)
        self.parents.append(ROOT_NODE)
        self.tokens.append(None)

    def __iter__(self) -> Iterator[tuple[int, int, bytes | None]]:
        return zip(self.nodes, self.parents, self.tokens, strict=True)


_NO_EVENTS = CacheEvents()  # is returned when there are none, and never changes: another thread may look at it later


def _root_key(namespace: Namespace) -> bytes:
    """Returns the beginning of the keys of blocks below the root: longer than any node's id."""
    return _TOP if namespace is COMMON else namespace_hash(_TOP, namespace)


class PrefixCache:
    """A trie of cached blocks. Each method takes time linear in the number of blocks that it is given or returns."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.version = 0  # rises whenever a lookup may have another result
        self._block_by_key: dict[bytes, int] = {}
        self._node_ids = count(ROOT_NODE + 1)
        # By block id; meaningful where the block has a node.
        self.is_node = np.zeros(num_blocks, dtype=np.bool_)  # to be read by others
        self._content = np.zeros((num_blocks, block_size), dtype=np.int32)  # token ids
        self._parent = [NO_BLOCK] * num_blocks
        self._next_sibling = [NO_BLOCK] * num_blocks
        self._previous_sibling = [NO_BLOCK] * num_blocks
        # Likewise, and the root's as the last item, which NO_BLOCK finds.
        self._node = [_NO_NODE] * num_blocks + [ROOT_NODE]
        self._pending = [False] * (num_blocks + 1)
        # A node's children are a list that runs through blocks: objects would be work for the garbage collector.
        self._first_child = [NO_BLOCK] * (num_blocks + 1)
        self._namespaces: dict[int, Namespace] = {}  # by block: of those below the root, but for COMMON
        self._marks: dict[int, bytes] = {}  # by block: of those in which media begin
        self._events = CacheEvents()

    def __len__(self) -> int:
        return len(self._block_by_key)

    def contains(self, block: int) -> bool:
        """True when the block has a node."""
        return self._node[block] != _NO_NODE

    def is_pending(self, block: int) -> bool:
        """True when the block has a node that is not ready."""
        return self._pending[block]

    def match(self, contents: Contents, namespace: Namespace = COMMON, position: int | None = None) -> Match:
        """Finds the longest ready prefix of contents with n positions, at most ⌊(n - 1) / block_size⌋ blocks.

        So at least the last token is always computed, and there are logits to sample from. position: of the first token
        that is to be computed, if it is not the one after the prefix; here each node has all that any token sees.
        """
        token_ids, marks = contents.token_ids, contents.marks(self.block_size)
        limit = (len(token_ids) - 1) // self.block_size
        wanted = token_ids[: limit * self.block_size].reshape(limit, self.block_size)
        blocks, root = array("i"), _root_key(namespace)
        guess, guess_from = _FIRST_GUESS, 1  # how many blocks to guess, and where to begin with it
        while len(blocks) < limit:
            if len(blocks) >= guess_from:
                right = self._follow(blocks, wanted[len(blocks) : len(blocks) + guess], marks)
                if right == guess:
                    guess *= 2
                    continue
                guess, guess_from = _FIRST_GUESS, len(blocks) + _FIRST_GUESS
            elif (block := self._child(blocks, wanted, root, marks)) is not None:
                blocks.append(block)
            else:
                break
        first_pending = bisect_left(blocks, True, key=self._pending.__getitem__)
        pending = blocks[first_pending] if first_pending < len(blocks) else NO_BLOCK
        return Match(np.array(blocks[:first_pending], dtype=np.int32), pending)

    def _child(self, blocks: "array[int]", wanted: np.ndarray, root: bytes, marks: Mapping[int, bytes]) -> int | None:
        """Finds the next block of a chain that begins with these."""
        above = self._node[blocks[-1]].to_bytes(8, "little") if blocks else root
        key = above + wanted[len(blocks)].tobytes()
        return self._block_by_key.get(key + marks.get(len(blocks), b"") if marks else key)

    def _follow(self, blocks: "array[int]", wanted: np.ndarray, marks: Mapping[int, bytes]) -> int:
        """Guesses that a chain goes on along the newest children; appends the blocks that are right, and counts them.

        Most nodes have one child, and comparing many blocks at once costs a tenth of looking each of them up.
        """
        guessed = array("i")
        child = self._first_child[blocks[-1]]
        while child != NO_BLOCK and len(guessed) < len(wanted):
            guessed.append(child)
            child = self._first_child[child]
        equal = (self._content[guessed] == wanted[: len(guessed)]).all(axis=1)
        right = len(guessed) if equal.all() else int(equal.argmin())
        if marks or self._marks:
            right = self._equal_marks(guessed[:right], len(blocks), marks)
        blocks.extend(guessed[:right])
        return right

    def _equal_marks(self, guessed: "array[int]", at: int, marks: Mapping[int, bytes]) -> int:
        """Counts the leading blocks whose marks are those of a chain, from its block `at` on."""
        for index, block in enumerate(guessed):
            if self._marks.get(block, b"") != marks.get(at + index, b""):
                return index
        return len(guessed)

    def insert(
        self,
        parents: list[int],
        blocks: list[int],
        token_ids: np.ndarray,
        *,
        pending: bool,
        namespace: Namespace = COMMON,
        marks: Mapping[int, bytes] = NO_MARKS,
    ) -> dict[int, int]:
        """Enters n blocks in order, each below its own parent; token_ids: int32[n, block_size], their tokens.

        namespace: of those below the root. marks: of those that have one, by index.

        A block may be the parent of a later one. A ready node needs a ready parent. Below a parent that has no node
        nothing is entered. A block that has this node already keeps it: sequences that share a block may each enter it,
        even in one call.
        Returns the twins: where another block has the node with this parent and content, that block by index.
        """
        nodes, known, is_pending = self._node, self._block_by_key, self._pending
        parent_of, first_child = self._parent, self._first_child
        next_sibling, previous_sibling = self._next_sibling, self._previous_sibling
        tokens, step, num_known = token_ids.tobytes(), self.block_size * 4, len(known)
        twins: dict[int, int] = {}
        left: list[int] = []  # indices of blocks that are not entered, or were entered before
        root, has_marks = _root_key(namespace), len(marks) > 0
        for index, (parent, block) in enumerate(zip(parents, blocks, strict=True)):
            above = nodes[parent]
            if above == _NO_NODE:
                left.append(index)
                continue
            own = tokens[index * step : (index + 1) * step]
            key = (root if parent == NO_BLOCK else above.to_bytes(8, "little")) + own
            if has_marks:
                key += marks.get(index, b"")
            holder = known.setdefault(key, block)
            if holder != block:
                twins[index] = holder
                left.append(index)
                continue
            if nodes[block] != _NO_NODE:
                assert is_pending[block] == pending
                left.append(index)
                continue
            assert pending or not is_pending[parent]
            nodes[block] = next(self._node_ids)
            parent_of[block] = parent
            is_pending[block] = pending
            next_sibling[block] = sibling = first_child[parent]
            previous_sibling[block] = NO_BLOCK
            if sibling != NO_BLOCK:
                previous_sibling[sibling] = block
            first_child[parent] = block
            if parent == NO_BLOCK and namespace is not COMMON:
                self._namespaces[block] = namespace
            if has_marks and index in marks:
                self._marks[block] = marks[index]
            if not pending:
                self._add_event(block, above, own)
        assert len(known) - num_known == len(blocks) - len(left)  # no block has two keys
        if len(left) < len(blocks):
            at = np.array(blocks)
            if left:
                at, token_ids = np.delete(at, left), np.delete(token_ids, left, axis=0)
            self._content[at], self.is_node[at] = token_ids, True
            self._changed()
        return twins

    def make_ready(self, block: int) -> None:
        """Makes a pending block, whose content is complete, a hit."""
        assert self._pending[block]
        parent = self._parent[block]
        assert not self._pending[parent]
        self._pending[block] = False
        self._changed()
        self._add_event(block, self._node[parent], self._content[block].tobytes())

    def remove(self, block: int) -> None:
        """Removes a leaf: a block that is evicted, or a pending one whose owner has failed."""
        assert self.contains(block)
        assert self._first_child[block] == NO_BLOCK
        if not self._pending[block]:
            self._events.evicted(self._node[block])
        parent = self._parent[block]
        del self._block_by_key[self._key_above(block) + self._content[block].tobytes() + self._marks.pop(block, b"")]
        self._namespaces.pop(block, None)
        self._unlink(block, parent)
        self._node[block] = _NO_NODE
        self.is_node[block] = False
        self._pending[block] = False
        self._changed()

    def subtree(self, block: int) -> list[int]:
        """Lists a block with a node and all blocks below it, children before their parents."""
        found = [block]
        for each in found:  # which grows meanwhile
            child = self._first_child[each]
            while child != NO_BLOCK:
                found.append(child)
                child = self._next_sibling[child]
        return found[::-1]

    def ancestors(self, block: int) -> list[int]:
        """Lists the blocks above one that has a node, nearest first."""
        found: list[int] = []
        while (block := self._parent[block]) != NO_BLOCK:
            found.append(block)
        return found

    def take_events(self) -> CacheEvents:
        """Takes the nodes that became ready or were evicted since the last call."""
        if not len(self._events):
            return _NO_EVENTS
        events, self._events = self._events, CacheEvents()
        return events

    def check(self) -> None:
        """Asserts that the nodes are one tree, and that the lists and dicts of the trie agree on each of them.

        Each node is reached from the root exactly once, and lists of siblings are linked both ways. A node's key is
        made of its parent and its content. Below a pending node all nodes are pending. The walk ends, also in a trie
        with a cycle. Slow; for tests and for an idle worker.
        """
        content, step = self._content.tobytes(), self.block_size * 4
        reached = [NO_BLOCK]
        for parent in reached:  # which grows meanwhile
            previous, child = NO_BLOCK, self._first_child[parent]
            while child != NO_BLOCK:
                reached.append(child)
                assert len(reached) <= len(self._node), "a cycle"
                assert self._node[child] not in (_NO_NODE, ROOT_NODE), f"block {child} is linked without a node"
                assert self._parent[child] == parent, f"block {child} is linked below another than its parent"
                assert self._previous_sibling[child] == previous, f"block {child} is linked one way"
                assert self._pending[child] or not self._pending[parent], f"block {child} is ready before its parent"
                own = content[child * step : (child + 1) * step] + self._marks.get(child, b"")
                key = self._key_above(child) + own
                assert self._block_by_key.get(key) == child, f"block {child} is not found by its content"
                previous, child = child, self._next_sibling[child]
        nodes = [node for node in self._node if node != _NO_NODE]
        assert len(set(nodes)) == len(nodes) == len(reached), "nodes that are not reached, or twice"
        assert len(self._block_by_key) == len(reached) - 1, "keys of no node"
        assert sorted(reached[1:]) == np.flatnonzero(self.is_node).tolist(), "is_node"
        assert all(self._parent[block] == NO_BLOCK for block in self._namespaces), "a namespace below another block"
        assert all(self.is_node[block] for block in (*self._namespaces, *self._marks)), "a mark of no node"
        assert sum(self._pending) == sum(self._pending[block] for block in reached), "a pending block without a node"

    def _key_above(self, block: int) -> bytes:
        """Returns the beginning of the key of a block that has a node."""
        parent = self._parent[block]
        if parent == NO_BLOCK:
            return _root_key(self._namespaces.get(block, COMMON))
        return self._node[parent].to_bytes(8, "little")

    def _add_event(self, block: int, above: int, own: bytes) -> None:
        node = self._node[block]
        self._events.added(node, above, own)
        if self._namespaces and (namespace := self._namespaces.get(block)) is not None:
            self._events.namespaces[node] = namespace
        if self._marks and (mark := self._marks.get(block)) is not None:
            self._events.marks[node] = mark

    def _unlink(self, block: int, parent: int) -> None:
        previous, following = self._previous_sibling[block], self._next_sibling[block]
        if previous == NO_BLOCK:
            self._first_child[parent] = following
        else:
            self._next_sibling[previous] = following
        if following != NO_BLOCK:
            self._previous_sibling[following] = previous

    def _changed(self) -> None:
        self.version += 1
