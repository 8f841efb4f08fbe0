"""Findings on certificates and on the keys file."""

import datetime
from pathlib import Path

import pytest
from cryptography import x509

from services.config import Right
from services.doctor.certificates import check_authorities, check_between_processes, check_for_clients
from services.doctor.finding import Level
from services.doctor.keys import check_keys
from services.gateway.keys.changes import add_key, revoke_key
from services.gateway.keys.key_entry import RateLimits
from services.launcher.authority import Authority
from services.tls.files import CertificatePaths
from services.tls.roles import CertificateRole
from tests.certificates import Certificates
from tests.doctor.findings import levels, named

GATEWAY, DECODE, WORKER = CertificateRole.GATEWAY, CertificateRole.DECODE, CertificateRole.WORKER
LONG = datetime.timedelta(days=60)


def directory_of(paths: CertificatePaths) -> Path:
    return paths.chain.parent


def test_good_certificates_are_fine(certificates: Certificates) -> None:
    directory = directory_of(certificates.paths(DECODE, WORKER, lifetime=datetime.timedelta(days=20)))
    found = check_between_processes(directory)
    assert set(levels(found).values()) == {Level.OK}
    assert named(found, "roles").found == "worker, decode"


def test_a_certificate_that_ends_within_two_weeks_is_a_warning(certificates: Certificates) -> None:
    found = check_between_processes(directory_of(certificates.paths(GATEWAY, lifetime=datetime.timedelta(days=13))))
    assert levels(found)["certificate"] is Level.WARNING
    assert levels(found)["files"] is Level.OK


def test_one_that_has_ended_is_an_error(certificates: Certificates) -> None:
    found = check_between_processes(directory_of(certificates.paths(GATEWAY, lifetime=datetime.timedelta(days=-1))))
    assert levels(found)["certificate"] is levels(found)["files"] is Level.ERROR


def test_an_authority_that_has_ended_beside_one_that_has_not_is_no_error(tmp_path: Path) -> None:
    """As while authorities are replaced."""

    def authority(days: int) -> x509.Certificate:
        certificates = Certificates(Authority(f"of {days} days"), tmp_path)
        lifetime = datetime.timedelta(days=days)
        return x509.load_pem_x509_certificate(certificates.paths("a", lifetime=lifetime).chain.read_bytes())

    ended, lasting, now = authority(-1), authority(60), datetime.datetime.now(datetime.UTC)
    found = check_authorities([ended, lasting], now)
    assert levels(found) == {"authority": Level.OK, "ended authorities": Level.NOTE}
    assert levels(check_authorities([ended, ended], now)) == {"authority": Level.ERROR}
    assert check_authorities([], now) == []


def test_so_is_a_client_s_one_which_no_authority_is_named_for(certificates: Certificates) -> None:
    paths = certificates.paths("localhost", lifetime=datetime.timedelta(days=-1))
    assert levels(check_for_clients(paths.chain, paths.key))["certificate"] is Level.ERROR


def test_one_of_another_authority_is_an_error(certificates: Certificates, other_authority: Authority) -> None:
    paths = certificates.trusting(certificates.paths(GATEWAY, by=other_authority, lifetime=LONG))
    found = check_between_processes(directory_of(paths))
    assert named(found, "files").level is Level.ERROR
    assert "is refused by" in named(found, "files").found


def test_a_key_of_another_certificate_is_an_error(certificates: Certificates) -> None:
    paths, other = certificates.paths("localhost", lifetime=LONG), certificates.paths("localhost", lifetime=LONG)
    assert levels(check_for_clients(paths.chain, other.key))["files"] is Level.ERROR


@pytest.mark.parametrize("names", [("some.host",), (DECODE,)], ids=["no role", "half a worker"])
def test_names_that_no_process_goes_by_are_an_error(
    names: tuple[CertificateRole | str, ...], certificates: Certificates
) -> None:
    found = check_between_processes(directory_of(certificates.paths(*names, lifetime=LONG)))
    assert levels(found)["roles"] is Level.ERROR


def test_a_key_that_others_may_read_is_a_warning(certificates: Certificates) -> None:
    paths = certificates.paths(GATEWAY, lifetime=LONG)
    assert levels(check_between_processes(directory_of(paths)))["key"] is Level.OK
    paths.key.chmod(0o644)
    assert levels(check_between_processes(directory_of(paths)))["key"] is Level.WARNING


def test_files_that_are_not_there_or_no_certificates_are_errors(tmp_path: Path) -> None:
    assert levels(check_between_processes(tmp_path)) == {"files": Level.ERROR, "key": Level.ERROR}
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).write_text("no certificate")
        (tmp_path / name).chmod(0o600)
    assert levels(check_between_processes(tmp_path)) == {"files": Level.ERROR, "key": Level.OK}


def test_a_keys_file_is_read_as_gateways_read_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    _, key = add_key(file, "acme", [Right.API], 0, RateLimits())
    add_key(file, "staff", [Right.ADMIN], 0, RateLimits())
    (found,) = check_keys(file)
    assert (found.level, found.found) == (Level.OK, "keys: 2, tenants: 2, keys with the right admin: 1")
    assert key not in found.found

    file.chmod(0o644)
    (found,) = check_keys(file)
    assert found.level is Level.ERROR
    assert "other users may read it" in found.found


def test_a_keys_file_without_keys_or_of_another_form_is_told(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    id, _ = add_key(file, "acme", [Right.API], 0, RateLimits())
    revoke_key(file, id)
    assert [found.level for found in check_keys(file)] == [Level.WARNING]
    file.write_text("{}")
    assert [found.level for found in check_keys(file)] == [Level.ERROR]
    assert [found.level for found in check_keys(tmp_path / "none")] == [Level.ERROR]
