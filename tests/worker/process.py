"""A worker over the simulated runner in a process of its own, whose KV moves over NIXL."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from kvtransfer.transports.memory import MemoryFabric
from services.config import TransportName, WorkerRole
from services.worker import main
from services.worker.transports import make_transports
from tests.forkserver import FORKSERVER
from tests.worker.conftest import make_worker


class SimulatedWorkerProcess:
    """Serves as a worker's own process does, and ends with this one."""

    def __init__(self, role: WorkerRole, num_blocks: int, port: int, environ: Mapping[str, str]) -> None:
        self.port = port
        arguments = (role, num_blocks, f"127.0.0.1:{port}", environ)
        self._process = FORKSERVER.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def freeze(self) -> None:
        """SIGSTOP, and waits until every thread has stopped."""
        os.kill(self._pid, signal.SIGSTOP)
        while not all("State:\tT" in status.read_text() for status in Path(f"/proc/{self._pid}/task").glob("*/status")):
            time.sleep(0.001)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self._pid, signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        os.kill(self._pid, number)

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None where it has not ended in time."""
        self._process.join(timeout_s)
        return self.exit_code

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


def _serve(role: WorkerRole, num_blocks: int, address: str, environ: Mapping[str, str]) -> None:
    os.environ.update(environ)
    transports = make_transports(TransportName.NIXL)
    worker = make_worker(role, MemoryFabric(), num_blocks=num_blocks, transports=transports)
    sys.exit(asyncio.run(main._serve(worker, address)))
