"""The two sides of a quality run: a server that runs already, or a model that `baton up` serves for the run alone."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench import access
from loadtest.cannot_run import CannotRun
from loadtest.compare.servers import Launch, running
from loadtest.http_stream import Address
from loadtest.processes import Process
from loadtest.quality.asked import AskedServer, described

DEMO = "demo"  # the model that `baton up` serves where none is named

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Side:
    """A URL, or a model with the options of `baton up` beside it. api_key, authority: of a URL's server."""

    of: str
    options: tuple[str, ...] = ()
    api_key: str | None = None
    authority: Path | None = None

    def __post_init__(self) -> None:
        """Raises CannotRun where a running server is given options."""
        if self.is_url and self.options:
            raise CannotRun(f"{self.of} runs already: options of `baton up` are for a model that is started here")

    @property
    def is_url(self) -> bool:
        """True for a server that runs already."""
        return self.of.startswith(("http://", "https://"))

    @property
    def words(self) -> str:
        """The side as a reader could start it."""
        if self.is_url:
            return self.of
        return " ".join(("baton up", *_model(self.of), *self.options))


@dataclass(frozen=True, slots=True)
class BatonUp:
    """`baton up` with a model, one prefill and one decode worker, set up as its own defaults and the options say."""

    model: str
    options: tuple[str, ...]
    num_ports: int = 3

    @property
    def name(self) -> str:
        """See `Server.name`."""
        return f"baton up, {self.model}"

    @property
    def setting(self) -> str:
        """See `Server.setting`."""
        return " ".join((*_model(self.model), *self.options))

    def launch(self, ports: Sequence[int]) -> Launch:
        """See `Server.launch`."""
        port, grpc_port, admin_port = ports
        own = ("--port", str(port), "--grpc-port", str(grpc_port), "--admin-port", str(admin_port))
        # -P: a folder called `services` in the working directory is not Baton's.
        command = (sys.executable, "-P", "-m", "services.cli", "up", *_model(self.model), *own, *self.options)
        address = Address(_LOOPBACK, port)
        return Launch((Process(self.name, command),), address, ((address, "/ready"),))


@asynccontextmanager
async def opened(side: Side) -> AsyncIterator[AskedServer]:
    """Yields the side's server, which ends with the block if it was started here.

    Raises CannotRun, ProcessError, HttpError.
    """
    if side.is_url:
        yield await described(access.local_address(side.of, side.api_key, side.authority))
        return
    async with running(BatonUp(side.of, side.options)) as launch:
        yield await described(launch.address)


def _model(name: str) -> tuple[str, ...]:
    return () if name == DEMO else ("--model", name)
