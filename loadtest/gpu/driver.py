"""Runs parts one after the other, and reports each as soon as it has ended."""

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from loadtest.gpu.part_process import Outcome, PartProcess, Piece
from loadtest.gpu.parts import Part
from loadtest.gpu.results import Results

WITHOUT_GPU = "check"  # the one part that runs without a GPU
_GRACE_S = 45.0  # after the deadline, for the part that is under way then


class Driver:
    """One run. `failed`: a piece did not end well, or a check is beyond its bound."""

    def __init__(self, results: Results, *, deadline: float, seed: int) -> None:
        """Takes the time after which no part begins, of the monotonic clock, and the seed of random cases."""
        self.failed = False
        self._results = results
        self._deadline = deadline
        self._seed = seed

    def run(self, names: Sequence[str], parts: Mapping[str, Part]) -> None:
        """Runs each part in turn; a part that fails does not keep the next one from running."""
        with PartProcess(self._seed) as process:
            for name in names:
                if time.monotonic() > self._deadline:
                    self._results.note(f"{name}: left out, no time")
                    continue
                part, begin = parts[name], time.monotonic()
                outcomes = self._at_once(part) if part.at_once else self._in_turn(part, process)
                self._tell(name, part, outcomes)
                self._results.took(name, time.monotonic() - begin)

    def _in_turn(self, part: Part, process: PartProcess) -> list[Outcome]:
        return [process.run(piece, self._limit_s(part)) for piece in part.pieces]

    def _at_once(self, part: Part) -> list[Outcome]:
        def run(piece: Piece) -> Outcome:
            with PartProcess(self._seed) as process:
                return process.run(piece, self._limit_s(part))

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(run, part.pieces))

    def _limit_s(self, part: Part) -> float:
        return max(1.0, min(part.limit_s, self._deadline + _GRACE_S - time.monotonic()))

    def _tell(self, name: str, part: Part, outcomes: list[Outcome]) -> None:
        records = [record for outcome in outcomes for record in outcome.records]
        if records:
            self._results.add(f"{name}: {part.about}", records)
        for outcome in outcomes:
            for note in outcome.notes:
                self._results.note(f"{name}: {note}")
            self.failed |= outcome.failed or (outcome.left_out and name == WITHOUT_GPU)
            self.failed |= any(record.get("failed") for record in outcome.records)


def run_without_gpu(driver: Driver, results: Results, names: Sequence[str], parts: Mapping[str, Part]) -> None:
    """Runs the checks in Triton's interpreter, and notes the parts that were not measured."""
    driver.run([name for name in names if name == WITHOUT_GPU], parts)
    if left_out := [name for name in names if name != WITHOUT_GPU]:
        results.note(f"Nothing was measured, there is no CUDA GPU: {', '.join(left_out)}.")
