"""Responses that are kept for a while: the interface, and the store in a gateway's memory."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

MAX_KEPT_BYTES = 1 << 20  # of one response with its conversation
MAX_MEMORY_BYTES = 64 << 20  # of all that a gateway keeps itself
LEASE_S = 10.0  # a gateway that generates a response in the background renews its lease more often

UNENDED = b"unended"


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, and the items of the conversation that it answers, both as JSON.

    pieces: of a response that was generated in the background, where its texts were cut (pieces.py), or UNENDED while
    it is being generated; empty for others.
    """

    response: bytes
    input: bytes
    pieces: bytes = b""

    @property
    def ended(self) -> bool:
        """False: a gateway generates the response, or did so when it died."""
        return self.pieces != UNENDED

    def pack(self) -> bytes:
        """Returns the bytes that a store keeps: a line each. JSON has no line breaks in it."""
        return b"\n".join((self.response, self.input, self.pieces) if self.pieces else (self.response, self.input))

    @classmethod
    def unpack(cls, packed: bytes) -> "KeptResponse":
        """Returns what was packed."""
        response, _, rest = packed.partition(b"\n")
        items, _, pieces = rest.partition(b"\n")
        return cls(response, items, pieces)


class StoreUnavailable(Exception):
    """The store does not answer."""


class ResponseStore(Protocol):
    """Keeps bytes for each response of a tenant, for the store's lifetime.

    A gateway that generates a response in the background has a lease on it, of LEASE_S from each renewal on.
    """

    async def put(self, tenant: str, response_id: str, packed: bytes) -> bool:
        """Keeps a response, in the place of one with the same id. False: it is not kept."""

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Returns what is kept; None: nothing. Raises StoreUnavailable."""

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Deletes a response. False: there was none. Raises StoreUnavailable."""

    async def renew(self, tenant: str, response_id: str) -> bool:
        """Begins or renews the lease on a response. True: its end was asked for meanwhile. Raises StoreUnavailable."""

    async def leased(self, tenant: str, response_id: str) -> bool:
        """Returns whether some gateway has the lease on a response. Raises StoreUnavailable."""

    async def ask_for_end(self, tenant: str, response_id: str) -> None:
        """Tells the gateway that has the lease, when it next renews it, to cancel. Raises StoreUnavailable."""


class MemoryResponseStore:
    """A ResponseStore in memory. Where it is full, the oldest responses go first."""

    def __init__(self, lifetime_s: float, clock: Callable[[], float], max_bytes: int = MAX_MEMORY_BYTES) -> None:
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

    async def renew(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore."""
        _, end_wanted = self._leases.pop((tenant, response_id), (0.0, False))
        self._leases[tenant, response_id] = self._clock() + LEASE_S, False
        while next(iter(self._leases.values()))[0] <= self._clock():
            self._leases.popitem(last=False)
        return end_wanted

    async def leased(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore."""
        until, _ = self._leases.get((tenant, response_id), (0.0, False))
        return self._clock() < until

    async def ask_for_end(self, tenant: str, response_id: str) -> None:
        """See ResponseStore."""
        if await self.leased(tenant, response_id):
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
