"""A gateway's view of Redis: since when leases could be renewed there, and whether Redis lost something.

A lease that is gone proves that its owner is dead only if the owner could have renewed it all the time: Redis was
there, took writes, lost nothing, and its clock did not jump. The witness is a lease like the others, with half their
length. Whatever ends theirs before their time, ends the witness first: nobody could renew anything, Redis was emptied
or is another server, or its clock was set forward. So who kept a witness for as long as a lease lasts may trust what is
not there. A second key, which lasts, tells a server that was emptied from one that was away.
"""

import secrets
from collections.abc import Callable

from services.prefix_index.redis_client import Client

_LASTING_MS = 24 * 3600 * 1000


class Witness:
    """The witness of one gateway: a key with the number of its last renewal. Not for two renewals at a time.

    lease_s: how long the leases last that it tells about.
    """

    def __init__(self, client: Client, lease_s: float, clock: Callable[[], float]) -> None:
        self._client = client
        self._lease_s = lease_s
        self._clock = clock
        self._key = f"baton:response-lease:gateway:{secrets.token_hex(8)}"
        self._lasting_key = f"{self._key}:lasting"
        self._broken = True  # since the lasting key was looked at
        self._number = 0  # of the last renewal that was tried
        self._confirmed = 0  # of the last one that Redis answered
        self._unbroken_since: float | None = None
        self._lost_at: float | None = None

    @property
    def saw_a_lease_s_time(self) -> bool:
        """True where a lease that is not there now was not renewed though it could have been."""
        return self._unbroken_since is not None and self._clock() - self._unbroken_since >= self._lease_s

    @property
    def lost_lately(self) -> bool:
        """True where Redis lost something so lately that its owner may not have noticed, and write it again."""
        return self._lost_at is not None and self._clock() - self._lost_at < self._lease_s

    async def renew(self) -> None:
        """Renews the witness. Raises one of redis_client.UNREACHABLE."""
        self._number += 1
        number = self._number
        try:
            call = self._client.redis.set(self._key, number, px=round(self._lease_s / 2 * 1e3), get=True)
            before = await self._client.within_limit(call)
        except BaseException:
            self._unbroken_since = None
            raise
        now = self._clock()
        unbroken = isinstance(before, bytes) and before.isdigit() and int(before) >= self._confirmed
        if not unbroken:
            self._unbroken_since = None
            self._broken = True
            if before is not None and self._confirmed:
                self._lost_at = now  # another server, which knows an earlier number
        if self._broken:
            await self._look_for_loss(now)
        if self._unbroken_since is None:
            self._unbroken_since = now
        self._confirmed = number

    async def _look_for_loss(self, now: float) -> None:
        call = self._client.redis.set(self._lasting_key, b"", px=_LASTING_MS, get=True)
        if await self._client.within_limit(call) is None and self._confirmed:
            self._lost_at = now
        self._broken = False
