"""Responses that are kept in Redis, for every gateway.

baton:response:<tenant>:<response id>          what KeptResponse packs, until its lifetime is over
baton:response-lease:<tenant>:<response id>    the lease on a background response (response_lease.lua), until it is over
baton:response-lease:gateway:<id>              a gateway's witness (witness.py)

Absence is not death: Redis may have been away, full, emptied, or another's clock may have jumped. What is not there is
believed only where the witness says that nothing of the kind happened.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

import structlog
from redis.exceptions import ResponseError

from services.gateway.openai.responses.kept_response import UNENDED_END
from services.gateway.openai.responses.store import LEASE_S, MAX_KEPT_BYTES, RENEW_AFTER, Renewal, StoreUnavailable
from services.gateway.openai.responses.witness import Witness
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.redis_client import UNREACHABLE, Client, is_of_another_type

_END, _OVER, _LIVES = b"end", b"over", b"lives"  # in response_lease.lua

T = TypeVar("T")

log = structlog.get_logger()


class RedisResponseStore:
    """A ResponseStore. After a failure Redis is left alone for a while by requests, whose responses are not kept.

    Leases are nobody's wait: they are renewed whatever happened before, so that a server that is back hears at once
    who lives.
    """

    def __init__(
        self,
        client: Client,
        breaker: CircuitBreaker,
        lifetime_s: float,
        clock: Callable[[], float] = time.monotonic,
        lease_s: float = LEASE_S,
    ) -> None:
        self.lease_s = lease_s
        self._lease_ms = round(lease_s * 1e3)
        self._client = client
        self._breaker = breaker
        self._clock = clock
        self._lifetime_ms = max(1, round(lifetime_s * 1e3))
        self._witness = Witness(client, lease_s, clock)
        self._one_witness = asyncio.Lock()
        self._refusing = False  # Redis answered that it takes nothing
        self._update = client.script("response_update")
        leases = [client.script(f"response_{name}", beginning="response_lease") for name in ("renew", "claim", "ask")]
        self._renew, self._claim, self._ask = leases

    async def put(self, tenant: str, response_id: str, packed: bytes) -> bool:
        """See ResponseStore."""
        if len(packed) > MAX_KEPT_BYTES:
            return False
        try:
            await self._answer(lambda: self._client.redis.set(_key(tenant, response_id), packed, px=self._lifetime_ms))
        except StoreUnavailable:
            return False
        self._refusing = False
        return True

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """See ResponseStore. Of another type is what no gateway wrote: no bytes."""
        try:
            packed = await self._answer(lambda: self._client.redis.get(_key(tenant, response_id)))
        except _OtherType:
            return b""
        if packed is None:
            await self._renew_witness()
            if self._witness.lost_lately:
                raise StoreUnavailable("Redis lost something a moment ago, perhaps this")
        assert not isinstance(packed, str)  # the client decodes nothing
        return packed

    async def delete(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore."""
        return bool(await self._answer(lambda: self._client.redis.delete(_key(tenant, response_id))))

    async def update(self, tenant: str, response_id: str, packed: bytes, anew: bool) -> bytes | None:
        """See ResponseStore."""
        arguments: list[bytes | int] = [packed, self._lifetime_ms, UNENDED_END, int(anew)]
        kept = await self._answer(lambda: self._update([_key(tenant, response_id)], arguments), waited_for=False)
        if isinstance(kept, bytes):
            return kept
        return packed if kept else None

    async def renew(self, tenant: str, response_id: str) -> Renewal:
        """See ResponseStore."""
        lease, kept = _lease(tenant, response_id), _key(tenant, response_id)
        before = await self._answer(lambda: self._renew([lease], [self._lease_ms]), waited_for=False)
        found = await self._answer(lambda: self._client.redis.exists(kept), waited_for=False)
        return Renewal(end_wanted=before == _END, over=before == _OVER, lost=not found)

    async def claim(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore."""
        lease = [_lease(tenant, response_id)]
        state = await self._answer(lambda: self._claim(lease, [self._lease_ms, 0]))
        if state in (_LIVES, _OVER):
            return bool(state == _OVER)
        try:
            await self._renew_witness()
            if not self._witness.saw_a_lease_s_time:
                return False
            return bool(await self._answer(lambda: self._claim(lease, [self._lease_ms, self._lifetime_ms])) == _OVER)
        except StoreUnavailable:  # which takes nothing: neither could the owner renew its lease
            return False

    async def ask_for_end(self, tenant: str, response_id: str) -> None:
        """See ResponseStore."""
        await self._answer(lambda: self._ask([_lease(tenant, response_id)], [self._lease_ms]))

    async def follow(self) -> NoReturn:
        """See ResponseStore."""
        while True:
            try:
                await self._renew_witness()
            except StoreUnavailable as error:
                log.debug("the witness is not renewed", reason=str(error))
            await asyncio.sleep(self.lease_s * RENEW_AFTER)

    async def _renew_witness(self) -> None:
        """Raises StoreUnavailable."""
        async with self._one_witness:
            await self._answer(self._witness.renew, waited_for=False)

    async def _answer(self, call: Callable[[], Awaitable[T]], *, waited_for: bool = True) -> T:
        """Returns the server's answer. Raises StoreUnavailable.

        waited_for: by a request; it is spared the wait for a server that did not answer a moment ago.
        """
        began = self._breaker.let_through() if waited_for else self._clock()
        if began is None:
            raise StoreUnavailable("Redis did not answer a moment ago")
        try:
            answer = await self._client.within_limit(call())
        except UNREACHABLE as error:
            self._note_failure(began, error)
            raise (_OtherType if is_of_another_type(error) else StoreUnavailable)(str(error)) from error
        self._breaker.succeeded()
        return answer

    def _note_failure(self, began: float, error: BaseException) -> None:
        if not isinstance(error, ResponseError):
            if not self._breaker.broken:
                log.warning("responses are not kept; Redis is not reachable", reason=str(error))
            self._breaker.failed(began)
            return
        self._breaker.succeeded()  # it answers, and can be read: it is full or a replica
        if not self._refusing and not is_of_another_type(error):
            log.warning("responses are not kept; Redis takes none", reason=str(error))
            self._refusing = True


class _OtherType(StoreUnavailable):
    """The key has a value of another type than Baton writes there."""


def _key(tenant: str, response_id: str) -> str:
    return f"baton:response:{tenant}:{response_id}"


def _lease(tenant: str, response_id: str) -> str:
    return f"baton:response-lease:{tenant}:{response_id}"
