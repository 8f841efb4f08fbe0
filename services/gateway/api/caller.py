"""The caller of a request: whose request it is and what it may ask for, as its key says."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from services.config import Right
from services.gateway.api.errors import invalid
from services.gateway.api.records.request_record import RequestRecord

DEFAULT_TENANT = "default"


class Quota(Protocol):
    """The limits of a key, and what of them is used."""

    async def check(self, record: RequestRecord) -> None:
        """Refuses a request of a key that is known to have reached a limit, before work is done for it; counts nothing.

        Raises ApiError, as `admit` does.
        """

    def admit(self, record: RequestRecord) -> AbstractAsyncContextManager[None]:
        """Counts a request, of which the prompt's tokens are known, for as long as the `async with` block runs.

        At the end it counts the tokens that were generated; or nothing of the request, where the block raises
        GenerationError before a worker has begun it. Raises ApiError, 429, where a limit is reached. The record
        gets what is left.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The one whose request it is.

    key_id: None where no key is asked for. priority: no request comes before it, and one that names no priority has it;
    None: there is no bound.
    salt: what all salts of the tenant's cached blocks begin with. The salts of two tenants differ, since this part of
    them has one length.
    quota: None for a key without limits.
    """

    tenant: str = DEFAULT_TENANT
    key_id: str | None = None
    rights: frozenset[Right] = frozenset(Right)
    priority: int | None = None
    salt: str = ""
    quota: Quota | None = None

    def cache_salt(self, asked: str | None) -> str:
        """Returns the salt of a request. asked: the request's own part."""
        return self.salt + (asked or "")

    async def check(self, record: RequestRecord) -> None:
        """Refuses a request whose key is known to have reached a limit, as Quota says."""
        if self.quota is not None:
            await self.quota.check(record)

    def admit(self, record: RequestRecord) -> AbstractAsyncContextManager[None]:
        """Counts a request against the limits of the caller's key, if it has any, as Quota says."""
        return nullcontext() if self.quota is None else self.quota.admit(record)

    def request_priority(self, asked: int | None) -> int:
        """Returns the priority of a request. asked: the one that it names. Raises ApiError."""
        if self.priority is None:
            return asked or 0
        if asked is None:
            return self.priority
        if asked < self.priority:
            raise invalid(f"'priority' must be at least {self.priority} with this key.", "priority")
        return asked


ANYBODY = Caller()


class Authenticator(Protocol):
    """Knows the keys."""

    def caller(self, header: Callable[[str], str], right: Right | None) -> Caller:
        """Returns who asks. header: the value of one of the request's headers, by name. Raises ApiError.

        right: None: any known key will do.
        401: there is no key, or an unknown one. 403: the key lacks the right.
        """
