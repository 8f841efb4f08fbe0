"""Turns: so many at a time, and tenants that wait for one get it in rotation, whatever each of them has waiting."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Crowded(Exception):
    """The wait for a turn was too long."""


class Turns:
    """Gives at most `most` turns at a time, to one tenant one less where there are several.

    So there is a turn at once for a tenant with little to do, unless several others have much. Any number may wait, as
    of all requests that a gateway holds; the time of each wait is bounded.
    """

    def __init__(self, most: int, *, max_wait_s: float) -> None:
        """max_wait_s: for a turn."""
        self._free = most
        self._of_one = max(1, most - 1)
        self._max_wait_s = max_wait_s
        self._taken: Counter[str] = Counter()  # turns by tenant
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Takes a turn for as long as the `async with` block runs. Raises Crowded where there is none in time."""
        if not self._may_begin(tenant):
            await self._wait(tenant)
        else:
            self._begin(tenant)
        try:
            yield
        finally:
            self._end(tenant)

    def _may_begin(self, tenant: str) -> bool:
        return self._free > 0 and self._taken[tenant] < self._of_one

    def _begin(self, tenant: str) -> None:
        self._free -= 1
        self._taken[tenant] += 1

    def _end(self, tenant: str) -> None:
        self._free += 1
        self._taken[tenant] -= 1
        self._taken += Counter()  # without tenants that have none
        self._pass_on()

    async def _wait(self, tenant: str) -> None:
        queue = self._waiting.setdefault(tenant, deque())
        mine = asyncio.get_running_loop().create_future()
        queue.append(mine)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await mine
        except BaseException as error:
            if mine.done() and not mine.cancelled():  # its turn came in the same moment
                self._end(tenant)
            elif mine in queue:
                self._leave(tenant, mine)
            if isinstance(error, TimeoutError):
                raise Crowded from error
            raise

    def _leave(self, tenant: str, mine: asyncio.Future[None]) -> None:
        queue = self._waiting[tenant]
        queue.remove(mine)
        if not queue:
            del self._waiting[tenant]

    def _pass_on(self) -> None:
        """Gives free turns to those that wait, one to each tenant in rotation."""
        while (tenant := next((each for each in self._waiting if self._may_begin(each)), None)) is not None:
            queue = self._waiting.pop(tenant)
            next_one = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the others
            if not next_one.done():
                self._begin(tenant)
                next_one.set_result(None)
