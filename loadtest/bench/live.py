"""Percentiles while a run is under way, from the times of pieces alone: no answer is read for them.

A piece is what came from the network at once, mostly one token. The figures after the run are those of events.
"""

from dataclasses import dataclass

import numpy as np

from loadtest.bench.drive import Driver, Open

_SHORTEST_S, _LONGEST_S, _STEP = 1e-5, 1e4, 1.05
_EDGES = np.geomspace(_SHORTEST_S, _LONGEST_S, round(np.log(_LONGEST_S / _SHORTEST_S) / np.log(_STEP)) + 1)
_HEAD_END, _FINE = b"\r\n\r\n", b"200"


class Times:
    """Times in cells that are 5 % apart."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(_EDGES) + 1, dtype=np.int64)

    def add(self, seconds: np.ndarray) -> None:
        """Adds some."""
        self._counts += np.bincount(np.searchsorted(_EDGES, seconds), minlength=len(self._counts))

    def percentile(self, percent: float) -> float | None:
        """The time, in seconds, that so many percent do not exceed; None where there are none."""
        total = int(self._counts.sum())
        if not total:
            return None
        cell = int(np.searchsorted(self._counts.cumsum(), total * percent / 100))
        return float(_EDGES[min(cell, len(_EDGES) - 1)])


@dataclass(frozen=True, slots=True)
class Look:
    """A run at one moment. done: scripts; pieces_per_s: since the look before."""

    done: int
    failed: int
    open: int
    pieces_per_s: float


class Live:
    """Looks at a driver's answers again and again, and counts each piece once."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._seen: dict[int, int] = {}  # pieces, by the number of the request
        self._num_pieces = 0
        self._at_s: float | None = None
        self.ttft = Times()
        self.itl = Times()

    def look(self, at_s: float) -> Look:
        """Takes in what came since the last look. at_s: now, on the clock of the pieces."""
        recent = list(self._driver.recent)
        self._driver.recent.clear()
        before = self._num_pieces
        first, gaps = self._new_times([*recent, *self._driver.open.values()])
        self.ttft.add(np.array(first))
        self.itl.add(np.concatenate([*gaps, np.empty(0)]))
        self._seen = {number: seen for number, seen in self._seen.items() if number in self._driver.open}
        elapsed_s = at_s - self._at_s if self._at_s is not None else 0.0
        self._at_s = at_s
        rate = (self._num_pieces - before) / elapsed_s if elapsed_s else 0.0
        driver = self._driver
        return Look(driver.num_scripts_done, driver.num_failed, len(driver.open), rate)

    def _new_times(self, requests: list[Open]) -> tuple[list[float], list[np.ndarray]]:
        """Finds times to the first piece with a token, and those between pieces, that no look had yet."""
        first: list[float] = []
        gaps: list[np.ndarray] = []
        for request in requests:
            times_s = request.answer.times_s
            begin = _first_piece(request)
            if begin is None:
                continue
            seen = self._seen.get(request.number)
            if seen is None:
                first.append(times_s[begin] - request.sent_s)
                seen = begin + 1
            gaps.append(np.diff(times_s[seen - 1 :]))
            self._num_pieces += len(gaps[-1])
            self._seen[request.number] = len(times_s)
        return first, gaps


def _first_piece(request: Open) -> int | None:
    """The piece that has the first token: the second one, where the first has the head alone; None: none has come."""
    pieces = request.answer.pieces
    if pieces and pieces[0][9:12] != _FINE:
        return None
    begin = 1 if pieces and pieces[0].endswith(_HEAD_END) else 0
    return begin if begin < len(pieces) else None
