"""Responses that are kept for a while: the interface, and the store in a gateway's memory."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.gateway.openai.responses.kept_response import UNENDED_END

MAX_KEPT_BYTES = 1 << 20  # of one response with its conversation
MAX_MEMORY_BYTES = 64 << 20  # of all that a gateway keeps itself
LEASE_S = 10.0
RENEW_AFTER = 0.2  # of a lease's time it is renewed


class StoreUnavailable(Exception):
    """The store does not answer."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to the owner of a lease who renews it.

    end_wanted: the response's end was asked for meanwhile. over: the response counts as lost, and has ended for all
    others; the lease is not renewed. lost: nothing is kept under the response's id.
    """

    end_wanted: bool = False
    over: bool = False
    lost: bool = False


class ResponseStore(Protocol):
    """Keeps bytes for each response of a tenant, for the store's lifetime.

    A gateway that generates a response in the background has a lease on it. lease_s: how long it lasts from each
    renewal on.
    """

    lease_s: float

    async def put(self, tenant: str, response_id: str, packed: bytes) -> bool:
        """Keeps a response, in the place of one with the same id. False: it is not kept."""

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Returns what is kept; None: nothing. Raises StoreUnavailable, also where nobody knows what was kept."""

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Deletes a response. False: there was none. Raises StoreUnavailable."""

    async def update(self, tenant: str, response_id: str, packed: bytes, anew: bool) -> bytes | None:
        """Keeps a background response as it is now, unless one that has ended is kept: an end is final.

        anew: also where nothing is kept. Returns what is kept then; None: nothing. Raises StoreUnavailable.
        """

    async def renew(self, tenant: str, response_id: str) -> Renewal:
        """Begins or renews the lease on a response. Raises StoreUnavailable."""

    async def claim(self, tenant: str, response_id: str) -> bool:
        """Ends the lease of a gateway that is dead, for good. False: it lives, or nobody can tell yet.

        Raises StoreUnavailable.
        """

    async def ask_for_end(self, tenant: str, response_id: str) -> None:
        """Tells the gateway that has the lease, when it next renews it, to cancel. Raises StoreUnavailable."""

    async def follow(self) -> None:
        """Watches what `claim` has to know, where there is anything to watch, until cancelled."""


class MemoryResponseStore:
    """A ResponseStore in memory. Where it is full, the oldest responses go first."""

    def __init__(
        self,
        lifetime_s: float,
        clock: Callable[[], float],
        max_bytes: int = MAX_MEMORY_BYTES,
        lease_s: float = LEASE_S,
    ) -> None:
        self.lease_s = lease_s
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # By age, since all live equally long: until when, and the bytes.
        self._kept: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()
        # By age too: until when, and whether the end is asked for.
        self._leases: OrderedDict[tuple[str, str], tuple[float, bool]] = OrderedDict()

    async def put(self, tenant: str, response_id: str, packed: bytes) -> bool:
        """See ResponseStore."""
        if len(packed) > min(MAX_KEPT_BYTES, self._max_bytes):
            return False
        self._remove((tenant, response_id))
        self._kept[tenant, response_id] = self._clock() + self._lifetime_s, packed
        self._num_bytes += len(packed)
        self._expire()
        return True

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """See ResponseStore."""
        self._expire()
        _, packed = self._kept.get((tenant, response_id), (0.0, None))
        return packed

    async def delete(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore."""
        self._expire()
        return self._remove((tenant, response_id))

    async def update(self, tenant: str, response_id: str, packed: bytes, anew: bool) -> bytes | None:
        """See ResponseStore."""
        kept = await self.get(tenant, response_id)
        if (kept is None and not anew) or (kept is not None and not kept.endswith(UNENDED_END)):
            return kept
        if not await self.put(tenant, response_id, packed):
            raise StoreUnavailable("the response is larger than the store")
        return packed

    async def renew(self, tenant: str, response_id: str) -> Renewal:
        """See ResponseStore."""
        _, end_wanted = self._leases.pop((tenant, response_id), (0.0, False))
        self._leases[tenant, response_id] = self._clock() + self.lease_s, False
        while next(iter(self._leases.values()))[0] <= self._clock():
            self._leases.popitem(last=False)
        return Renewal(end_wanted, lost=(tenant, response_id) not in self._kept)

    async def claim(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore. Only this process has leases."""
        return not self._leased(tenant, response_id)

    async def follow(self) -> None:
        """See ResponseStore."""

    def _leased(self, tenant: str, response_id: str) -> bool:
        until, _ = self._leases.get((tenant, response_id), (0.0, False))
        return self._clock() < until

    async def ask_for_end(self, tenant: str, response_id: str) -> None:
        """See ResponseStore."""
        if self._leased(tenant, response_id):
            until, _ = self._leases[tenant, response_id]
            self._leases[tenant, response_id] = until, True

    def _expire(self) -> None:
        now = self._clock()
        while self._kept:
            key, (until, _) = next(iter(self._kept.items()))
            if until > now and self._num_bytes <= self._max_bytes:
                break
            self._remove(key)

    def _remove(self, key: tuple[str, str]) -> bool:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._num_bytes -= len(kept[1])
        return kept is not None
