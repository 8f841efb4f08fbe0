"""A stack with a proxy before each worker."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from loadtest.tcp_proxy import Proxy, ProxyThread
from tests.e2e.stack import Stack, wait_until, worker_ports


class ProxiedStack(Stack):
    """A stack with a proxy before each worker, through which gateways and other workers reach it."""

    proxies: dict[str, Proxy]

    def processes(self) -> dict[str, int]:
        """Process ids, by name."""
        pids = {name: process.pid for name, process in self.workers.items()}
        return pids | ({"gateway": self.gateway.process.pid} if hasattr(self, "gateway") else {})

    def heal(self) -> None:
        """Heals the links too."""
        for proxy in self.proxies.values():
            proxy.heal()
        super().heal()


@contextlib.contextmanager
def proxied_stack(
    model: Path,
    *options: str,
    workers: int = 2,
    redis_url: str | None = None,
) -> Iterator[ProxiedStack]:
    """So many workers of each role, which listen at 127.0.0.2, where their proxies find them."""
    chosen = ["--max-num-batched-tokens", "37", *options]
    ports = worker_ports(workers, workers)
    stack = ProxiedStack(model, ports, chosen, redis_url, listen_on="127.0.0.2")
    with ProxyThread() as thread, contextlib.ExitStack() as proxies:
        stack.proxies = {
            name: Proxy(thread, ("127.0.0.1", port), ("127.0.0.2", port), stack.processes)
            for name, port in stack.ports.items()
        }
        for proxy in stack.proxies.values():
            proxies.callback(proxy.close)
        with stack.running():
            yield stack


def until_at(stack: Stack, name: str) -> None:
    """Waits for a request that is placed at a worker."""
    address, role = stack.address(name), name.partition("-")[0]
    wait_until(lambda: any(entry[role] == address for entry in stack.gateway.ledger()["rows"]), 60, f"one at {name}")


def is_taken(stack: Stack, role: str) -> bool:
    """True once a worker of a role has reported blocks that are taken: a later word that none is will be new."""
    workers = stack.gateway.ledger()["workers"]
    return any(each["role"] == role and each["available_blocks"] < each["num_blocks"] for each in workers)


def in_phase(stack: Stack, phase: str) -> bool:
    """True while a request is in this phase."""
    return any(entry["phase"] == phase for entry in stack.gateway.ledger()["rows"])


def until_taken(stack: Stack, role: str) -> None:
    """Waits until blocks of a worker of a role are taken."""
    wait_until(lambda: is_taken(stack, role), 240, f"taken blocks at {role}")


def until_phase(stack: Stack, phase: str) -> None:
    """Waits for a request in this phase."""
    wait_until(lambda: in_phase(stack, phase), 240, f"one in {phase}")
