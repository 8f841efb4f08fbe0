"""Limits counted in Redis, by all gateways together, in one round trip when a request begins and one when it has ended.

While Redis does not answer, each gateway counts alone, against an equal part of the limits: one for each gateway that
Redis last saw ask for the key.
"""

import secrets

import structlog

from services.gateway.api.generation import Refusal
from services.gateway.keys.local_quotas import LocalQuotas
from services.gateway.keys.quota import Ask, Taken
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.redis_client import UNREACHABLE, Client

_REFUSALS = {1: Refusal.KEY_CONCURRENT, 2: Refusal.KEY_REQUESTS, 3: Refusal.KEY_TOKENS}

log = structlog.get_logger()


class RedisQuotas:
    """A QuotaStore in Redis."""

    def __init__(self, client: Client, breaker: CircuitBreaker) -> None:
        self._take = client.script("limits")
        self._settle = client.script("settle")
        self._breaker = breaker
        self._local = LocalQuotas()
        self._gateway = secrets.token_hex(8)
        self._num_gateways: dict[str, int] = {}  # by key, as Redis last said
        self._unanswered: dict[str, str] = {}  # leases that Redis may have granted after all, with their keys

    async def take(self, ask: Ask) -> Taken:
        """See QuotaStore."""
        began = self._breaker.let_through()
        if began is None:
            return self._alone(ask)
        limits, lease_ms = ask.limits, int(ask.lease_s * 1000)
        wanted = (limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent)
        counted = [limit or 0 for limit in wanted]
        arguments: list[str | int] = [*counted, ask.tokens, ask.lease, lease_ms, self._gateway]
        try:
            answer = await self._take(_keys(ask.key_id), arguments)
        except UNREACHABLE as error:
            if not self._breaker.broken:
                log.warning("limits of keys are counted by this gateway alone", reason=str(error))
            self._breaker.failed(began)
            self._unanswered[ask.lease] = ask.key_id
            return self._alone(ask)
        self._breaker.succeeded()
        await self._end_unanswered()
        verdict, requests_us, tokens_us, wait_us, num_gateways = map(int, answer)
        self._num_gateways[ask.key_id] = num_gateways
        return Taken(requests_us / 1e6, tokens_us / 1e6, _REFUSALS.get(verdict), wait_us / 1e6)

    async def settle(self, ask: Ask, taken: Taken, generated: int) -> None:
        """See QuotaStore. Where Redis does not answer, the request's lease ends by itself, and its answer is free."""
        if taken.alone:
            await self._local.settle(ask, taken, generated)
            return
        began = self._breaker.let_through()
        if began is None:
            return
        try:
            await self._settle(_keys(ask.key_id), [ask.limits.tokens_per_minute or 0, generated, ask.lease])
            self._breaker.succeeded()
        except UNREACHABLE as error:
            self._breaker.failed(began)
            log.warning("the tokens of an answer are not counted", reason=str(error))

    async def _end_unanswered(self) -> None:
        """Ends leases of requests that this gateway counted alone: Redis may have read of them when it went on."""
        while self._unanswered:
            lease, key_id = self._unanswered.popitem()
            try:
                await self._settle(_keys(key_id), [0, 0, lease])
            except UNREACHABLE as error:
                log.warning("leases of requests are not ended now", reason=str(error))
                self._unanswered[lease] = key_id
                return

    def _alone(self, ask: Ask) -> Taken:
        return self._local.take_share(ask, self._num_gateways.get(ask.key_id, 1))


def _keys(key_id: str) -> list[str]:
    return [f"baton:limits:{{{key_id}}}:{name}" for name in ("requests", "tokens", "running", "gateways")]
