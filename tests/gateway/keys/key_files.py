"""Keys for tests: those of two tenants and of an operator, in memory or in a file."""

from dataclasses import dataclass
from pathlib import Path

from services.config import Right
from services.gateway.keys.authentication import Keys
from services.gateway.keys.changes import add_key
from services.gateway.keys.file import read_keys
from services.gateway.keys.key_entry import RateLimits


@dataclass(frozen=True)
class KeySet:
    """A keys file, and the keys that are not in it. patient: its requests have priority 5 or more."""

    path: Path
    acme: str
    other: str
    patient: str
    operator: str
    file_secret: str

    def keys(self) -> Keys:
        return Keys(("plain-key",), read_keys(self.path))

    @property
    def secrets(self) -> tuple[str, ...]:
        return self.acme, self.other, self.patient, self.operator, self.file_secret


def write_keys(path: Path) -> KeySet:
    def key(tenant: str, rights: tuple[Right, ...] = (Right.API,), priority: int = 0) -> str:
        return add_key(path, tenant, rights, priority, RateLimits())[1]

    found = key("acme"), key("other"), key("patient", priority=5), key("staff", (Right.ADMIN,))
    return KeySet(path, *found, read_keys(path).secret.hex())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
