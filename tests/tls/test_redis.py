"""TLS to a Redis of the distribution's: 1.3 alone, certificates of both sides, and new ones while it runs."""

import asyncio
import contextlib
import datetime
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.config.option import OptionError
from services.launcher.authority import Authority
from services.launcher.ports import free_ports
from services.prefix_index.redis_client import UNREACHABLE, Client, connect
from services.prefix_index.redis_tls import with_certificate
from services.process.configs import parse_redis_url
from services.tls.roles import CertificateRole
from tests.certificates import Certificates
from tests.machine import REDIS, needs

GATEWAY = CertificateRole.GATEWAY
PAST = datetime.timedelta(days=-1)


@dataclass
class Server:
    """A `redis-server` with TLS, which asks clients for certificates."""

    port: int
    log: Path
    host: str

    def connect(self, mtls: Path | None, options: str = "", scheme: str = "rediss") -> Client:
        url = with_certificate(f"{scheme}://{self.host}:{self.port}{options}", mtls)
        assert url is not None
        return connect(url, timeout_s=60)


@contextlib.contextmanager
def running(certificates: Certificates, tmp_path: Path, *options: str, host: str = "127.0.0.1") -> Iterator[Server]:
    paths, log = certificates.paths(host, directory="redis"), tmp_path / "log"
    (port,) = free_ports(host, 1)
    command = [shutil.which("redis-server") or "", "--port", "0", "--tls-port", str(port), "--bind", host]
    command += ["--tls-cert-file", str(paths.chain), "--tls-key-file", str(paths.key)]
    command += ["--tls-ca-cert-file", str(paths.authorities), "--save", "", "--dir", str(tmp_path)]
    command += ["--logfile", str(log), "--loglevel", "verbose", *options]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 60
        while not log.exists() or "Ready to accept" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        try:
            yield Server(port, log, host)
        finally:
            process.kill()


async def answers(client: Client) -> bool:
    try:
        return bool(await client.within_limit(client.redis.ping()))
    finally:
        await client.aclose()


@needs(REDIS)
async def test_redis_is_reached_with_certificates_of_its_authority_alone(
    certificates: Certificates, other_authority: Authority, tmp_path: Path
) -> None:
    made = certificates
    good = made.paths(GATEWAY).chain.parent
    strangers = {
        "another authority": (made.trusting(made.paths(GATEWAY, by=other_authority)).chain.parent, ""),
        "out of date": (made.paths(GATEWAY, lifetime=PAST).chain.parent, ""),
        "no certificate": (None, f"?ssl_ca_certs={good / 'ca.crt'}"),
        "a server of another authority": (made.paths(GATEWAY, by=other_authority).chain.parent, ""),
        "a server that the system does not trust": (None, ""),
    }
    with running(certificates, tmp_path) as server:
        assert await answers(server.connect(good))
        files = f"ssl_ca_certs={good / 'ca.crt'}&ssl_certfile={good / 'tls.crt'}&ssl_keyfile={good / 'tls.key'}"
        assert await answers(server.connect(strangers["out of date"][0], f"?{files}"))  # those of the URL count
        for name, (mtls, options) in strangers.items():
            with pytest.raises(UNREACHABLE):
                assert not await answers(server.connect(mtls, options)), name
        with pytest.raises(UNREACHABLE):
            await answers(server.connect(None, scheme="redis"))
        log = server.log.read_text()
    assert log.count("certificate verify failed") == 2  # the first two
    assert "peer did not return a certificate" in log
    assert "wrong version number" in log


@needs(REDIS)
@pytest.mark.parametrize(("protocols", "spoken"), [("TLSv1.2", False), ("TLSv1.2 TLSv1.3", True)])
async def test_nothing_older_than_tls_1_3_is_spoken(
    certificates: Certificates, tmp_path: Path, protocols: str, spoken: bool
) -> None:
    with running(certificates, tmp_path, "--tls-protocols", protocols) as server:
        client = server.connect(certificates.paths(GATEWAY).chain.parent)
        if spoken:
            assert await answers(client)
        else:
            with pytest.raises(UNREACHABLE, match=r"PROTOCOL_VERSION|protocol version"):
                await answers(client)


@needs(REDIS)
@pytest.mark.parametrize("scheme", ["rediss", "rediss+cluster"])
async def test_new_connections_use_the_newest_certificate_and_old_ones_go_on(
    certificates: Certificates, other_authority: Authority, tmp_path: Path, scheme: str
) -> None:
    certificates.paths(GATEWAY, directory="client")
    cluster = ("--cluster-enabled", "yes", "--tls-cluster", "yes") if "cluster" in scheme else ()
    with running(certificates, tmp_path, *cluster) as server:
        if cluster:
            await own_all_slots(server.connect(certificates.root / "client"))
        client = server.connect(certificates.root / "client", scheme=scheme)
        ask = lambda: client.within_limit(client.redis.set("key", "value"))
        assert await ask()
        certificates.trusting(certificates.paths(GATEWAY, by=other_authority, directory="client"))
        assert await ask()
        await end_connections(server.connect(certificates.paths(GATEWAY).chain.parent))
        with pytest.raises(UNREACHABLE):
            await ask()
        certificates.paths(GATEWAY, directory="client")
        assert await ask()
        await client.aclose()


async def own_all_slots(client: Client) -> None:
    """Makes a cluster of the one node."""
    await client.redis.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    while b"cluster_state:ok" not in await client.redis.execute_command("CLUSTER", "INFO"):
        await asyncio.sleep(0.02)
    await client.aclose()


async def end_connections(client: Client) -> None:
    """Ends those of all others."""
    await client.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await client.aclose()


def test_a_url_gets_the_certificate_of_its_process_unless_it_names_files_or_is_no_tls() -> None:
    mtls = Path("/d")
    files = "ssl_ca_certs=%2Fd%2Fca.crt&ssl_certfile=%2Fd%2Ftls.crt&ssl_keyfile=%2Fd%2Ftls.key"
    assert with_certificate("rediss://u:p@h:1/2?x=1", mtls) == f"rediss://u:p@h:1/2?x=1&{files}"
    assert with_certificate("rediss+cluster://h", mtls) == f"rediss+cluster://h?{files}"
    for url in ("redis://h", "unix:///s", "rediss://h?ssl_ca_certs=/c", None):
        assert with_certificate(url, mtls) == url
    assert with_certificate("rediss://h", None) == "rediss://h"


def test_a_url_that_names_a_lowest_version_is_refused() -> None:
    with pytest.raises(OptionError, match="leave ssl_min_version out"):
        parse_redis_url("rediss://h?ssl_min_version=771")
