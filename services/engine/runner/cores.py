"""Cores shared by the CPU workers of one host: who steps alone has all of them, who does not an equal share.

A table in shared memory has a row for each worker: its process id, and since when it is stepping. Nobody waits for
anybody; a worker looks at the table when it starts a step, and again in between. A row of a process that is no more is
taken by the next one that comes.
"""

import fcntl
import mmap
import os
import time
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil

_DIRECTORY = Path("/dev/shm")
_ROWS = 256
_PID, _SINCE = 0, 1
_FORGOTTEN_NS = 60_000_000_000  # a step does not take so long: its worker died in it


class Threads(Protocol):
    """What a lease tells `OpenMP`."""

    def set_num_threads(self, count: int) -> None: ...

    def spin(self) -> None: ...

    def sleep(self) -> None: ...


class CoreLease:
    """This process's row, and its OpenMP team."""

    def __init__(self, openmp: Threads, num_threads: int | None = None, directory: Path = _DIRECTORY) -> None:
        """num_threads: always so many, whatever others do. None: as described."""
        self._openmp = openmp
        self._cores = len(os.sched_getaffinity(0))
        self._fixed = num_threads
        self._table, self._row = _join(directory)
        self._current = 0

    def begin(self) -> None:
        """A step starts. Called on the thread that runs it."""
        self._openmp.spin()
        self._table[self._row, _SINCE] = time.monotonic_ns()
        self.adjust()

    def adjust(self) -> None:
        """Between two operations of a step: more threads if others have stopped, fewer if others have begun."""
        count = self._fixed or self._share()
        if count != self._current:
            self._openmp.set_num_threads(count)
            self._current = count

    def end(self) -> None:
        """The step is over: its threads sleep, and others may have the cores."""
        self._table[self._row, _SINCE] = 0
        self._openmp.sleep()

    def _share(self) -> int:
        since = self._table[:, _SINCE]
        others = int(np.count_nonzero(since > time.monotonic_ns() - _FORGOTTEN_NS)) - 1
        return self._cores if others <= 0 else max(1, self._cores // (others + 1))


def _join(directory: Path) -> tuple[np.ndarray, int]:
    """The table of this user's workers that run on the same cores, int64[rows, 2], and this process's row in it."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    name = f"baton-cores-{os.getuid()}-{blake2b(cores.encode(), digest_size=8).hexdigest()}"
    descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, _ROWS * 2 * 8)
        table = np.frombuffer(mmap.mmap(descriptor, _ROWS * 2 * 8), dtype=np.int64).reshape(_ROWS, 2)
        own, pids = os.getpid(), [int(pid) for pid in table[:, _PID]]
        free = [row for row, pid in enumerate(pids) if pid in (0, own) or not psutil.pid_exists(pid)]
        table[free] = 0
        table[free[0], _PID] = own
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: the mapping has a descriptor of its own
        os.close(descriptor)
    return table, free[0]
