"""The processes that have the weights of one name in memory, as a file tells them, and how the next one finds them.

    <XDG_CACHE_HOME, or ~/.cache>/baton/weights/<name>     a line for each: process id, when it started, descriptor

A process opens the weights of another by the other's descriptor (/proc/<pid>/fd), which needs nothing of the other: it
may be busy, or stopped. The file is only a hint. What a line names is opened, checked and believed if it is complete
and says itself that it has the weights of this name (`shared_file.open_sealed`): the process may have closed them
since, and may have another file by the same descriptor. A line of a process that is gone, of an older life of the
machine, or of another host that shares the directory names nothing (the name has the machine's boot and the process
namespace in it).

Whoever packs weights keeps the file locked (flock) until they are complete. The kernel frees the lock of a process that
dies, and its weights with it.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from services.engine.kernels.cpu.code_store import cache_directory, check_owned
from services.engine.kernels.cpu.shared_file import Mapping, SharedFileError, open_sealed, written_bytes

_LINE = re.compile(rb"(\d{1,10}) (\d{1,20}) (\d{1,7})")
_MOST_BYTES = 1 << 16  # of the file that are looked at
_LOOK_AGAIN_S = 0.05
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_OLD_S = 24 * 3600  # a file that nobody has written for so long is removed if nobody in it lives


class NotSharedError(Exception):
    """Weights cannot be shared: one line that says why."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has weights, or is packing them."""

    pid: int
    started: int  # in the clock ticks of /proc/<pid>/stat
    file: int  # its descriptor

    @property
    def path(self) -> str:
        """Returns the path of the file."""
        return f"/proc/{self.pid}/fd/{self.file}"

    @property
    def lives(self) -> bool:
        """Returns True if the process is the one that wrote the line."""
        return _started(self.pid) == self.started

    @classmethod
    def of_this_process(cls, file: int) -> "Holder":
        """Returns what others find this process by. Raises NotSharedError without /proc."""
        started = _started(os.getpid())
        if started is None:
            raise NotSharedError("/proc does not tell of this process")
        return cls(os.getpid(), started, file)


class HolderFile:
    """The file of one name, locked."""

    def __init__(self, file: int, name: str) -> None:
        self._file = file
        self.name = name

    def holders(self) -> list[Holder]:
        """Returns the processes of the file that live."""
        return _holders(self._file)

    def complete(self) -> Mapping | None:
        """Returns the weights of the first process that has all of them; None: nobody has."""
        for holder in self.holders():
            with suppress(SharedFileError):
                return open_sealed(holder.path, self.name)
        return None

    def add(self, own: Holder) -> None:
        """Adds this process in place of what the file said of it, and leaves out those that live no more."""
        self._write([*(each for each in self.holders() if each.pid != own.pid), own])

    def remove(self) -> bool:
        """Takes this process out. Returns True if nobody is left."""
        rest = [each for each in self.holders() if each.pid != os.getpid()]
        self._write(rest)
        return not rest

    def _write(self, holders: list[Holder]) -> None:
        lines = "".join(f"{each.pid} {each.started} {each.file}\n" for each in holders).encode()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, lines, 0)


class WeightHolders:
    """The holders of all names, by directory."""

    def __init__(self, directory: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """directory: None: this user's. Raises NotSharedError."""
        try:
            self._directory = cache_directory() / "weights" if directory is None else directory
        except RuntimeError as error:
            raise NotSharedError(str(error)) from error
        self._clock = clock

    @contextmanager
    def locked(self, name: str, *, patience_s: float, tell: Callable[[int, int], None]) -> Iterator[HolderFile]:
        """Locks the file of a name. Raises NotSharedError if that is not possible.

        While another process has it, waits as long as its weights become more: it may stand still for `patience_s`.
        tell: hears of the process that is waited for, and of the bytes that have come since the last time.
        """
        try:
            file = self._lock(name, patience_s, tell)
        except OSError as error:
            raise NotSharedError(f"{self._directory}: {error.strerror or error}") from error
        try:
            yield HolderFile(file, name)
        finally:
            os.close(file)

    def leave(self, name: str) -> None:
        """Takes this process out of the file of a name, at its end; and other files of which nobody lives. Errors and
        files that others have locked are passed over: the lines of a process that is gone are no harm.
        """
        with suppress(OSError):
            self._leave(name, is_own=True)
            for other in os.listdir(self._directory):
                path = self._directory / other
                if other != name and time.time() - path.stat().st_mtime > _OLD_S:
                    self._leave(other, is_own=False)

    def _leave(self, name: str, *, is_own: bool) -> None:
        path = self._directory / name
        file = _open(path, os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(file, path) and (HolderFile(file, name).remove() if is_own else not _holders(file)):
                path.unlink()
        finally:
            os.close(file)

    def _lock(self, name: str, patience_s: float, tell: Callable[[int, int], None]) -> int:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            check_owned(directory, str(self._directory))
        finally:
            os.close(directory)
        path, seen, came_on = self._directory / name, 0, self._clock()
        while True:
            file = _open(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_there(file, path):
                    return file
            except BlockingIOError:
                pass
            except BaseException:
                os.close(file)
                raise
            packing = _holders(file)
            os.close(file)
            written = (written_bytes(packing[-1].path) or 0) if packing else 0
            if written > seen:
                came_on = self._clock()
                tell(packing[-1].pid, written - seen)
                seen = written
            if self._clock() - came_on > patience_s:
                who = f"process {packing[-1].pid}" if packing else f"a process that has locked {path}"
                raise NotSharedError(f"{who} packs them, and has not come on for {patience_s:.0f} s")
            time.sleep(_LOOK_AGAIN_S)


def host_digest() -> str:
    """Returns a name of this life of this machine, and of the processes that see each other. Raises NotSharedError."""
    try:
        found = _BOOT.read_text(), os.readlink("/proc/self/ns/pid"), os.geteuid()
    except OSError as error:
        raise NotSharedError(f"/proc: {error.strerror}") from error
    return sha256(repr(found).encode()).hexdigest()


def _open(path: Path, flags: int) -> int:
    """Opens a file of lines. Raises OSError for one that other users own or may write."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode=0o600)
    try:
        check_owned(file, str(path))
    except BaseException:
        os.close(file)
        raise
    return file


def _is_there(file: int, path: Path) -> bool:
    """Returns False if the path was removed since the file was opened: another process has made another since."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    return False


def _holders(file: int) -> list[Holder]:
    lines = map(_LINE.fullmatch, os.pread(file, _MOST_BYTES, 0).split(b"\n"))
    found = [Holder(*(int(number) for number in line.groups())) for line in lines if line is not None]
    return [each for each in found if each.lives]


def _started(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since the boot; None: there is none."""
    with suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return int(stat[stat.rindex(b")") + 2 :].split()[19])
    return None
