"""Work that ends early when something happens."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def cut_short(
    when: Callable[[], Awaitable[object]], error: type[Exception], at_most_s: float | None = None
) -> AsyncIterator[None]:
    """Cancels the `async with` block and raises `error` as soon as `when` returns, and also after `at_most_s`."""
    try:
        async with asyncio.timeout(at_most_s) as time_left:
            watcher = asyncio.create_task(_expire(when, time_left))
            try:
                yield
            finally:
                watcher.cancel()
    except TimeoutError as timeout:
        if not time_left.expired():
            raise
        raise error from timeout


async def _expire(when: Callable[[], Awaitable[object]], time_left: asyncio.Timeout) -> None:
    await when()
    time_left.reschedule(asyncio.get_running_loop().time())
