"""The requests that are being answered, of all doors: a gateway whose time is over ends them together.

What has a ledger entry ends by it. This ends what has none: a request whose body has not come, one that waits for a
worker, one that reads what another gateway generates.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway.api.errors import from_generation_error
from services.gateway.api.generation import Stopping


class InProgress:
    """Ends all requests in one error each when it is told to."""

    def __init__(self) -> None:
        self._requests: set[asyncio.Timeout] = set()
        self._over = False

    def end_all(self) -> None:
        """Ends those that are being answered, and from now on each new one."""
        self._over = True
        for request in self._requests:
            request.reschedule(0.0)

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Answers one request in the `async with` block, which `end_all` cancels. Raises ApiError in its place."""
        request = asyncio.timeout_at(0.0 if self._over else None)
        try:
            async with request:
                self._requests.add(request)
                try:
                    yield
                finally:
                    self._requests.discard(request)
        except TimeoutError as error:
            if not request.expired():
                raise
            raise from_generation_error(Stopping("the gateway ends"), "") from error
