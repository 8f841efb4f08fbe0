"""The release with TLS everywhere and a keys file, as processes; certificates are as cert-manager would make them."""

import contextlib
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.launcher.authority import Authority
from tests.e2e.conftest import write_model
from tests.e2e.stack import wait_until
from tests.helm.chart import MTLS, Helm, Manifest, of_kind
from tests.helm.kubelet import SERVICE_IP, Container, Node, write_secret
from tests.helm.release import COMPONENTS, Release, choose_ports, running, settings
from tests.helm.test_processes import num_handed_off
from tests.machine import REDIS, needs

KEY = "baton-a-key-of-the-test"
RENEWAL_S = 0.2  # between two looks at the certificates of Redis, instead of 20


def issued(manifests: list[Manifest], authority: Authority, directory: Path) -> dict[str, dict[str, bytes]]:
    """The Secrets of all Certificates. They also name the address that every Service has here."""
    secrets = {}
    for name, certificate in of_kind(manifests, "Certificate").items():
        if not certificate["spec"].get("isCA"):
            paths = authority.issue([*certificate["spec"]["dnsNames"], SERVICE_IP], directory / name)
            files = {"tls.crt": paths.chain, "tls.key": paths.key, "ca.crt": directory / name / "ca.crt"}
            secrets[certificate["spec"]["secretName"]] = {key: path.read_bytes() for key, path in files.items()}
    return secrets


def keys_file(directory: Path) -> bytes:
    """One that `baton keys` wrote."""
    file = directory / "keys.json"
    add = [sys.executable, "-m", "services.cli", "keys", "add", str(file), "--tenant", "team"]
    subprocess.run(add, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return file.read_bytes()


@needs(REDIS)
@pytest.mark.long
def test_a_release_serves_over_tls_alone_and_takes_new_certificates(helm: Helm, tmp_path: Path):
    model, ports, authority = write_model(tmp_path / "tiny", "llama"), choose_ports(), Authority()
    secrets_named = {"keys__existingSecret": "keys", "keys__apiKeySecret": "test-key"}
    chosen = settings(model, ports, **secrets_named, monitoring__monitor="service")
    manifests = helm.render(MTLS, *chosen)
    own = {"keys": {"keys.json": keys_file(tmp_path)}, "test-key": {"key": KEY.encode()}}
    secrets = {**issued(manifests, authority, tmp_path / "issued"), **own}
    programs = Path(shutil.which("redis-server") or "").parent
    node = Node(hasty(manifests), tmp_path / "node", secrets, programs)
    with running(node) as release:
        admin = f"https://{SERVICE_IP}:{ports['gateway.adminPort']}"
        trusting = ssl.create_default_context(cadata=authority.certificate.decode())
        wait_until(lambda: release.test() == 0 and bool(num_handed_off(admin, trusting)), 60, "a handoff")
        check_that_prometheus_reaches_the_admin_port(manifests, authority, ports["gateway.adminPort"])
        check_that_strangers_are_refused(ports)
        check_that_redis_takes_new_certificates(release, authority, tmp_path)
        assert release.end() == [(name, 0) for name in reversed(COMPONENTS)]


def check_that_prometheus_reaches_the_admin_port(manifests: list[Manifest], authority: Authority, port: int) -> None:
    """As the monitor of the gateways tells it to: by that name, and by CAs that it trusts."""
    (monitor,) = of_kind(manifests, "ServiceMonitor").values()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["scheme"], set(endpoint["tlsConfig"])) == ("https", {"serverName"})
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    with socket.create_connection((SERVICE_IP, port), timeout=60) as plain:
        context.wrap_socket(plain, server_hostname=endpoint["tlsConfig"]["serverName"]).close()


def hasty(manifests: list[Manifest]) -> list[Manifest]:
    """The same, with a Redis that looks at its certificates more often."""
    (server,) = of_kind(manifests, "StatefulSet").values()
    (container,) = server["spec"]["template"]["spec"]["containers"]
    assert "while sleep 20;" in container["args"][0]
    container["args"][0] = container["args"][0].replace("while sleep 20;", f"while sleep {RENEWAL_S};")
    return manifests


def check_that_strangers_are_refused(ports: dict[str, int]) -> None:
    """Plain text reaches nothing but the ports for health."""
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=ports["redis.port"], retry=once) as stranger, pytest.raises(redis.ConnectionError):
        stranger.ping()
    for port in ("prefill.port", "gateway.grpcPort", "gateway.adminPort"):
        with grpc.insecure_channel(f"{SERVICE_IP}:{ports[port]}") as channel, pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(timeout=1)


def check_that_redis_takes_new_certificates(release: Release, authority: Authority, tmp_path: Path) -> None:
    """It shows the new one soon, without a restart."""
    pod, manifests = release.pods["redis"], release.node.manifests
    before, pid = shown_by(pod), pod.process.pid
    time.sleep(1.1)  # dates of files are compared, in whole seconds by some shells
    renewed = issued(manifests, authority, tmp_path / "renewed")
    write_secret(renewed["demo-baton-redis-mtls"], pod.mounts["/etc/baton/mtls"])
    wait_until(lambda: shown_by(pod) != before, 60, "the new certificate of Redis")
    assert (pod.process.pid, pod.process.running) == (pid, True)
    assert all(pod.passes(probe) for probe in pod.probes)


def shown_by(pod: Container) -> bytes:
    """The certificate of Redis, as openssl sees it."""
    port = pod.port("redis")
    directory = pod.mounts["/etc/baton/mtls"]
    files = ["-CAfile", f"{directory}/ca.crt", "-cert", f"{directory}/tls.crt", "-key", f"{directory}/tls.key"]
    command = ["openssl", "s_client", "-connect", f"{SERVICE_IP}:{port}", "-tls1_3", *files]
    seen = b""
    with contextlib.suppress(subprocess.TimeoutExpired):
        seen = subprocess.run(command, input=b"", capture_output=True, timeout=30).stdout
    begin, _, rest = seen.partition(b"-----BEGIN CERTIFICATE-----")
    assert begin
    return rest.partition(b"-----END CERTIFICATE-----")[0]
