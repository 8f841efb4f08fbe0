"""Limits counted by one gateway alone: without Redis, and while Redis does not answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.gateway.api.generation import Refusal
from services.gateway.keys.entry import RateLimits
from services.gateway.keys.quota import Ask, Taken
from services.gateway.keys.rates import WINDOW_S, fill


@dataclass(slots=True)
class _Counts:
    """Counts of one key. The moments are those at which the buckets will be empty."""

    requests_empty: float = 0.0
    tokens_empty: float = 0.0
    running: dict[str, float] = field(default_factory=dict)  # by lease: when it ends


class LocalQuotas:
    """A QuotaStore in this process. Holds an entry for every key with limits that was ever used."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, _Counts] = {}

    async def take(self, ask: Ask) -> Taken:
        """See QuotaStore."""
        return self.take_share(ask, 1)

    def take_share(self, ask: Ask, share: int) -> Taken:
        """Counts a request against one of `share` equal parts of the key's limits, each at least 1."""
        now, limits = self._clock(), _part(ask.limits, share)
        counts = self._counts.setdefault(ask.key_id, _Counts())
        running = counts.running = {each: ends for each, ends in counts.running.items() if ends > now}
        requests_s, tokens_s = max(0.0, counts.requests_empty - now), max(0.0, counts.tokens_empty - now)
        before = Taken(requests_s, tokens_s, share=share, alone=True)
        if limits.max_concurrent is not None and len(running) >= limits.max_concurrent:
            return replace(before, refusal=Refusal.KEY_CONCURRENT)
        if limits.requests_per_minute is not None:
            requests = fill(requests_s, 1, limits.requests_per_minute)
            if requests.wait_s:
                return replace(before, refusal=Refusal.KEY_REQUESTS, wait_s=requests.wait_s)
            requests_s = requests.level_s
        if limits.tokens_per_minute is not None:
            tokens = fill(tokens_s, ask.tokens, limits.tokens_per_minute)
            if tokens.wait_s:
                return replace(before, refusal=Refusal.KEY_TOKENS, wait_s=tokens.wait_s)
            tokens_s = tokens.level_s
        counts.requests_empty, counts.tokens_empty = now + requests_s, now + tokens_s
        running[ask.lease] = now + ask.lease_s
        return Taken(requests_s, tokens_s, share=share, alone=True)

    async def settle(self, ask: Ask, taken: Taken, generated: int) -> None:
        """See QuotaStore."""
        counts, limit = self._counts[ask.key_id], _part(ask.limits, taken.share).tokens_per_minute
        counts.running.pop(ask.lease, None)
        if limit is not None:
            counts.tokens_empty = max(counts.tokens_empty, self._clock()) + generated * WINDOW_S / limit


def _part(limits: RateLimits, share: int) -> RateLimits:
    if share == 1:
        return limits

    def part(limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // share)

    return RateLimits(
        requests_per_minute=part(limits.requests_per_minute),
        tokens_per_minute=part(limits.tokens_per_minute),
        max_concurrent=part(limits.max_concurrent),
    )
