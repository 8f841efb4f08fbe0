"""One life of a process on one host, and whether that life is seen to be over. Linux only.

A process id is used again, so a life is named by the id and the time of its start, beside the kernel and the process
namespace in which both mean something. Only what is read from this kernel just now counts: whoever cannot be looked up
from here may be alive, and elsewhere than on Linux nothing is ever seen.

A life that is over has given back its memory and closed its connections. What it had sent before may still be on its
way to others.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
_BOOT_ID_LENGTH = 36
_ENDED = frozenset("ZXx")  # states in /proc/PID/stat of a process that runs no more


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Names one life of a process. Raises ValueError for an id that names no single process."""

    boot_id: str  # of the running kernel
    pid_namespace: int  # its inode
    pid: int  # in that namespace
    start_ticks: int  # after the kernel's start

    def __post_init__(self) -> None:
        if not 0 < self.pid < 1 << 31:  # 0 and what is negative stand for groups of processes
            raise ValueError(f"{self.pid} is no process id")

    @classmethod
    def own(cls) -> "ProcessIdentity | None":
        """Names this process; None where it cannot be told."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """Names the process that has this id here now; None where it cannot be told, or there is none."""
        place, stat = _place(), _stat(pid)
        if place is None or stat is None or stat.has_ended:
            return None
        return cls(place.boot_id, place.pid_namespace, pid, stat.start_ticks)

    def is_seen_alive(self) -> bool:
        """True when this life can be looked up from here, and is not over.

        False may mean as well that it is on another host, or that its start cannot be read.
        """
        return self == ProcessIdentity.of(self.pid)

    def is_seen_gone(self) -> bool:
        """True when this life is over: no process has its id, another life has it, or only its parent has not looked.

        Worth something only where it was seen alive from here before: a copy of a virtual machine has the same boot id
        and namespaces, and other processes.
        """
        if _place() != (self.boot_id, self.pid_namespace):
            return False
        try:
            os.kill(self.pid, 0)  # not by looking into /proc, which may hide what belongs to others
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # there is one, of another user
        stat = _stat(self.pid)
        return stat is not None and (stat.start_ticks != self.start_ticks or stat.has_ended)


def boot_id() -> str:
    """Names this run of the kernel. Raises OSError where the kernel does not tell."""
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
        """True when no thread of the process runs any more, though its parent may not have looked yet.

        The first thread alone says little: it can end before the others, which then still have the memory and the
        connections. A thread stops being counted, or the first one's state changes, only after it let go of both.
        """
        return self.state in _ENDED and self.num_threads <= 1


def _place() -> _Place | None:
    """The place of this process; None where it cannot be told, or /proc is that of another namespace."""
    try:
        if os.readlink(_PROC / "self") != str(os.getpid()):
            return None
        return _Place(boot_id(), os.stat(_PROC / "self/ns/pid").st_ino)
    except OSError:
        return None


def _stat(pid: int) -> _Stat | None:
    """None where there is no such process, or it is hidden."""
    try:
        line = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = line.rpartition(")")[2].split()  # the program's name, before it, may hold anything; fields from the 3rd on
    return _Stat(state=fields[0], num_threads=int(fields[17]), start_ticks=int(fields[19]))
