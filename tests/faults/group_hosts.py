"""A stack of workers that have one rank on each of two hosts, which are networks with a link.

10.78.0.1  gateway, workers of one host, rank 0 of those of two, and the test itself
10.78.0.2  rank 1 of workers of two hosts: what it sees of the kernel is another host's
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from loadtest.processes import free_ports
from tests.e2e.forked import BatonProcess
from tests.e2e.stack import Gateway, Stack, wait_until, worker_ports
from tests.faults.namespace import (
    cut_off,
    lay_bridge,
    linked_network,
    pose_as_another_host,
    private_network,
    reconnect,
    see_own_devices,
)

FIRST, SECOND = "10.78.0.1", "10.78.0.2"


@dataclass
class GroupHosts(Stack):
    """The stack. A worker's name is that of its rank 0; rank 1 is in `others`."""

    first: Callable[[], None] = field(kw_only=True)  # takes a process to its host
    second: Callable[[], None] = field(kw_only=True)
    second_network: Callable[[], None] = field(kw_only=True)  # takes a process to its network alone
    groups: dict[str, int] = field(kw_only=True)  # by worker of several hosts: the port where its rank 0 waits
    others: dict[str, BatonProcess] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)  # workers whose rank 1 stands still until the stack is healed

    def address(self, name: str) -> str:
        """Returns the address at which a worker is reached."""
        return f"{FIRST}:{self.ports[name]}"

    def start(self, name: str, *options: str, prepare: Callable[[], None] | None = None) -> None:
        """Starts a worker: of one of two hosts rank 0, and rank 1 unless it runs."""
        where = ["--host", FIRST, "--allow-plaintext"]
        if name not in self.groups:
            super().start(name, *where, *options, prepare=prepare or self.first)
            return
        group = ["--world-size", "2", "--group", f"{FIRST}:{self.groups[name]}"]
        super().start(name, *where, "--rank", "0", *group, *options, prepare=prepare or self.first)
        if name not in self.others or not self.others[name].running:
            self._start_rank(name)

    def _start_rank(self, name: str) -> None:
        role = name.partition("-")[0]
        group = ["--world-size", "2", "--group", f"{FIRST}:{self.groups[name]}"]
        arguments = [role, "--model", str(self.model), "--host", SECOND, "--port", str(self.ports[name])]
        arguments += ["--allow-plaintext", "--num-threads", "1", "--rank", "1", *group]
        self.others[name] = BatonProcess(arguments, self.own_environment, self.second)

    def processes_of_workers(self) -> list[BatonProcess]:
        """Returns those of all ranks that are not to stand still."""
        others = [process for name, process in self.others.items() if name not in self.stopped]
        return [*self.workers.values(), *others]

    def start_ended(self, prepare: Callable[[], None] | None = None) -> list[str]:
        """Starts every rank that has ended, each for itself, as a supervisor on its host does."""
        ended = super().start_ended(prepare)
        for name in [name for name, process in self.others.items() if not process.running]:
            self._start_rank(name)
            ended.append(f"rank 1 of {name}")
        return ended

    def stop_rank(self, name: str) -> None:
        """Stops rank 1 of a worker (SIGSTOP), until the stack is healed."""
        self.stopped.add(name)
        self.others[name].freeze()

    def cut_off(self) -> None:
        """Cuts the second host off, until the stack is healed."""
        cut_off(self.second_network)

    def heal(self) -> None:
        """Joins the hosts again, and has ranks end and start until all workers are connected."""
        reconnect(self.second_network)
        self.stopped.clear()
        for process in self.processes_of_workers():
            process.thaw()

        def healed() -> bool:
            return not self.start_ended() and self.gateway.num_connected() == len(self.workers)

        wait_until(healed, 240, "all workers with all ranks")

    @contextlib.contextmanager
    def running(self, *options: str) -> Iterator[None]:
        """All ranks and a gateway."""
        try:
            with super().running(*options):
                yield
        finally:
            for process in self.others.values():
                process.stop()

    def _gateway(self, options: Sequence[str]) -> Gateway:
        addresses = ",".join(map(self.address, self.ports))
        return Gateway(
            self.model,
            ["--workers", addresses, "--allow-plaintext", "--handoff", "always", *options],
            prepare=self.prepare_gateway,
        )


@contextlib.contextmanager
def group_hosts(
    model: Path, directory: Path, transport: str, *groups: str, workers: int = 1, options: Sequence[str] = ()
) -> Iterator[GroupHosts]:
    """Everything runs, and ends with the context. groups: the roles whose first worker is on two hosts.

    workers: of each role. options: of all workers.
    """
    boot_id = directory / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    ports = worker_ports(workers, workers)
    with contextlib.ExitStack() as entered:
        first = entered.enter_context(private_network())
        lay_bridge(f"{FIRST}/24")
        second = entered.enter_context(linked_network("second", f"{SECOND}/24"))
        named = [f"{role}-0" for role in groups]
        stack = GroupHosts(
            model,
            ports,
            ["--transport", transport, *options],
            None,
            # Else NIXL goes to no other host without RDMA, and UCX takes no bridge.
            environment={"UCX_NET_DEVICES": "all", "UCX_TCP_BRIDGE_ENABLE": "y"},
            first=partial(_enter_first, first),
            second=partial(_enter_as_another_host, second, boot_id),
            second_network=second,
            groups=dict(zip(named, free_ports(len(named)), strict=True)),
        )
        stack.prepare_gateway = first
        entered.enter_context(stack.running())
        yield stack


def _enter_first(enter: Callable[[], None]) -> None:
    enter()
    see_own_devices()


def _enter_as_another_host(enter: Callable[[], None], boot_id: Path) -> None:
    enter()
    see_own_devices()
    pose_as_another_host(boot_id)
