"""One life of a process on one host, and proof that the process is alive or gone. Linux only.

A process id is used again, so a life is named by the id and the start time of the process, beside the kernel and the
process namespace in which both mean something. Proof is what this kernel says at the time of the call. A process that
cannot be looked up from here may be alive; on other systems than Linux no process is ever seen alive or gone.

A process that is gone has no memory and no connection any more. Bytes that it sent before may still be on their way.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
_BOOT_ID_LENGTH = 36
_ENDED = frozenset("ZXx")  # states in /proc/PID/stat of a process that has ended


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Names one life of a process. Raises ValueError for an id that names no single process."""

    boot_id: str  # of the running kernel
    pid_namespace: int  # its inode
    pid: int  # in that namespace
    start_ticks: int  # after the kernel's start

    def __post_init__(self) -> None:
        if not 0 < self.pid < 1 << 31:  # 0 and negative numbers stand for groups of processes
            raise ValueError(f"{self.pid} is no process id")

    @classmethod
    def own(cls) -> "ProcessIdentity | None":
        """Names this process; None where /proc does not tell."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """Names the process that has this id here now; None where there is none or /proc does not tell."""
        place, stat = _place(), _stat(pid)
        if place is None or stat is None or stat.has_ended:
            return None
        return cls(place.boot_id, place.pid_namespace, pid, stat.start_ticks)

    def is_seen_alive(self) -> bool:
        """True when this process can be looked up from here and runs.

        False may also mean that the process is on another host, or that its start time cannot be read.
        """
        return self == ProcessIdentity.of(self.pid)

    def is_seen_gone(self) -> bool:
        """True when no process or a later one has the id, or the process ended and its parent has not reaped it.

        The answer is proof only of a process that was seen alive from here before: a copy of a virtual machine has the
        same boot id and namespaces, and other processes.
        """
        if _place() != (self.boot_id, self.pid_namespace):
            return False
        try:
            os.kill(self.pid, 0)  # /proc may hide processes of other users
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # the id belongs to a process of another user
        stat = _stat(self.pid)
        return stat is not None and (stat.start_ticks != self.start_ticks or stat.has_ended)


def boot_id() -> str:
    """Names this run of the kernel: 36 characters. Raises OSError where the kernel does not tell."""
    return _BOOT_ID.read_text()[:_BOOT_ID_LENGTH]


class _Place(NamedTuple):
    """A run of a kernel and a process namespace: process ids mean something within both."""

    boot_id: str
    pid_namespace: int


class _Stat(NamedTuple):
    """The fields of /proc/PID/stat that are read here."""

    state: str
    num_threads: int
    start_ticks: int

    @property
    def has_ended(self) -> bool:
        """True when no thread of the process runs any more, though its parent may not have reaped it yet.

        The state of the first thread is not enough: it can end before other threads, which still have the memory and
        the connections. The kernel stops to count a thread, and changes the state of the first one, only after that
        thread has detached from both.
        """
        return self.state in _ENDED and self.num_threads <= 1


def _place() -> _Place | None:
    """Names the place of this process; None where /proc does not tell, or belongs to another namespace."""
    try:
        if os.readlink(_PROC / "self") != str(os.getpid()):
            return None
        return _Place(boot_id(), os.stat(_PROC / "self/ns/pid").st_ino)
    except OSError:
        return None


def _stat(pid: int) -> _Stat | None:
    """Reads /proc/PID/stat; None where there is no such process, or it is hidden."""
    try:
        line = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = line.rpartition(")")[2].split()  # from the 3rd field on; the 2nd, a program's name, may contain anything
    return _Stat(state=fields[0], num_threads=int(fields[17]), start_ticks=int(fields[19]))
