"""Processes that share weights, for tests: each does what it is told over a pipe."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from services.engine.kernels.cpu.matmul import WEIGHTS
from services.engine.runner.cpu.shared_weights import share_weights
from services.engine.runner.cpu.weight_holders import NotSharedError, WeightHolders
from tests.forkserver import FORKSERVER

SHAPE = torch.Size((6 << 20,))  # of the weight that these processes share, float32: 24 MiB, whole huge pages
_LONG_S = 60.0


class Told:
    """`Progress` that remembers the stages."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.num_bytes = 0

    def stage(self, name: str, num_bytes: int | None = None) -> None:
        self.stages.append(name)

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


class Sharer:
    """A process that shares weights of one name: it packs them where nobody has them, filled with `number`."""

    def __init__(self, directory: Path, number: float, *, patience_s: float) -> None:
        self._pipe, others = FORKSERVER.Pipe()
        self.process: BaseProcess = FORKSERVER.Process(
            target=_share, args=(directory, number, patience_s, others), daemon=True
        )
        self.process.start()
        others.close()

    def hears(self) -> Any:
        """Returns what the process says next: "half" in the middle of packing; then (is_own, stages), or why not."""
        assert self._pipe.poll(_LONG_S), "the process says nothing"
        return self._pipe.recv()

    def tell(self, word: str) -> None:
        """Tells it a word of `_share`."""
        self._pipe.send(word)

    def ask(self, word: str) -> Any:
        """Tells it a word and returns the answer."""
        self.tell(word)
        return self.hears()

    def kill(self) -> None:
        """Ends it as `kill -9` does."""
        self.process.kill()
        self.process.join(_LONG_S)


@contextmanager
def sharers(directory: Path, *numbers: float, patience_s: float = _LONG_S) -> Iterator[list[Sharer]]:
    """Starts a process for each number, and ends them."""
    started = [Sharer(directory, number, patience_s=patience_s) for number in numbers]
    try:
        yield started
    finally:
        for each in started:
            each.kill()


def _share(directory: Path, number: float, patience_s: float, pipe: Connection) -> None:
    told = Told()

    def pack() -> dict[str, torch.Tensor]:
        weight = WEIGHTS.empty(SHAPE, torch.float32)
        weight[: len(weight) // 2] = number
        pipe.send("half")
        pipe.recv()
        weight[len(weight) // 2 :] = number
        return {"weight": weight, "norm": torch.full((4096,), number), "counts": torch.zeros(4, dtype=torch.int64)}

    try:
        shared = share_weights("name", pack, told, WeightHolders(directory), patience_s)
    except NotSharedError as error:
        pipe.send(str(error))
        return
    pipe.send((shared.is_own, told.stages))
    weights = shared.weights
    while (word := pipe.recv()) != "end":
        match word:
            case "sums":
                weights["counts"] += 1
                pipe.send([tensor.double().sum().item() for tensor in weights.values()])
            case "memory":
                pipe.send(mapped_kib())
            case "write":
                weights["weight"][0] = 0


def mapped_kib() -> tuple[int, int, int]:
    """Returns KiB of this process's mappings of shared weights: resident, its part of what is shared, in huge pages."""
    found, is_here = {"Rss": 0, "Pss": 0, "ShmemPmdMapped": 0}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            is_here = "baton-weights" in line
        elif is_here and first[:-1] in found:
            found[first[:-1]] += int(rest[0])
    return found["Rss"], found["Pss"], found["ShmemPmdMapped"]
