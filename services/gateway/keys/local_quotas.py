"""Limits counted by one gateway alone: without Redis, and while Redis does not answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.gateway.api.generation import Refusal
from services.gateway.keys.key_entry import RateLimits
from services.gateway.keys.quota import Ask, Taken, without
from services.gateway.keys.rates import WINDOW_S, fill, part_of


@dataclass(slots=True)
class _Counts:
    """Counts of one key. The moments are those at which the buckets will be empty. running: leases."""

    requests_empty: float = 0.0
    tokens_empty: float = 0.0
    running: set[str] = field(default_factory=set)


class LocalQuotas:
    """A QuotaStore in this process. Holds an entry for every key with limits that was ever used."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, _Counts] = {}

    async def look(self, ask: Ask) -> Taken:
        """See QuotaStore."""
        return self.look_at_share(ask, 1)

    async def take(self, ask: Ask) -> Taken:
        """See QuotaStore."""
        return self.take_share(ask, 1)

    async def settle(self, ask: Ask, taken: Taken, generated: int) -> None:
        """See QuotaStore."""
        self.end(ask, taken, generated)

    async def undo(self, ask: Ask, taken: Taken, generated: int) -> None:
        """See QuotaStore."""
        self.take_back(ask, taken)

    def look_at_share(self, ask: Ask, share: int) -> Taken:
        """Returns what `take_share` would, and counts nothing."""
        return _judged(self._counts.get(ask.key_id) or _Counts(), ask, share, self._clock())

    def take_share(self, ask: Ask, share: int) -> Taken:
        """Counts a request against one of `share` equal parts of the key's limits, each at least 1."""
        counts = self._counts.setdefault(ask.key_id, _Counts())
        taken = _judged(counts, ask, share, self._clock())
        if taken.refusal is None:
            self.note(ask, taken)
        return taken

    def note(self, ask: Ask, taken: Taken) -> None:
        """Fills the key's buckets as this answer says, and counts the request as running if it was let in."""
        now, counts = self._clock(), self._counts.setdefault(ask.key_id, _Counts())
        counts.requests_empty, counts.tokens_empty = now + taken.requests_s, now + taken.tokens_s
        if taken.refusal is None:
            counts.running.add(ask.lease)

    def end(self, ask: Ask, taken: Taken, generated: int) -> None:
        """Does what `settle` does."""
        self.stop(ask)
        if (limit := ask.limits.tokens_per_minute) is not None:
            counts, part = self._counts[ask.key_id], part_of(limit, taken.share)
            counts.tokens_empty = max(counts.tokens_empty, self._clock()) + generated * WINDOW_S / part

    def take_back(self, ask: Ask, taken: Taken) -> None:
        """Does what `undo` does."""
        self.stop(ask)
        now, counts = self._clock(), self._counts[ask.key_id]
        levels = Taken(counts.requests_empty - now, counts.tokens_empty - now, share=taken.share)
        before = without(ask, levels)
        counts.requests_empty, counts.tokens_empty = now + before.requests_s, now + before.tokens_s

    def stop(self, ask: Ask) -> None:
        """Counts a request as running no more."""
        if (counts := self._counts.get(ask.key_id)) is not None:
            counts.running.discard(ask.lease)

    def fill_up(self, key_id: str, other: "LocalQuotas") -> None:
        """Fills a key's buckets at least as another store has them, and counts all requests that run there."""
        if (theirs := other._counts.get(key_id)) is not None:
            ours = self._counts.setdefault(key_id, _Counts())
            ours.requests_empty = max(ours.requests_empty, theirs.requests_empty)
            ours.tokens_empty = max(ours.tokens_empty, theirs.tokens_empty)
            ours.running |= theirs.running

    def empty(self) -> None:
        """Empties the buckets of all keys. Requests go on running."""
        for counts in self._counts.values():
            counts.requests_empty = counts.tokens_empty = 0.0


def _judged(counts: _Counts, ask: Ask, share: int, now: float) -> Taken:
    limits = _part(ask.limits, share)
    requests_s, tokens_s = max(0.0, counts.requests_empty - now), max(0.0, counts.tokens_empty - now)
    before = Taken(requests_s, tokens_s, share=share, alone=True)
    if limits.max_concurrent is not None and len(counts.running) >= limits.max_concurrent:
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
    return Taken(requests_s, tokens_s, share=share, alone=True)


def _part(limits: RateLimits, share: int) -> RateLimits:
    if share == 1:
        return limits

    def part(limit: int | None) -> int | None:
        return None if limit is None else part_of(limit, share)

    return RateLimits(
        requests_per_minute=part(limits.requests_per_minute),
        tokens_per_minute=part(limits.tokens_per_minute),
        max_concurrent=part(limits.max_concurrent),
    )
