"""The core lease between real processes."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from services.engine.openmp import loaded_openmp
from services.engine.runner.cores import CoreLease

CORES = len(os.sched_getaffinity(0))


class Recorder:
    """Stands where OpenMP does: notes how many threads it was told."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def set_num_threads(self, count: int) -> None:
        self.counts.append(count)

    def spin(self) -> None: ...

    def sleep(self) -> None: ...


def other_worker(directory: Path, pipe: Connection) -> None:
    """Begins and ends steps as it is told; says how many threads it has."""
    recorder = Recorder()
    lease = CoreLease(recorder, directory=directory)
    while (word := pipe.recv()) != "die":
        getattr(lease, word)()
        pipe.send(recorder.counts)
    os._exit(1)


@pytest.mark.skipif(CORES < 2, reason="one core cannot be shared")
def test_who_steps_alone_has_all_cores_and_others_share_them(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=other_worker, args=(tmp_path, there), daemon=True)
    process.start()
    recorder = Recorder()
    lease = CoreLease(recorder, directory=tmp_path)

    def tell(word: str) -> list[int]:
        here.send(word)
        counts: list[int] = here.recv()
        return counts

    assert tell("begin") == [CORES]
    lease.begin()
    assert recorder.counts == [CORES // 2]
    assert tell("adjust") == [CORES, CORES // 2], "another worker has begun a step"
    tell("end")
    lease.adjust()
    assert recorder.counts == [CORES // 2, CORES], "it has stopped"
    lease.end()

    tell("begin")
    here.send("die")
    process.join(10)
    CoreLease(Recorder(), directory=tmp_path)  # the next that comes takes the row of the one that died in a step
    lease.begin()
    assert recorder.counts[-1] == CORES


def test_a_fixed_number_of_threads_is_kept(tmp_path: Path) -> None:
    recorder = Recorder()
    lease = CoreLease(recorder, 3, directory=tmp_path)
    lease.begin()
    lease.adjust()
    assert recorder.counts == [3]


def test_torch_follows_what_openmp_is_told() -> None:
    torch = pytest.importorskip("torch")
    openmp = loaded_openmp()
    if openmp is None:
        pytest.skip("torch runs on another OpenMP here")
    before = torch.get_num_threads()
    try:
        openmp.set_num_threads(1)
        assert torch.get_num_threads() == 1
    finally:
        openmp.set_num_threads(before)
