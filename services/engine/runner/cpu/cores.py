"""Cores shared by the CPU workers of one host: a step that runs alone has all of them, others a share.

A table in shared memory has a row for each worker: its process id and its current work. A worker reads the table when
it starts a step, and again during the step. A new worker takes the row of a process that has ended.

A step that only decodes has an equal share among all steps. A step that computes prompts shares only with other steps
that compute prompts: a decode step beside it takes few threads for a short time, and a share for it would leave cores
idle until prefill reads the table again. Requests/s of 64 prompts of 462 tokens, prefill and decode apart on 2 cores of
a Xeon, by the class avx512_bf16: 2.66 to 2.67, with equal shares 2.02 to 2.04; ms from token to token 254 to 257, and
173 to 175.

No worker waits for another, with one exception: between two steps that only decode, a worker pauses for a while if
another one computes prompts.

    prefill   ███████████████████████████████████████████████████████
    decode    ███▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁███▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁████████████████ ...
              step     pause                          nobody computes prompts any more

A step costs about the same for a few sequences as for many. Decoding at full pace beside prefill would take half of the
cores for the few sequences that are there so far; sequences that come during a pause share the next step.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil

_DIRECTORY = Path("/dev/shm")
_ROWS = 256
_COLUMNS = 4
_PID, _SINCE, _ENDED, _PROMPTS = range(_COLUMNS)
_STALE_NS = 60_000_000_000  # a step does not take so long: its worker died in it
_BETWEEN_STEPS_NS = 5_000_000  # a worker whose last step ended so recently is about to begin another
# A pause is as long as so many steps, up to a limit. 64 prompts of 462 tokens at once, 16 tokens each, prefill and
# decode apart on 2 cores of a Xeon with AMX, came to these requests/s, ms from token to token, and ms from the first
# token to the second, by steps/limit in ms: 8/220: 17.8, 116, 185; 10/300: 17.6, 119, 218; 15/400: 17.2, 123, 290. In
# another run, 6/150 and 8/220: 17.1 and 17.8 requests/s.
_PAUSE_STEPS = 8
_LONGEST_PAUSE_NS = 220_000_000
_LOOK_AGAIN_S = 0.002
# In a step of prompts, a thread sleeps after it waited this long for another thread, whose core a decode step may have
# taken for a while: spinning, it would keep its own core from both. 64 prompts of 462 tokens on 2 cores of an EPYC of
# Zen 4, prefill and decode apart, medians of three: 4.76 requests/s, and 4.51 where threads spin to the step's end.
PROMPTS_SPIN_MS = 1


class Threads(Protocol):
    """The calls of `OpenMP` that a share of the cores makes."""

    def set_num_threads(self, count: int) -> None: ...

    def spin(self, most_ms: int = ...) -> None: ...

    def sleep(self) -> None: ...


class StepCores(Protocol):
    """The cores of a runner's steps."""

    def begin(self, *, prompts: bool) -> None:
        """Starts a step, on the thread that runs it. prompts: the step computes many tokens of prompts."""

    def adjust(self) -> None:
        """Adapts the number of threads between two operations of a step, if it may change."""

    def adjust_for_prompts(self) -> None:
        """Does `adjust` in a step that computes many tokens of prompts."""

    def shares_prompts(self) -> bool:
        """Returns True if this step and one of another worker compute prompts."""

    def end(self) -> None:
        """Ends the step: its threads sleep, and other workers may have the cores."""


class CoreShare:
    """This process's row of the table, and its OpenMP team."""

    def __init__(
        self,
        openmp: Threads,
        num_threads: int | None = None,
        *,
        directory: Path = _DIRECTORY,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """num_threads: a fixed number of threads without pauses, whatever other workers do. None: as the module
        describes.

        clock_ns: the same clock for all workers of the host.
        """
        self._openmp = openmp
        self._cores = len(os.sched_getaffinity(0))
        self._fixed = num_threads
        self._clock_ns = clock_ns
        self._path = _path(directory)
        self._table, self._row = _join(self._path)
        self._current = 0
        self._prompts = False  # True: the last step computed prompts
        self._pause_until = 0

    @property
    def num_threads(self) -> int:
        """Returns the threads of the step that has begun."""
        return self._current

    def leave(self) -> None:
        """Frees the row. The last worker removes the table."""
        with _locked(self._path):
            self._table[self._row] = 0
            if not any(pid and psutil.pid_exists(pid) for pid in self._table[:, _PID].tolist()):
                self._path.unlink()

    def begin(self, *, prompts: bool) -> None:
        """Starts a step, on the thread that runs it. prompts: the step computes many tokens of prompts."""
        self._prompts = prompts
        self._table[self._row, _PROMPTS] = prompts
        self._table[self._row, _SINCE] = self._clock_ns()
        self._set(self._fixed or self._share())
        self._spin()

    def adjust(self) -> None:
        """Adapts the number of threads between two operations of a step: more if other steps have ended, fewer if
        others have begun.
        """
        count = self._fixed or self._share()
        if count < self._current:
            self._openmp.sleep()  # threads that leave the team now would spin until they join it again
            self._set(count)
            self._spin()
        else:
            self._set(count)

    def adjust_for_prompts(self) -> None:
        """Does `adjust` in a step that computes many tokens of prompts. Places that are passed often call it."""
        if self._prompts:
            self.adjust()

    def shares_prompts(self) -> bool:
        """Returns True if this step and one of another worker compute prompts."""
        return self._prompts and self._fixed is None and self._share() < self._cores

    def _spin(self) -> None:
        if self._prompts:
            self._openmp.spin(PROMPTS_SPIN_MS)
        else:
            self._openmp.spin()

    def _set(self, count: int) -> None:
        if count != self._current:
            self._openmp.set_num_threads(count)
            self._current = count

    def end(self) -> None:
        """Ends the step: its threads sleep, and other workers may have the cores."""
        row, now = self._table[self._row], self._clock_ns()
        took = now - int(row[_SINCE])
        self._pause_until = now if self._prompts else now + min(_PAUSE_STEPS * took, _LONGEST_PAUSE_NS)
        row[_ENDED] = now
        row[_SINCE] = 0
        self._openmp.sleep()

    def decode_pause_s(self) -> float:
        """Returns how many seconds to wait before asking again whether a step that only decodes may start; 0: now."""
        now = self._clock_ns()
        left = self._pause_until - now
        if left <= 0 or self._fixed is not None or not self._others_compute_prompts(now):
            return 0.0
        return min(left * 1e-9, _LOOK_AGAIN_S)

    def _share(self) -> int:
        sharing = self._stepping(self._clock_ns())
        if self._prompts:
            sharing &= self._table[:, _PROMPTS] != 0
        others = int(np.count_nonzero(sharing)) - 1
        return self._cores if others <= 0 else max(1, self._cores // (others + 1))

    def _others_compute_prompts(self, now: int) -> bool:
        active = self._stepping(now) | (self._table[:, _ENDED] > now - _BETWEEN_STEPS_NS)
        active[self._row] = False
        return bool(self._table[active, _PROMPTS].any())

    def _stepping(self, now: int) -> np.ndarray:
        """Returns the rows whose workers run a step, bool[rows]."""
        stepping: np.ndarray = self._table[:, _SINCE] > now - _STALE_NS
        return stepping


def _path(directory: Path) -> Path:
    """The file with the table of this user's workers on the same cores."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return directory / f"baton-cores-{os.getuid()}-{_COLUMNS}-{blake2b(cores.encode(), digest_size=8).hexdigest()}"


def _join(path: Path) -> tuple[np.ndarray, int]:
    """Returns the table, int64[rows, columns], and this process's row in it."""
    with _locked(path) as descriptor:
        os.ftruncate(descriptor, _ROWS * _COLUMNS * 8)
        table = np.frombuffer(mmap.mmap(descriptor, _ROWS * _COLUMNS * 8), dtype=np.int64).reshape(_ROWS, _COLUMNS)
        own, pids = os.getpid(), [int(pid) for pid in table[:, _PID]]
        free = [row for row, pid in enumerate(pids) if pid in (0, own) or not psutil.pid_exists(pid)]
        table[free] = 0
        table[free[0], _PID] = own
    return table, free[0]


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Opens the file, and holds its lock. Where another process removed it meanwhile, it is made anew."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(path, descriptor):
                yield descriptor
                return
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a mapping has a descriptor of its own
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
