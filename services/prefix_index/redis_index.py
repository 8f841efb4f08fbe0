"""The index in Redis, as a gateway reads it. Workers fill it (publisher.py)."""

from collections.abc import Sequence

import structlog

from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.publication import unpack_id
from services.prefix_index.recent import RecentPrefixes
from services.prefix_index.redis_client import UNREACHABLE, Client, tree_key
from services.protocol.block_hash import BlockHash
from services.protocol.messages import BlockEvents

log = structlog.get_logger()


class RedisPrefixIndex:
    """A `PrefixIndex`. Where Redis does not answer in time, it says what this gateway sent where.

    After a failure Redis is left alone for a while.
    """

    wants_block_events = False

    def __init__(self, client: Client, breaker: CircuitBreaker) -> None:
        self._lookup = client.script("lookup")
        self._breaker = breaker
        self._recent = RecentPrefixes()

    def apply(self, worker: int, events: BlockEvents) -> None:
        """See PrefixIndex. An older worker may send events that nobody asked for."""

    def placed(self, worker: int, chain: Sequence[BlockHash]) -> None:
        """See PrefixIndex."""
        self._recent.note(worker, chain)

    def drop(self, worker: int) -> None:
        """See PrefixIndex. In Redis the worker's lease runs out."""
        self._recent.drop(worker)

    async def depths(self, chain: Sequence[BlockHash]) -> dict[int, int]:
        """See PrefixIndex. Of a worker's publications the newest counts."""
        if not chain:
            return {}
        began = self._breaker.let_through()
        if began is None:
            return self._recent.depths(chain)
        try:
            answer = await self._lookup([tree_key(chain[0])], [b"".join(chain)])
        except UNREACHABLE as error:
            if not self._breaker.broken:
                log.warning("prefix index not reachable; routing by load and recent prompts", reason=str(error))
            self._breaker.failed(began)
            return self._recent.depths(chain)
        if self._breaker.broken:
            log.info("prefix index reachable again")
        self._breaker.succeeded()
        rows = sorted((*unpack_id(id), depth) for id, depth in zip(answer[::2], answer[1::2], strict=True))
        return {incarnation: depth for incarnation, _, depth in rows}
