"""The limits of one key, as a request meets them.

They are looked at when it comes, count it when its prompt is known, and are settled when it has ended.
"""

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from services.gateway.api.errors import ApiError
from services.gateway.api.generation import GenerationError, Refusal
from services.gateway.api.records.limits_left import LimitLeft
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.keys.key_entry import RateLimits
from services.gateway.keys.rates import WINDOW_S, part_of, remaining, unfill

_NO_TIME_S = 1.0  # until another try, where nobody can say when a running request ends

_WORDS = {
    Refusal.KEY_REQUESTS: ("requests", "requests per minute"),
    Refusal.KEY_TOKENS: ("tokens", "tokens per minute"),
    Refusal.KEY_CONCURRENT: ("requests", "requests at once"),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of a key. lease: the name under which it counts as running.

    tokens: of its prompt, and those that were made of its text and cut.
    """

    key_id: str
    limits: RateLimits
    lease: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer to an Ask. The levels are those of `rates.py`, in seconds. refusal: None for what was let in.

    share: into how many equal parts the limits were divided, of which one was asked.
    alone: this gateway counted it, and Redis did not.
    """

    requests_s: float = 0.0
    tokens_s: float = 0.0
    refusal: Refusal | None = None
    wait_s: float = 0.0
    share: int = 1
    alone: bool = False


class QuotaStore(Protocol):
    """Counts what keys ask for."""

    async def look(self, ask: Ask) -> Taken:
        """Refuses a request that `take` is known to refuse, and counts nothing. Never fails."""

    async def take(self, ask: Ask) -> Taken:
        """Counts a request, or refuses it and counts nothing. Never fails."""

    async def settle(self, ask: Ask, taken: Taken, generated: int) -> None:
        """Ends a request that was let in, and counts the tokens that were generated for it. Never fails."""

    async def undo(self, ask: Ask, taken: Taken, generated: int) -> None:
        """Ends a request that was let in and for which nothing was done: it no longer counts. Never fails."""


class KeyQuota:
    """The limits of one key: a Quota."""

    def __init__(self, key_id: str, limits: RateLimits, store: QuotaStore, refused: Callable[[Refusal], None]) -> None:
        """refused: counts refusals."""
        self._key_id = key_id
        self._limits = limits
        self._store = store
        self._refused = refused
        self._settling: set[asyncio.Task[None]] = set()

    async def check(self, record: RequestRecord) -> None:
        """See Quota."""
        ask = Ask(self._key_id, self._limits, "", 1)
        if (seen := await self._store.look(ask)).refusal is not None:
            self._judge(record, ask, seen)

    @asynccontextmanager
    async def admit(self, record: RequestRecord) -> AsyncIterator[None]:
        """See Quota."""
        ask = Ask(self._key_id, self._limits, secrets.token_hex(8), (record.prompt_tokens or 0) + record.cut_tokens)
        taken = await self._store.take(ask)
        self._judge(record, ask, taken)
        ending = self._store.settle
        try:
            yield
        except GenerationError:
            if record.attempts.computed_nothing:
                record.limits_left = limits_left(self._limits, without(ask, taken))
                ending = self._store.undo
            raise
        finally:
            self._finish(ending(ask, taken, record.generated_tokens or 0))

    def _judge(self, record: RequestRecord, ask: Ask, taken: Taken) -> None:
        record.limits_left = limits_left(self._limits, taken)
        if taken.refusal is not None:
            self._refused(taken.refusal)
            raise _refusal(taken.refusal, taken.wait_s, self._limits, ask.tokens)

    def _finish(self, ending: Coroutine[Any, Any, None]) -> None:
        # A task of its own: a request that is cancelled has to be settled too.
        task = asyncio.create_task(ending)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)


def without(ask: Ask, taken: Taken) -> Taken:
    """Returns the levels as they were before a request was let in."""
    requests, tokens = ask.limits.requests_per_minute, ask.limits.tokens_per_minute
    requests_s = 0.0 if requests is None else unfill(taken.requests_s, 1, part_of(requests, taken.share))
    tokens_s = 0.0 if tokens is None else unfill(taken.tokens_s, ask.tokens, part_of(tokens, taken.share))
    return replace(taken, requests_s=requests_s, tokens_s=tokens_s)


def limits_left(limits: RateLimits, taken: Taken) -> list[LimitLeft]:
    """Returns what is left of a key's rates."""
    requests, tokens, share = limits.requests_per_minute, limits.tokens_per_minute, taken.share
    found = []
    if requests is not None:
        left = remaining(taken.requests_s, part_of(requests, share))
        found.append(LimitLeft("requests", requests, left, taken.requests_s))
    if tokens is not None:
        left = remaining(taken.tokens_s, part_of(tokens, share))
        found.append(LimitLeft("tokens", tokens, left, taken.tokens_s))
    return found


def _refusal(refusal: Refusal, wait_s: float, limits: RateLimits, tokens: int) -> ApiError:
    kind, words = _WORDS[refusal]
    limit = {
        Refusal.KEY_REQUESTS: limits.requests_per_minute,
        Refusal.KEY_TOKENS: limits.tokens_per_minute,
        Refusal.KEY_CONCURRENT: limits.max_concurrent,
    }[refusal]
    message = f"Rate limit reached: this key may have {limit} {words}."
    if refusal is Refusal.KEY_TOKENS and limit is not None and tokens > limit:
        message += f" The prompt alone has {tokens} tokens: it can never be let in."
        wait_s = WINDOW_S
    wait_s = min(wait_s or _NO_TIME_S, WINDOW_S)  # who waits longer, for an answer beyond the limit, asks each minute
    headers = {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(math.ceil(wait_s * 1000))}
    return ApiError(429, message, code="rate_limit_exceeded", type=kind, headers=headers)
