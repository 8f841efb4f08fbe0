"""Real processes: prefill and decode workers and gateways on loopback, over NIXL, with a tiny checkpoint."""

import contextlib
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai

from loadtest.ledger import leftovers
from loadtest.processes import free_ports
from tests.e2e.forked import BatonProcess
from tests.e2e.ranks import rank_options


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0, what: str = "the condition") -> float:
    """Seconds until the condition held. Fails when it does not come about in time."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"{what} did not come about in {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - start


class Endpoint:
    """A gateway's ports, and what a person could ask there. options: those that give a gateway these ports."""

    def __init__(self, key: str | None = None, trusted: ssl.SSLContext | None = None) -> None:
        """key: one with all rights; None: no key is asked for. trusted: who signed its certificate; None: no TLS."""
        self._key, self._trusted = key, trusted
        self.port, self.grpc_port, self.admin_port = free_ports(3)
        self.options = ["--port", str(self.port), "--grpc-port", str(self.grpc_port)]
        self.options += ["--admin-port", str(self.admin_port)]
        http_client = None if trusted is None else httpx2.Client(verify=trusted, timeout=120)
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key or "none", max_retries=0, http_client=http_client
        )

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def _scheme(self) -> str:
        return "http" if self._trusted is None else "https"

    def get(self, path: str) -> tuple[int, str]:
        """GET at the admin port: status and body; 0 when nobody answers."""
        headers = {"x-api-key": self._key} if self._key else {}
        request = urllib.request.Request(f"{self._scheme}://127.0.0.1:{self.admin_port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60, context=self._trusted) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except urllib.error.URLError:
            return 0, ""

    def ledger(self) -> dict[str, Any]:
        """What /debug/ledger shows."""
        described: dict[str, Any] = json.loads(self.get("/debug/ledger")[1])
        return described

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in self.get("/metrics")[1].splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted))

    def num_connected(self) -> int:
        """Workers with a live stream."""
        return len(self.ledger()["workers"]) if self.get("/health")[0] == 200 else 0

    def wait_for_workers(self, number: int, timeout_s: float = 240) -> float:
        """Seconds until so many workers had a live stream."""
        return wait_until(lambda: self.num_connected() == number, timeout_s, f"{number} connected workers")

    def at_baseline(self) -> bool:
        """True when no request is in flight, and every worker's blocks are free or evictable."""
        return not leftovers(self.ledger())

    def wait_for_baseline(self, timeout_s: float = 120.0) -> float:
        """Seconds until then."""
        return wait_until(self.at_baseline, timeout_s, "the baseline")

    def settled(self, name: str, **labels: str) -> float:
        """A metric of workers once all is over. They tell it with each frame and when they have no request, together
        with the blocks that are free, so at the baseline nothing is missing.
        """
        self.wait_for_baseline()
        return self.metric(name, **labels)

    def moved_bytes(self) -> float:
        """KV bytes that workers read of others so far, once all is over."""
        return self.settled("baton_kv_bytes_moved_total")


class Gateway(Endpoint):
    """A gateway process."""

    def __init__(
        self,
        model: Path,
        options: list[str],
        key: str | None = None,
        trusted: ssl.SSLContext | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """prepare: called in the process before it begins."""
        super().__init__(key, trusted)
        self._prepare = prepare
        self._arguments = ["gateway", "--model", str(model), "--served-model-name", "tiny"]
        self._arguments += [*self.options, *options]
        self.start()

    def start(self) -> None:
        """Starts it, or starts it again. It ends with this process."""
        self.process = BatonProcess(self._arguments, prepare=self._prepare)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def close(self) -> None:
        """Ends its client, and it: a connection that was used just now would be kept for the next request."""
        self.client.close()
        self.process.stop()


@dataclass
class Stack:
    """Workers by name ("prefill-0", "decode-1"), and a gateway for them."""

    model: Path
    ports: dict[str, int]
    options: list[str]
    redis_url: str | None
    kv_memory: str = "16MiB"  # empty: the model keeps no KV
    listen_on: str = "127.0.0.1"  # of the workers; elsewhere, something at 127.0.0.1 leads there
    role_options: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of "prefill" or "decode" workers alone
    environment: Mapping[str, str] = field(default_factory=dict)  # of the workers, beside that of this process
    mtls: Path | None = None  # has the certificates of each role, in a directory of its name
    prepare: Callable[[], None] | None = None  # called in each worker before it begins
    prepare_gateway: Callable[[], None] | None = None  # likewise in each gateway
    key: str | None = None  # with all rights at the gateways, where these ask for keys
    trusted: ssl.SSLContext | None = None  # who signed the gateways' certificates for clients, where these have one
    workers: dict[str, BatonProcess] = field(default_factory=dict)
    gateway: Gateway = field(init=False)

    def start(self, name: str, *options: str, prepare: Callable[[], None] | None = None) -> None:
        """Starts a worker, or starts it again."""
        arguments = [name.partition("-")[0], "--model", str(self.model), "--port", str(self.ports[name])]
        arguments += ["--host", self.listen_on, "--num-threads", "1"]
        arguments += ["--redis-url", self.redis_url, "--advertise-host", "127.0.0.1"] if self.redis_url else []
        arguments += [] if self.mtls is None else ["--mtls", str(self.mtls / arguments[0])]
        arguments += ["--kv-memory", self.kv_memory] if self.kv_memory else []
        own = [*self.options, *self.role_options.get(arguments[0], ()), *options]
        arguments += ["--device", "cpu", *own, *rank_options(own)]
        self.workers[name] = BatonProcess(arguments, self.own_environment, prepare or self.prepare)

    @property
    def own_environment(self) -> dict[str, str]:
        """The environment of workers."""
        return os.environ | self.environment

    def address(self, name: str) -> str:
        """Returns the address at which a worker is reached."""
        return f"127.0.0.1:{self.ports[name]}"

    def processes_of_workers(self) -> list[BatonProcess]:
        """Returns the processes that serve, or would if they did not stand still."""
        return list(self.workers.values())

    def start_ended(self, prepare: Callable[[], None] | None = None) -> list[str]:
        """Starts every worker that has ended. Returns their names."""
        ended = [name for name, worker in self.workers.items() if not worker.running]
        for name in ended:
            self.start(name, prepare=prepare)
        return ended

    def heal(self) -> None:
        """Thaws every frozen worker, starts every one that has ended, and waits until all are connected."""
        for process in self.processes_of_workers():
            process.thaw()
        self.start_ended()
        self.gateway.wait_for_workers(len(self.workers))

    def _gateway(self, options: Sequence[str]) -> Gateway:
        addresses = ",".join(f"127.0.0.1:{port}" for port in self.ports.values())
        found_by = ["--redis-url", self.redis_url] if self.redis_url else ["--workers", addresses]
        mtls = [] if self.mtls is None else ["--mtls", str(self.mtls / "gateway")]
        arguments = [*found_by, *mtls, "--handoff", "always", *options]
        return Gateway(self.model, arguments, self.key, self.trusted, self.prepare_gateway)

    @contextlib.contextmanager
    def running(self, *options: str) -> Iterator[None]:
        """All workers and a gateway, which has these options; all of them end with the context."""
        try:
            for name in self.ports:
                self.start(name)
            self.gateway = self._gateway(options)
            with contextlib.closing(self.gateway):
                self.gateway.wait_for_workers(len(self.ports))
                yield
        finally:
            for process in self.workers.values():
                process.stop()

    @contextlib.contextmanager
    def serving(self, *options: str) -> Iterator[Gateway]:
        """A gateway for these workers, beside others that there may be. It hands off unless told otherwise."""
        gateway = self._gateway(options)
        try:
            gateway.wait_for_workers(len(self.ports))
            yield gateway
        finally:
            gateway.close()


@contextlib.contextmanager
def running_stack(
    model: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    options: list[str] | None = None,
    redis_url: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Stack]:
    """A stack that is ready, and ends with the context. environment: of its workers, beside that of this process."""
    ports = worker_ports(prefill, decode)
    stack = Stack(model, ports, options or [], redis_url, environment=environment or {})
    with stack.running():
        yield stack


def worker_ports(prefill: int, decode: int) -> dict[str, int]:
    """Names of so many workers, each with a free port."""
    names = [f"prefill-{index}" for index in range(prefill)] + [f"decode-{index}" for index in range(decode)]
    return dict(zip(names, free_ports(len(names)), strict=True))
