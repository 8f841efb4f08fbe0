"""A launcher over stand-ins, as a process of its own.

stand_in_stack.py WORKER_PORT GATEWAY_PORT [manner of the worker] prints a line for each event, for a test to read.
"""

import asyncio
import os
import sys
from pathlib import Path

from services.launcher.child import ChildFailed, ChildSpec
from services.launcher.commands import Stack, environment
from services.launcher.launcher import Launcher
from services.launcher.readiness import http_ready
from services.launcher.restart import RestartPolicy

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


def stand_in(name: str, port: int, manner: str) -> ChildSpec:
    return ChildSpec(name, (sys.executable, str(STAND_IN), str(port), manner), http_ready(f"http://127.0.0.1:{port}"))


def main(worker_port: int, gateway_port: int, manner: str) -> int:
    worker, gateway = stand_in("worker", worker_port, manner), stand_in("gateway", gateway_port, "")
    stack = Stack(redis=None, workers=(worker,), gateway=gateway)
    launcher = Launcher(stack, environment(os.environ, 1), Printer(), RestartPolicy(first_s=0.01), GRACE_S)
    try:
        asyncio.run(launcher.run(lambda: print("all ready", flush=True)))
    except ChildFailed as failure:
        print(f"failed {failure}", flush=True)
        return 1
    print("ended", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""))
