"""Cores shared by the CPU workers of one host: a step that runs alone has all of them, others a share.

A table in shared memory has a row for each worker: its process id, and what it is doing. A worker looks at the table
when it starts a step, and again in between. A row of a process that is no more is taken by the next one that comes.

A step that only decodes has an equal share among all steps. One that computes prompts shares with its like alone: a
decode step beside it takes few threads for a short time, and would leave cores idle until prefill looks at the table
again. Requests/s of 64 prompts of 462 tokens, prefill and decode apart on 2 cores of a Xeon, by the class avx512_bf16:
2.66 to 2.67, with equal shares 2.02 to 2.04; ms from token to token 254 to 257, and 173 to 175.

Nobody waits for anybody, with one exception: between two steps that only decode, a worker lets prompts that another one
computes go first for a while.

    prefill   ███████████████████████████████████████████████████████
    decode    ███▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁███▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁████████████████ ...
              step     pause                          nobody computes prompts any more

A step costs about the same for a few sequences as for many, so decoding that goes on at full pace beside prefill takes
half of the cores for the few sequences that are there so far. Those that come during a pause share the next step.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil

_DIRECTORY = Path("/dev/shm")
_ROWS = 256
_COLUMNS = 4
_PID, _SINCE, _ENDED, _PROMPTS = range(_COLUMNS)
_FORGOTTEN_NS = 60_000_000_000  # a step does not take so long: its worker died in it
_BETWEEN_STEPS_NS = 5_000_000  # whose last step ended so recently is about to begin another
# 64 prompts of 462 tokens at once, 16 tokens each, prefill and decode apart on 2 cores: requests/s and ms from token to
# token, by the steps that a pause is long, and its limit in ms. 3/100: 15.2, 109; 6/150: 15.7, 126; 10/200: 16.2, 131.
_PAUSE_STEPS = 6
_LONGEST_PAUSE_NS = 150_000_000
_LOOK_AGAIN_S = 0.002


class Threads(Protocol):
    """What a lease tells `OpenMP`."""

    def set_num_threads(self, count: int) -> None: ...

    def spin(self) -> None: ...

    def sleep(self) -> None: ...


class CoreLease:
    """This process's row, and its OpenMP team."""

    def __init__(
        self,
        openmp: Threads,
        num_threads: int | None = None,
        *,
        directory: Path = _DIRECTORY,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """num_threads: always so many, and no pauses, whatever others do. None: as described.

        clock_ns: one for all workers of the host.
        """
        self._openmp = openmp
        self._cores = len(os.sched_getaffinity(0))
        self._fixed = num_threads
        self._clock_ns = clock_ns
        self._table, self._row = _join(directory)
        self._current = 0
        self._prompts = False  # of the last step
        self._pause_until = 0

    def begin(self, *, prompts: bool) -> None:
        """A step starts; prompts: it computes many tokens of them. Called on the thread that runs it."""
        self._prompts = prompts
        self._table[self._row, _PROMPTS] = prompts
        self._table[self._row, _SINCE] = self._clock_ns()
        self._set(self._fixed or self._share())
        self._openmp.spin()

    def adjust(self) -> None:
        """Between two operations of a step: more threads if others have stopped, fewer if others have begun."""
        count = self._fixed or self._share()
        if count < self._current:
            self._openmp.sleep()  # those that leave the team now would spin until they belong to it again
            self._set(count)
            self._openmp.spin()
        else:
            self._set(count)

    def adjust_for_prompts(self) -> None:
        """The same in a step that computes many tokens of prompts. For places that are passed often."""
        if self._prompts:
            self.adjust()

    def _set(self, count: int) -> None:
        if count != self._current:
            self._openmp.set_num_threads(count)
            self._current = count

    def end(self) -> None:
        """The step is over: its threads sleep, and others may have the cores."""
        row, now = self._table[self._row], self._clock_ns()
        took = now - int(row[_SINCE])
        self._pause_until = now if self._prompts else now + min(_PAUSE_STEPS * took, _LONGEST_PAUSE_NS)
        row[_ENDED] = now
        row[_SINCE] = 0
        self._openmp.sleep()

    def decode_pause_s(self) -> float:
        """How long to wait before asking again whether a step that only decodes may start; 0: now."""
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
        """bool[rows]"""
        stepping: np.ndarray = self._table[:, _SINCE] > now - _FORGOTTEN_NS
        return stepping


def _join(directory: Path) -> tuple[np.ndarray, int]:
    """The table of this user's workers on the same cores, int64[rows, columns], and this process's row in it."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    name = f"baton-cores-{os.getuid()}-{_COLUMNS}-{blake2b(cores.encode(), digest_size=8).hexdigest()}"
    descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, _ROWS * _COLUMNS * 8)
        table = np.frombuffer(mmap.mmap(descriptor, _ROWS * _COLUMNS * 8), dtype=np.int64).reshape(_ROWS, _COLUMNS)
        own, pids = os.getpid(), [int(pid) for pid in table[:, _PID]]
        free = [row for row, pid in enumerate(pids) if pid in (0, own) or not psutil.pid_exists(pid)]
        table[free] = 0
        table[free[0], _PID] = own
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: the mapping has a descriptor of its own
        os.close(descriptor)
    return table, free[0]
