"""Measures sums over the ranks of two processes: each adds up the same rows as often, and rank 0 takes the time."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from torch.distributed import FileStore

from loadtest.children import child
from loadtest.tables import Record
from services.engine.kernels.cpu.isa import known_isa
from services.engine.kernels.cpu.openmp import load_openmp, loaded_openmp
from services.engine.kernels.cpu.shared_ranks import RankSizes, SharedRanks
from services.engine.kernels.gloo_ranks import GlooRanks
from services.engine.kernels.ranks import Ranks

_SIZES = ((1, 576), (1, 4096), (16, 4096), (64, 4096), (512, 4096), (2048, 4096))  # rows, width
_ROWS_OF_A_TURN = 4096  # sums of a turn are of so many rows, but at least _LEAST
_LEAST, _MOST = 8, 256
_DTYPE = torch.bfloat16
_PATIENCE_S = 60.0


def measure(rounds: int) -> list[Record]:
    """Measures all sizes in each round; of each, the median counts."""
    spent: dict[tuple[str, int, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as directory, _ranks(Path(directory) / "store") as (ranks, other):
        for _ in range(rounds):
            for rows, width in _SIZES:
                for name in ranks:
                    other.send((name, rows, width))
                    spent.setdefault((name, rows, width), []).append(_run(ranks[name], rows, width))
        other.send(None)
    return [
        {
            "rows": rows,
            "width": width,
            "isa": known_isa().name,
            **{f"{name}_us": median(spent[name, rows, width]) * 1e6 for name in ("kernel", "gloo")},
            "ratio": median(spent["gloo", rows, width]) / median(spent["kernel", rows, width]),
        }
        for rows, width in _SIZES
    ]


@contextmanager
def _ranks(store: Path) -> Iterator[tuple[dict[str, Ranks], Connection]]:
    """Makes rank 0 of both kinds, and a process that has rank 1 of both and does what the pipe says."""
    rows, width = (max(one) for one in zip(*_SIZES, strict=True))
    shared = SharedRanks.create(RankSizes(2, rows, width, width, _DTYPE.itemsize, 1))
    with child(_serve, f"/proc/{os.getpid()}/fd/{shared.fd}", str(store)) as other:
        yield {"kernel": shared, "gloo": _by_gloo(store, 0)}, other.pipe


def _serve(pipe: Connection, memory: str, store: str) -> None:
    load_openmp()
    shared = SharedRanks.join(os.open(memory, os.O_RDWR), 1)
    ranks: dict[str, Ranks] = {"kernel": shared, "gloo": _by_gloo(Path(store), 1)}
    while (told := pipe.recv()) is not None:
        name, rows, width = told
        _run(ranks[name], rows, width)


def _by_gloo(store: Path, rank: int) -> GlooRanks:
    return GlooRanks(FileStore(str(store), 2), "sums", rank, 2, _PATIENCE_S)


def _run(ranks: Ranks, rows: int, width: int) -> float:
    """Returns the seconds of one sum, of many. The first one, for which the ranks wait for each other, is left out."""
    openmp = loaded_openmp()
    assert openmp is not None, "ranks by kernels need it"
    openmp.set_num_threads(1)
    x = torch.ones(rows, width, dtype=_DTYPE)
    number = min(_MOST, max(_LEAST, _ROWS_OF_A_TURN // rows))
    ranks.sum(x)
    began = time.perf_counter()
    for _ in range(number):
        ranks.sum(x)
    spent = (time.perf_counter() - began) / number
    ranks.check()
    return spent
