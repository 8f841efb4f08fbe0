"""A worker tells the index what it caches. Never in anybody's way: changes wait, newer ones replacing older ones.

What is known of the server's side is the number of the last batch in each tree. It refuses a batch that does not follow
on that one, so a server that lost something says so at the next change; one that lost everything says so at the next
heartbeat (registry.py), also of a worker whose cache rests.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

import structlog

from kvtransfer.ids import WorkerId
from services.prefix_index.publication import pack_id
from services.prefix_index.redis_client import UNREACHABLE, Client, tree_key
from services.process.backoff import Backoff
from services.protocol.block_hash import BlockHash

_MAX_BATCH = 256  # blocks of one tree in one call: well under a millisecond of the server's time
_MAX_TREES = 8  # in one round trip: a fourth of the CPU time of so many round trips, and still a short slice of it
_GATHER_S = 0.02  # rest once everything is published: what decodes changes many trees a little
_MAX_WAITING_EVICTIONS = 100_000  # beyond that, a new id costs less than to remember what the old one no longer has
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0

log = structlog.get_logger()


class _Outcome(Enum):
    DONE = b"done"
    UNKNOWN = b"unknown"
    GAP = b"gap"


@dataclass(slots=True)
class _Tree:
    """One tree of this worker."""

    cached: set[BlockHash] = field(default_factory=set)
    changed: dict[BlockHash, None] = field(default_factory=dict)  # not published yet, oldest first
    batches: int = 0  # that the server took

    def repeat(self) -> None:
        """The server knows nothing of it."""
        self.batches = 0
        self.changed = dict.fromkeys(self.cached)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Changes of one tree that are on their way."""

    first: BlockHash
    tree: _Tree
    added: list[BlockHash]
    evicted: list[BlockHash]
    emptied: bool  # nothing of the tree is cached after it


class IndexPublisher:
    """Publishes under one id after the other. Lives on the event loop."""

    def __init__(self, client: Client, worker_id: WorkerId) -> None:
        self._publish = client.script("publish")
        self._worker_id = worker_id
        self._epoch = 0
        self._trees: dict[BlockHash, _Tree] = {}
        self._dirty: dict[BlockHash, None] = {}  # trees with changes, in turn
        self._waiting_evictions = 0
        self._work = asyncio.Event()
        self._confirmed = asyncio.Event()  # set while the registry knows the id
        self.retired: tuple[bytes, ...] = ()  # ids that are no longer used, of which the registry has not heard
        self.renamed = asyncio.Event()  # set by `begin_anew`

    @property
    def id(self) -> bytes:
        """The current publication's."""
        return pack_id(self._worker_id, self._epoch)

    @property
    def idle(self) -> bool:
        """True when everything is published."""
        return not self._dirty

    def change(self, first: BlockHash, added: Iterable[BlockHash], evicted: Iterable[BlockHash]) -> None:
        """Takes note of blocks below the first block `first`. Evictions came before additions."""
        tree = self._trees.setdefault(first, _Tree())
        for hash in evicted:
            tree.cached.discard(hash)
            tree.changed[hash] = None
            self._waiting_evictions += 1
        for hash in added:
            tree.cached.add(hash)
            tree.changed[hash] = None
        self._mark(first)
        if self._waiting_evictions > _MAX_WAITING_EVICTIONS:
            self.begin_anew()

    def begin_anew(self) -> None:
        """Publishes everything again under a new id."""
        self.retired += (self.id,)
        self._epoch += 1
        self._confirmed.clear()
        self.renamed.set()
        self._waiting_evictions = 0
        self._dirty.clear()
        self._work.clear()
        self._trees = {first: _Tree(tree.cached) for first, tree in self._trees.items() if tree.cached}
        for first, tree in self._trees.items():
            tree.repeat()
            self._mark(first)

    @property
    def confirmed(self) -> bool:
        """True when the registry knows the current id."""
        return self._confirmed.is_set()

    def confirm(self, id: bytes, retired: Sequence[bytes] = ()) -> None:
        """The registry knows this id, so that a sweep takes its entries should the worker die, and those retired."""
        self.retired = tuple(other for other in self.retired if other not in retired)
        if id == self.id:
            self._confirmed.set()

    async def run(self) -> None:
        """Publishes under ids that were confirmed, until cancelled. After a defect the next run publishes all anew."""
        backoff = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
        while True:
            await self._work.wait()
            await self._confirmed.wait()
            try:
                while self._dirty and self.confirmed:
                    await self._publish_next()
                backoff.reset()
                await asyncio.sleep(_GATHER_S)
            except UNREACHABLE as error:
                if not backoff.failing:
                    log.warning("prefix index takes nothing; publishing waits", reason=str(error))
                await asyncio.sleep(backoff.next_s())
            except Exception:  # a defect: which changes the server has is not known any more
                self.begin_anew()
                raise

    async def flush(self) -> None:
        """Publishes until nothing is left. Raises one of UNREACHABLE, and then knows what to repeat."""
        while self._dirty:
            await self._publish_next()

    async def _publish_next(self) -> None:
        """A batch of each of the trees whose turn it is, in one round trip."""
        batches = [self._take(first) for first in islice(self._dirty, _MAX_TREES)]
        try:
            answers = await self._publish.each([([tree_key(batch.first)], self._arguments(batch)) for batch in batches])
        except BaseException:  # whether the server took them, nobody knows; they may come twice
            for batch in batches:
                self._put_back(batch)
            raise
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        for batch, answer in zip(batches, answers, strict=True):
            if isinstance(answer, Exception):
                self._put_back(batch)
            else:
                self._conclude(batch, _Outcome(answer))
        if errors:
            raise errors[0]
        if not self._dirty:
            self._waiting_evictions = 0
            self._work.clear()

    def _take(self, first: BlockHash) -> _Batch:
        tree = self._trees[first]
        blocks = list(islice(tree.changed, _MAX_BATCH))
        for hash in blocks:
            del tree.changed[hash]
        added = [hash for hash in blocks if hash in tree.cached]
        evicted = [hash for hash in blocks if hash not in tree.cached]
        return _Batch(first, tree, added, evicted, emptied=not tree.cached)

    def _arguments(self, batch: _Batch) -> list[bytes | int]:
        added, evicted = b"".join(batch.added), b"".join(batch.evicted)
        return [self.id, batch.tree.batches + 1, added, evicted, int(batch.emptied)]

    def _put_back(self, batch: _Batch) -> None:
        batch.tree.changed = dict.fromkeys([*batch.evicted, *batch.added]) | batch.tree.changed
        self._settle(batch)

    def _conclude(self, batch: _Batch, outcome: _Outcome) -> None:
        tree = batch.tree
        match outcome:
            case _Outcome.DONE:
                tree.batches = 0 if batch.emptied else tree.batches + 1
                self._waiting_evictions = max(0, self._waiting_evictions - len(batch.evicted))
            case _Outcome.UNKNOWN:
                tree.repeat()
            case _Outcome.GAP if self._trees.get(batch.first) is tree:
                log.warning("the prefix index lost changes; publishing everything again", tree=tree_key(batch.first))
                self.begin_anew()
        self._settle(batch)

    def _settle(self, batch: _Batch) -> None:
        """Puts a tree back to the end of the queue, or removes it when nothing of it is left."""
        first, tree = batch.first, batch.tree
        if self._trees.get(first) is not tree:  # begun anew meanwhile
            return
        del self._dirty[first]
        if tree.changed:
            self._mark(first)
        elif not tree.cached:
            del self._trees[first]

    def _mark(self, first: BlockHash) -> None:
        self._dirty[first] = None
        self._work.set()
