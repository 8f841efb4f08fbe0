"""The children of one stack that run now, and three ways to change them: start, retire, replace.

    start     a worker more, in a place that is free; done when the gateway is connected to it
    retire    tells workers to end: each drains, and is gone
    replace   a successor in the same place is ready before the child that it replaces is told to end

Whoever calls them awaits one before the next. Each may be cancelled: what is not ready then is told to end, what was
told to end goes on to drain, and the rest stays as it is. A child that was ready once and dies is started again by its
supervisor, until it is told to end.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from services.config import WorkerRole
from services.launcher.child import ChildFailed, ChildSpec, Place, Supervisor
from services.launcher.control import CommandFailed, Tell
from services.launcher.listener import Listener, SafeListener
from services.process.backoff import Backoff

_FIXED = (
    "there are only the workers of the start: without Redis the gateway was told their addresses then. Give `baton up` "
    "a --redis-url"
)


@dataclass(frozen=True, slots=True)
class Growth:
    """The way in which a stack gets workers that it did not begin with.

    check_room is called first, with the environment of children. It raises CommandFailed where there is no room.
    """

    specs: Callable[[Sequence[Place]], list[ChildSpec]]
    check_room: Callable[[Sequence[Place], Mapping[str, str]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Start:
    """All that every child of a stack is started with."""

    environment: Callable[[int], Mapping[str, str]]  # of children, when there are so many workers
    listener: Listener
    new_backoff: Callable[[], Backoff]  # makes one child's waits
    grace_s: float  # between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True)
class Member:
    """A child that runs, and the task group of those that start and end together with it."""

    supervisor: Supervisor
    group: asyncio.TaskGroup
    running: "asyncio.Task[ChildFailed | None]"

    @property
    def spec(self) -> ChildSpec:
        """The spec by which the child was started."""
        return self.supervisor.spec


class Members:
    """The children of one stack that run now."""

    def __init__(self, growth: Growth | None, start: Start) -> None:
        """growth: None for a stack whose workers are those of its start."""
        self._growth = growth
        self._with = start
        self._listener = SafeListener(start.listener)
        self._members: list[Member] = []
        self._groups: list[asyncio.TaskGroup] = []  # as they were begun

    async def begin(self, group: asyncio.TaskGroup, specs: Sequence[ChildSpec]) -> None:
        """Starts the first children of a task group; returns when all are ready. One that never is fails the group."""
        self._groups.append(group)
        num_workers = self._num_workers() + sum(spec.place is not None for spec in specs)
        started = [self._begin(group, spec, num_workers) for spec in specs]
        for member in started:
            await member.supervisor.was_ready.wait()

    def names(self) -> list[str]:
        """The names of the children that are to stay, in the order in which a stack starts them."""
        return [member.spec.name for member in sorted(self._staying(), key=self._order)]

    def of_role(self, role: WorkerRole) -> list[str]:
        """The names of the workers of a role that are to stay: those that serve first, then by number."""
        return [member.spec.name for member in sorted(self._workers(role), key=_worth)]

    async def start(self, roles: Sequence[WorkerRole], tell: Tell) -> None:
        """Starts one more worker for each of these roles, all at once; returns when the gateway is connected to them.

        Raises CommandFailed where there is no room, before anything is started, and where one does not start. Those
        that do start stay then.
        """
        if not roles:
            return
        growth, places = self._grow(), self._free_places(roles)
        num_workers = self._num_workers() + len(places)
        await growth.check_room(places, self._with.environment(num_workers))
        group = next(member.group for member in self._members if member.spec.place is not None)
        started = [self._begin(group, spec, num_workers, is_later=True) for spec in growth.specs(places)]
        try:
            failures = await asyncio.gather(*(self._until_ready(member, tell) for member in started))
        finally:
            _end_unready(started)  # of which some may not have been waited for yet
        if failed := [failure for failure in failures if failure is not None]:
            raise CommandFailed(f"{'; '.join(failed)}. `baton up` shows what it wrote")

    async def retire(self, names: Collection[str], tell: Tell) -> None:
        """Tells workers to end, all at once; returns when they have drained and are gone.

        Raises CommandFailed, before any is told, where requests would have nowhere to go: no decode worker would be
        left, or of a role none that serves now.
        """
        if not names:
            return
        self._grow()
        leaving = [self._named(name) for name in names]
        if others := [member.spec.name for member in leaving if member.spec.place is None]:
            raise CommandFailed(f"{others[0]} is no worker")
        for role in WorkerRole:
            self._check_may_leave(role, [member for member in leaving if _role(member) is role])
        for member in leaving:
            member.supervisor.retire()
        await asyncio.gather(*(_until_gone(member, tell) for member in leaving))

    async def replace(self, name: str, tell: Tell) -> None:
        """Replaces a child by its successor; does nothing where it can have none.

        Raises CommandFailed where the successor does not start; the old child goes on then. Cancelled, it leaves the
        one or the other.
        """
        old, started = self._named(name), time.monotonic()
        if old.spec.successor is None:
            return
        spec = replace(old.spec.successor(), ready_within_s=old.spec.ready_within_s)
        new = self._begin(old.group, spec, self._num_workers(), is_later=True)
        try:
            failure = await self._until_ready(new, tell)
        finally:
            if new.supervisor.was_ready.is_set():
                old.supervisor.retire()
        if failure is not None:
            raise CommandFailed(f"{failure}; the old one goes on. `baton up` shows what the new one wrote")
        replaced = time.monotonic()
        await asyncio.wait([old.running])
        ready_s, ended_s = replaced - started, time.monotonic() - replaced
        tell(f"{name} is replaced: the new one was ready in {ready_s:.1f} s, the old one ended in {ended_s:.1f} s")

    async def until_ended(self, tell: Tell) -> None:
        """Waits until all are gone that an earlier call told to end, as one that was cancelled."""
        ending = [member for member in self._members if member.supervisor.retired]
        if ending:
            names = ", ".join(member.spec.name for member in ending)
            tell(f"{names} of an earlier command has not ended yet: waiting for it")
            await asyncio.wait([member.running for member in ending])

    def hurry(self) -> None:
        """Ends the grace of all children."""
        for member in self._members:
            member.supervisor.hurry()

    def _begin(self, group: asyncio.TaskGroup, spec: ChildSpec, num_workers: int, is_later: bool = False) -> Member:
        environment, start = self._with.environment(num_workers), self._with
        supervisor = Supervisor(spec, environment, start.listener, start.new_backoff(), start.grace_s)
        self._listener.starting(spec.name, "loading")
        member = Member(supervisor, group, group.create_task(_run(supervisor, is_later)))
        self._members.append(member)
        member.running.add_done_callback(lambda _: self._members.remove(member))
        return member

    async def _until_ready(self, new: Member, tell: Tell) -> str | None:
        """Returns None when a child is ready, and otherwise the reason why it never will be. Cancelled, it ends it."""
        ready = asyncio.create_task(new.supervisor.was_ready.wait())
        waiting = asyncio.create_task(_tell_what_it_waits_for(new.supervisor, tell))
        try:
            await asyncio.wait((new.running, ready), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            waiting.cancel()
            _end_unready([new])
        if new.supervisor.was_ready.is_set():
            return None
        failure = await new.running
        for line in () if failure is None else failure.lines:
            self._listener.line(new.spec.name, line)
        return f"{new.spec.name} ended" if failure is None else str(failure)

    def _check_may_leave(self, role: WorkerRole, leaving: Collection[Member]) -> None:
        if not leaving:
            return
        staying = [member for member in self._workers(role) if member not in leaving]
        if not staying and role is WorkerRole.DECODE:
            raise CommandFailed("every request ends at a decode worker: one has to stay")
        last = [member.spec.name for member in leaving if member.supervisor.serves]
        if staying and last and not any(member.supervisor.serves for member in staying):
            names = ", ".join(sorted(member.spec.name for member in staying))
            raise CommandFailed(f"no other {role.value} worker than {', '.join(last)} serves now: {names} starts again")

    def _grow(self) -> Growth:
        if self._growth is None:
            raise CommandFailed(_FIXED)
        return self._growth

    def _free_places(self, roles: Iterable[WorkerRole]) -> list[Place]:
        """The first places that no member has, one that still drains included."""
        taken = [member.spec.place for member in self._members if member.spec.place is not None]
        found: list[Place] = []
        for role in roles:
            numbers = {place.number for place in (*taken, *found) if place.role is role}
            indexes = {place.index for place in (*taken, *found)}
            found.append(Place(role, _first_beside(numbers), _first_beside(indexes)))
        return found

    def _named(self, name: str) -> Member:
        """The member of this name that is to stay. Raises CommandFailed."""
        for member in self._staying():
            if member.spec.name == name:
                return member
        raise CommandFailed(f"{name} does not run")

    def _staying(self) -> list[Member]:
        return [member for member in self._members if not member.supervisor.retired]

    def _workers(self, role: WorkerRole) -> list[Member]:
        return [member for member in self._staying() if _role(member) is role]

    def _num_workers(self) -> int:
        return sum(member.spec.place is not None for member in self._staying())

    def _order(self, member: Member) -> tuple[int, int, int]:
        group, place = self._groups.index(member.group), member.spec.place
        return (group, 0, 0) if place is None else (group, list(WorkerRole).index(place.role), place.number)


def _role(member: Member) -> WorkerRole | None:
    return None if member.spec.place is None else member.spec.place.role


def _worth(member: Member) -> tuple[bool, int]:
    place = member.spec.place
    return (not member.supervisor.serves, 0 if place is None else place.number)


def _first_beside(taken: Collection[int]) -> int:
    return next(number for number in count() if number not in taken)


def _end_unready(started: Iterable[Member]) -> None:
    for member in started:
        if not member.supervisor.was_ready.is_set():
            member.supervisor.retire()


async def _until_gone(member: Member, tell: Tell) -> None:
    began = time.monotonic()
    await asyncio.wait([member.running])
    tell(f"{member.spec.name} has ended, {time.monotonic() - began:.1f} s after it was told to")


async def _tell_what_it_waits_for(supervisor: Supervisor, tell: Tell) -> None:
    await supervisor.waits_long.wait()
    tell(f"{supervisor.spec.name} is not ready yet: {supervisor.waits_for}")


async def _run(supervisor: Supervisor, is_later: bool) -> ChildFailed | None:
    """Returns how a later child failed, or None when the child was retired. Raises ChildFailed for the first ones."""
    try:
        await supervisor.run()
    except ChildFailed as failure:
        if is_later:
            return failure
        raise
    return None
