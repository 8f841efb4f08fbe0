"""Resident memory of the stack's processes over their lives."""

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_S = 1.0
_WINDOW = 15  # samples of which the median is taken, at either end
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of one life of a process, in MiB: when the first quarter of the run was over, and at the end."""

    name: str
    before_mib: float
    after_mib: float

    @property
    def mib(self) -> float:
        return self.after_mib - self.before_mib


class Memory:
    """Samples of what /proc says of each life."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._samples: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)  # moment, MiB

    async def watch(self) -> None:
        """Takes samples for ever."""
        while True:
            for name, pid in self._pids().items():
                with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    self._samples[name, pid].append((time.perf_counter(), resident_mib(pid)))
            await asyncio.sleep(_SAMPLE_S)

    def growths(self, since_s: float) -> list[Growth]:
        """The lives that lasted from a moment on perf_counter's clock to now."""
        alive = set(self._pids().items())
        found = []
        for (name, pid), samples in sorted(self._samples.items()):
            later = [mib for at_s, mib in samples if at_s >= since_s]
            if (name, pid) in alive and later and samples[0][0] <= since_s:
                before, after = later[:_WINDOW], later[-_WINDOW:]
                found.append(Growth(name, statistics.median(before), statistics.median(after)))
        return found


def resident_mib(pid: int) -> float:
    """The memory of a process that is in RAM. Raises FileNotFoundError where it is gone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / _MIB
    raise ProcessLookupError(f"process {pid} has ended")
