"""A server under test: its processes, from their start to their end.

Whatever happens in between, nothing is left behind: each process leads a group of its own, which is killed after a
grace, and the ports are free again when `running` returns.
"""

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from loadtest import http_stream
from loadtest.http_stream import Address, HttpError

# The same for every server.
MODEL_NAME = "m"
KV_GIB = 2  # of each engine
MAX_MODEL_LEN = 8192

START_TIMEOUT_S = 600.0
_PROBE_INTERVAL_S = 0.3
_END_GRACE_S = 20.0
_END_INTERVAL_S = 0.05
_PORT_TIMEOUT_S = 10.0
_LAST_LINES = 30


class ServerError(Exception):
    """A server did not start, died, or left something behind."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a server. `environment`: what it finds beside what we have."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server, and where it answers when it is ready."""

    processes: tuple[Process, ...]
    address: Address
    ready: tuple[tuple[Address, str], ...]  # address and path of pages that answer with 200


class Server(Protocol):
    """Something that speaks the OpenAI API, as it is set up here."""

    @property
    def name(self) -> str:
        """Short, for tables."""

    @property
    def setting(self) -> str:
        """How it is set up: what a reader needs to judge whether that is fair."""

    @property
    def num_ports(self) -> int:
        """Ports that a launch needs."""

    def launch(self, ports: Sequence[int]) -> Launch:
        """How to start it on these ports."""


@asynccontextmanager
async def running(server: Server, start_timeout_s: float = START_TIMEOUT_S) -> AsyncIterator[Address]:
    """A server that answers; it is gone, and its ports are free, when the block ends. Raises ServerError."""
    ports = free_ports(server.num_ports)
    launch = server.launch(ports)
    try:
        async with AsyncExitStack() as stack:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-")))
            started = [await stack.enter_async_context(_process(process, logs)) for process in launch.processes]
            await _until_ready(launch, started, start_timeout_s)
            yield launch.address
            for process in started:
                process.check()
    finally:
        await _until_free(ports)


def free_ports(count: int) -> list[int]:
    """Different ports of loopback that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listening.getsockname()[1] for listening in sockets]


@dataclass(frozen=True, slots=True)
class _Started:
    name: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def check(self) -> None:
        """Raises ServerError when it is over."""
        if (code := self.process.poll()) is not None:
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            raise ServerError(f"{self.name} ended with {code}; its last lines:\n{last}")


@asynccontextmanager
async def _process(process: Process, logs: Path) -> AsyncIterator[_Started]:
    log = logs / f"{process.name}.log"
    with log.open("wb") as output:
        started = subprocess.Popen(
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
        yield _Started(process.name, started, log)
    finally:
        await _end(started)


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


async def _until_ready(launch: Launch, started: Sequence[_Started], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            for address, path in launch.ready:
                while not await _answers(address, path):
                    for process in started:
                        process.check()
                    await asyncio.sleep(_PROBE_INTERVAL_S)
    except TimeoutError:
        raise ServerError(f"{started[-1].name} did not answer within {timeout_s:g} s") from None


async def _answers(address: Address, path: str) -> bool:
    try:
        (await http_stream.ask(address, path, None)).body()
    except HttpError:
        return False
    return True


async def _until_free(ports: Sequence[int]) -> None:
    deadline = time.monotonic() + _PORT_TIMEOUT_S
    while taken := [port for port in ports if not _is_free(port)]:
        if time.monotonic() > deadline:
            raise ServerError(f"somebody still listens on port {taken[0]}")
        await asyncio.sleep(_PROBE_INTERVAL_S)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()  # reuses addresses: only a listener is in its way
    except OSError:
        return False
    return True
