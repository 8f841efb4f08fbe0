"""Findings on running processes: a stack's workers and gateway, and one whose clock is wrong."""

import contextlib
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvtransfer.moved import Moved
from loadtest.processes import free_ports
from services.config.option import OptionError
from services.doctor import handoffs
from services.doctor.config import parse_gateway
from services.doctor.finding import Level
from services.doctor.gateway import (
    ReadsOfPair,
    check_clocks,
    check_fingerprints,
    check_gateway,
    check_pairs,
    check_refused,
    check_roles,
)
from services.doctor.handoffs import measure_handoffs
from services.doctor.workers import check_workers
from services.process import lifeline
from services.protocol.clock import certain_lead_s
from services.tls.grpc_ends import open_port
from services.tls.roles import CertificateRole
from tests.certificates import Certificates
from tests.doctor.findings import levels, named
from tests.e2e.conftest import llama, prompt_of, stack
from tests.e2e.stack import Endpoint, Stack, wait_until
from tests.gateway.keys.key_files import write_keys

__all__ = ["llama", "stack"]  # fixtures


@contextlib.contextmanager
def gateway_whose_clock_is(offset_s: float, ledger: bytes = b'{"workers": []}', metrics: bytes = b"") -> Iterator[str]:
    """A server that is like a gateway's admin port, with the time of its own; its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write({"/debug/ledger": ledger, "/metrics": metrics}.get(self.path, b""))

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time.time() + offset_s, usegmt=True)

        def log_message(self, format: str, *arguments: object) -> None:
            """Keeps quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("offset_s", "level"),
    [(0.0, Level.OK), (5.0, Level.WARNING), (-5.0, Level.WARNING)],
    ids=["same", "ahead", "behind"],
)
async def test_a_gateway_whose_clock_is_wrong_is_a_warning(offset_s: float, level: Level) -> None:
    with gateway_whose_clock_is(offset_s) as url:
        found = await check_gateway(url, None, rdma_here=False)
    assert named(found, "clock").level is level
    if level is Level.WARNING:
        assert ("ahead of" if offset_s > 0 else "behind") in named(found, "clock").found
    assert named(found, "decode workers").level is Level.ERROR


def test_clocks_differ_only_where_no_delay_explains_it() -> None:
    assert certain_lead_s((10.0, 12.0), (11.0, 11.5)) == 0
    assert certain_lead_s((10.0, 12.0), (15.0, 16.0)) == -3
    assert certain_lead_s((20.0, 22.0), (15.0, 16.0)) == 4


@pytest.mark.long
async def test_a_gateway_with_keys_is_asked_with_one(llama: Path, stack: Stack, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json")
    endpoint = Endpoint()
    addresses = ",".join(f"127.0.0.1:{port}" for port in stack.ports.values())
    command = [sys.executable, "-m", "services.cli", "gateway", "--model", str(llama), "--workers", addresses]
    environment = os.environ | lifeline.environment()
    gateway = subprocess.Popen([*command, "--keys", str(keys.path), *endpoint.options], env=environment)
    url = f"http://127.0.0.1:{endpoint.admin_port}"
    try:
        wait_until(lambda: endpoint.get("/ready")[0] == 200, what="a gateway that is ready")
        assert named(await check_gateway(url, None, rdma_here=False), "workers").level is Level.NOTE
        assert named(await check_gateway(url, keys.acme, rdma_here=False), "workers").level is Level.NOTE
        found = levels(await check_gateway(url, keys.operator, rdma_here=False))
        assert {f"127.0.0.1:{port}" for port in stack.ports.values()} <= found.keys()
    finally:
        gateway.kill()
        gateway.wait()
        endpoint.client.close()


async def test_a_gateway_that_is_not_there_is_an_error() -> None:
    (port,) = free_ports(1)
    (found,) = await check_gateway(f"http://127.0.0.1:{port}", None, rdma_here=False)
    assert (found.name, found.level) == ("reached", Level.ERROR)


@pytest.mark.parametrize(
    "url", ["no url", "http://a b", "http://127.0.0.1:abc", "http://127.0.0.1:99999", "ftp://a", "http://me:secret@a"]
)
def test_what_is_no_url_of_an_admin_port_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="name an admin port") as refused:
        parse_gateway(url)
    assert "secret" not in str(refused.value)


@pytest.mark.long
async def test_a_gateway_s_port_for_clients_is_named_as_one(stack: Stack) -> None:
    (found,) = await check_gateway(f"http://127.0.0.1:{stack.gateway.port}", None, rdma_here=False)
    assert (found.name, found.level) == ("reached", Level.ERROR)
    assert "port for clients" in found.found


@pytest.mark.parametrize(
    ("ledger", "metrics"),
    [
        (b"<html>", b""),
        (b"[]", b""),
        (b'{"workers": 5}', b""),
        (b'{"workers": [{"role": "decode"}]}', b""),
        (b'{"workers": []}', b"<html>"),
    ],
    ids=["no JSON", "a list", "no workers", "half a worker", "no metrics"],
)
async def test_a_port_of_something_else_is_an_error(ledger: bytes, metrics: bytes) -> None:
    with gateway_whose_clock_is(0.0, ledger, metrics) as url:
        (found,) = await check_gateway(url, None, rdma_here=False)
    assert (found.name, found.level) == ("reached", Level.ERROR)


async def test_a_key_is_not_sent_as_plain_text_to_another_machine() -> None:
    """Nobody is there: 192.0.2.0/24 is for documentation."""
    found = await check_gateway("http://192.0.2.1:9001", "a-key", rdma_here=False)
    assert levels(found) == {"key": Level.WARNING, "reached": Level.ERROR}


@pytest.mark.long
async def test_a_stack_s_workers_and_the_transport_of_its_pair(stack: Stack) -> None:
    url = f"http://127.0.0.1:{stack.gateway.admin_port}"
    stack.gateway.client.completions.create(model="tiny", prompt=prompt_of(771, 200), max_tokens=4)
    stack.gateway.wait_for_baseline()
    found = await check_gateway(url, None, rdma_here=False)
    prefill, decode = (f"127.0.0.1:{stack.ports[name]}" for name in ("prefill-0", "decode-0"))
    assert levels(found) == {
        "clock": Level.OK,
        "ready": Level.OK,
        prefill: Level.OK,
        decode: Level.OK,
        "clocks of workers": Level.OK,
        f"{prefill} to {decode}": Level.OK,
    }
    pair = named(found, f"{prefill} to {decode}")
    assert pair.found.startswith("KV moves over nixl (its memory can be read from here (CMA)), ")
    assert pair.figures["bytes"] > 0 < pair.figures["reading_s"]
    assert "KV by nixl or grpc" in named(found, decode).found


@pytest.mark.long
async def test_handoffs_of_a_pair_are_measured(stack: Stack) -> None:
    prefill, decode = (f"127.0.0.1:{stack.ports[name]}" for name in ("prefill-0", "decode-0"))
    found = await measure_handoffs([prefill, decode], None, rdma_here=False)
    assert set(levels(found).values()) == {Level.OK}
    pair = [named(found, f"{prefill} to {decode}, {length} tokens") for length in (64, 508)]  # of a context of 512
    short, long = (finding.figures for finding in pair)
    assert (short["tokens"], long["tokens"]) == (64, 508)
    assert 0 < short["bytes"] < long["bytes"]
    assert all(figures["reading_ms"] > 0 < figures["after_ms"] for figures in (short, long))
    assert "KV moves over nixl (its memory can be read from here (CMA))" in pair[0].found


@pytest.mark.long
async def test_a_worker_that_is_not_there_is_an_error_of_measuring_and_the_rest_is_measured(stack: Stack) -> None:
    (free,) = free_ports(1)
    gone, decode = f"127.0.0.1:{free}", f"127.0.0.1:{stack.ports['decode-0']}"
    found = levels(await measure_handoffs([gone, decode], None, rdma_here=False))
    assert found == {gone: Level.ERROR, decode: Level.OK, "prefill workers": Level.NOTE, "clocks of workers": Level.OK}


@pytest.mark.long
async def test_pairs_for_which_no_time_is_left_are_named(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoffs, "_MEASURE_S", 0.0)
    prefill, decode = (f"127.0.0.1:{stack.ports[name]}" for name in ("prefill-0", "decode-0"))
    found = await measure_handoffs([prefill, decode], None, rdma_here=False)
    assert named(found, f"{prefill} to {decode}").found == "not measured: 0 s are over"


@pytest.mark.long
async def test_workers_are_asked_whether_they_serve(stack: Stack) -> None:
    (free,) = free_ports(1)
    addresses = [f"127.0.0.1:{port}" for port in (*stack.ports.values(), free)]
    found = levels(await check_workers(addresses, None))
    assert found == dict(zip(addresses, (Level.OK, Level.OK, Level.ERROR), strict=True))


@pytest.mark.parametrize("serving", [True, False])
async def test_a_worker_with_tls_is_asked_with_an_operator_s_certificate(
    serving: bool, certificates: Certificates
) -> None:
    servicer = health.aio.HealthServicer()
    answer = health_pb2.HealthCheckResponse
    await servicer.set("", answer.SERVING if serving else answer.NOT_SERVING)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{open_port(server, '127.0.0.1:0', certificates.files(CertificateRole.WORKER))}"
    await server.start()
    try:
        found = await check_workers([address], certificates.paths(CertificateRole.OPERATOR).chain.parent)
    finally:
        await server.stop(None)
    assert levels(found) == {address: Level.OK if serving else Level.WARNING}


async def test_what_is_no_worker_is_an_error(certificates: Certificates) -> None:
    """Also where it speaks TLS, or is asked with a certificate that cannot be used."""
    server = grpc.aio.server()
    port = open_port(server, "127.0.0.1:0", certificates.files(CertificateRole.WORKER))
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        operator = certificates.paths(CertificateRole.OPERATOR).chain.parent
        (found,) = await check_workers([address], operator)
        assert (found.level, found.found) == (Level.ERROR, "what listens there is no worker")
        assert levels(await check_workers([address], None)) == {address: Level.ERROR}
        assert levels(await check_workers([address], Path("none"))) == {"workers": Level.ERROR}
    finally:
        await server.stop(None)


WORKERS = [
    {
        "address": address,
        "role": role,
        "kernels": "avx2",
        "transports": ["nixl", "grpc"],
        "draining": False,
        "protocol": "1",
    }
    for address, role in (("a:1", "prefill"), ("b:1", "decode"))
]


@pytest.mark.parametrize(
    ("transport", "rdma_here", "level"),
    [("nixl", True, Level.OK), ("grpc", False, Level.OK), ("grpc", True, Level.WARNING)],
)
def test_a_pair_that_does_not_use_the_port_for_rdma_is_a_warning(transport: str, rdma_here: bool, level: Level) -> None:
    moved = Moved(transport, "for a reason", 3_000_000_000, 1.5)
    (found,) = check_pairs([ReadsOfPair("a:1", "b:1", moved)], WORKERS, rdma_here=rdma_here)
    assert found.level is level
    assert found.found == f"KV moves over {transport} (for a reason), 3,000.0 MB in 1,500.0 ms: 2.00 GB/s"
    assert found.figures == {"bytes": 3_000_000_000, "reading_s": 1.5}


def test_a_pair_that_has_no_nixl_is_fine_over_grpc() -> None:
    without = [WORKERS[0] | {"transports": ["grpc"]}, WORKERS[1]]
    (found,) = check_pairs([ReadsOfPair("a:1", "b:1", Moved("grpc"))], without, rdma_here=True)
    assert (found.level, found.found) == (Level.OK, "KV moves over grpc")
    assert check_pairs([], WORKERS, rdma_here=True)[0].level is Level.NOTE


def test_clocks_of_workers_that_are_wrong_are_named() -> None:
    right = [worker | {"clock_lead_s": 0.4} for worker in WORKERS]
    assert levels(check_clocks(right, "the gateway's")) == {"clocks of workers": Level.OK}
    wrong = [right[0], right[1] | {"clock_lead_s": -3.0}]
    (found,) = check_clocks(wrong, "the gateway's")
    assert (found.name, found.level) == ("clock of b:1", Level.WARNING)
    assert found.found == "at least 3.0 s behind the gateway's"
    assert check_clocks(WORKERS, "the gateway's") == []  # of an older version, which does not tell


def test_missing_roles_are_told() -> None:
    assert set(levels(check_roles(WORKERS))) == {"a:1", "b:1"}
    assert levels(check_roles(WORKERS[:1]))["decode workers"] is Level.ERROR
    assert levels(check_roles(WORKERS[1:]))["prefill workers"] is Level.NOTE


def test_bytes_of_weights_are_told_and_whether_workers_of_a_host_share_them() -> None:
    shared = WORKERS[0] | {"weight_bytes": 312 << 20, "shares_weights": True}
    own = WORKERS[1] | {"weight_bytes": 257 << 20, "shares_weights": False}
    assert [found.found for found in check_roles([shared, own, WORKERS[1]])] == [
        "prefill, kernels avx2, 312 MiB of weights, shared with workers of its host, KV by nixl or grpc, protocol 1",
        "decode, kernels avx2, 257 MiB of weights, KV by nixl or grpc, protocol 1",
        "decode, kernels avx2, KV by nixl or grpc, protocol 1",
    ]


def test_workers_of_different_weights_are_told_of():
    workers = [{"address": f"{name}:1", "fingerprint": name} for name in "ab"]
    (found,) = check_fingerprints(workers)
    assert (found.level, "a:1 a, b:1 b" in found.found) == (Level.WARNING, True)
    assert check_fingerprints(workers[:1]) == []
    assert check_fingerprints([{"address": "a:1"}, {"address": "b:1"}]) == [], "an older gateway does not tell"


def test_workers_that_a_gateway_refuses_are_noted_with_the_reason():
    (found,) = check_refused([{"address": "c:1", "why": "it serves model b, this gateway a"}])
    assert (found.name, found.level) == ("c:1", Level.NOTE)
    assert "the gateway refuses it: it serves model b, this gateway a" in found.found
