"""Machine code of kernels on disk, which a later process loads instead of compiling the kernels.

    <XDG_CACHE_HOME, or ~/.cache>/baton/kernels/<key>    a checksum of 32 bytes, then the code

The code is executed, so a directory or entry that another user owns or may write is not used. An entry is written whole
or not at all. If an entry cannot be read or written, the kernel is compiled.
"""

import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import structlog

_MOST_BYTES = 256 << 20  # of all entries; one is some 2 to 50 KiB
_MOST_AGE_S = 30 * 24 * 3600  # since an entry was written, or last read as far as the file system records that
_CHECKSUM_BYTES = 32
log = structlog.get_logger()


class CodeStore(Protocol):
    """Machine code by key. Keys are names of files. Several processes may use one store at the same time."""

    def find(self, key: str) -> bytes | None:
        """Returns the code that was kept under this key; None: there is none that may be used."""

    def keep(self, key: str, code: bytes) -> None:
        """Keeps the code under this key, in place of an earlier one, if that is possible."""


class NoStore:
    """Keeps nothing."""

    def find(self, key: str) -> bytes | None:
        """See `CodeStore.find`."""
        return None

    def keep(self, key: str, code: bytes) -> None:
        """See `CodeStore.keep`."""


class CodeDirectory:
    """Keeps each entry in a file. Logs the first error."""

    def __init__(self, path: Path) -> None:
        """path: need not exist."""
        self.path = path
        self._is_told = False

    def find(self, key: str) -> bytes | None:
        """See `CodeStore.find`."""
        try:
            with self._opened() as directory:
                return _read(directory, key)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell(error)
            return None

    def keep(self, key: str, code: bytes) -> None:
        """See `CodeStore.keep`. Removes other entries if all entries take too much room."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._opened() as directory:
                _write(directory, key, code)
                _make_room(directory)
        except OSError as error:
            self._tell(error)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Opens the directory. Its descriptor keeps naming the directory that was checked."""
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            check_owned(directory, str(self.path))
            yield directory
        finally:
            os.close(directory)

    def _tell(self, error: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            log.warning("compiled kernels are not kept", directory=str(self.path), reason=str(error))


@cache
def the_code_store() -> CodeStore:
    """Returns this user's code store."""
    try:
        return CodeDirectory(cache_directory() / "kernels")
    except RuntimeError as error:
        log.warning("compiled kernels are not kept", reason=str(error))
        return NoStore()


def cache_directory() -> Path:
    """Returns the directory for this user's files that may be lost. Raises RuntimeError if there is no such user, and
    no HOME.
    """
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache_home if cache_home.is_absolute() else Path.home() / ".cache") / "baton"


def check_owned(descriptor: int, name: str) -> None:
    """Raises PermissionError for a file or directory that other users may have written."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{name}: other users own or may write it")


def _checksum(key: str, code: bytes) -> bytes:
    return sha256(key.encode() + code).digest()


def _read(directory: int, key: str) -> bytes | None:
    with open(os.open(key, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory), "rb") as file:
        check_owned(file.fileno(), key)
        content = file.read()
    checksum, code = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    return code if checksum == _checksum(key, code) else None


def _write(directory: int, key: str, code: bytes) -> None:
    """Writes beside the entry, then renames: another process finds the whole entry or none."""
    partial = f".{key}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(os.open(partial, flags, mode=0o600, dir_fd=directory), "wb") as file:
            file.write(_checksum(key, code) + code)
        os.rename(partial, key, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(partial, dir_fd=directory)
        raise


def _make_room(directory: int) -> None:
    """Removes entries that were not used for long; then the least recently used ones, until the rest fits."""
    total, oldest = 0, time.time() - _MOST_AGE_S
    for used_at, size, name in sorted(_entries(directory), reverse=True):
        total += size
        if total > _MOST_BYTES or used_at < oldest:
            with suppress(FileNotFoundError):  # another process was faster
                os.unlink(name, dir_fd=directory)


def _entries(directory: int) -> Iterator[tuple[float, int, str]]:
    """Yields each entry's time of last use, its bytes and its name."""
    for name in os.listdir(directory):
        with suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            yield max(status.st_atime, status.st_mtime), status.st_size, name
