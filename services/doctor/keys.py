"""The keys file of a gateway, read as the gateway reads it."""

from pathlib import Path

from services.config import Right
from services.doctor.finding import Finding, error, ok, warning
from services.gateway.keys.file import KeysFileError, read_keys


def check_keys(file: Path) -> list[Finding]:
    """Looks at who may read the file, at its form, and at what its keys open."""
    try:
        entries = read_keys(file).entries
    except KeysFileError as reason:
        return [error("file", str(reason), "a gateway refuses this file; `baton keys add FILE` makes a new one")]
    if not entries:
        return [warning("file", f"{file} has no key: nobody gets in", "baton keys add FILE")]
    tenants = len({entry.tenant for entry in entries})
    admins = sum(Right.ADMIN in entry.rights for entry in entries)
    return [ok("file", f"keys: {len(entries)}, tenants: {tenants}, keys with the right admin: {admins}")]
