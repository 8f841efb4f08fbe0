"""The index in Redis, as a gateway reads it. Workers fill it (publisher.py)."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import structlog

from kvtransfer.ids import WorkerId
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.malformed import MalformedEntries
from services.prefix_index.publication import unpack_id
from services.prefix_index.recent import RecentPrefixes
from services.prefix_index.redis_client import UNREACHABLE, Client, ScriptCall, is_of_another_type, tree_key
from services.protocol.block_hash import BlockHash
from services.protocol.messages import BlockEvents

log = structlog.get_logger()


class RedisPrefixIndex:
    """A `PrefixIndex`. Where Redis does not answer in time, it says what this gateway sent where.

    After a failure Redis is left alone for a while. Entries that no worker writes are skipped.
    """

    wants_block_events = False

    def __init__(self, client: Client, breaker: CircuitBreaker, malformed: MalformedEntries | None = None) -> None:
        self.malformed = malformed or MalformedEntries()
        self._lookup = client.script("lookup")
        self._breaker = breaker
        self._recent = RecentPrefixes()
        self._asked: list[tuple[ScriptCall, asyncio.Future[Any]]] = []  # in this turn of the loop
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def broken(self) -> bool:
        """True while Redis does not answer look-ups."""
        return self._breaker.broken

    def apply(self, worker: WorkerId, events: BlockEvents) -> None:
        """See PrefixIndex. An older worker may send events that nobody asked for."""

    def placed(self, worker: WorkerId, chain: Sequence[BlockHash]) -> None:
        """See PrefixIndex."""
        self._recent.note(worker, chain)

    def remove_worker(self, worker: WorkerId) -> None:
        """See PrefixIndex. In Redis the worker's lease runs out."""
        self._recent.remove_worker(worker)

    async def depths(self, chain: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """See PrefixIndex. Of a worker's publications the newest counts."""
        if not chain:
            return {}
        began = self._breaker.let_through()
        if began is None:
            return self._recent.depths(chain)
        tree = tree_key(chain[0])
        try:
            answer = await self._answer(([tree], [b"".join(chain)]))
        except UNREACHABLE as error:
            if is_of_another_type(error):
                self.malformed.skipped("tree", tree, str(error))
                self._breaker.succeeded()
                return {}
            if not self._breaker.broken:
                log.warning("prefix index not reachable; routing by load and recent prompts", reason=str(error))
            self._breaker.failed(began)
            return self._recent.depths(chain)
        if self._breaker.broken:
            log.info("prefix index reachable again")
        self._breaker.succeeded()
        return self._by_worker(zip(answer[::2], answer[1::2], strict=True))

    def _by_worker(self, depths: Iterable[tuple[bytes, int]]) -> dict[WorkerId, int]:
        """Returns the depth of each worker's newest publication, of the depths by publication."""
        rows = []
        for id, depth in depths:
            try:
                rows.append((*unpack_id(id), depth))
            except ValueError as error:
                self.malformed.skipped("holder of a block", id, str(error))
        return {worker: depth for worker, _, depth in sorted(rows)}

    async def _answer(self, call: ScriptCall) -> Any:
        """The server's, in one round trip with all that is asked for in the same turn of the loop."""
        answer = asyncio.get_running_loop().create_future()
        self._asked.append((call, answer))
        if len(self._asked) == 1:
            self._asking.add(task := asyncio.create_task(self._ask()))
            task.add_done_callback(self._asking.discard)
        return await answer

    async def _ask(self) -> None:
        asked, self._asked = self._asked, []
        try:
            if len(asked) == 1:
                answers = [await self._lookup(*asked[0][0])]
            else:
                answers = await self._lookup.each([call for call, _ in asked])
        except Exception as error:  # theirs who asked
            answers = [error] * len(asked)
        for (_, answer), found in zip(asked, answers, strict=True):
            if answer.done():  # cancelled
                continue
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)
