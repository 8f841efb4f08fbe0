"""Processes of ranks above 0, as they are started by hand on their hosts."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.processes import free_ports
from services.engine.runner.group.hosts.place import HostPlace

_ROOT = Path(__file__).parents[4]
_SOON_S = 30.0


class RankOnHost:
    """One process, whose log goes to a file."""

    def __init__(self, command: list[str], log: Path, enter: Callable[[], None] | None) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", "decode", *command],
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                preexec_fn=enter,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def until_logged(self, words: str) -> None:
        """Waits for words in its log."""
        ends = time.monotonic() + _SOON_S
        while words not in self.log:
            assert time.monotonic() < ends, f"{words!r} is not logged: {self.log}"
            time.sleep(0.02)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextmanager
def rank_on_host(
    place: HostPlace,
    model: Path,
    log: Path,
    *options: str,
    rank: int = 1,
    enter: Callable[[], None] | None = None,
) -> Iterator[RankOnHost]:
    """Starts a rank of a group. enter: takes its process into the network of its host."""
    where = ["--port", f"{free_ports(1)[0]}"]  # hosts of a test are one host
    where += ["--rank", f"{rank}", "--world-size", f"{place.size}", "--group", place.address, "--model", str(model)]
    process = RankOnHost([*where, *options], log, enter)
    try:
        yield process
    finally:
        process.end()
