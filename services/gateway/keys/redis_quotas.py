"""Limits counted in Redis, by all gateways together, in one round trip when a request begins and one when it has ended.

Every gateway tells Redis every few seconds that it lives, and learns how many do. While Redis does not answer, each
gateway counts alone, from where Redis was, against an equal part of the limits: one for each gateway that lived. What
it counted alone counts the next time too that Redis does not answer: many short times grant no more than a long one.
"""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import islice

import structlog

from services.gateway.api.generation import Refusal
from services.gateway.keys.local_quotas import LocalQuotas
from services.gateway.keys.quota import Ask, Taken
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.redis_client import UNREACHABLE, Client, Script, ScriptCall

TIMEOUT_S = 0.05  # a gateway counts alone what Redis has not answered by then
INTERVAL_S = 2.0  # between two beats
GATEWAY_LEASE_S = 10.0  # a gateway that does not say that it lives counts for so long
LEASE_S = 30.0  # a request of a gateway that died counts as running for so long
_LEASE_MS = int(LEASE_S * 1000)
_RENEWED_AFTER_S = 10.0
_MAX_UNANSWERED = 10_000
_AT_ONCE = 100  # requests that are undone in one round trip
_GATEWAYS = "baton:limits:gateways"
_REFUSALS = {1: Refusal.KEY_CONCURRENT, 2: Refusal.KEY_REQUESTS, 3: Refusal.KEY_TOKENS}

log = structlog.get_logger()


class RedisQuotas:
    """A QuotaStore in Redis. num_gateways: how many live, as Redis said lately."""

    def __init__(self, client: Client, breaker: CircuitBreaker, clock: Callable[[], float] = time.monotonic) -> None:
        names = ("limits", "settle", "undo", "renew", "gateways")
        scripts = [client.script(name, beginning="limit_state") for name in names]
        self._take, self._settle, self._undo, self._renew, self._gateways = scripts
        self._breaker = breaker
        self._clock = clock
        self._seen = LocalQuotas(clock)  # the buckets as Redis last said, and the requests that it let in here
        self._counted_alone = LocalQuotas(clock)
        self._id = secrets.token_hex(8)
        self.num_gateways = 1
        self._beaten = False
        self._complete_from = 0.0  # Redis knows all gateways again by then, where it lost them
        self._crowded: set[str] = set()  # keys that had too many requests running, as Redis last said
        self._renewed: dict[str, tuple[Ask, float]] = {}  # by lease, of requests that run: when it was renewed
        self._unanswered: dict[str, Ask] = {}  # by lease: Redis may have counted these after all

    @property
    def alone(self) -> bool:
        """True while this gateway counts alone, since Redis does not answer."""
        return self._breaker.broken

    async def look(self, ask: Ask) -> Taken:
        """See QuotaStore. Redis is asked where it alone can know: whether requests of other gateways still run."""
        if self.alone:
            return self._share_of(ask).look_at_share(ask, self.num_gateways)
        seen = self._seen.look_at_share(ask, 1)
        if seen.refusal is not None or ask.key_id not in self._crowded:
            return seen
        return await self._answer(ask, only_look=True) or self._share_of(ask).look_at_share(ask, self.num_gateways)

    async def take(self, ask: Ask) -> Taken:
        """See QuotaStore."""
        taken = await self._answer(ask, only_look=False)
        if taken is None:
            return self._share_of(ask).take_share(ask, self.num_gateways)
        self._seen.note(ask, taken)
        if taken.refusal is None and ask.limits.max_concurrent is not None:
            self._renewed[ask.lease] = ask, self._clock()
        return taken

    async def settle(self, ask: Ask, taken: Taken, generated: int) -> None:
        """See QuotaStore. Where Redis does not answer, the request's lease ends by itself, and its answer is free."""
        ours, other = self._stores(taken)
        ours.end(ask, taken, generated)
        other.stop(ask)
        self._renewed.pop(ask.lease, None)
        if taken.alone or (began := self._breaker.let_through()) is None:
            return
        try:
            await self._settle(_keys(ask), [ask.limits.tokens_per_minute or 0, generated, ask.lease, _LEASE_MS])
            self._answered()
        except UNREACHABLE as error:
            self._unreachable(began, error)

    async def undo(self, ask: Ask, taken: Taken, generated: int) -> None:
        """See QuotaStore. Where Redis does not answer, it is told with a later beat."""
        ours, other = self._stores(taken)
        ours.take_back(ask, taken)
        other.stop(ask)
        self._renewed.pop(ask.lease, None)
        if taken.alone:
            return
        self._note_unanswered(ask)
        if (began := self._breaker.let_through()) is None:
            return
        try:
            await self._undo_unanswered()
            self._answered()
        except UNREACHABLE as error:
            self._unreachable(began, error)

    def _stores(self, taken: Taken) -> tuple[LocalQuotas, LocalQuotas]:
        """Returns the store that has counted a request, and the other one."""
        return (self._counted_alone, self._seen) if taken.alone else (self._seen, self._counted_alone)

    async def follow(self) -> None:
        """Beats until it is cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(INTERVAL_S)

    async def beat(self) -> None:
        """Tells Redis that this gateway lives and which requests run, and undoes what Redis counted too late."""
        if (began := self._breaker.let_through()) is None:
            return
        try:
            lease_ms = int(GATEWAY_LEASE_S * 1000)
            number, known = await self._gateways([_GATEWAYS], [self._id, lease_ms])
            self._note_gateways(int(number), bool(known))
            await self._renew_leases()
            await self._undo_unanswered()
            self._answered()
        except UNREACHABLE as error:
            self._unreachable(began, error)

    def _note_gateways(self, number: int, known: bool) -> None:
        """Counts as gateways those too that Redis lost, until they had time to say again that they live.

        known: Redis had the lease of this one.
        """
        now = self._clock()
        if not known and self._beaten:
            self._complete_from = now + GATEWAY_LEASE_S
        self._beaten = True
        self.num_gateways = number if now >= self._complete_from else max(number, self.num_gateways)

    async def _renew_leases(self) -> None:
        now, due = self._clock(), defaultdict(list)
        for ask, renewed in self._renewed.values():
            if now - renewed >= _RENEWED_AFTER_S:
                due[_running(ask)].append(ask)
        calls: list[ScriptCall] = []
        for key, asks in due.items():
            calls.append(([key, *map(_counted, asks)], [_LEASE_MS, *(ask.lease for ask in asks)]))
        await _each(self._renew, calls)
        asked = [ask for asks in due.values() for ask in asks]
        self._renewed |= {ask.lease: (ask, now) for ask in asked if ask.lease in self._renewed}  # others have ended

    async def _undo_unanswered(self) -> None:
        while batch := list(islice(self._unanswered.values(), _AT_ONCE)):
            calls: list[ScriptCall] = []
            for ask in batch:
                rates = (ask.limits.requests_per_minute or 0, ask.limits.tokens_per_minute or 0)
                calls.append((_keys(ask), [*rates, ask.tokens, ask.lease, _LEASE_MS]))
            await _each(self._undo, calls)
            for ask in batch:
                self._unanswered.pop(ask.lease, None)

    def _share_of(self, ask: Ask) -> LocalQuotas:
        """Returns what counts while Redis does not answer: from where Redis was, and what was counted so before."""
        self._counted_alone.fill_up(ask.key_id, self._seen)
        return self._counted_alone

    async def _answer(self, ask: Ask, only_look: bool) -> Taken | None:
        """Returns Redis' answer; None: there was none in time, or Redis was not asked."""
        if (began := self._breaker.let_through()) is None:
            return None
        wanted = (ask.limits.requests_per_minute, ask.limits.tokens_per_minute, ask.limits.max_concurrent)
        arguments: list[str | int] = [*(limit or 0 for limit in wanted), ask.tokens, ask.lease, _LEASE_MS]
        try:
            answer = await self._take(_keys(ask), [*arguments, int(only_look)])
        except (*UNREACHABLE, asyncio.CancelledError) as error:
            if not only_look:
                self._note_unanswered(ask)
            if isinstance(error, asyncio.CancelledError):
                raise
            self._unreachable(began, error)
            return None
        self._answered()
        verdict, requests_us, tokens_us, wait_us = map(int, answer)
        taken = Taken(requests_us / 1e6, tokens_us / 1e6, _REFUSALS.get(verdict), wait_us / 1e6)
        if taken.refusal is Refusal.KEY_CONCURRENT:
            self._crowded.add(ask.key_id)
        else:
            self._crowded.discard(ask.key_id)
        return taken

    def _note_unanswered(self, ask: Ask) -> None:
        if len(self._unanswered) >= _MAX_UNANSWERED:
            del self._unanswered[next(iter(self._unanswered))]  # which is not undone
        self._unanswered[ask.lease] = ask

    def _answered(self) -> None:
        if self._breaker.broken:
            self._seen.empty()  # Redis says anew how full they are
            log.info("limits of keys are counted in Redis again")
        self._breaker.succeeded()

    def _unreachable(self, began: float, error: Exception) -> None:
        if not self._breaker.broken:
            log.warning("limits of keys are counted by this gateway alone", reason=str(error))
        self._breaker.failed(began)


async def _each(script: Script, calls: list[ScriptCall]) -> None:
    """Runs a script for each call. Raises one of UNREACHABLE where any of them failed."""
    for answer in await script.each(calls) if calls else []:
        if isinstance(answer, BaseException):
            raise answer


def _keys(ask: Ask) -> list[str]:
    names = ("requests", "tokens", "running", f"counted:{ask.lease}")
    return [f"baton:limits:{{{ask.key_id}}}:{name}" for name in names]


def _running(ask: Ask) -> str:
    return _keys(ask)[2]


def _counted(ask: Ask) -> str:
    return _keys(ask)[3]
