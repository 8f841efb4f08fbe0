"""Connections between ranks on different hosts, plain and with TLS."""

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from services.engine.runner.group.connection import Connection, ConnectionLostError, accepted, connect
from services.launcher.authority import Authority
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.rank_contexts import RankTls
from services.tls.roles import CertificateRole
from tests.certificates import Certificates

MOST_BYTES = 1 << 20
LIVELY_S, PATIENT_S = 0.4, 30.0

Ends = tuple[Connection, Connection]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(Authority(), tmp_path_factory.mktemp("certificates"))


@contextmanager
def listening() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server


@contextmanager
def ends(tls: tuple[RankTls | None, RankTls | None], patience_s: float = PATIENT_S) -> Iterator[Ends]:
    """Yields both ends: of who connected, and of who was connected to. Raises what the latter raises."""
    with listening() as server, ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        theirs = pool.submit(lambda: accepted(server.accept()[0], tls[1], most_bytes=MOST_BYTES, patience_s=patience_s))
        host, port = server.getsockname()
        try:
            mine = connect(host, port, tls[0], most_bytes=MOST_BYTES, patience_s=patience_s)
            stack.callback(mine.close)
        finally:
            with suppress(ConnectionLostError):
                stack.callback(theirs.result().close)
        yield mine, theirs.result()


@pytest.fixture(params=["plain", "TLS"])
def tls(request: pytest.FixtureRequest, certificates: Certificates) -> RankTls | None:
    return rank_tls(certificates.paths(CertificateRole.DECODE)) if request.param == "TLS" else None


def rank_tls(paths: CertificatePaths) -> RankTls:
    return RankTls(CertificateFiles(paths), CertificateRole.DECODE)


def test_messages_of_every_size_come_whole_and_in_order_both_ways_at_once(tls: RankTls | None) -> None:
    source = random.Random(1)
    sizes = [1, 2, 3, 4, 5, 65_535, 65_536, 262_143, 262_144, 262_145, MOST_BYTES]
    sizes += [source.randrange(1, 3000) for _ in range(200)]
    messages = [source.randbytes(size) for size in sizes]

    def send(end: Connection) -> None:
        for message in messages:
            middle = len(message) // 2
            end.send((message[:middle], message[middle:]))

    def receive(end: Connection) -> list[bytes]:
        return [bytes(end.receive()) for _ in messages]

    with ends((tls, tls)) as both, ThreadPoolExecutor(4) as pool:
        for end in both:
            end.beat()
        sent = [pool.submit(send, end) for end in both]
        received = [pool.submit(receive, end) for end in both]
        for future in sent:
            future.result()
        for received_by_one in received:
            assert received_by_one.result() == messages


@pytest.mark.long
def test_an_end_that_only_beats_is_not_lost(tls: RankTls | None) -> None:
    with ends((tls, tls), LIVELY_S) as (mine, theirs), ThreadPoolExecutor(1) as pool:
        theirs.beat()
        waiting = pool.submit(mine.receive)
        threading.Event().wait(2 * LIVELY_S)
        theirs.send((b"at last",))
        assert waiting.result() == b"at last"


def test_silence_is_loss(tls: RankTls | None) -> None:
    with ends((tls, tls), LIVELY_S) as (mine, _), pytest.raises(ConnectionLostError, match=r"nothing came for 0.4 s"):
        mine.receive()


@pytest.mark.long
def test_patience_may_end_later(tls: RankTls | None) -> None:
    with ends((tls, tls)) as (mine, theirs):
        theirs.send((b"loaded",))
        mine.receive()
        mine.set_patience(LIVELY_S)
        with pytest.raises(ConnectionLostError, match="nothing came"):
            mine.receive()


def fill(end: Connection) -> None:
    while True:
        end.send((bytes(MOST_BYTES),))


@pytest.mark.long
def test_an_end_that_reads_nothing_is_lost(tls: RankTls | None) -> None:
    with ends((tls, tls), LIVELY_S) as (mine, _), pytest.raises(ConnectionLostError, match="nothing was read"):
        fill(mine)


@pytest.mark.parametrize("who", ["this end is", "the other end has"])
def test_closing_ends_a_wait_at_either_end(tls: RankTls | None, who: str) -> None:
    with ends((tls, tls)) as (mine, theirs), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(mine.receive)
        (mine if who.startswith("this") else theirs).close()
        with pytest.raises(ConnectionLostError, match=f"{who} closed"):
            waiting.result()
        assert mine.is_closed == who.startswith("this")


def test_nothing_is_sent_over_a_closed_connection(tls: RankTls | None) -> None:
    with ends((tls, tls)) as (mine, _):
        mine.close()
        with pytest.raises(ConnectionLostError, match="this end is closed"):
            mine.send((b"too late",))


def test_a_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    with listening() as server, closing(socket.create_connection(server.getsockname())) as stranger:
        end = accepted(server.accept()[0], None, most_bytes=MOST_BYTES, patience_s=PATIENT_S)
        with closing(end):
            stranger.sendall(struct.pack("<I", MOST_BYTES + 1))
            with pytest.raises(ConnectionLostError, match=f"a message of {MOST_BYTES + 1} bytes"):
                end.receive()


@pytest.mark.parametrize("stranger", ["role", "authority"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_stranger_at_either_end_is_not_trusted(certificates: Certificates, stranger: str, side: int) -> None:
    """In TLS 1.3 who connects is done before who was connected to has seen its certificate: it learns in a read."""
    good = rank_tls(certificates.paths(CertificateRole.DECODE))
    bad: Callable[[], CertificatePaths] = {
        "role": lambda: certificates.paths(CertificateRole.PREFILL),
        "authority": lambda: certificates.paths(CertificateRole.DECODE, by=Authority("another")),
    }[stranger]
    tls = (good, rank_tls(bad())) if side else (rank_tls(bad()), good)
    with pytest.raises(ConnectionLostError), ends(tls) as (mine, _):
        mine.receive()


def test_whoever_speaks_no_tls_is_refused(certificates: Certificates) -> None:
    tls = rank_tls(certificates.paths(CertificateRole.DECODE))
    with listening() as server, closing(socket.create_connection(server.getsockname())) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ConnectionLostError, match="http request"):
            accepted(server.accept()[0], tls, most_bytes=MOST_BYTES, patience_s=PATIENT_S)


def test_whoever_says_nothing_is_not_waited_for(certificates: Certificates) -> None:
    tls = rank_tls(certificates.paths(CertificateRole.DECODE))
    with (
        listening() as server,
        closing(socket.create_connection(server.getsockname())),
        pytest.raises(ConnectionLostError, match="no answer in time"),
    ):
        accepted(server.accept()[0], tls, most_bytes=MOST_BYTES, patience_s=LIVELY_S)


def test_an_address_where_nobody_listens_is_named() -> None:
    with listening() as server:
        host, port = server.getsockname()
    with pytest.raises(ConnectionLostError, match=f"{host}:{port}: connection refused"):
        connect(host, port, None, most_bytes=MOST_BYTES, patience_s=PATIENT_S)
