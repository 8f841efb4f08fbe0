"""The reload of a keys file that has changed. One that cannot be used changes nothing, and is tried again."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import structlog

from services.files.followed import FileContent, FollowedFiles
from services.gateway.keys.authentication import Keys, no_quota
from services.gateway.keys.file import KeysFile, KeysFileError, keys_of
from services.gateway.keys.key_entry import QuotaMaker

INTERVAL_S = 1.0
_REFUSED = "the keys file cannot be used; the keys stay as they were"

log = structlog.get_logger()


class FollowedKeys:
    """The keys of a file, as it is now. keys: these and the plain ones."""

    def __init__(self, path: Path, plain: Sequence[str] = (), quota: QuotaMaker = no_quota) -> None:
        """Reads the file. Raises KeysFileError."""
        self.keys = Keys(plain, None, quota)
        self._file = FollowedFiles([path], self._take, KeysFileError, _REFUSED)

    def refused_s(self) -> float:
        """Seconds since the file as it is now was first refused; 0.0: its keys are those that open."""
        return self._file.refused_s()

    async def follow(self, interval_s: float = INTERVAL_S) -> NoReturn:
        """Looks at the file again and again, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await self.look()

    async def look(self) -> None:
        """Looks at the file once, and takes its keys where they are others."""
        if await asyncio.to_thread(self._file.look):
            log.info("keys reloaded", num_keys=len(self.keys))

    def _take(self, contents: Sequence[FileContent], older: KeysFile | None) -> KeysFile:
        file = keys_of(contents[0])
        if file != older:
            self.keys.use(file)
        return file
