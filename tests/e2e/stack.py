"""Real processes: prefill and decode workers and a gateway on loopback, over NIXL, with a tiny checkpoint."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from services import lifeline


def free_ports(number: int) -> list[int]:
    """Ports that nobody listened on a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0, what: str = "the condition") -> float:
    """Seconds until the condition held. Fails when it does not come about in time."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"{what} did not come about in {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - start


@dataclass
class Stack:
    """The processes, and what a person could ask them."""

    model: Path
    worker_options: list[str] = field(default_factory=list)
    gateway_options: list[str] = field(default_factory=list)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['gateway']}"

    def start(self, name: str) -> None:
        """Starts, or starts again, one process: "prefill-0", "decode-1", "gateway"."""
        role = name.partition("-")[0]
        command = [
            sys.executable,
            "-m",
            "services.cli",
            role,
            "--model",
            str(self.model),
            "--port",
            str(self.ports[name]),
        ]
        if role == "gateway":
            workers = ",".join(f"127.0.0.1:{port}" for other, port in self.ports.items() if other != "gateway")
            command += ["--workers", workers, "--served-model-name", "tiny", *self.gateway_options]
        else:
            command += ["--num-threads", "1", "--kv-memory", "16MiB", *self.worker_options]
        environment = os.environ | lifeline.environment() | {"OMP_WAIT_POLICY": "passive"}
        self.processes[name] = subprocess.Popen(command, env=environment)

    def stop(self) -> None:
        """Ends all processes: first nicely."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.processes[name].kill()
        self.processes[name].wait()

    def get(self, path: str) -> tuple[int, str]:
        """GET from the gateway."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except urllib.error.URLError:
            return 0, ""

    def ledger(self) -> dict:
        """What /debug/ledger shows."""
        return json.loads(self.get("/debug/ledger")[1])

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in self.get("/metrics")[1].splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted))

    def num_connected(self) -> int:
        """Workers with a live stream."""
        return len(self.ledger()["workers"]) if self.get("/health")[0] == 200 else 0

    def at_baseline(self) -> bool:
        """True when no request is in flight, and every worker's blocks are free or evictable."""
        ledger = self.ledger()
        return not ledger["rows"] and all(
            worker["available_blocks"] == worker["num_blocks"] and not worker["running"] and not worker["waiting"]
            for worker in ledger["workers"]
        )

    def wait_for_baseline(self, timeout_s: float = 5.0) -> float:
        """Workers report about once a second when idle."""
        return wait_until(self.at_baseline, timeout_s, "the baseline")


@contextlib.contextmanager
def running_stack(
    model: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    worker_options: list[str] | None = None,
    gateway_options: list[str] | None = None,
) -> Iterator[Stack]:
    """A stack that is ready, and ends with the context."""
    names = [f"prefill-{index}" for index in range(prefill)] + [f"decode-{index}" for index in range(decode)]
    stack = Stack(model, worker_options or [], gateway_options or [])
    stack.ports = dict(zip([*names, "gateway"], free_ports(len(names) + 1), strict=True))
    try:
        for name in stack.ports:
            stack.start(name)
        wait_until(lambda: stack.num_connected() == len(names), 100, "a stack with all its workers")
        yield stack
    finally:
        stack.stop()
