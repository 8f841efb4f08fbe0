"""Runs one stack of children until a signal ends it.

Redis first, then the workers, the gateway when they serve: a checkpoint that cannot be loaded so opens no port to
clients. A child that fails before it was ever ready ends everything; later deaths are mended. SIGINT, SIGTERM and
SIGHUP end the children in reverse; a second one ends their grace. Meanwhile commands change which children run
(`members.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from services.launcher import changes, control
from services.launcher.child import ChildFailed
from services.launcher.commands import Stack
from services.launcher.listener import SafeListener
from services.launcher.members import Members, Start
from services.process.signals import on_ending_signals
from services.process.supervised import supervised


class Launcher:
    """Runs one stack until a signal ends it."""

    def __init__(self, stack: Stack, start: Start, control_path: Path) -> None:
        """control_path: of the socket for commands."""
        self._stack = stack
        self._listener = SafeListener(start.listener)
        self._control_path = control_path
        self._members = Members(stack.growth, start)
        self._ending = False

    async def run(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        """Serves; returns when a signal came and all children are gone. Raises ChildFailed, children gone as well."""
        serving = asyncio.create_task(self._serve(on_ready))
        on_ending_signals(lambda: self._end(serving), self._members.hurry)
        try:
            await serving
        except asyncio.CancelledError:
            if not self._ending:
                raise

    def _end(self, serving: "asyncio.Task[None]") -> None:
        self._ending = True
        serving.cancel()

    async def _serve(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        failures: list[BaseException] = []
        try:
            async with AsyncExitStack() as groups:  # the last group ends first: no gateway without workers
                for specs in self._stack.in_order():
                    await self._members.begin(await groups.enter_async_context(asyncio.TaskGroup()), specs)
                try:
                    await on_ready()
                except Exception as error:  # a full disk, a closed pipe: the children serve all the same
                    self._listener.say(f"everything is ready, which could not be shown: {error!r}")
                await supervised("the socket for commands", self._take_commands, self._say_failed)
        except* ChildFailed as group:
            failures += _leaves(group)
        if failures:
            raise failures[0]  # the others, if any, will have failed for the same reason

    async def _take_commands(self) -> None:
        """Takes commands until it is cancelled."""
        commands = {"restart": partial(changes.restart, self._members), "scale": partial(changes.scale, self._members)}
        async with control.listening(self._control_path, commands):
            await asyncio.Event().wait()

    def _say_failed(self, part: str, error: Exception) -> None:
        self._listener.say(f"{part} failed, and is tried again: {error!r}")


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
