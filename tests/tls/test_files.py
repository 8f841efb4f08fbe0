"""Certificates in files: tried before they are used, and read again where they changed."""

import datetime
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.launcher.authority import Authority
from services.tls.certificate import TlsError
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.roles import CertificateRole
from tests.certificates import Certificates

GATEWAY, PREFILL, WORKER = CertificateRole.GATEWAY, CertificateRole.PREFILL, CertificateRole.WORKER
PAST = datetime.timedelta(days=-1)


def test_a_certificate_is_the_same_object_until_its_files_change(certificates: Certificates) -> None:
    files = CertificateFiles(certificates.paths(GATEWAY, directory="it"))
    first = files.current()
    assert files.current() is first
    certificates.paths(GATEWAY, directory="it")
    second = files.current()
    assert second.chain != first.chain
    assert files.current() is second


def test_files_that_are_exchanged_by_a_link_are_seen(certificates: Certificates, tmp_path: Path) -> None:
    """As a kubelet exchanges those of a Secret."""
    for name in ("old", "new"):
        certificates.paths(GATEWAY, directory=name)
    link = tmp_path / "..data"
    link.symlink_to(certificates.root / "old")
    files = CertificateFiles(CertificatePaths.in_directory(link))
    first = files.current()
    beside = tmp_path / "..tmp"
    beside.symlink_to(certificates.root / "new")
    beside.replace(link)
    assert files.current().chain != first.chain


def replace_key_alone(certificates: Certificates) -> None:
    new = certificates.paths(GATEWAY)
    new.key.replace(certificates.root / "it" / "tls.key")


def remove_the_key(certificates: Certificates) -> None:
    (certificates.root / "it" / "tls.key").unlink()


def write_nonsense(certificates: Certificates) -> None:
    (certificates.root / "it" / "tls.crt").write_text("nonsense")


def let_it_be_old(certificates: Certificates) -> None:
    certificates.paths(GATEWAY, directory="it", lifetime=PAST)


def give_it_another_role(certificates: Certificates) -> None:
    certificates.paths(PREFILL, directory="it")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (replace_key_alone, "are no certificate with its key"),
        (remove_the_key, "cannot be read: No such file or directory"),
        (write_nonsense, "are no certificate with its key"),
        (let_it_be_old, "certificate has expired"),
        (give_it_another_role, "is for prefill.baton.internal; here it must be for gateway.baton.internal"),
    ],
)
def test_files_that_cannot_be_used_leave_the_older_ones_in_use(
    certificates: Certificates, spoil: Callable[[Certificates], None], reason: str
) -> None:
    """Each change is tried and logged once; good files are taken again. At the start they are refused."""
    paths = certificates.paths(GATEWAY, directory="it")
    files = CertificateFiles(paths, [GATEWAY])
    good = files.current()
    spoil(certificates)
    with capture_logs() as logs:
        assert [files.current() for _ in range(3)] == [good] * 3
    (log,) = logs
    assert reason in log["reason"]
    with pytest.raises(TlsError, match=reason):
        CertificateFiles(paths, [GATEWAY])
    certificates.paths(GATEWAY, directory="it")
    assert files.current().chain != good.chain


def test_a_certificate_of_another_authority_is_refused(certificates: Certificates, other_authority: Authority) -> None:
    paths = certificates.trusting(certificates.paths(GATEWAY, by=other_authority))
    with pytest.raises(TlsError, match=r"tls.crt is refused by .*ca.crt: unable to get local issuer certificate"):
        CertificateFiles(paths)


def test_the_roles_that_are_missing_are_named(certificates: Certificates) -> None:
    with pytest.raises(TlsError, match=r"is for prefill.baton.internal; here it must be for worker.baton.internal$"):
        CertificateFiles(certificates.paths(PREFILL), [WORKER, PREFILL])


def test_without_authorities_the_other_side_shows_none(certificates: Certificates) -> None:
    paths = certificates.paths("localhost")
    assert CertificateFiles(CertificatePaths(paths.chain, paths.key)).current().authorities is None


def test_files_of_the_throw_away_authority_are_this_user_s_alone(certificates: Certificates) -> None:
    paths = certificates.paths(GATEWAY)
    assert {os.stat(path).st_mode & 0o777 for path in paths.all} == {0o600}
    assert paths.chain.parent.stat().st_mode & 0o777 == 0o700


def test_a_refusal_is_seen_where_nobody_asks_for_a_certificate(certificates: Certificates) -> None:
    paths = certificates.paths(GATEWAY, directory="it")
    files = CertificateFiles(paths)
    assert files.refused_s() == 0.0
    paths.key.write_text("half of a k")
    assert files.refused_s() > 0.0
    certificates.paths(GATEWAY, directory="it")
    assert files.refused_s() == 0.0
