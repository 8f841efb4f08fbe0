"""Garbage collections of this process: their number, the time that they took, and on request a log line for each.

A collection stops all threads. `gc.freeze` after the start keeps them short; what a step or a request leaves behind
for the collector makes them frequent.
"""

import gc
import threading
import time
from collections import Counter
from queue import SimpleQueue

import structlog

log = structlog.get_logger()


class GcWatch:
    """Counts collections from now on. logged_types: each is logged, with so many of the types that it looked at."""

    def __init__(self, logged_types: int | None = None) -> None:
        self.num_collections = 0
        self.pause_s = 0.0  # of all collections
        self._logged_types = logged_types
        self._looked_at: dict[str, int] = {}
        self._started = 0.0
        # A collection may begin while its thread holds the log's lock: another thread writes the lines.
        self._lines: SimpleQueue[dict[str, object]] = SimpleQueue()
        if logged_types is not None:
            threading.Thread(target=self._write, name="gc log", daemon=True).start()
        gc.callbacks.append(self._on_collection)

    def close(self) -> None:
        """Ends the count."""
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            if self._logged_types:
                self._looked_at = _common_types(info["generation"], self._logged_types)
            self._started = time.perf_counter()
            return
        pause_s = time.perf_counter() - self._started
        self.num_collections += 1
        self.pause_s += pause_s
        if self._logged_types is not None:
            line: dict[str, object] = {**info, "pause_ms": round(pause_s * 1e3, 3)}
            self._lines.put(line | {"types": self._looked_at} if self._logged_types else line)

    def _write(self) -> None:
        while True:
            log.info("garbage collection", **self._lines.get())


def _common_types(generation: int, number: int) -> dict[str, int]:
    """The most common types, and how many objects of each the collection of a generation looks at, younger ones too."""
    counts: Counter[str] = Counter()
    for younger in range(generation + 1):
        counts.update(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects(younger))
    return dict(counts.most_common(number))
