"""A launcher over stand-ins, as a process of its own.

stand_in_stack.py CONTROL WORKER_PORT GATEWAY_PORT [manner of the worker] prints a line for each event, for a test to
read. CONTROL: the path of the socket for commands. The gateway has no successor; the worker's has the manner that the
file beside CONTROL says, if there is one.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from services.launcher import child
from services.launcher.child import ChildFailed, ChildSpec
from services.launcher.commands import Stack, environment
from services.launcher.launcher import Launcher
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


def stand_in(name: str, port: int, manner: str, next_manner: Path | None = None) -> ChildSpec:
    command = (sys.executable, str(STAND_IN), str(port), manner)
    successor = None
    if next_manner is not None:
        successor = lambda: stand_in(name, port, next_manner.read_text() if next_manner.exists() else "", next_manner)
    probe = gateway_ready(f"http://127.0.0.1:{port}")
    return ChildSpec(name, command, late(probe) if manner == "late" else probe, successor=successor)


def late(probe: Probe) -> Probe:
    """The probe, which for a while says what the child waits for."""
    until = time.monotonic() + 1.5

    async def waiting(pid: int) -> bool | NotYet | NeverReady:
        return NotYet("nobody knows it") if time.monotonic() < until else await probe(pid)

    return waiting


async def say_ready() -> None:
    print("all ready", flush=True)


def main(control: Path, worker_port: int, gateway_port: int, manner: str) -> int:
    worker = stand_in("worker", worker_port, manner, control.with_name("manner"))
    stack = Stack(redis=None, workers=(worker,), gateway=stand_in("gateway", gateway_port, ""))
    launcher = Launcher(stack, environment(os.environ, 1), Printer(), lambda: Backoff(0.01, 30.0), GRACE_S, control)
    try:
        asyncio.run(launcher.run(say_ready))
    except ChildFailed as failure:
        print(f"failed {failure}", flush=True)
        return 1
    print("ended", flush=True)
    return 0


if __name__ == "__main__":
    child._LONG_S = 0.5
    path, first_port, second_port, *rest = sys.argv[1:]
    sys.exit(main(Path(path), int(first_port), int(second_port), rest[0] if rest else ""))
