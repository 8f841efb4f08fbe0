"""A release whose containers run as processes of this machine."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loadtest.processes import free_ports
from tests.e2e.stack import wait_until
from tests.helm.kubelet import Container, Node, Program

COMPONENTS = ("redis", "prefill", "decode", "gateway")
PORTS = (
    "gateway.port",
    "gateway.grpcPort",
    "gateway.adminPort",
    "prefill.port",
    "decode.port",
    "workers.healthPort",
    "workers.groupPort",
    "redis.port",
)


@dataclass(frozen=True)
class Release:
    """All its pods, which run and are ready."""

    node: Node
    pods: dict[str, Container]
    others: list[Container]  # those of decode's worker beside its first one

    def test(self) -> int | None:
        """Runs the helm test, which sends a chat; returns its exit code."""
        program = Container(self.node, "test").process
        assert isinstance(program, Program)
        return program.wait(120)

    def end(self) -> list[tuple[str, int | None]]:
        """Tells pods to end, one after the other, and returns their exit codes."""
        return [(name, self.pods[name].end()) for name in reversed(COMPONENTS)]


@contextlib.contextmanager
def running(node: Node, decode_pods: int = 1) -> Iterator[Release]:
    """Starts the pods and waits until each probe passes. decode_pods: of decode's one worker."""
    with contextlib.ExitStack() as stack:
        pods: dict[str, Container] = {}
        for name in COMPONENTS:
            pods[name] = Container(node, name)
            stack.callback(pods[name].process.kill)
        others = []
        for rank in range(1, decode_pods):
            others.append(Container(node, "decode", rank))
            stack.callback(others[-1].process.kill)
        for name, pod in [*pods.items(), *(("decode's others", pod) for pod in others)]:
            for probe in pod.probes:
                wait_until(partial(pod.passes, probe), 600, f"the {probe} of {name}")
        yield Release(node, pods, others)


def choose_ports() -> dict[str, int]:
    """A free port for each value that is one."""
    return dict(zip(PORTS, free_ports(len(PORTS)), strict=True))


def settings(model: Path, ports: dict[str, int], **others: object) -> list[str]:
    """Options of helm that make the chart fit this machine: paths and ports of its own, small workers of one thread."""
    small = {"kvMemory": "16MiB", "resources.limits.cpu": "500m", "resources.requests.cpu": "500m"}
    values = {
        "gateway.host": "127.0.0.1",
        "gateway.handoff": "always",
        "drainTimeoutSeconds": 6,
        "model.hostPath": model.parent,
        "model.mountPath": model.parent,
        "model.path": model,
        **{f"{role}.{key}": value for role in ("prefill", "decode") for key, value in small.items()},
        **ports,
        **{key.replace("__", "."): value for key, value in others.items()},
    }
    return ["--set", ",".join(f"{key}={value}" for key, value in values.items())]
