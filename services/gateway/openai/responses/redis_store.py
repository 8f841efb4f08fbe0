"""Responses that are kept in Redis, for every gateway.

baton:response:<tenant>:<response id>          what KeptResponse packs, until its lifetime is over
baton:response-lease:<tenant>:<response id>    empty, or _END, until the lease is over
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from services.gateway.openai.responses.store import LEASE_S, MAX_KEPT_BYTES, StoreUnavailable
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.redis_client import UNREACHABLE, Client, is_of_another_type

_END = b"end"
_LEASE_MS = round(LEASE_S * 1e3)

T = TypeVar("T")

log = structlog.get_logger()


class RedisResponseStore:
    """A ResponseStore. After a failure Redis is left alone for a while, in which nothing is kept."""

    def __init__(self, client: Client, breaker: CircuitBreaker, lifetime_s: float) -> None:
        self._client = client
        self._breaker = breaker
        self._lifetime_ms = max(1, round(lifetime_s * 1e3))

    async def put(self, tenant: str, response_id: str, packed: bytes) -> bool:
        """See ResponseStore."""
        if len(packed) > MAX_KEPT_BYTES:
            return False
        try:
            await self._answer(lambda: self._client.redis.set(_key(tenant, response_id), packed, px=self._lifetime_ms))
        except StoreUnavailable:
            return False
        return True

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """See ResponseStore."""
        packed = await self._answer(lambda: self._client.redis.get(_key(tenant, response_id)))
        assert not isinstance(packed, str)  # the client decodes nothing
        return packed

    async def delete(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore."""
        return bool(await self._answer(lambda: self._client.redis.delete(_key(tenant, response_id))))

    async def renew(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore."""
        lease = _lease(tenant, response_id)
        before = await self._answer(lambda: self._client.redis.set(lease, b"", px=_LEASE_MS, get=True))
        return before == _END

    async def leased(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore."""
        return bool(await self._answer(lambda: self._client.redis.exists(_lease(tenant, response_id))))

    async def ask_for_end(self, tenant: str, response_id: str) -> None:
        """See ResponseStore."""
        lease = _lease(tenant, response_id)
        await self._answer(lambda: self._client.redis.set(lease, _END, xx=True, keepttl=True))

    async def _answer(self, call: Callable[[], Awaitable[T]]) -> T:
        """Returns the server's answer. Raises StoreUnavailable."""
        began = self._breaker.let_through()
        if began is None:
            raise StoreUnavailable("Redis did not answer a moment ago")
        try:
            answer = await self._client.within_limit(call())
        except UNREACHABLE as error:
            if is_of_another_type(error):
                self._breaker.succeeded()
            else:
                self._note_failure(began, error)
            raise StoreUnavailable(str(error)) from error
        self._breaker.succeeded()
        return answer

    def _note_failure(self, began: float, error: BaseException) -> None:
        if not self._breaker.broken:
            log.warning("responses are not kept; Redis is not reachable", reason=str(error))
        self._breaker.failed(began)


def _key(tenant: str, response_id: str) -> str:
    return f"baton:response:{tenant}:{response_id}"


def _lease(tenant: str, response_id: str) -> str:
    return f"baton:response-lease:{tenant}:{response_id}"
