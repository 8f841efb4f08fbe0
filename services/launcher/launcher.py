"""Runs one stack of children until a signal ends it.

Redis first, then the workers, the gateway when they serve: a checkpoint that cannot be loaded so opens no port to
clients. A child that fails before it was ever ready ends everything; later deaths are mended. SIGINT, SIGTERM and
SIGHUP end the children in reverse; a second one ends their grace.

A restart replaces the children one by one: the successor is ready before the child that it replaces is told to end.
Wherever it is interrupted, one of the two stays, and the other ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from services.launcher import control
from services.launcher.child import ChildFailed, ChildSpec, Supervisor
from services.launcher.commands import Stack
from services.launcher.listener import Listener, SafeListener
from services.process.backoff import Backoff
from services.process.signals import on_ending_signals
from services.process.supervised import supervised


@dataclass(frozen=True, slots=True)
class _Member:
    """A child that runs, and the task group of those that start and end together with it."""

    supervisor: Supervisor
    group: asyncio.TaskGroup
    running: "asyncio.Task[ChildFailed | None]"


class Launcher:
    """Runs one stack until a signal ends it."""

    def __init__(
        self,
        stack: Stack,
        environment: Mapping[str, str],
        listener: Listener,
        new_backoff: Callable[[], Backoff],
        grace_s: float,
        control_path: Path,
    ) -> None:
        """new_backoff: makes one child's waits; control_path: of the socket at which `baton restart` asks."""
        self._stack = stack
        self._environment = environment
        self._listener = SafeListener(listener)
        self._new_backoff = new_backoff
        self._grace_s = grace_s
        self._control_path = control_path
        self._members: list[_Member] = []
        self._ending = False

    async def run(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        """Serves; returns when a signal came and all children are gone. Raises ChildFailed, children gone as well."""
        serving = asyncio.create_task(self._serve(on_ready))
        on_ending_signals(lambda: self._end(serving), self._hurry)
        try:
            await serving
        except asyncio.CancelledError:
            if not self._ending:
                raise

    async def restart(self, tell: control.Tell) -> None:
        """Replaces one by one all children that have a successor. Raises CommandFailed where one does not start.

        Cancelled, it leaves the rest as it is; a successor that is not ready yet ends. A child that an earlier restart
        told to end is waited for, and has no further successor.
        """
        await self._until_ended([member for member in self._members if member.supervisor.retired], tell)
        order = [spec.name for children in self._stack.in_order() for spec in children]
        for member in sorted(self._members, key=lambda each: order.index(each.supervisor.spec.name)):
            spec = member.supervisor.spec
            if spec.successor is not None:
                await self._replace(member, replace(spec.successor(), ready_within_s=spec.ready_within_s), tell)

    async def _until_ended(self, members: Sequence[_Member], tell: control.Tell) -> None:
        if members:
            names = ", ".join(member.supervisor.spec.name for member in members)
            tell(f"{names} of an earlier restart has not ended yet: waiting for it")
            await asyncio.wait([member.running for member in members])

    async def _replace(self, old: _Member, spec: ChildSpec, tell: control.Tell) -> None:
        started = time.monotonic()
        new = self._start(old.group, spec, is_successor=True)
        ready = asyncio.create_task(new.supervisor.was_ready.wait())
        waiting = asyncio.create_task(_tell_what_it_waits_for(new.supervisor, tell))
        try:
            await asyncio.wait((new.running, ready), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            waiting.cancel()
            leaving = old if new.supervisor.was_ready.is_set() else new
            leaving.supervisor.retire()
        if leaving is new:
            failure = await new.running
            for line in () if failure is None else failure.lines:
                self._listener.line(spec.name, line)
            why = failure or f"{spec.name} ended"
            raise control.CommandFailed(f"{why}; the old one goes on. `baton up` shows what the new one wrote")
        replaced = time.monotonic()
        await asyncio.wait([old.running])
        ready_s, ended_s = replaced - started, time.monotonic() - replaced
        tell(f"{spec.name} is replaced: the new one was ready in {ready_s:.1f} s, the old one ended in {ended_s:.1f} s")

    def _end(self, serving: "asyncio.Task[None]") -> None:
        self._ending = True
        serving.cancel()

    def _hurry(self) -> None:
        for member in self._members:
            member.supervisor.hurry()

    async def _serve(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        failures: list[BaseException] = []
        try:
            async with AsyncExitStack() as groups:  # the last group ends first: no gateway without workers
                for children in self._stack.in_order():
                    group = await groups.enter_async_context(asyncio.TaskGroup())
                    started = [self._start(group, spec) for spec in children]
                    for member in started:
                        await member.supervisor.was_ready.wait()
                try:
                    await on_ready()
                except Exception as error:  # a full disk, a closed pipe: the children serve all the same
                    self._listener.say(f"everything is ready, which could not be shown: {error!r}")
                await supervised("the socket of `baton restart`", self._take_commands, self._say_failed)
        except* ChildFailed as group:
            failures += _leaves(group)
        if failures:
            raise failures[0]  # the others, if any, will have failed for the same reason

    async def _take_commands(self) -> None:
        """Takes commands until it is cancelled."""
        async with control.listening(self._control_path, {"restart": self.restart}):
            await asyncio.Event().wait()

    def _say_failed(self, part: str, error: Exception) -> None:
        self._listener.say(f"{part} failed, and is tried again: {error!r}")

    def _start(self, group: asyncio.TaskGroup, spec: ChildSpec, is_successor: bool = False) -> _Member:
        supervisor = Supervisor(spec, self._environment, self._listener, self._new_backoff(), self._grace_s)
        self._listener.starting(spec.name, "loading")
        member = _Member(supervisor, group, group.create_task(_run(supervisor, is_successor)))
        self._members.append(member)
        member.running.add_done_callback(lambda _: self._members.remove(member))
        return member


async def _tell_what_it_waits_for(supervisor: Supervisor, tell: control.Tell) -> None:
    await supervisor.waits_long.wait()
    tell(f"{supervisor.spec.name} is not ready yet: {supervisor.waits_for}")


async def _run(supervisor: Supervisor, is_successor: bool) -> ChildFailed | None:
    """Returns how a successor failed, or None when the child was retired. Raises ChildFailed for others."""
    try:
        await supervisor.run()
    except ChildFailed as failure:
        if is_successor:
            return failure
        raise
    return None


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
