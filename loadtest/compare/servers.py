"""A server under test: what a launch needs, and the server while it runs."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from loadtest.http_stream import Address
from loadtest.processes import Process, free_ports, http_ok, started, until_free, until_ready

# Equal for every server.
MODEL_NAME = "m"
KV_GIB = 2  # of each engine
MAX_MODEL_LEN = 8192

START_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Launch:
    """The processes of a server, its address, and the URLs that answer with 200 when it is ready.

    metrics: where Baton's own counters are; None: the server is no Baton.
    """

    processes: tuple[Process, ...]
    address: Address
    ready: tuple[tuple[Address, str], ...]  # address and path of each URL
    metrics: Address | None = None


class Server(Protocol):
    """A program that speaks the OpenAI API, in one set-up."""

    @property
    def name(self) -> str:
        """A short name, for tables."""

    @property
    def setting(self) -> str:
        """The server's set-up in words, from which a reader can judge whether the comparison is fair."""

    @property
    def num_ports(self) -> int:
        """Ports that a launch needs."""

    def launch(self, ports: Sequence[int]) -> Launch:
        """Says how to start it on these ports."""


@asynccontextmanager
async def running(server: Server, start_timeout_s: float = START_TIMEOUT_S) -> AsyncIterator[Launch]:
    """Starts a server and yields its launch once it answers. Raises ProcessError.

    The server is gone, and its ports are free, when the block ends."""
    ports = free_ports(server.num_ports)
    launch = server.launch(ports)
    try:
        async with AsyncExitStack() as stack:
            processes = [await stack.enter_async_context(started(process)) for process in launch.processes]
            await until_ready([http_ok(*ready) for ready in launch.ready], processes, start_timeout_s)
            yield launch
            for process in processes:
                process.check()
    finally:
        await until_free(ports)
