"""Carries the faults of a schedule out on the stack, each in its time, and undoes each of them."""

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence

from loadtest.soak.schedule import Fault, Kind
from loadtest.soak.stack import DRAIN_S, SoakStack

_END_S = 10.0  # beyond the drain: a process that was told to end must have ended


class Faults:
    """The faults of one run. `done`: faults that were carried out and undone, by kind.

    outlasted: processes that were told to end and did not within their time, and were killed.
    unclean: exit codes other than 0 of processes that were told to end.
    """

    def __init__(self, stack: SoakStack) -> None:
        self.done: Counter[Kind] = Counter()
        self.outlasted = 0
        self.unclean: Counter[str] = Counter()
        self.begun: list[tuple[float, Fault]] = []  # moments on perf_counter's clock
        self._stack = stack

    async def run(self, faults: Sequence[Fault]) -> None:
        """Begins each fault at its moment from now on; faults with different victims overlap. Raises ProcessError."""
        start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                await asyncio.sleep(max(0.0, start + fault.at_s - time.perf_counter()))
                tasks.create_task(self._one(fault))

    async def _one(self, fault: Fault) -> None:
        for victim in fault.victims:  # a rolling restart takes one after the other
            async with self._stack.members[victim].lock:
                self.begun.append((time.perf_counter(), fault))
                await self._carry_out(fault, victim)
        self.done[fault.kind] += 1

    async def _carry_out(self, fault: Fault, victim: str) -> None:
        what = fault.kind.name.partition("_")[0]
        member = self._stack.members[victim]
        if what == "KILL":
            await member.kill()
            await self._stack.start(victim)
        elif what == "FREEZE":
            member.send(signal.SIGSTOP)
            await asyncio.sleep(fault.duration_s)
            member.send(signal.SIGCONT)
        elif what in ("SILENCE", "DELAY", "CUT"):
            await self._spoil_network(what, fault, victim)
        elif what == "DRAIN":
            await self._drain(victim)
        else:
            await self._restart(victim)

    async def _spoil_network(self, what: str, fault: Fault, worker: str) -> None:
        proxy = self._stack.proxies[worker]
        if what == "CUT":
            proxy.reset(fault.client)
            return
        if what == "SILENCE":
            proxy.silence(fault.client, fault.ways)
        else:
            proxy.delay(fault.client, fault.delay_s, fault.ways)
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            proxy.heal()

    async def _drain(self, worker: str) -> None:
        command = (sys.executable, "-P", "-m", "services.cli", "drain", self._stack.worker_address(worker))
        draining = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        if code := await draining.wait():
            self.unclean[f"baton drain: exit code {code}"] += 1
        await self._until_ended(worker)

    async def _restart(self, name: str) -> None:
        self._stack.members[name].send(signal.SIGTERM)
        await self._until_ended(name)

    async def _until_ended(self, name: str) -> None:
        member = self._stack.members[name]
        if not await member.ended(DRAIN_S + _END_S):
            self.outlasted += 1
            await member.kill()
        elif member.exit_code:
            self.unclean[f"{name}: exit code {member.exit_code}"] += 1
        await self._stack.start(name)
