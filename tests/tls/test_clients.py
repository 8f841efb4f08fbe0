"""TLS with clients: which versions are spoken, who is refused, and new certificates while clients are connected."""

import asyncio
import datetime
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import grpc
import httpx2
import openai
import pytest

from protos import inference_pb2, inference_pb2_grpc
from services.gateway.http.http_protocol import GOODBYE_S
from services.launcher.authority import Authority
from services.tls.contexts import server_context
from services.tls.files import CertificateFiles, CertificatePaths
from tests.certificates import Certificates
from tests.gateway.running_api import MAX_BODY_BYTES, MODEL, Api, running_api

NAMES = ("localhost", "127.0.0.1", "::1")
IDLE_S = 0.5  # less than a server gives idle connections when it stops


def front(paths: CertificatePaths) -> CertificateFiles:
    """As --tls-cert and --tls-key name them: clients show no certificate."""
    return CertificateFiles(CertificatePaths(paths.chain, paths.key))


@pytest.fixture
async def api(certificates: Certificates) -> AsyncIterator[Api]:
    async with running_api(tls=front(certificates.paths(*NAMES, directory="front"))) as running:
        yield running


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.certificate.decode())


async def serial_seen(port: int, context: ssl.SSLContext) -> str:
    """The serial number of the certificate that a new connection is shown."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    del reader
    serial: str = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return serial


async def test_the_official_client_speaks_to_it(api: Api, authority: Authority, certificates: Certificates) -> None:
    """By the environment variable that `baton up --tls` names, and by a context."""
    file = certificates.root / "front" / "ca.crt"
    script = "import openai, sys; c = openai.OpenAI(base_url=sys.argv[1], api_key='none', max_retries=0);"
    script += "print(c.completions.create(model=sys.argv[2], prompt='Hi').choices[0].text)"
    command = [sys.executable, "-c", script, f"{api.base_url}/v1", MODEL]
    environment = os.environ | {"SSL_CERT_FILE": str(file)}
    run = lambda: subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    done = await asyncio.to_thread(run)
    assert (done.stdout, done.returncode) == ("Hello\n", 0), done.stderr
    async with openai.AsyncOpenAI(
        base_url=f"{api.base_url.replace('127.0.0.1', 'localhost')}/v1",
        api_key="none",
        http_client=openai.DefaultAsyncHttpxClient(verify=trusting(authority)),
    ) as client:
        stream = await client.completions.create(model=MODEL, prompt="Hi", stream=True)
        assert "".join([part.choices[0].text async for part in stream]) == "Hello"


async def test_a_client_that_does_not_trust_the_authority_refuses(api: Api, other_authority: Authority) -> None:
    with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        await api.complete()
    async with httpx2.AsyncClient(verify=trusting(other_authority)) as client:
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.get(f"{api.base_url}/health")


async def test_http_is_spoken_over_tls_1_3_alone(api: Api, authority: Authority) -> None:
    context = trusting(authority)
    _, writer = await asyncio.open_connection("127.0.0.1", api.port, ssl=context)
    assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
    writer.close()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", api.port, ssl=context)


async def test_a_client_that_still_sends_gets_its_refusal(
    api: Api, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """TLS has no end for one direction alone: the connection stays until the client has read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port, ssl=trusting(authority))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {8 << 20}"
    writer.write(head.encode() + b"\r\n\r\n" + bytes(MAX_BODY_BYTES + 1))
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()
    writer.close()
    assert [record.message for record in caplog.records] == []  # as of an exception in the server


SERVING = """
import asyncio, sys
import uvloop
from pathlib import Path
from services.gateway.http import http_protocol
from services.gateway.http.serving import serving
from services.gateway.listening import listen
from services.process.signals import on_ending_signals
from services.tls.contexts import server_context
from services.tls.files import CertificateFiles, CertificatePaths

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"end"})

http_protocol.IDLE_S = float(sys.argv[2])

async def main():
    listener = listen("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    paths = CertificatePaths.in_directory(Path(sys.argv[1]))
    files = CertificateFiles(CertificatePaths(paths.chain, paths.key))
    told = asyncio.Event()
    on_ending_signals(told.set, told.set)
    async with serving(app, listener, server_context(files, http_protocol.plain_http_answer())) as server:
        await told.wait()
        await server.stop(120)

asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
"""


def test_clients_that_say_no_goodbye_do_not_hold_up_a_server_that_stops(
    certificates: Certificates, authority: Authority
) -> None:
    """One that has its answer over TLS, and one that spoke plain HTTP and was told so."""
    command = [sys.executable, "-c", SERVING, str(certificates.paths(*NAMES).chain.parent), str(IDLE_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with (
            socket.create_connection(("127.0.0.1", port)) as stranger,
            socket.create_connection(("127.0.0.1", port)) as plain,
            trusting(authority).wrap_socket(plain, server_hostname="127.0.0.1") as client,
        ):
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            assert stranger.recv(65536).startswith(b"HTTP/1.1 400 Bad Request\r\n")
            client.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
            started = time.monotonic()
            server.terminate()
            assert server.wait(60) == 0
            assert time.monotonic() - started < IDLE_S + GOODBYE_S + 8  # and not 30 s later


def test_nothing_is_kept_of_what_a_client_of_plain_http_sends_after_its_answer(certificates: Certificates) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = server_context(front(certificates.paths(*NAMES)), b"answer").wrap_bio(incoming, outgoing, True)
    for sent in (b"POST / HTTP/1.1\r\n\r\n", bytes(1 << 20), bytes(1 << 20)):
        incoming.write(sent)
        with pytest.raises(ssl.SSLWantReadError):
            connection.do_handshake()
    assert (incoming.pending, outgoing.read()) == (0, b"answer")


async def test_new_connections_are_shown_the_newest_certificate_and_old_ones_go_on(
    api: Api, authority: Authority, certificates: Certificates
) -> None:
    context = trusting(authority)
    first = await serial_seen(api.port, context)
    async with httpx2.AsyncClient(verify=context) as client:
        assert (await client.get(f"{api.base_url}/health")).status_code == 200
        certificates.paths(*NAMES, directory="front")
        assert await serial_seen(api.port, context) != first
        (certificates.root / "front" / "tls.key").write_text("nonsense")
        assert await serial_seen(api.port, context) != first
        assert (await client.get(f"{api.base_url}/health")).status_code == 200


async def test_an_expired_certificate_is_shown_and_refused_by_clients(
    certificates: Certificates, authority: Authority
) -> None:
    past = datetime.timedelta(days=-1)
    async with running_api(tls=front(certificates.paths(*NAMES, lifetime=past))) as api:
        with pytest.raises(ssl.SSLCertVerificationError, match="certificate has expired"):
            await asyncio.open_connection("127.0.0.1", api.port, ssl=trusting(authority))


async def generate(port: int, credentials: grpc.ChannelCredentials | None) -> str:
    address = f"127.0.0.1:{port}"
    channel = (
        grpc.aio.insecure_channel(address) if credentials is None else grpc.aio.secure_channel(address, credentials)
    )
    async with channel:
        request = inference_pb2.GenerateRequest(text="Hi")
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
        return "".join([answer.text async for answer in call])


async def test_grpc_is_spoken_over_tls(
    api: Api, authority: Authority, other_authority: Authority, capfd: pytest.CaptureFixture[str]
) -> None:
    port = await api.start_grpc()
    assert await generate(port, grpc.ssl_channel_credentials(authority.certificate)) == "Hello"
    with pytest.raises(grpc.aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
        await generate(port, grpc.ssl_channel_credentials(other_authority.certificate))
    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
        await generate(port, None)
    assert "Handshake failed with error SSL_ERROR_SSL" in capfd.readouterr().err


async def test_new_connections_over_grpc_are_shown_the_newest_certificate(
    api: Api, authority: Authority, certificates: Certificates
) -> None:
    context, port = trusting(authority), await api.start_grpc()
    context.set_alpn_protocols(["h2"])
    first = await serial_seen(port, context)
    assert await serial_seen(port, context) == first
    certificates.paths(*NAMES, directory="front")
    assert await serial_seen(port, context) != first


async def test_grpc_is_spoken_over_tls_1_2_too(api: Api, authority: Authority) -> None:
    """Python's gRPC has no setting for the lowest version."""
    port = await api.start_grpc()
    assert await shakes_hands(port, authority, ssl.TLSVersion.TLSv1_2)
    assert await shakes_hands(port, authority, ssl.TLSVersion.TLSv1_3)


SERVER = """
import asyncio, sys
from pathlib import Path
import grpc
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.grpc_ends import open_port

async def main():
    server = grpc.aio.server()
    paths = CertificatePaths.in_directory(Path(sys.argv[1]))
    print(open_port(server, "127.0.0.1:0", CertificateFiles(CertificatePaths(paths.chain, paths.key))), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


async def test_an_environment_variable_of_grpc_leaves_tls_1_2_without_a_cipher(
    certificates: Certificates, authority: Authority
) -> None:
    """As docs/run/tls.md says: none of its keys are shared beforehand."""
    environment = os.environ | {"GRPC_SSL_CIPHER_SUITES": "ECDHE-PSK-AES128-CBC-SHA"}
    command = [sys.executable, "-c", SERVER, str(certificates.paths(*NAMES).chain.parent), str(IDLE_S)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        assert not await shakes_hands(port, authority, ssl.TLSVersion.TLSv1_2)
        assert await shakes_hands(port, authority, ssl.TLSVersion.TLSv1_3)
        server.kill()


async def shakes_hands(port: int, authority: Authority, version: ssl.TLSVersion) -> bool:
    context = trusting(authority)
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except (ssl.SSLError, ConnectionError):
        return False
    writer.close()
    return True


@pytest.mark.parametrize("request_line", ["GET /health", "POST /v1/completions"])
async def test_plain_http_gets_an_answer_that_names_https_and_the_log_has_it_once(api: Api, request_line: str) -> None:
    for _ in range(2):
        async with asyncio.timeout(120):
            reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
            writer.write(f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            body = await reader.readexactly(length)
            writer.close()
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"https://" in body
    async with httpx2.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{api.port}/health")
    assert answer.json()["error"]["message"].endswith("its URL begins with https://.")
    assert [line["event"] for line in api.logs if "plain HTTP" in line["event"]] == [
        "a client speaks plain HTTP at a port for TLS; its URL begins with https://"
    ]


async def test_tls_at_a_port_for_plain_text_is_answered_and_said_once() -> None:
    async with running_api() as api:
        for _ in range(2):
            async with httpx2.AsyncClient() as client:
                with pytest.raises(httpx2.ConnectError, match=r"(?i)wrong.version"):
                    await client.get(f"https://127.0.0.1:{api.port}/health")
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(bytes.fromhex("160301020001000001fc0303"))
        answer = await asyncio.wait_for(reader.read(), 120)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"its URL begins with http://." in answer
        assert [line["event"] for line in api.logs if "begins TLS" in line["event"]] == [
            "a client begins TLS at a port for plain text; its URL begins with http://"
        ]
