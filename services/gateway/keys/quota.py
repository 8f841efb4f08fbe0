"""The limits of one key, as a request meets them: counted when its prompt is known, and settled when it has ended."""

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from services.gateway.api.errors import ApiError
from services.gateway.api.generation import Refusal
from services.gateway.api.request_record import RequestRecord
from services.gateway.keys.entry import RateLimits
from services.gateway.keys.rates import WINDOW_S, remaining

_LEASE_GRACE_S = 15.0  # of a gateway that died: its requests are counted as running until their time and this are over
_NO_TIME_S = 1.0  # until another try, where nobody can say when a running request ends

_WORDS = {
    Refusal.KEY_REQUESTS: ("requests", "requests per minute"),
    Refusal.KEY_TOKENS: ("tokens", "tokens per minute"),
    Refusal.KEY_CONCURRENT: ("requests", "requests at once"),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of a key. tokens: of its prompt.

    lease: a name, under which the request counts as running, for lease_s if nobody says its end.
    """

    key_id: str
    limits: RateLimits
    lease: str
    tokens: int
    lease_s: float


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

    async def take(self, ask: Ask) -> Taken:
        """Counts a request, or refuses it and counts nothing. Never fails."""

    async def settle(self, ask: Ask, taken: Taken, generated: int) -> None:
        """Ends a request that was let in, and counts the tokens that were generated for it. Never fails."""


class KeyQuota:
    """The limits of one key: a Quota."""

    def __init__(self, key_id: str, limits: RateLimits, store: QuotaStore, refused: Callable[[Refusal], None]) -> None:
        """refused: counts refusals."""
        self._key_id = key_id
        self._limits = limits
        self._store = store
        self._refused = refused
        self._settling: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def admit(self, record: RequestRecord, timeout_s: float) -> AsyncIterator[None]:
        """See Quota."""
        tokens = record.prompt_tokens or 0
        ask = Ask(self._key_id, self._limits, secrets.token_hex(8), tokens, timeout_s + _LEASE_GRACE_S)
        try:
            taken = await self._store.take(ask)
        except asyncio.CancelledError:
            self._settle(ask, Taken(), 0)  # it may have been counted
            raise
        record.limit_headers = limit_headers(self._limits, taken)
        if taken.refusal is not None:
            self._refused(taken.refusal)
            raise _refusal(taken.refusal, taken.wait_s, self._limits, tokens)
        try:
            yield
        finally:
            self._settle(ask, taken, record.generated_tokens or 0)

    def _settle(self, ask: Ask, taken: Taken, generated: int) -> None:
        # A task of its own: a request that is cancelled has to be settled too.
        task = asyncio.create_task(self._store.settle(ask, taken, generated))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)


def limit_headers(limits: RateLimits, taken: Taken) -> tuple[tuple[str, str], ...]:
    """Returns the headers of an answer that say what is left, with OpenAI's names and forms."""
    found: list[tuple[str, str]] = []
    for name, limit, level_s in (
        ("requests", limits.requests_per_minute, taken.requests_s),
        ("tokens", limits.tokens_per_minute, taken.tokens_s),
    ):
        if limit is not None:
            left = remaining(level_s, max(1, limit // taken.share))
            shown = (("limit", str(limit)), ("remaining", str(left)), ("reset", duration(level_s)))
            found += [(f"x-ratelimit-{what}-{name}", value) for what, value in shown]
    return tuple(found)


def duration(seconds: float) -> str:
    """Returns a time as OpenAI writes it: `20ms`, `1s`, `6m0s`, `1h0m0s`; rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, whole = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{whole}s"


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
    wait_s = wait_s or _NO_TIME_S
    headers = {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(math.ceil(wait_s * 1000))}
    return ApiError(429, message, code="rate_limit_exceeded", type=kind, headers=headers)
