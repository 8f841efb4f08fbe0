"""A stack on two hosts, which are networks with a link, over mutual TLS: and a third network, which is a stranger's.

    10.77.0.1  gateway, Redis, prefill worker, and the test itself
    10.77.0.2  decode workers: what they see of the kernel is another host's
    10.77.0.3  a stranger

All three are on one bridge. Workers choose their transport: that the hosts are one kernel, whose processes could read
each other's memory, must not show. See `pose_as_another_host`.
"""

import contextlib
import ssl
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from services.launcher.authority import Authority
from services.launcher.certificates import ROLES
from tests.certificates import Certificates
from tests.e2e.stack import Stack, worker_ports
from tests.faults.namespace import lay_bridge, linked_network, pose_as_another_host, private_network
from tests.tls.test_redis import running as running_redis

FIRST, SECOND = "10.77.0.1", "10.77.0.2"
LINK = "second"  # to the second host, at the first one's bridge
KEY = "a-key-of-the-first-host"
_STRANGER = "10.77.0.3"
_ADDRESSES = {"prefill": FIRST, "decode": SECOND}

T = TypeVar("T")


class Hosts(Stack):
    """The stack: a prefill worker on the first host, two decode workers on the second."""

    enter: Mapping[str, Callable[[], None]]  # takes a worker to its host, by role

    def address(self, name: str) -> str:
        """Returns the address at which a worker is reached."""
        return f"{_ADDRESSES[name.partition('-')[0]]}:{self.ports[name]}"

    def start(self, name: str, *options: str, prepare: Callable[[], None] | None = None) -> None:
        """Starts a worker on its host."""
        role = name.partition("-")[0]
        where = ["--host", _ADDRESSES[role], "--advertise-host", _ADDRESSES[role]]
        super().start(name, *where, *options, prepare=prepare or self.enter[role])

    @contextlib.contextmanager
    def running(self, *options: str) -> Iterator[None]:
        """Runs the stack; its client comes to the first host's address."""
        with super().running(*options):
            self.gateway.client.base_url = f"https://{FIRST}:{self.gateway.port}/v1"
            yield


@dataclass(frozen=True)
class Connected:
    """The hosts' stack, and ways to see their networks."""

    stack: Hosts
    redis_port: int
    _enter: Mapping[str, Callable[[], None]]  # by address

    def on(self, address: str, run: Callable[[], T]) -> T:
        """Runs a function on a host, on a thread of its own, and so what it starts."""
        with ThreadPoolExecutor(1, initializer=self._enter[address]) as pool:
            return pool.submit(run).result()

    def ask_as_stranger(self, targets: list[str]) -> str:
        """Sends a stranger to ports, HOST:PORT, and returns what `tests.e2e.strangers` prints."""
        command = [sys.executable, "-m", "tests.e2e.strangers", *targets]
        run = partial(subprocess.run, command, stdout=subprocess.PIPE, text=True, check=True, timeout=200)
        return self.on(_STRANGER, run).stdout


@contextlib.contextmanager
def connected_hosts(model: Path, directory: Path) -> Iterator[Connected]:
    """Everything runs, and ends with the context."""
    boot_id, authority = directory / "boot_id", Authority()
    boot_id.write_text(f"{uuid.uuid4()}\n")
    certificates = Certificates(authority, directory)
    for role, names in ROLES.items():
        certificates.paths(*names, directory=role.value)
    front = certificates.paths(FIRST, "127.0.0.1", directory="clients")
    serving = ["--host", FIRST, "--tls-cert", str(front.chain), "--tls-key", str(front.key), "--api-key", KEY]
    with contextlib.ExitStack() as entered:
        first = entered.enter_context(private_network())
        lay_bridge(f"{FIRST}/24")
        second = entered.enter_context(linked_network(LINK, f"{SECOND}/24"))
        stranger = entered.enter_context(linked_network("stranger", f"{_STRANGER}/24"))
        # Certificates guard it: its own protection would refuse every other host.
        redis = entered.enter_context(running_redis(certificates, directory, "--protected-mode", "no", host=FIRST))
        url = f"rediss://{FIRST}:{redis.port}"
        trusted = ssl.create_default_context(cafile=directory / "clients" / "ca.crt")
        options = ["--transport", "auto"]
        stack = Hosts(model, worker_ports(1, 2), options, url, mtls=directory, key=KEY, trusted=trusted)
        stack.prepare_gateway = first
        stack.enter = {"prefill": first, "decode": partial(_enter_as_another_host, second, boot_id)}
        entered.enter_context(stack.running(*serving))
        yield Connected(stack, redis.port, {FIRST: first, SECOND: second, _STRANGER: stranger})


def _enter_as_another_host(enter: Callable[[], None], boot_id: Path) -> None:
    enter()
    pose_as_another_host(boot_id)
