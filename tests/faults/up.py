"""A running `baton up`."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.e2e.ranks import rank_options
from tests.e2e.stack import Endpoint, wait_until
from tests.processes import is_alive


@dataclass
class UpStack:
    """Workers of each role, a gateway and Redis, all started by one `baton up`."""

    model: Path
    directory: Path  # for the socket of its commands
    gateway: Endpoint = field(default_factory=Endpoint)
    options: tuple[str, ...] = ()  # further ones
    each: int = field(default=2, kw_only=True)  # workers of each role, at its start
    python: str = sys.executable  # that runs all of them

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Starts all; the context ends them."""
        command = ["up", "--model", str(self.model), "--served-model-name", "tiny"]
        command += ["--prefill", str(self.each), "--decode", str(self.each)]
        command += self.gateway.options
        command += ["--device", "cpu", "--kv-memory", "16MiB", "--num-threads", "1", "--handoff", "always"]
        command += [*self.options, *rank_options(self.options)]
        self.process = self._baton(command)
        try:
            self.heal()
            wait_until((self.directory / "baton" / f"{self.gateway.port}.sock").exists, 300, "the socket for commands")
            yield
        finally:
            self.gateway.client.close()
            self.process.terminate()
            assert self.process.wait(300) == 0

    def heal(self) -> None:
        """Waits until everything runs, which is the launcher's work."""
        wait_until(lambda: self.gateway.get("/ready")[0] == 200, 240, "a gateway that is ready")
        self.gateway.wait_for_workers(2 * self.each)

    def restart(self) -> subprocess.Popen[str]:
        """Starts `baton restart`."""
        return self._command("restart")

    def scale(self, *numbers: str) -> subprocess.Popen[str]:
        """Starts `baton scale`; each as `decode=2`."""
        return self._command("scale", *numbers)

    def pids_of(self, role: str) -> list[int]:
        """The ids of the processes of a role, as `gateway`."""
        return [pid for pid in self.children() if role in psutil.Process(pid).cmdline()]

    def children(self) -> set[int]:
        """The ids of the processes that `baton up` runs now."""
        found = psutil.Process(self.process.pid).children()
        return {child.pid for child in found if is_alive(child)}

    def child(self, command: str, number: int = 0) -> psutil.Process:
        """One of its processes, by the command that it runs: prefill, decode or gateway."""
        found = [child for child in psutil.Process(self.process.pid).children() if command in child.cmdline()]
        return sorted(found, key=lambda child: child.pid)[number]

    def _command(self, *words: str) -> subprocess.Popen[str]:
        arguments = [*words, "--port", str(self.gateway.port)]
        return self._baton(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _baton(
        self, arguments: list[str], stdout: int | None = None, stderr: int | None = None
    ) -> subprocess.Popen[str]:
        command = [self.python, "-m", "services.cli", *arguments]
        environment = os.environ | {"XDG_RUNTIME_DIR": str(self.directory)}
        return subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, text=True)
