"""A stack of workers that have one rank on each of two hosts, which are networks with a link.

10.78.0.1  gateway, rank 0 of the prefill worker and of the decode worker, and the test itself
10.78.0.2  rank 1 of both: what they see of the kernel is another host's
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from loadtest.processes import free_ports
from tests.e2e.forked import BatonProcess
from tests.e2e.stack import Gateway, Stack, worker_ports
from tests.faults.namespace import (
    lay_bridge,
    linked_network,
    pose_as_another_host,
    private_network,
    see_own_devices,
)

FIRST, SECOND = "10.78.0.1", "10.78.0.2"


@dataclass
class GroupHosts(Stack):
    """The stack. A worker's name is that of its rank 0; rank 1 is in `others`."""

    first: Callable[[], None] = field(kw_only=True)  # takes a process to its host
    second: Callable[[], None] = field(kw_only=True)
    groups: dict[str, int] = field(kw_only=True)  # by worker of several hosts: the port where its rank 0 waits
    others: dict[str, BatonProcess] = field(default_factory=dict)

    def start(self, name: str, *options: str, prepare: Callable[[], None] | None = None) -> None:
        """Starts both ranks of a worker."""
        where = ["--host", FIRST, "--allow-plaintext"]
        if name not in self.groups:
            super().start(name, *where, *options, prepare=prepare or self.first)
            return
        group = ["--world-size", "2", "--group", f"{FIRST}:{self.groups[name]}"]
        super().start(name, *where, "--rank", "0", *group, *options, prepare=prepare or self.first)
        self.start_rank(name, *group)

    def start_rank(self, name: str, *group: str) -> None:
        """Starts rank 1 of a worker."""
        role = name.partition("-")[0]
        arguments = [role, "--model", str(self.model), "--host", SECOND, "--port", str(self.ports[name])]
        arguments += ["--allow-plaintext", "--num-threads", "1", "--rank", "1", *group]
        self.others[name] = BatonProcess(arguments, self.own_environment, self.second)

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
        addresses = ",".join(f"{FIRST}:{port}" for port in self.ports.values())
        return Gateway(
            self.model,
            ["--workers", addresses, "--allow-plaintext", "--handoff", "always", *options],
            prepare=self.prepare_gateway,
        )


@contextlib.contextmanager
def group_hosts(model: Path, directory: Path, transport: str, *groups: str) -> Iterator[GroupHosts]:
    """Everything runs, and ends with the context. groups: the roles whose worker is on two hosts."""
    boot_id = directory / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    ports = worker_ports(1, 1)
    with contextlib.ExitStack() as entered:
        first = entered.enter_context(private_network())
        lay_bridge(f"{FIRST}/24")
        second = entered.enter_context(linked_network("second", f"{SECOND}/24"))
        named = [name for name in ports if name.partition("-")[0] in groups]
        stack = GroupHosts(
            model,
            ports,
            ["--transport", transport],
            None,
            # Else NIXL goes to no other host without RDMA, and UCX takes no bridge.
            environment={"UCX_NET_DEVICES": "all", "UCX_TCP_BRIDGE_ENABLE": "y"},
            first=partial(_enter_first, first),
            second=partial(_enter_as_another_host, second, boot_id),
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
