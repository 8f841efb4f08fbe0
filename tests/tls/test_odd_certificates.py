"""Certificates that are not valid yet, not any more, or have keys that TLS cannot use. New ones, while clients come."""

import datetime
import time

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from structlog.testing import capture_logs

from services.files import followed
from services.launcher.authority import Authority
from services.tls.certificate import TlsError
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.roles import CertificateRole
from tests.certificates import BOTH_SIDES, HOUR, Certificates, Key
from tests.failures import FAILURES, failing
from tests.gateway.running_api import running_api
from tests.tls.test_clients import NAMES, front, serial_seen, trusting

GATEWAY = CertificateRole.GATEWAY
SOON = datetime.timedelta(seconds=2)
FOR_CLIENTS = (ExtendedKeyUsageOID.CLIENT_AUTH,)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "RETRY_S", 0.05)


async def test_clients_are_shown_a_certificate_that_begins_later_when_it_has_begun(
    certificates: Certificates, authority: Authority
) -> None:
    context = trusting(authority)
    async with running_api(tls=front(certificates.paths(*NAMES, directory="front"))) as api:
        first = await serial_seen(api.port, context)
        with capture_logs() as logs:
            began = int(time.time() + SOON.total_seconds())  # a certificate's times are whole seconds
            certificates.odd_paths(*NAMES, directory="front", begins_in=SOON)
            seen = [await serial_seen(api.port, context)]
            while time.time() < began:  # it was seen before that
                assert seen[-1] == first
                seen.append(await serial_seen(api.port, context))
            seen.append(first)
            while seen[-1] == first:
                assert time.time() < began + 300
                seen.append(await serial_seen(api.port, context))
        assert [line["log_level"] for line in logs] == ["error", "info"]
        assert "cannot replace one that is in its time: certificate is not yet valid" in logs[0]["reason"]


async def test_clients_are_never_shown_a_certificate_that_has_ended_in_place_of_one_that_has_not(
    certificates: Certificates, authority: Authority
) -> None:
    context = trusting(authority)
    async with running_api(tls=front(certificates.paths(*NAMES, directory="front"))) as api:
        first = await serial_seen(api.port, context)
        certificates.odd_paths(*NAMES, directory="front", begins_in=-2 * HOUR, ends_in=-HOUR)
        assert await serial_seen(api.port, context) == first


@pytest.mark.parametrize("purposes", [BOTH_SIDES, FOR_CLIENTS], ids=["both sides", "for clients alone"])
@pytest.mark.parametrize(
    ("begins_in", "ends_in", "reason"),
    [(-2 * HOUR, -HOUR, "certificate has expired"), (HOUR, 2 * HOUR, "certificate is not yet valid")],
    ids=["ended", "not begun"],
)
def test_between_processes_one_out_of_its_time_is_refused_whatever_its_purpose(
    certificates: Certificates, purposes: tuple, begins_in: datetime.timedelta, ends_in: datetime.timedelta, reason: str
) -> None:
    files = CertificateFiles(certificates.odd_paths(GATEWAY, directory="it", purposes=purposes), [GATEWAY])
    good = files.current()
    certificates.odd_paths(GATEWAY, directory="it", purposes=purposes, begins_in=begins_in, ends_in=ends_in)
    with capture_logs() as logs:
        assert files.current() is good
    assert reason in logs[0]["reason"]


def test_the_roles_of_a_certificate_for_clients_alone_count(certificates: Certificates) -> None:
    paths = certificates.odd_paths(CertificateRole.PREFILL, directory="it", purposes=FOR_CLIENTS)
    with pytest.raises(TlsError, match=r"it must be for gateway\.baton\.internal$"):
        CertificateFiles(paths, [GATEWAY])


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (ec.generate_private_key(ec.SECP256K1()), "a key that TLS cannot use"),
        (ec.generate_private_key(ec.BrainpoolP256R1()), "a key that TLS cannot use"),
        (ec.generate_private_key(ec.SECP521R1()), "a key that gRPC cannot use"),
        (ed25519.Ed25519PrivateKey.generate(), "a key that gRPC cannot use"),
        (ed448.Ed448PrivateKey.generate(), "a key that gRPC cannot use"),
    ],
    ids=["secp256k1", "brainpool", "P-521", "Ed25519", "Ed448"],
)
def test_a_key_that_cannot_be_used_is_refused_in_words(certificates: Certificates, key: Key, reason: str) -> None:
    paths = certificates.paths(GATEWAY, directory="it")
    files = CertificateFiles(paths, [GATEWAY])
    good = files.current()
    certificates.odd_paths(GATEWAY, directory="it", key=key)
    with capture_logs() as logs:
        assert [files.current() for _ in range(3)] == [good] * 3
    assert reason in logs[0]["reason"]
    assert len(logs) == 1
    with pytest.raises(TlsError, match=reason):
        CertificateFiles(paths, [GATEWAY])


@pytest.mark.parametrize(
    "key", [ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048)], ids=["P-384", "RSA"]
)
def test_other_keys_of_grpc_are_taken(certificates: Certificates, key: Key) -> None:
    assert CertificateFiles(certificates.odd_paths(GATEWAY, directory="it", key=key), [GATEWAY]).current()


async def test_clients_keep_the_older_certificate_beside_a_key_that_tls_cannot_use(
    certificates: Certificates, authority: Authority
) -> None:
    context = trusting(authority)
    async with running_api(tls=front(certificates.paths(*NAMES, directory="front"))) as api:
        first = await serial_seen(api.port, context)
        certificates.odd_paths(*NAMES, directory="front", key=ec.generate_private_key(ec.SECP256K1()))
        assert await serial_seen(api.port, context) == first
        certificates.paths(*NAMES, directory="front")
        assert await serial_seen(api.port, context) != first


async def test_clients_are_shown_the_older_certificate_while_a_newer_one_cannot_be_loaded(
    certificates: Certificates, authority: Authority
) -> None:
    context = trusting(authority)
    async with running_api(tls=front(certificates.paths(*NAMES, directory="front"))) as api:
        first = await serial_seen(api.port, context)
        for failure in FAILURES:
            certificates.paths(*NAMES, directory="front")
            with capture_logs() as logs, failing("services.tls.contexts._context", failure):
                for _ in range(3):
                    assert await serial_seen(api.port, context) == first
            assert [line["log_level"] for line in logs] == ["info", "error"], logs
            newer = await serial_seen(api.port, context)
            assert newer != first
            first = newer


def test_where_there_is_no_better_one_clients_are_shown_one_that_has_ended(certificates: Certificates) -> None:
    """At the start, and in place of one that has ended too."""
    ended = lambda: certificates.odd_paths("localhost", directory="front", begins_in=-2 * HOUR, ends_in=-HOUR)
    paths = ended()
    files = CertificateFiles(CertificatePaths(paths.chain, paths.key))
    first = files.current()
    ended()
    assert files.current() != first
