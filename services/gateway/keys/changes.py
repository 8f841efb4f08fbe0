"""The changes that `baton keys` makes to a keys file."""

from collections.abc import Collection
from pathlib import Path

from pydantic import ValidationError

from services.config import Right
from services.gateway.keys.file import KeysFile, KeysFileError, change_keys, words_of
from services.gateway.keys.key_entry import KeyEntry, RateLimits, key_digest, new_id, new_key, now


def add_key(path: Path, tenant: str, rights: Collection[Right], priority: int, limits: RateLimits) -> tuple[str, str]:
    """Adds a new key to a file, which is made where it is not there; returns the key's id, and the key.

    Raises KeysFileError.
    """
    id, key = new_id(), new_key()

    def added(file: KeysFile) -> list[KeyEntry]:
        entry = KeyEntry(
            id=id,
            tenant=tenant,
            hmac_sha256=key_digest(file.secret, key).hex(),
            rights=frozenset(rights),
            limits=limits,
            priority=priority,
            created=now(),
        )
        return [*file.entries, entry]

    try:
        change_keys(path, added, create=True)
    except ValidationError as error:
        raise KeysFileError(words_of(error)) from None
    return id, key


def revoke_key(path: Path, id: str) -> None:
    """Takes a key out of a file. Raises KeysFileError, also where the file has no such key."""

    def left(file: KeysFile) -> list[KeyEntry]:
        others = [entry for entry in file.entries if entry.id != id]
        if len(others) == len(file.entries):
            raise KeysFileError(f"{path} has no key {id}")
        return others

    change_keys(path, left)
