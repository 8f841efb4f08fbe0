"""The keys file: JSON with a secret and an entry for each key. It is read by gateways and written by `baton keys`.

A file is replaced as a whole, so that a reader finds the old one or the new one. Whoever changes it holds a lock on
its directory meanwhile.
"""

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from services.files.followed import FileContent, FileRefused, read_file
from services.gateway.keys.key_entry import KeyEntry, new_secret

MODE = 0o600

_OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class KeysFileError(FileRefused):
    """A keys file that cannot be used or changed. The message is one line for a person, and has nothing secret."""


def _unique(entries: tuple[KeyEntry, ...]) -> tuple[KeyEntry, ...]:
    if len({entry.id for entry in entries}) < len(entries):
        raise ValueError("two keys have one id")
    return entries


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    version: Literal[1] = 1
    secret: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    keys: Annotated[tuple[KeyEntry, ...], AfterValidator(_unique)] = ()


@dataclass(frozen=True, slots=True)
class KeysFile:
    """The content of a keys file."""

    secret: bytes
    entries: tuple[KeyEntry, ...]


def read_keys(path: Path) -> KeysFile:
    """Reads a keys file. Raises KeysFileError, also where others may read or change it."""
    return keys_of(read_file(path, KeysFileError))


def keys_of(content: FileContent) -> KeysFile:
    """The keys of a file that was read. Raises KeysFileError, also where others may read or change it."""
    if (wrong := what_is_wrong(content.found, is_mounted_secret(content.path))) is not None:
        raise KeysFileError(f"{content.path}: {wrong}")
    return _parsed(content.path, content.data)


def what_is_wrong(found: os.stat_result, mounted_secret: bool) -> str | None:
    """Returns why a file with this owner and these rights is not to be trusted; None: it is.

    mounted_secret: it is where Kubernetes mounts Secrets, whose files all of the pod may read.
    """
    if not stat.S_ISREG(found.st_mode):
        return "it is no file"
    if found.st_uid not in (0, os.geteuid()):
        return "it belongs to another user: the keys of a gateway belong to the user that it runs as, or to root"
    if found.st_mode & _OTHERS_WRITE:
        return "other users may change it: run chmod 600 on it"
    if found.st_mode & _OTHERS_READ and not (mounted_secret and found.st_uid == 0):
        return "other users may read it: run chmod 600 on it"
    return None


def is_mounted_secret(path: Path) -> bool:
    """True for a link as kubelet makes it: keys.json -> ..data/keys.json, where ..data names the newest version."""
    return path.is_symlink() and os.readlink(path).startswith("..data/")


def _parsed(path: Path, data: bytes) -> KeysFile:
    try:
        content = _Content.model_validate_json(data)
    except ValidationError as error:
        raise KeysFileError(f"{path}: {words_of(error)}") from None
    return KeysFile(bytes.fromhex(content.secret), content.keys)


def words_of(error: ValidationError) -> str:
    """Returns the place and the reason of the first fault, and nothing of the values."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    return f"{where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"


def change_keys(path: Path, change: Callable[[KeysFile], Sequence[KeyEntry]], *, create: bool = False) -> None:
    """Gives a file the entries that `change` returns. create: one that is not there is made. Raises KeysFileError."""
    target = Path(os.path.realpath(path))  # a link stays one
    try:
        with _locked(target.parent):
            found = KeysFile(new_secret(), ()) if create and not target.exists() else read_keys(path)
            _replace(target, found.secret, change(found))
    except OSError as error:
        raise KeysFileError(f"{path} cannot be changed: {error.strerror}") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace(target: Path, secret: bytes, entries: Sequence[KeyEntry]) -> None:
    content = _Content(secret=secret.hex(), keys=tuple(entries))
    handle, partial = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)  # with MODE
    try:
        with os.fdopen(handle, "w") as file:
            file.write(content.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except OSError:
        Path(partial).unlink(missing_ok=True)
        raise
