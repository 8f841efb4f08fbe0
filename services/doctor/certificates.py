"""Certificates in files: tried as a process tries them, and how long they last, for whom, and who may read the key."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from services.doctor.finding import Finding, error, note, ok, warning
from services.files.followed import FileRefused, read_file
from services.gateway.keys.file import is_mounted_secret, what_is_wrong
from services.tls.certificate import TlsError
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.roles import CertificateRole

SOON = timedelta(days=14)


def check_between_processes(directory: Path) -> list[Finding]:
    """Looks at a directory of `--mtls`."""
    paths = CertificatePaths.in_directory(directory)
    return [*_check_files(paths), *_names(paths, between_processes=True)]


def check_for_clients(chain: Path, key: Path) -> list[Finding]:
    """Looks at the files of `--tls-cert` and `--tls-key`."""
    paths = CertificatePaths(chain, key)
    return [*_check_files(paths), *_names(paths, between_processes=False)]


def _check_files(paths: CertificatePaths) -> list[Finding]:
    try:
        CertificateFiles(paths)
    except TlsError as reason:
        fit = error("files", str(reason), "no process starts with these; one that runs keeps the older ones")
    else:
        fit = ok("files", f"{paths.chain} fits its key" + ("" if paths.authorities is None else " and its authority"))
    now, chain = datetime.now(UTC), _parse(paths.chain)
    authorities = [] if paths.authorities is None else _parse(paths.authorities)
    lasting = [check_expiry("certificate", chain, now)] if chain else []
    return [fit, *lasting, *check_authorities(authorities, now), check_key_file(paths.key)]


def check_authorities(authorities: list[x509.Certificate], now: datetime) -> list[Finding]:
    """Tells when the last of them ends: beside a new one, the old one may have ended."""
    if not authorities:
        return []
    ended = [certificate for certificate in authorities if certificate.not_valid_after_utc <= now]
    findings = [check_expiry("authority", [max(authorities, key=lambda each: each.not_valid_after_utc)], now)]
    if ended and len(ended) < len(authorities):
        findings.append(note("ended authorities", f"{len(ended)} beside it", "take them out of the file"))
    return findings


def _parse(file: Path) -> list[x509.Certificate]:
    """Returns the certificates of a file; none where it cannot be used, of which `CertificateFiles` says why."""
    try:
        return x509.load_pem_x509_certificates(read_file(file).data)
    except (FileRefused, ValueError):
        return []


def check_expiry(name: str, certificates: list[x509.Certificate], now: datetime) -> Finding:
    """Tells when the first of them ends, and whether all have begun."""
    end = min(certificate.not_valid_after_utc for certificate in certificates)
    start = max(certificate.not_valid_before_utc for certificate in certificates)
    if now < start:
        return error(name, f"begins at {start:%Y-%m-%d %H:%M} UTC", "look at this machine's clock, or wait")
    if end <= now:
        return error(name, f"ended at {end:%Y-%m-%d %H:%M} UTC", "renew it: processes take new files by themselves")
    found = f"lasts until {end:%Y-%m-%d %H:%M} UTC ({(end - now).days} days)"
    if end - now < SOON:
        return warning(name, found, "renew it: processes take new files by themselves")
    return ok(name, found)


def check_key_file(file: Path) -> Finding:
    """Tells whether others may read or change a key, as gateways do for the keys file."""
    try:
        found = file.stat()
    except OSError as reason:
        return error("key", f"{file}: {reason.strerror}", "name a file that this user can read")
    if (wrong := what_is_wrong(found, is_mounted_secret(file))) is not None:
        return warning("key", f"{file}: {wrong}", f"chmod 600 {file}: whoever reads it can pass for this process")
    return ok("key", f"{file} is for its owner alone")


def _names(paths: CertificatePaths, *, between_processes: bool) -> list[Finding]:
    if not (chain := _parse(paths.chain)):
        return []
    names = _names_of(chain[0])
    shown = ", ".join(names) or "none"
    if not between_processes:
        return [ok("names", shown) if names else error("names", shown, "clients find no name that they asked for")]
    roles = [role for role in CertificateRole if role.dns_name in names]
    if not roles:
        wanted = ", ".join(role.dns_name for role in CertificateRole)
        return [error("roles", f"none among the names: {shown}", f"DNS names that count: {wanted}")]
    lacks_worker = CertificateRole.WORKER not in roles
    if lacks_worker and (CertificateRole.PREFILL in roles or CertificateRole.DECODE in roles):
        return [error("roles", ", ".join(roles), f"a worker's certificate also has {CertificateRole.WORKER.dns_name}")]
    found = [ok("roles", ", ".join(roles))]
    if CertificateRole.GATEWAY in roles and len(roles) > 1:
        found.append(note("roles together", "one certificate for several processes: whoever has it can do all of that"))
    return found


def _names_of(certificate: x509.Certificate) -> list[str]:
    """Returns the DNS names and IP addresses."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]
