"""Who may do what at a worker: gateways, decode workers and operators, by their certificates, and nobody else."""

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from kvtransfer.transports.memory import MemoryFabric
from protos import kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.cli.drain import drain
from services.config import HandoffMode, WorkerRole
from services.config.option import Refusal
from services.gateway.dispatch.dispatcher import Dispatcher, WorkerAccess
from services.gateway.dispatch.router import Policy
from services.launcher.authority import Authority
from services.launcher.ports import free_ports
from services.launcher.readiness import grpc_serving
from services.prefix_index.memory import MemoryPrefixIndex
from services.protocol.grpc_options import CLIENT_OPTIONS
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.grpc_ends import Channels
from services.tls.roles import CertificateRole
from services.worker.callers import CALLERS
from tests.certificates import Certificates
from tests.engine.harness import reference
from tests.gateway.dispatch_stack import Counts
from tests.tls.relay import Relay
from tests.worker.client import TestGateway
from tests.worker.conftest import make_worker, serving
from tests.worker.test_transports import having

GATEWAY, PREFILL, DECODE = CertificateRole.GATEWAY, CertificateRole.PREFILL, CertificateRole.DECODE
WORKER, OPERATOR = CertificateRole.WORKER, CertificateRole.OPERATOR


@dataclass
class Served:
    """A prefill worker with TLS."""

    address: str
    certificates: Certificates

    def channel(self, paths: CertificatePaths) -> grpc.aio.Channel:
        """Whatever the files are, also what Baton itself would not use."""
        chain, key, authorities = (path.read_bytes() for path in paths.all)
        credentials = grpc.ssl_channel_credentials(authorities, key, chain)
        options = [*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", WORKER.dns_name)]
        return grpc.aio.secure_channel(self.address, credentials, options=options)


@pytest.fixture
async def served(certificates: Certificates) -> AsyncIterator[Served]:
    fabric = MemoryFabric()
    files = certificates.files(PREFILL, WORKER)
    worker = make_worker(WorkerRole.PREFILL, fabric, transports=having(fabric, "grpc"), tls=files)
    async with serving(worker) as (port,):
        yield Served(f"127.0.0.1:{port}", certificates)


CALLS: dict[str, Callable[[grpc.aio.Channel], Any]] = {
    "/baton.v1.Worker/Connect": lambda channel: worker_pb2_grpc.WorkerStub(channel).Connect(
        iter([worker_pb2.GatewayMessage()])
    ),
    "/baton.v1.Worker/Drain": lambda channel: worker_pb2_grpc.WorkerStub(channel).Drain(
        worker_pb2.DrainRequest(timeout_s=-1)
    ),
    "/baton.v1.KvControl/Pair": lambda channel: kv_pb2_grpc.KvControlStub(channel).Pair(
        iter([kv_pb2.ConsumerMessage()])
    ),
    "/baton.v1.KvBytes/Read": lambda channel: kv_pb2_grpc.KvBytesStub(channel).Read(kv_pb2.ReadRequest()),
    "/grpc.health.v1.Health/Check": lambda channel: raw(channel.unary_unary, "/grpc.health.v1.Health/Check"),
    "/grpc.health.v1.Health/Watch": lambda channel: raw(channel.unary_stream, "/grpc.health.v1.Health/Watch"),
    "/baton.v1.Worker/Else": lambda channel: raw(channel.unary_unary, "/baton.v1.Worker/Else"),
}


def raw(kind: Callable[[str], Any], method: str) -> Any:
    """A call with an empty message, whatever it is."""
    return kind(method)(b"")


async def use(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    """The code that a call of this method ends with; OK where the worker answers it."""
    call = CALLS[method](channel)
    try:
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await call
        else:
            await call.read()
            call.cancel()
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL:  # its client lost the answer, which came before the first write
            return await use(channel, method)
        return error.code()
    return grpc.StatusCode.OK


# What a worker says to a caller that it lets in: each of these calls is one that it can refuse in words.
ANSWERS = {
    "/baton.v1.Worker/Connect": grpc.StatusCode.INVALID_ARGUMENT,
    "/baton.v1.Worker/Drain": grpc.StatusCode.INVALID_ARGUMENT,
    "/baton.v1.KvControl/Pair": grpc.StatusCode.FAILED_PRECONDITION,
    "/baton.v1.KvBytes/Read": grpc.StatusCode.INVALID_ARGUMENT,
    "/grpc.health.v1.Health/Check": grpc.StatusCode.OK,
    "/grpc.health.v1.Health/Watch": grpc.StatusCode.OK,
}
MAY = {
    GATEWAY: {"/baton.v1.Worker/Connect", "/baton.v1.Worker/Drain"},
    DECODE: {"/baton.v1.KvControl/Pair", "/baton.v1.KvBytes/Read"},
    PREFILL: set(),
    WORKER: set(),
    OPERATOR: {"/baton.v1.Worker/Drain"},
}
HEALTH = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}


def test_the_table_has_every_method_of_a_worker() -> None:
    services = [*worker_pb2.DESCRIPTOR.services_by_name.values(), *kv_pb2.DESCRIPTOR.services_by_name.values()]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert set(CALLERS) == set(ANSWERS) == methods | HEALTH


@pytest.mark.parametrize("role", CertificateRole)
async def test_a_role_may_do_what_is_its_own(served: Served, role: CertificateRole) -> None:
    async with served.channel(served.certificates.paths(role)) as channel:
        with capture_logs() as logs:
            found = {method: await use(channel, method) for method in ANSWERS}
    allowed = MAY[role] | HEALTH
    denied = grpc.StatusCode.PERMISSION_DENIED
    assert found == {method: code if method in allowed else denied for method, code in ANSWERS.items()}
    refusals = [log for log in logs if log["event"] == "call refused"]
    assert {log["method"] for log in refusals} == ANSWERS.keys() - allowed
    assert all(log["names"] == [role.dns_name] and log["address"].startswith("ipv4:127.0.0.1:") for log in refusals)


async def test_a_refusal_says_whose_the_method_is(served: Served) -> None:
    async with served.channel(served.certificates.paths(PREFILL)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kv_pb2_grpc.KvControlStub(channel).Pair(iter([kv_pb2.ConsumerMessage()])).read()
    words = "/baton.v1.KvControl/Pair is for decode.baton.internal, not for prefill.baton.internal"
    assert refused.value.details() == words


async def test_a_certificate_without_a_name_may_only_ask_for_health(served: Served) -> None:
    async with served.channel(served.certificates.paths("127.0.0.1")) as channel:
        assert await use(channel, "/baton.v1.Worker/Connect") is grpc.StatusCode.UNAUTHENTICATED
        assert await use(channel, "/grpc.health.v1.Health/Check") is grpc.StatusCode.OK


async def test_a_method_that_nobody_has_is_unimplemented(served: Served) -> None:
    async with served.channel(served.certificates.paths(GATEWAY)) as channel:
        assert await use(channel, "/baton.v1.Worker/Else") is grpc.StatusCode.UNIMPLEMENTED


async def test_strangers_do_not_get_as_far_as_a_call(
    served: Served, other_authority: Authority, capfd: pytest.CaptureFixture[str]
) -> None:
    """gRPC itself writes to stderr why it ends a handshake."""
    made, gateway = served.certificates, GATEWAY.dns_name
    strangers = {
        "unable to get local issuer": made.trusting(made.paths(gateway, by=other_authority)),
        "certificate has expired": made.paths(gateway, lifetime=datetime.timedelta(days=-1)),
    }
    for reason, paths in strangers.items():
        async with served.channel(paths) as channel:
            assert await use(channel, "/grpc.health.v1.Health/Check") is grpc.StatusCode.UNAVAILABLE
        assert "Handshake failed with error SSL_ERROR_SSL: " in (said := capfd.readouterr().err)
        assert reason in said
    trust = grpc.ssl_channel_credentials(made.authority.certificate)  # no certificate of its own
    options = [("grpc.ssl_target_name_override", WORKER.dns_name)]
    async with grpc.aio.secure_channel(served.address, trust, options=options) as channel:
        assert await use(channel, "/grpc.health.v1.Health/Check") is grpc.StatusCode.UNAVAILABLE
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in capfd.readouterr().err
    async with grpc.aio.insecure_channel(served.address) as channel:
        assert await use(channel, "/grpc.health.v1.Health/Check") is grpc.StatusCode.UNAVAILABLE
    assert "WRONG_VERSION_NUMBER" in capfd.readouterr().err


async def test_calls_over_older_versions_of_tls_are_refused(served: Served) -> None:
    """Python's gRPC cannot refuse the handshake."""
    paths = served.certificates.paths(GATEWAY)
    context = ssl.create_default_context(cafile=paths.authorities)
    context.load_cert_chain(paths.chain, paths.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    host, _, port = served.address.rpartition(":")
    with capture_logs() as logs, Relay(host, int(port), context, WORKER.dns_name) as relay:
        async with grpc.aio.insecure_channel(relay.address) as channel:
            code = await use(channel, "/baton.v1.Worker/Connect")
    assert relay.version == "TLSv1.2"
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert [log["reason"] for log in logs if log["event"] == "call refused"] == ["only TLSv1.3 is spoken here"]


async def reasons_of_a_gateway(address: str, channels: Channels) -> list[str]:
    """Why a gateway is not connected to a worker, as its log says; none where it is."""
    with capture_logs() as logs:
        access = WorkerAccess(channels=channels)
        dispatcher = Dispatcher([address], Policy(HandoffMode.NEVER), 9, MemoryPrefixIndex(), Counts(), access)
        task = asyncio.create_task(dispatcher.run())
        async with asyncio.timeout(60):
            while not any(log["event"] in ("worker connected", "worker not connected") for log in logs):
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return [log["reason"] for log in logs if log["event"] == "worker not connected"]


async def test_a_gateway_connects_to_a_worker_of_its_authority_alone(
    served: Served, other_authority: Authority
) -> None:
    made = served.certificates
    assert await reasons_of_a_gateway(served.address, Channels(made.files(GATEWAY))) == []
    (reason,) = await reasons_of_a_gateway(
        served.address, Channels(CertificateFiles(made.paths(GATEWAY, by=other_authority)))
    )
    assert "CERTIFICATE_VERIFY_FAILED" in reason
    (reason,) = await reasons_of_a_gateway(served.address, Channels())
    assert "UNAVAILABLE" in reason
    (reason,) = await reasons_of_a_gateway(served.address, Channels(made.files(DECODE)))
    assert "PERMISSION_DENIED: /baton.v1.Worker/Connect is for gateway.baton.internal" in reason


@pytest.mark.parametrize("tls", [True, False])
async def test_a_gateway_refuses_what_is_no_worker(certificates: Certificates, tls: bool) -> None:
    """Whatever the registry says of it: another certificate than a worker's, or none."""
    files = certificates.files(GATEWAY, PREFILL) if tls else None
    async with serving(make_worker(WorkerRole.PREFILL, MemoryFabric(), tls=files)) as (port,):
        (reason,) = await reasons_of_a_gateway(f"127.0.0.1:{port}", Channels(certificates.files(GATEWAY)))
    assert ("Hostname Verification Check failed" if tls else "WRONG_VERSION_NUMBER") in reason


@pytest.mark.parametrize(
    ("prefill_names", "decode_names", "refusal"),
    [
        ((PREFILL, WORKER), (DECODE, WORKER), None),
        ((PREFILL, WORKER), (GATEWAY, WORKER), "/baton.v1.KvControl/Pair is for decode.baton.internal"),
        ((DECODE, WORKER), (DECODE, WORKER), "Hostname Verification Check failed"),
    ],
    ids=["both", "no decode worker", "no prefill worker"],
)
async def test_kv_goes_from_a_prefill_worker_to_a_decode_worker(
    certificates: Certificates,
    prefill_names: tuple[CertificateRole, ...],
    decode_names: tuple[CertificateRole, ...],
    refusal: str | None,
) -> None:
    """Control stream and bytes, both over TLS, and to nobody else."""
    fabric, gateway, prompt = MemoryFabric(), TestGateway(), list(range(200))
    make = having(fabric, "grpc")
    prefill_worker = make_worker(WorkerRole.PREFILL, fabric, transports=make, tls=certificates.files(*prefill_names))
    decode_worker = make_worker(WorkerRole.DECODE, fabric, transports=make, tls=certificates.files(*decode_names))
    channels = Channels(certificates.files(GATEWAY))
    with capture_logs() as logs:
        async with (
            serving(prefill_worker, decode_worker) as (prefill_port, decode_port),
            gateway.connect(prefill_port, channels) as prefill,
            gateway.connect(decode_port, channels) as decode,
        ):
            handle = await gateway.hand_off(prefill, decode, prompt, 12)
            if refusal is None:
                await decode.until(lambda: decode.ended(handle))
                assert decode.tokens(handle) == reference(prompt, 12)
                assert decode.load.bytes_moved == 200 * 8  # K and V of a token: 8 bytes
                return
            async with asyncio.timeout(60):
                while not any(refusal in str(log.get("reason")) for log in logs):
                    await asyncio.sleep(0.01)


async def test_reads_show_the_newest_certificate(certificates: Certificates) -> None:
    """Over a new connection, beside the control stream that goes on: here with a certificate that may not read."""
    fabric, gateway = MemoryFabric(), TestGateway()
    make = having(fabric, "grpc")
    tls = CertificateFiles(certificates.paths(DECODE, WORKER, directory="decode"))
    prefill_worker = make_worker(WorkerRole.PREFILL, fabric, transports=make, tls=certificates.files(PREFILL, WORKER))
    decode_worker = make_worker(WorkerRole.DECODE, fabric, transports=make, tls=tls)
    channels = Channels(certificates.files(GATEWAY))
    with capture_logs() as logs:
        async with (
            serving(prefill_worker, decode_worker) as (prefill_port, decode_port),
            gateway.connect(prefill_port, channels) as prefill,
            gateway.connect(decode_port, channels) as decode,
        ):
            handle = await gateway.hand_off(prefill, decode, list(range(200)), 12)
            await decode.until(lambda: decode.ended(handle))
            assert decode.tokens(handle) == reference(list(range(200)), 12)
            certificates.paths(GATEWAY, WORKER, directory="decode")
            handle = await gateway.hand_off(prefill, decode, list(range(1, 200)), 12)
            await decode.until(lambda: decode.ended(handle))
            assert handle in decode.failures
    refusals = [(log["method"], log["names"]) for log in logs if log["event"] == "call refused"]
    assert {name for name, _ in refusals} == {"/baton.v1.KvBytes/Read"}
    assert refusals[0][1] == ["gateway.baton.internal", "worker.baton.internal"]


async def test_health_alone_is_there_without_tls_at_a_port_of_its_own(certificates: Certificates) -> None:
    (health_port,) = free_ports("127.0.0.1", 1)
    files = certificates.files(PREFILL, WORKER)
    worker = make_worker(WorkerRole.PREFILL, MemoryFabric(), tls=files, health_address=f"127.0.0.1:{health_port}")
    async with serving(worker), grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as channel:
        found = {method: await use(channel, method) for method in ANSWERS}
    unknown = grpc.StatusCode.UNIMPLEMENTED
    assert found == {method: grpc.StatusCode.OK if method in HEALTH else unknown for method in ANSWERS}


async def test_operators_ask_and_drain(served: Served) -> None:
    """The launcher's probe, and `baton drain --mtls`."""
    operator = served.certificates.paths(OPERATOR).chain.parent
    assert await grpc_serving(served.address, operator)(0)
    assert not await grpc_serving(served.address)(0)
    with pytest.raises(Refusal, match=r"Drain is for gateway.baton.internal or operator.baton.internal, not for dec"):
        await asyncio.to_thread(drain, served.address, 0.0, served.certificates.paths(DECODE).chain.parent)
    with pytest.raises(Refusal, match="cannot be drained"):
        await asyncio.to_thread(drain, served.address, 0.0)
    assert await asyncio.to_thread(drain, served.address, 0.0, operator) == 0
