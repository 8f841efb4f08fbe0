"""The stack under test: two prefill and two decode workers, two gateways and Redis, each a real process.

Gateways and other workers reach a worker through a proxy of its own, so that the network between any two of them can
fail. Workers listen at 127.0.0.2, their proxies at 127.0.0.1 on the same port, the address that is registered.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from loadtest import http_stream
from loadtest.http_stream import Address, HttpError
from loadtest.processes import Process, ProcessError, free_ports
from loadtest.soak.members import Member
from loadtest.soak.schedule import ROLES
from loadtest.soak.traffic import Doors
from loadtest.tcp_proxy import Proxy, ProxyThread
from services.launcher import random_model
from services.launcher.readiness import redis_answers
from services.process import lifeline

MODEL_NAME = "m"
DRAIN_S = 5.0  # of every process
START_S = 90.0  # a process is ready within it, or the run is over
_ASK_S = 5.0
_LOOK_S = 0.2
_BATON = (sys.executable, "-P", "-m", "services.cli")  # -P: no folder of the working directory is taken for Baton's
_HANDOFF = {"gateway-0": "always", "gateway-1": "auto"}
_WORKER_OPTIONS = ("--device", "cpu", "--num-threads", "1", "--kv-memory", "16MiB", "--max-num-batched-tokens", "256")


class SoakStack:
    """The processes by name ("prefill-0", "gateway-1", "redis"), and the proxies before the workers."""

    def __init__(self, thread: ProxyThread, logs: Path, sockets: Path) -> None:
        names = [f"{role}-{index}" for role in ROLES for index in range(2)]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._redis_socket = sockets / "redis.sock"
        self._grpc_ports = dict(zip(_HANDOFF, free_ports(len(_HANDOFF)), strict=True))
        admin_ports = free_ports(len(_HANDOFF))
        self._admins = {name: Address("127.0.0.1", port) for name, port in zip(_HANDOFF, admin_ports, strict=True)}
        self.workers = [name for name in names if name not in _HANDOFF]
        self.gateways = {name: Address("127.0.0.1", self.ports[name]) for name in _HANDOFF}
        self.doors = {
            name: Doors(address, Address("127.0.0.1", self._grpc_ports[name]))
            for name, address in self.gateways.items()
        }
        self.members = {name: Member(self._process(name, logs)) for name in [*names, "redis"]}
        self.ended_by_themselves: Counter[str] = Counter()  # name and exit code
        self.proxies = {
            name: Proxy(thread, ("127.0.0.1", self.ports[name]), ("127.0.0.2", self.ports[name]), self.pids)
            for name in self.workers
        }

    def pids(self) -> dict[str, int]:
        """Process ids of all that run, by name."""
        found = {name: member.pid for name, member in self.members.items()}
        return {name: pid for name, pid in found.items() if pid is not None}

    async def start(self, name: str) -> None:
        """Starts a process, and returns when a request can reach it. Raises ProcessError."""
        before = await self._worker_ids(name)
        await self.members[name].start()
        until = time.monotonic() + START_S
        while not await self._is_ready(name, before):
            self.members[name].check()
            if time.monotonic() > until:
                raise ProcessError(f"{name} was not ready within {START_S:g} s")
            await asyncio.sleep(_LOOK_S)

    async def ledgers(self) -> dict[str, Any]:
        """Returns the ledger of each gateway that answers, by name."""
        found = await asyncio.gather(*map(_ledger, self._admins.values()))
        return {name: ledger for name, ledger in zip(self.gateways, found, strict=True) if ledger is not None}

    async def watch(self) -> None:
        """Starts processes that ended by themselves again, for ever, as a supervisor does."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for name, member in self.members.items():
                if member.pid is None and not member.lock.locked():
                    async with member.lock:
                        self.ended_by_themselves[f"{name}: exit code {member.exit_code}"] += 1
                        await self.start(name)

    def worker_address(self, name: str) -> str:
        """Address of a worker's own port, without the proxy."""
        return f"127.0.0.2:{self.ports[name]}"

    async def _worker_ids(self, name: str) -> set[str]:
        if name not in self.workers:
            return set()
        address, ledgers = f"127.0.0.1:{self.ports[name]}", (await self.ledgers()).values()
        return {each["incarnation"] for ledger in ledgers for each in ledger["workers"] if each["address"] == address}

    async def _is_ready(self, name: str, before: set[str]) -> bool:
        if name in self.gateways:
            return await _answers(self.gateways[name], "/ready" if self._has_workers() else "/health")
        if name == "redis":
            return await redis_answers(f"unix://{self._redis_socket}")(0)
        if not any(self.members[gateway].pid for gateway in self.gateways):  # nobody could tell of it
            return await _listens(Address("127.0.0.2", self.ports[name]))
        return bool(await self._worker_ids(name) - before)

    def _has_workers(self) -> bool:
        return any(self.members[name].pid for name in self.workers)

    def _process(self, name: str, logs: Path) -> Process:
        log = logs / f"{name}.log"
        if name == "redis":
            command = (sys.executable, "-P", "-m", "services.prefix_index.embedded", str(self._redis_socket))
            return Process(name, command, lifeline.environment(), log)
        common = ["--model", str(random_model.made()), "--port", str(self.ports[name])]
        common += ["--redis-url", f"unix://{self._redis_socket}"]
        common += ["--drain-timeout", f"{DRAIN_S:g}", "--log-format", "json"]
        if name in _HANDOFF:
            options = ["gateway", *common, "--served-model-name", MODEL_NAME, "--handoff", _HANDOFF[name]]
            options += ["--grpc-port", str(self._grpc_ports[name]), "--admin-port", str(self._admins[name].port)]
            options += ["--request-timeout", "60"]
        else:
            options = [name.partition("-")[0], *common, "--host", "127.0.0.2", "--advertise-host", "127.0.0.1"]
            options += _WORKER_OPTIONS
        return Process(name, (*_BATON, *options), lifeline.environment(), log)


@asynccontextmanager
async def running_stack(logs: Path) -> AsyncIterator[SoakStack]:
    """Starts all of the stack, and ends it with the block. Raises ProcessError."""
    async with AsyncExitStack() as open_things:
        thread = open_things.enter_context(ProxyThread())
        sockets = open_things.enter_context(TemporaryDirectory(prefix="baton-"))
        stack = SoakStack(thread, logs, Path(sockets))
        for proxy in stack.proxies.values():
            open_things.callback(proxy.close)
        for member in stack.members.values():
            open_things.push_async_callback(member.stop)
        await stack.start("redis")
        async with asyncio.TaskGroup() as starts:
            for name in stack.workers:
                starts.create_task(stack.start(name))
        for name in stack.gateways:
            await stack.start(name)
        await all_connected(stack, START_S)
        yield stack


async def all_connected(stack: SoakStack, timeout_s: float) -> None:
    """Waits until every gateway has a stream to every worker. Raises ProcessError."""
    until = time.monotonic() + timeout_s
    while True:
        ledgers = await stack.ledgers()
        numbers = {name: len(ledgers[name]["workers"]) if name in ledgers else 0 for name in stack.gateways}
        if all(number == len(stack.workers) for number in numbers.values()):
            return
        if time.monotonic() > until:
            raise ProcessError(f"not every worker is connected to every gateway: {numbers}")
        await asyncio.sleep(_LOOK_S)


async def _ledger(address: Address) -> dict[str, Any] | None:
    with suppress(HttpError, TimeoutError):
        async with asyncio.timeout(_ASK_S):
            described: dict[str, Any] = orjson.loads((await http_stream.ask(address, "/debug/ledger", None)).body())
            return described
    return None


async def _answers(address: Address, path: str) -> bool:
    with suppress(HttpError, TimeoutError):
        async with asyncio.timeout(_ASK_S):
            (await http_stream.ask(address, path, None)).body()
            return True
    return False


async def _listens(address: Address) -> bool:
    try:
        _, writer = await asyncio.open_connection(address.host, address.port)
    except OSError:
        return False
    writer.close()
    return True
