"""Runs one stack of children until a signal ends it.

Redis first, then the workers, the gateway when they serve: a checkpoint that cannot be loaded so opens no port to
clients. A child that fails before it was ever ready ends everything; later deaths are mended. SIGINT, SIGTERM and
SIGHUP end the children in reverse; a second one ends their grace.
"""

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

from services.launcher.child import ChildFailed, ChildSpec, Listener, Supervisor
from services.launcher.commands import Stack
from services.launcher.restart import RestartPolicy

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Launcher:
    """Runs one stack until a signal ends it."""

    def __init__(
        self,
        stack: Stack,
        environment: Mapping[str, str],
        listener: Listener,
        policy: RestartPolicy,
        grace_s: float,
    ) -> None:
        self._stack = stack
        self._environment = environment
        self._listener = listener
        self._policy = policy
        self._grace_s = grace_s
        self._supervisors: list[Supervisor] = []
        self._ending = False

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serves; returns when a signal came and all children are gone. Raises ChildFailed, children gone as well."""
        serving = asyncio.create_task(self._serve(on_ready))
        loop = asyncio.get_running_loop()
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(number, self._on_signal, serving)
        try:
            await serving
        except asyncio.CancelledError:
            if not self._ending:
                raise

    def _on_signal(self, serving: "asyncio.Task[None]") -> None:
        if not self._ending:
            self._ending = True
            serving.cancel()
            return
        for supervisor in self._supervisors:
            supervisor.hurry()

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        failures: list[BaseException] = []
        try:
            async with AsyncExitStack() as groups:  # the last group ends first: no gateway without workers
                for children in self._stack.in_order():
                    group = await groups.enter_async_context(asyncio.TaskGroup())
                    await self._start(group, children)
                on_ready()
        except* ChildFailed as group:
            failures += _leaves(group)
        if failures:
            raise failures[0]  # the others, if any, will have failed for the same reason

    async def _start(self, children: asyncio.TaskGroup, specs: tuple[ChildSpec, ...]) -> None:
        started = [Supervisor(spec, self._environment, self._listener, self._policy, self._grace_s) for spec in specs]
        self._supervisors += started
        for supervisor in started:
            self._listener.starting(supervisor.spec.name, "loading")
            children.create_task(supervisor.run())
        for supervisor in started:
            await supervisor.was_ready.wait()


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
