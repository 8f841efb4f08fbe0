"""A thread beside the event loop, for work of one request that would keep the others waiting.

There is one thread, and work in it waits for its turn: several would contend with the event loop for the interpreter
lock, each for itself. What releases the lock, as tokenizing does, has threads of its own.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SideThread:
    """Runs calls of which each may take long, but no part of which may keep the interpreter lock for long."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="side")

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what the call returns, and raises what it raises. It sees the caller's context variables."""
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: context.run(call, *args, **kwargs))

    async def run_if(self, takes_long: bool, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Does `run` where the call takes long; else makes the call at once, on the event loop."""
        return await self.run(call, *args, **kwargs) if takes_long else call(*args, **kwargs)
