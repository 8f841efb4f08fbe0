"""The reload of a keys file that has changed. One that cannot be used changes nothing, and is logged."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from services.gateway.keys.authentication import Keys, no_quota
from services.gateway.keys.entry import QuotaMaker
from services.gateway.keys.file import KeysFileError, read_keys

INTERVAL_S = 1.0

_Version = tuple[int, int, int, int]  # inode, rights, size, time of the last change

log = structlog.get_logger()


class FollowedKeys:
    """The keys of a file, as it is now. keys: these and the plain ones."""

    def __init__(self, path: Path, plain: Sequence[str] = (), quota: QuotaMaker = no_quota) -> None:
        """Reads the file. Raises KeysFileError."""
        self._path = path
        self._version = _version(path)  # before it is read: a change in between is found
        self.keys = Keys(plain, read_keys(path), quota)

    async def follow(self, interval_s: float = INTERVAL_S) -> None:
        """Looks at the file again and again, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            version = await asyncio.to_thread(_version, self._path)
            if version != self._version:
                self._version = version
                await self._reload()

    async def _reload(self) -> None:
        try:
            file = await asyncio.to_thread(read_keys, self._path)
        except KeysFileError as error:
            log.error("the keys file cannot be used; the keys stay as they were", reason=str(error))
            return
        self.keys.use(file)
        log.info("keys reloaded", num_keys=len(self.keys))


def _version(path: Path) -> _Version | None:
    """Returns what differs between two versions of a file; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns
