"""Files that may change while a process runs. Those that belong together are taken together, or not at all.

A file may be wrong for a moment: half written, not readable yet, not valid yet, or read while no descriptor is left. So
a change counts as seen when its content was taken. Until then what was taken before stays in use, the reason is logged
once, and the files are tried again every RETRY_S, and at once where they change.

Reading never waits for a file: a pipe, a device and a directory are refused.

    FileRefused   a file that cannot be used; the message is one line for a person
"""

import os
import stat
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import structlog

RETRY_S = 2.0
MAX_BYTES = 32 << 20  # of one file

# A file that changes twice within one tick of the kernel's clock has one time of change for both. What changed less
# than this long before it was read is compared again, byte by byte.
_CLOCK_TICK_NS = 1_000_000_000

T = TypeVar("T")

log = structlog.get_logger()

_Stamp = tuple[int, ...]


class FileRefused(Exception):
    """A file cannot be used. The message is one line for a person."""


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file as it was read. found: what the system says of the file that was read, whatever its path names by now."""

    path: Path
    data: bytes = field(repr=False)  # may be secret
    found: os.stat_result


def read_file(path: Path, error: type[FileRefused] = FileRefused) -> FileContent:
    """Reads a regular file of at most MAX_BYTES. Raises `error`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise error(f"{path} cannot be read: it is no file")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror or reason}") from reason
    if len(data) > MAX_BYTES:
        raise error(f"{path} is larger than {MAX_BYTES} bytes")
    return FileContent(path, data, found)


@dataclass(frozen=True, slots=True)
class _Refusal:
    stamps: tuple[_Stamp, ...]  # of the files before they were read
    reason: str
    since: float  # of the first refusal in a row
    tried: float


class FollowedFiles(Generic[T]):
    """A value that is made of some files, and made again where they change. May be asked on any thread.

    `value` is that of the newest files that could be taken.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        take: Callable[[Sequence[FileContent], T | None], T],
        error: type[FileRefused],
        refused: str,
    ) -> None:
        """Takes the files. Raises `error`, and what else `take` raises.

        take: makes the value of the files' contents and of the older value, None at first. Whatever it raises later is
        a refusal. refused: the event that is logged then.
        """
        self._paths = tuple(paths)
        self._take = take
        self._error = error
        self._event = refused
        self._lock = threading.Lock()
        self._refusal: _Refusal | None = None
        self._contents, self._comparable = self._read()
        self.value = take(self._contents, None)

    def refused_s(self) -> float:
        """Seconds since the files as they are now were first refused; 0.0: `value` is made of them."""
        refusal = self._refusal
        return 0.0 if refusal is None else time.monotonic() - refusal.since

    def look(self) -> bool:
        """Looks at the files, and takes them where they have changed. Returns True where that is news.

        It is where `value` is another one now, or where the files were refused before.
        """
        with self._lock:
            stamps = tuple(map(_stamp_at, self._paths))
            if not self._is_due(stamps):
                return False
            older = self.value
            try:
                self._try()
            except Exception as error:  # whatever it is: the older value stays, and the next try may succeed
                self._refuse(stamps, error)
                return False
            was_refused, self._refusal = self._refusal is not None, None
            return was_refused or self.value != older

    def _is_due(self, stamps: tuple[_Stamp, ...]) -> bool:
        if self._refusal is not None:
            return stamps != self._refusal.stamps or time.monotonic() >= self._refusal.tried + RETRY_S
        return not self._comparable or stamps != _stamps(self._contents)

    def _try(self) -> None:
        contents, comparable = self._read()
        taken = self._contents
        unchanged = _stamps(contents) == _stamps(taken) and _data(contents) == _data(taken)
        if not unchanged:
            self.value = self._take(contents, self.value)
        self._contents, self._comparable = contents, comparable

    def _read(self) -> tuple[tuple[FileContent, ...], bool]:
        """Returns the contents of all files, and whether a later change is sure to change a stamp."""
        began = time.time_ns()
        contents = tuple(read_file(path, self._error) for path in self._paths)
        for content in contents:
            if _stamp_at(content.path) != _stamp(content.found):
                raise self._error(f"{content.path} changed while it was read")
        return contents, all(content.found.st_ctime_ns < began - _CLOCK_TICK_NS for content in contents)

    def _refuse(self, stamps: tuple[_Stamp, ...], error: Exception) -> None:
        reason = str(error) if isinstance(error, self._error) else _words(error)
        before, now = self._refusal, time.monotonic()
        if before is None or (before.stamps, before.reason) != (stamps, reason):
            log.error(self._event, reason=reason)
        self._refusal = _Refusal(stamps, reason, now if before is None else before.since, now)


def _stamp(found: os.stat_result) -> _Stamp:
    """A value that changes with a file's content, and with who may read it."""
    times = (found.st_mtime_ns, found.st_ctime_ns)
    return (found.st_dev, found.st_ino, found.st_size, *times, found.st_mode, found.st_uid, found.st_gid)


def _stamp_at(path: Path) -> _Stamp:
    try:
        return _stamp(path.stat())
    except OSError as error:
        return (error.errno or 0,)


def _stamps(contents: Sequence[FileContent]) -> tuple[_Stamp, ...]:
    return tuple(_stamp(content.found) for content in contents)


def _data(contents: Sequence[FileContent]) -> list[bytes]:
    return [content.data for content in contents]


def _words(error: Exception) -> str:
    """An error that nobody foresaw, with its place: a traceback's local variables may be secret."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
