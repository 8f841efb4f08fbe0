"""What a port says to a stranger, who has neither a certificate nor a key: in the words of the table "Ports".

python -m tests.e2e.strangers HOST:PORT ...     prints the words for each, as JSON; for use in another network
"""

import json
import re
import socket
import ssl
import sys
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import grpc
import httpx2

from tests.test_docs import API

T = TypeVar("T")

NOTHING, UNREACHABLE = "nothing", "unreachable"
_TIMEOUT_S = 5.0
_PATIENCE_S = 2.0  # with a port that takes what comes, and never says a word
_REFUSED = (401, 403)
_HEALTH = "/grpc.health.v1.Health/Check"
_METHODS = ("/baton.v1.Inference/ListModels", "/baton.v1.Worker/Unknown", "/grpc.reflection.v1alpha.ServerReflection/X")
_NOBODY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class _Hello(NamedTuple):
    """The answer to a handshake without a certificate. certificate: the port's, as PEM."""

    certificate: bytes
    refused: bool


def documented_paths() -> set[str]:
    """All paths of the gateway's ports for HTTP."""
    section = API.read_text().partition("\n## Endpoints\n")[2].partition("\n`/debug/ledger` is JSON")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    return {re.sub(r"\b(ID|NAME)\b", "x", path) for cell in cells for path in re.findall(r"`([^`]+)`", cell)}


def answer_of(host: str, port: int, paths: Set[str]) -> str:
    """Tries a connection, TLS, HTTP and gRPC, plain and over TLS. Raises OSError where nobody listens."""
    socket.create_connection((host, port), timeout=_TIMEOUT_S).close()
    plain = _over_http(f"http://{host}:{port}", paths) or _over_grpc(grpc.insecure_channel(f"{host}:{port}"))
    hello = _hello(host, port)
    if hello is None:
        return plain or NOTHING
    assert plain is None, "plain text beside TLS"
    if hello.refused:
        return "TLS; refused without a certificate"
    credentials = grpc.ssl_channel_credentials(hello.certificate)
    over_grpc = lambda: _over_grpc(grpc.secure_channel(f"{host}:{port}", credentials))
    return f"TLS; {_over_http(f'https://{host}:{port}', paths) or over_grpc() or NOTHING}"


def _hello(host: str, port: int) -> _Hello | None:
    """Begins TLS without a certificate; None where none is spoken."""
    with socket.create_connection((host, port), timeout=_PATIENCE_S) as plain:
        try:
            connection = _anybody().wrap_socket(plain)
        except OSError:
            return None
        with connection:
            assert connection.version() == "TLSv1.3"
            shown = ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"").encode()
            try:
                refused = not connection.recv(1)  # gRPC's server speaks first, if not to this client
            except TimeoutError:  # HTTP's waits for a request
                refused = False
            except ssl.SSLError:  # Redis' ends it, by an alert
                refused = True
    return _Hello(shown, refused)


def _anybody() -> ssl.SSLContext:
    """Whose certificate it is does not matter."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])  # gRPC's servers want it
    return context


def _over_http(url: str, paths: Set[str]) -> str | None:
    """Words for the answers to GET of all paths; None where no HTTP is spoken but to say that it is TLS."""
    with httpx2.Client(base_url=url, verify=_anybody(), trust_env=False, timeout=_TIMEOUT_S) as client:
        try:
            refused = client.get("/", timeout=_PATIENCE_S)
        except httpx2.TransportError:
            return None
        if refused.status_code == 400 and "its URL begins with https://" in refused.text:
            return None
        opened = sorted(path for path in paths if _status(client, path) not in _REFUSED)
    return "serves HTTP" if len(opened) == len(paths) else f"401, but {', '.join(f'`{path}`' for path in opened)}"


def _status(client: httpx2.Client, path: str) -> int:
    """The status of an answer, which may be a stream without an end."""
    with client.stream("GET", path) as answer:
        return answer.status_code


def _over_grpc(channel: grpc.Channel) -> str | None:
    """Words for the answers to calls; None where no gRPC is spoken."""
    with channel:
        if _code(channel, _HEALTH, _PATIENCE_S) in _NOBODY:
            return None
        codes = [_code(channel, method, _TIMEOUT_S) for method in _METHODS]
    num_refused = codes.count(grpc.StatusCode.UNAUTHENTICATED)
    assert num_refused in (0, len(codes))
    return "`UNAUTHENTICATED`, but health" if num_refused else "serves gRPC"


def _code(channel: grpc.Channel, method: str, timeout_s: float) -> grpc.StatusCode:
    call: Any = channel.unary_unary(method)
    try:
        call(b"", timeout=timeout_s)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def side_by_side(ask: Callable[[T], str], targets: Sequence[T]) -> list[str]:
    """Asks all of them at once: what never says a word takes all of the patience with it."""
    with ThreadPoolExecutor(len(targets)) as pool:
        return list(pool.map(ask, targets))


def main(targets: list[str]) -> None:
    """See above."""
    paths = documented_paths()

    def answer(target: str) -> str:
        host, _, port = target.rpartition(":")
        try:
            return answer_of(host, int(port), paths)
        except OSError:
            return UNREACHABLE

    print(json.dumps(dict(zip(targets, side_by_side(answer, targets), strict=True))))


if __name__ == "__main__":
    main(sys.argv[1:])
