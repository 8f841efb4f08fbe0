"""A running `baton up`, and what it printed."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.processes import free_ports
from services.process import lifeline


@dataclass
class Up:
    """Its gateway's ports, and the file by which clients trust it."""

    process: subprocess.Popen[str]
    printed: dict[str, str]  # lines, by their first words
    port: int
    grpc_port: int
    admin_port: int

    @property
    def url(self) -> str:
        """The API's base URL."""
        return self.printed["Baton is ready"]

    @property
    def ca_file(self) -> Path:
        """The authority's certificate, where `baton up` has --tls."""
        found = re.search(r"SSL_CERT_FILE=(\S+)", self.printed["TLS"])
        assert found is not None
        return Path(found[1])


@contextlib.contextmanager
def running_up(model: Path, directory: Path, *options: str) -> Iterator[Up]:
    """One pair, a gateway and Redis, which are ready; the context ends them. directory: for its sockets."""
    port, grpc_port, admin_port = free_ports(3)
    command = [sys.executable, "-m", "services.cli", "up", "--model", str(model), "--served-model-name", "tiny"]
    command += ["--port", str(port), "--grpc-port", str(grpc_port), "--admin-port", str(admin_port)]
    command += ["--device", "cpu", "--kv-memory", "16MiB", "--num-threads", "1", "--handoff", "always", *options]
    environment = os.environ | lifeline.environment() | {"XDG_RUNTIME_DIR": str(directory)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Up(process, _printed(process), port, grpc_port, admin_port)
        finally:
            process.terminate()
            assert process.wait(60) == 0


def _printed(process: subprocess.Popen[str]) -> dict[str, str]:
    """What it prints until it is ready; less where it ends before."""
    assert process.stdout is not None
    printed = {}
    for line in process.stdout:
        name, _, value = line.strip().partition("  ")
        printed[name] = value.strip()
        if name == "end it":
            break
    return printed
