"""Members whose children are shells, and serve when the test says so."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from services.config import WorkerRole
from services.launcher.changes import restart, scale
from services.launcher.child import ChildSpec, Place
from services.launcher.control import CommandFailed
from services.launcher.members import Growth, Members, Start
from services.process.backoff import Backoff
from tests.launcher.test_failures import Screen

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


@dataclass
class Shells:
    """Makes workers. Those in `silent` never serve."""

    silent: set[str] = field(default_factory=set)
    pids: dict[str, int] = field(default_factory=dict)
    num_workers: list[int] = field(default_factory=list)  # of each environment that was asked for

    def worker(self, place: Place) -> ChildSpec:
        name = f"{place.role.value}-{place.number}"

        async def probe(pid: int) -> bool:
            self.pids[name] = pid
            return name not in self.silent

        return ChildSpec(name, ("/bin/sleep", "3600"), probe, place=place, successor=lambda: self.worker(place))

    def later(self, places: Sequence[Place]) -> list[ChildSpec]:
        return [self.worker(place) for place in places]

    async def has_room(self, places: Sequence[Place], environment: Mapping[str, str]) -> None:
        """There always is."""

    def environment(self, num_workers: int) -> dict[str, str]:
        self.num_workers.append(num_workers)
        return dict(os.environ)


@asynccontextmanager
async def running(shells: Shells, growth: Growth | None, *places: Place) -> AsyncIterator[Members]:
    """A stack of workers in these places and a gateway, which has no successor. It ends with the context."""
    members = Members(growth, Start(shells.environment, Screen(), lambda: Backoff(0.01, 0.02), 30.0))

    other = shells.worker(Place(DECODE, 99, 99))

    async def serve() -> None:
        async with asyncio.TaskGroup() as workers, asyncio.TaskGroup() as last:
            await members.begin(workers, [shells.worker(place) for place in places])
            await members.begin(last, [replace(other, name="gateway", place=None, successor=None)])
            ready.set()
            await asyncio.Event().wait()

    ready = asyncio.Event()
    serving = asyncio.create_task(serve())
    try:
        async with asyncio.timeout(300):
            await ready.wait()
        yield members
        assert not serving.done(), serving
    finally:
        serving.cancel()
        await asyncio.wait([serving])


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.005)


async def told(command: Callable[[Callable[[str], None]], Awaitable[None]]) -> list[str]:
    said: list[str] = []
    await asyncio.wait_for(command(said.append), 300)
    return said


async def test_the_last_worker_of_a_role_that_serves_stays() -> None:
    """Both roles have another one, which died and does not serve again."""
    shells = Shells()
    places = [Place(role, number, 2 * number) for role in (PREFILL, DECODE) for number in (0, 1)]
    async with running(shells, Growth(shells.later, shells.has_room), *places) as members:
        for name in ("prefill-0", "decode-0"):
            shells.silent.add(name)
            died = shells.pids[name]
            os.kill(died, signal.SIGKILL)
            await wait_for(lambda name=name, died=died: shells.pids[name] != died)  # type: ignore[misc]
        for role in (PREFILL, DECODE):
            last = f"{role.value}-1"
            with pytest.raises(CommandFailed, match=f"^no other {role.value} worker than {last} serves now: "):
                await members.retire([last], print)
        with pytest.raises(CommandFailed, match="gateway is no worker"):
            await members.retire(["decode-1", "gateway"], print)
        assert members.names() == ["prefill-0", "prefill-1", "decode-0", "decode-1", "gateway"]
        with pytest.raises(CommandFailed, match="one has to stay"):
            await members.retire(["decode-0", "decode-1"], print)
        said = await told(lambda tell: scale(members, {"prefill": "1", "decode": "1"}, tell))
        assert sorted(line.split()[0] for line in said[:2]) == ["decode-0", "prefill-0"]
        assert said[2:] == ["1 prefill (prefill-1); 1 decode (decode-1)"]
        await told(lambda tell: members.retire(["prefill-1"], tell))  # decode workers do without
        with pytest.raises(CommandFailed, match=r"^prefill-1 does not run$"):
            await members.retire(["prefill-1"], print)


async def test_places_of_workers_that_ended_are_given_again() -> None:
    """So that a GPU's share, which follows from the index, goes to one worker at a time."""
    shells, given = Shells(), list[Place]()

    def later(places: Sequence[Place]) -> list[ChildSpec]:
        given.extend(places)
        return shells.later(places)

    growth = Growth(later, shells.has_room)
    async with running(shells, growth, Place(PREFILL, 0, 0), Place(PREFILL, 1, 1), Place(DECODE, 0, 2)) as members:
        await told(lambda tell: scale(members, {"prefill": "1"}, tell))
        assert shells.num_workers[-1] == 3
        await told(lambda tell: scale(members, {"prefill": "2", "decode": "2"}, tell))
        assert given == [Place(PREFILL, 1, 1), Place(DECODE, 1, 3)]
        assert shells.num_workers[-1] == 4
        said = await told(lambda tell: restart(members, {}, tell))
        assert [line.split()[0] for line in said] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]


async def test_a_stack_whose_gateway_was_told_its_workers_keeps_them() -> None:
    shells = Shells()
    async with running(shells, None, Place(PREFILL, 0, 0), Place(DECODE, 0, 1)) as members:
        for numbers in ({"decode": "2"}, {"prefill": "0"}):
            with pytest.raises(CommandFailed, match="there are only the workers of the start: without Redis"):
                await scale(members, numbers, print)
        for numbers in ({}, {"decode": "1"}):
            said = await told(lambda tell, numbers=numbers: scale(members, numbers, tell))  # type: ignore[misc]
            assert said == ["1 prefill (prefill-0); 1 decode (decode-0)"]


async def test_one_that_does_not_start_leaves_those_that_do() -> None:
    shells = Shells(silent={"decode-2"})

    def later(places: Sequence[Place]) -> list[ChildSpec]:
        specs = shells.later(places)
        return [replace(spec, ready_within_s=0.5) if spec.name in shells.silent else spec for spec in specs]

    async with running(shells, Growth(later, shells.has_room), Place(DECODE, 0, 0)) as members:
        with pytest.raises(CommandFailed, match=r"^decode-2 did not start: it was not ready within 0\.5 s\. "):
            await scale(members, {"decode": "3"}, print)
        assert members.names() == ["decode-0", "decode-1", "gateway"]
