"""Programs that a benchmark starts, from their start to their end: servers under test, their peers, Redis.

Whatever happens in between, nothing is left behind: each process leads a group of its own, which is killed after a
grace. Python functions that run in processes of their own are in `children`.
"""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from loadtest import http_stream
from loadtest.http_stream import Address, HttpError

Probe = Callable[[], Awaitable[bool]]  # true once a process answers

_PROBE_INTERVAL_S = 0.1
_END_GRACE_S = 20.0
_END_INTERVAL_S = 0.05
_PORT_TIMEOUT_S = 10.0
_LAST_LINES = 30
# Below those that kernels deal out to outgoing connections, of which the tests make many, and beside `baton up`'s.
_PORTS = range(10_000, 20_000)
_MAX_CLAIMS = 512
_claims: deque[int] = deque()  # descriptors of what `_claim` holds, the oldest first


class ProcessError(Exception):
    """A process did not answer, died, or left something behind."""


@dataclass(frozen=True, slots=True)
class Process:
    """A program to be started. `environment`: variables beside those of this process.

    log: a file that its output is appended to, and that stays; None: one that is gone with the process.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was started; its output goes to a file."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def check(self) -> None:
        """Raises ProcessError, with the last lines of the output, when the process has ended."""
        if (code := self.process.poll()) is not None:
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            raise ProcessError(f"{self.name} ended with {code}; its last lines:\n{last}")


@asynccontextmanager
async def started(process: Process) -> AsyncIterator[Started]:
    """Starts a process, which is gone when the block ends, with all processes of its group."""
    with process.log.open("ab") if process.log else tempfile.NamedTemporaryFile(prefix="loadtest-") as output:
        running = subprocess.Popen(
            process.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **process.environment},
            # A terminal's Ctrl-C is ours alone, and what it starts can be found and killed. No session of its own: the
            # kernel may share the cores among sessions first.
            process_group=0,
        )
        try:
            yield Started(process.name, running, Path(output.name))
        finally:
            await _end(running)


async def until_ready(probes: Sequence[Probe], processes: Sequence[Started], timeout_s: float) -> None:
    """Waits for each probe in turn. Raises ProcessError when a process ends meanwhile, or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            for answers in probes:
                while not await answers():
                    for process in processes:
                        process.check()
                    await asyncio.sleep(_PROBE_INTERVAL_S)
    except TimeoutError:
        raise ProcessError(f"{processes[-1].name} did not answer within {timeout_s:g} s") from None


def http_ok(address: Address, path: str) -> Probe:
    """Makes a probe that is true once GET of this path answers 200."""

    async def probe() -> bool:
        try:
            (await http_stream.ask(address, path, None)).body()
        except HttpError:
            return False
        return True

    return probe


def free_ports(count: int) -> list[int]:
    """Finds different ports of loopback that nobody listens on, and that no other process gets from here meanwhile.

    So a server that is killed and started again finds its port free. Raises ProcessError.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            return found
        if _claim(port) and _is_free(port):
            found.append(port)
    raise ProcessError(f"there are no {count} free ports")


async def until_free(ports: Sequence[int]) -> None:
    """Waits until nobody listens on these ports of loopback. Raises ProcessError when somebody goes on."""
    deadline = time.monotonic() + _PORT_TIMEOUT_S
    while taken := [port for port in ports if not _is_free(port)]:
        if time.monotonic() > deadline:
            raise ProcessError(f"somebody still listens on port {taken[0]}")
        await asyncio.sleep(_PROBE_INTERVAL_S)


async def _end(process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _END_GRACE_S
    try:
        process.terminate()
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(_END_INTERVAL_S)
    finally:
        with suppress(ProcessLookupError):  # nobody is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _claim(port: int) -> bool:
    """Claims a port by a name that only one socket of this machine can have; False: another process has claimed it.

    A claim ends with this process, or when the process has _MAX_CLAIMS newer ones.
    """
    if sys.platform != "linux":  # other kernels know no such names
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
        try:
            claim.bind(f"\0baton-port-{port}")
        except OSError:
            return False
        _claims.append(claim.detach())
    if len(_claims) > _MAX_CLAIMS:
        os.close(_claims.popleft())
    return True


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()  # reuses addresses: only a listener is in its way
    except OSError:
        return False
    return True
