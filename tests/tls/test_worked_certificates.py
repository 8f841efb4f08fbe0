"""The certificates that docs/run/tls.md makes by openssl: its commands run, and Baton serves with what they make."""

import re
import shlex
import socket
import ssl
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from loadtest.processes import free_ports
from services.launcher import random_model
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.roles import CertificateRole
from tests.redis_server import RedisServer
from tests.test_docs import ROOT

SECTION = (ROOT / "docs/run/tls.md").read_text().partition("## Certificates for three machines\n")[2]
MAKING, STARTING = re.findall(r"^```sh\n(.*?)^```$", SECTION.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
ROLES = {
    "gateway": [CertificateRole.GATEWAY],
    "prefill": [CertificateRole.PREFILL, CertificateRole.WORKER],
    "decode": [CertificateRole.DECODE, CertificateRole.WORKER],
    "operator": [CertificateRole.OPERATOR],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    result = subprocess.run(["sh", "-euc", MAKING], cwd=folder, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return folder / "baton-certificates"


def test_every_process_takes_its_certificate(made: Path) -> None:
    for name, roles in ROLES.items():
        CertificateFiles(CertificatePaths.in_directory(made / name), roles).current()
    clients = CertificatePaths.in_directory(made / "clients")
    CertificateFiles(CertificatePaths(clients.chain, clients.key)).current()
    assert (made / "gateway" / "tls.key").stat().st_mode & 0o077 == 0


@pytest.fixture
def commands(made: Path, tmp_path: Path) -> dict[str, list[str]]:
    """The commands for three machines, on this one: by their names, each with ports of its own."""
    http, grpc, admin, prefill, decode = map(str, free_ports(5))
    ports = {
        "gateway": ["--port", http, "--grpc-port", grpc, "--admin-port", admin],
        "prefill": ["--port", prefill],
        "decode": ["--port", decode],
    }
    keys = tmp_path / "keys.json"
    add = [sys.executable, "-m", "services.cli", "keys", "add", str(keys)]
    subprocess.run(add, cwd=ROOT, check=True, capture_output=True, timeout=60)
    here = {"DIR": str(random_model.made()), "10.0.0.2": "127.0.0.1", "10.0.0.3": "127.0.0.1", "keys.json": str(keys)}
    found = {}
    for line in STARTING.splitlines():
        program, command, *arguments = shlex.split(line)
        assert program == "baton"
        arguments = [str(made / each) if (made / each).exists() else here.get(each, each) for each in arguments]
        found[command] = [sys.executable, "-m", "services.cli", command, *arguments, *ports[command]]
    return found


@pytest.mark.long
def test_three_processes_serve_with_them(made: Path, commands: dict[str, list[str]], tmp_path: Path) -> None:
    """The gateway is ready, which it is not before it is connected to a decode worker over mutual TLS."""
    port = int(commands["gateway"][commands["gateway"].index("--port") + 1])
    with ExitStack() as stack:
        server = RedisServer(tmp_path)
        stack.callback(server.kill)
        for name, command in commands.items():
            own = ["--kv-memory", "16MiB", "--num-threads", "1"] if name != "gateway" else []
            process = subprocess.Popen([*command, *own, "--redis-url", server.url], cwd=ROOT)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
        until = time.monotonic() + 240
        while (status := ask(made, port, "/ready")) != 200:
            assert time.monotonic() < until, status
            time.sleep(0.5)
        assert ask(made, port, "/v1/models") == 401


def ask(made: Path, port: int, path: str) -> int:
    """The status of an answer to a client that trusts the authority; 0: there is none."""
    context = ssl.create_default_context(cafile=str(made / "ca.crt"))
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname="chat.example.com") as client,
        ):
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: chat.example.com\r\nConnection: close\r\n\r\n".encode())
            return int(client.recv(65536).split(b" ", 2)[1])
    except (ConnectionError, TimeoutError):
        return 0
