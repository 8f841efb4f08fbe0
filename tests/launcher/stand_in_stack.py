"""A launcher over stand-ins, as a process of its own.

stand_in_stack.py CONTROL WORKER_PORT GATEWAY_PORT [manner of the worker] prints a line for each event, for a test to
read. CONTROL: the path of the socket for commands. The gateway has no successor; the worker's, and workers that are
started later, have the manner that the file `manner` beside CONTROL says, if there is one. There is no room for more
where a file `full` says why. A worker of the manner `late` waits until there is a file `known`.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from services.config import WorkerRole
from services.launcher import child
from services.launcher.child import ChildFailed, ChildSpec, Place
from services.launcher.commands import Stack, environment
from services.launcher.control import CommandFailed
from services.launcher.launcher import Launcher
from services.launcher.members import Growth, Start
from services.launcher.ports import free_ports
from services.launcher.readiness import NeverReady, NotYet, Probe, gateway_ready
from services.process.backoff import Backoff

GRACE_S = 3600.0  # a test that waits for it fails by its own limit
STAND_IN = Path(__file__).with_name("stand_in.py")


class Printer:
    def starting(self, name: str, what: str) -> None:
        print("starting", name, flush=True)

    def loading(self, name: str, line: str) -> None:
        print("loading", name, line, flush=True)

    def ready(self, name: str, seconds: float) -> None:
        print("ready", name, flush=True)

    def line(self, name: str, line: str) -> None:
        print("line", name, line, flush=True)

    def died(self, name: str, how: str, restart_in_s: float) -> None:
        print("died", name, how, flush=True)

    def say(self, text: str) -> None:
        print("say", text, flush=True)


def stand_in(name: str, port: int, manner: str) -> ChildSpec:
    command = (sys.executable, str(STAND_IN), str(port), manner)
    probe = gateway_ready(f"http://127.0.0.1:{port}")
    return ChildSpec(name, command, probe)


class Workers:
    """Makes workers of the manner that the file says."""

    def __init__(self, directory: Path) -> None:
        self._manner, self._full, self._known = (directory / name for name in ("manner", "full", "known"))

    def first(self, name: str, place: Place, port: int, manner: str) -> ChildSpec:
        successor = lambda: self.first(name, place, port, self._next_manner())
        spec = stand_in(name, port, manner)
        probe = late(spec.probe, self._known) if manner == "late" else spec.probe
        return replace(spec, probe=probe, successor=successor, place=place)

    def later(self, places: Sequence[Place]) -> list[ChildSpec]:
        return [
            self.first(f"{place.role.value}-{place.number}", place, port, self._next_manner())
            for place, port in zip(places, free_ports("127.0.0.1", len(places)), strict=True)
        ]

    async def check_room(self, places: Sequence[Place], environment: Mapping[str, str]) -> None:
        if self._full.exists():
            raise CommandFailed(self._full.read_text())

    def _next_manner(self) -> str:
        return self._manner.read_text() if self._manner.exists() else ""


def late(probe: Probe, known: Path) -> Probe:
    """The probe, which says what the child waits for until there is a file at a path."""

    async def waiting(pid: int) -> bool | NotYet | NeverReady:
        return await probe(pid) if known.exists() else NotYet("nobody knows it")

    return waiting


async def say_ready() -> None:
    print("all ready", flush=True)


def main(control: Path, worker_port: int, gateway_port: int, manner: str) -> int:
    workers = Workers(control.parent)
    worker = workers.first("worker", Place(WorkerRole.DECODE, 0, 0), worker_port, manner)
    growth = Growth(workers.later, workers.check_room)
    stack = Stack(redis=None, workers=(worker,), gateway=stand_in("gateway", gateway_port, ""), growth=growth)
    start = Start(partial(environment, os.environ), Printer(), lambda: Backoff(0.01, 30.0), GRACE_S)
    launcher = Launcher(stack, start, control)
    try:
        asyncio.run(launcher.run(say_ready))
    except ChildFailed as failure:
        print(f"failed {failure}", flush=True)
        return 1
    print("ended", flush=True)
    return 0


if __name__ == "__main__":
    child._LONG_S = 0.5
    child._LAST_WORDS_S = 300.0
    path, first_port, second_port, *rest = sys.argv[1:]
    sys.exit(main(Path(path), int(first_port), int(second_port), rest[0] if rest else ""))
