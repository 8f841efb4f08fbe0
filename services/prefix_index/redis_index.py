"""The index in Redis, as a gateway reads it. Workers fill it (publisher.py)."""

from collections.abc import Sequence

import structlog

from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.publication import unpack_id
from services.prefix_index.redis_client import UNREACHABLE, Client, script, tree_key
from services.protocol.block_hash import BlockHash

log = structlog.get_logger()


class RedisPrefixIndex:
    """Looks chains up. Without Redis it knows nobody, after at most one call's timeout in a while."""

    def __init__(self, client: Client, breaker: CircuitBreaker) -> None:
        self._lookup = script(client, "lookup")
        self._breaker = breaker

    async def depths(self, chain: Sequence[BlockHash]) -> dict[int, int]:
        """See PrefixIndex. Of a worker's publications the newest counts."""
        if not chain or not self._breaker.let_through():
            return {}
        try:
            answer = await self._lookup([tree_key(chain[0])], [b"".join(chain)])
        except UNREACHABLE as error:
            if not self._breaker.broken:
                log.warning("prefix index not reachable; routing goes on by load", reason=str(error))
            self._breaker.failed()
            return {}
        if self._breaker.broken:
            log.info("prefix index reachable again")
        self._breaker.succeeded()
        rows = sorted((*unpack_id(id), depth) for id, depth in zip(answer[::2], answer[1::2], strict=True))
        return {incarnation: depth for incarnation, _, depth in rows}
