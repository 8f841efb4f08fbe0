"""A stranger, who has neither key nor certificate, comes to ports and prints what each answers, as JSON.

python -m tests.faults.stranger CA HOST:PORT ...     CA: the authority's certificate, which is no secret

For each port: as plain text, as TLS without a certificate, as TLS with a certificate of the stranger's own authority,
and by gRPC. `unreachable`: no connection; `closed`: it ended without a word; `silent`: it stays, without a word;
`refused`: TLS ends it, in its words; `HTTP/2`: it is spoken there; else the first line that came, or gRPC's word.
"""

import contextlib
import json
import socket
import ssl
import sys
import tempfile
from pathlib import Path

import grpc

from protos import inference_pb2, inference_pb2_grpc
from services.launcher.authority import Authority
from services.tls.files import CertificatePaths
from services.tls.roles import CertificateRole

_PATIENCE_S = 0.5
_ALERT = b"\x15\x03"  # how a refusal of TLS begins
_SETTINGS = b"\x04" + bytes(5)  # kind, flags and stream of the first frame of HTTP/2, which precedes all questions
# What servers of several kinds would answer: HTTP, Redis, and HTTP/2, whose beginning is no request of the others.
_QUESTIONS = (
    *(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for path in ("/v1/models", "/metrics", "/debug/ledger")),
    b"PING\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
)
UNREACHABLE, CLOSED, SILENT, REFUSED, HTTP2 = "unreachable", "closed", "silent", "refused", "HTTP/2"


def answers_of(target: str, authorities: Path, own: CertificatePaths) -> dict[str, str]:
    """All that a port answers, by the way of asking."""
    host, _, port = target.rpartition(":")
    address = host, int(port)
    return {
        "plain": _all_answers(address, None),
        "tls": _all_answers(address, _context()),
        "own certificate": _all_answers(address, _context(own)),
        "grpc": _grpc(target, authorities),
    }


def _all_answers(address: tuple[str, int], context: ssl.SSLContext | None) -> str:
    return ", ".join(sorted({_ask(address, context, question) for question in _QUESTIONS}))


def _ask(address: tuple[str, int], context: ssl.SSLContext | None, question: bytes) -> str:
    try:
        connection = socket.create_connection(address, timeout=5)
    except OSError:
        return UNREACHABLE
    with contextlib.ExitStack() as opened:
        opened.enter_context(connection)
        try:
            if context is not None:
                connection = opened.enter_context(context.wrap_socket(connection))
            connection.settimeout(_PATIENCE_S)
            connection.sendall(question)
            answer = connection.recv(4096)
        except ssl.SSLError:
            return REFUSED
        except TimeoutError:
            return SILENT
        except OSError:
            return CLOSED
    if answer.startswith(_ALERT):
        return REFUSED
    if answer[3:9] == _SETTINGS:
        return HTTP2
    return answer.split(b"\r\n")[0].decode("latin-1") if answer else CLOSED


def _context(own: CertificatePaths | None = None) -> ssl.SSLContext:
    """Believes every server. own: what is shown to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    if own is not None:
        context.load_cert_chain(own.chain, own.key)
    return context


def _grpc(target: str, authorities: Path) -> str:
    """Asks for an answer of the model."""
    credentials = grpc.ssl_channel_credentials(authorities.read_bytes())
    with grpc.secure_channel(target, credentials) as channel:
        try:
            next(
                inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="Hi"), timeout=5)
            )
        except grpc.RpcError as error:
            return str(error.code().name)
    return "answered"


def main() -> None:
    """See above."""
    authorities, targets = Path(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as directory:
        own = Authority("a stranger's").issue([CertificateRole.GATEWAY.dns_name], Path(directory))
        print(json.dumps({target: answers_of(target, authorities, own) for target in targets}))


if __name__ == "__main__":
    main()
