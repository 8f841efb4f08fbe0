"""The cores shared between real processes, with a clock of the test's own."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import pytest

from services.engine.kernels.cpu.openmp import loaded_openmp, remove_registrations
from services.engine.runner.cpu.cores import CoreShare
from tests.machine import TWO_CORES, needs

CORES = len(os.sched_getaffinity(0))
SHARED = needs(TWO_CORES)
MS = 1_000_000


class Recorder:
    """Stands where OpenMP does: notes what it was told."""

    def __init__(self) -> None:
        self.told: list[str | int] = []

    @property
    def counts(self) -> list[int]:
        """Of threads."""
        return [told for told in self.told if isinstance(told, int)]

    def set_num_threads(self, count: int) -> None:
        self.told.append(count)

    def spin(self, most_ms: int | None = None) -> None:
        self.told.append("spin" if most_ms is None else f"spin {most_ms} ms")

    def sleep(self) -> None:
        self.told.append("sleep")


def other_worker(directory: Path, clock: "Synchronized[int]", pipe: Connection) -> None:
    """Does with its share as it is told; says how many threads it has had."""
    recorder = Recorder()
    share = CoreShare(recorder, directory=directory, clock_ns=lambda: clock.value)
    pipe.send(recorder.counts)  # it is in the table
    while (word := pipe.recv()) != "die":
        _do(share, word)
        pipe.send(recorder.counts)
    os._exit(1)


def _do(share: CoreShare, word: str) -> None:
    match word:
        case "prompts" | "decode":
            share.begin(prompts=word == "prompts")
        case "adjust":
            share.adjust()
        case "end":
            share.end()


class Workers:
    """A worker in this process and one in another."""

    def __init__(self, directory: Path) -> None:
        self.clock = multiprocessing.Value("q", 1_000_000 * MS)
        self.directory = directory
        self.recorder = Recorder()
        self.here = self.share()
        self._pipe, there = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(
            target=other_worker, args=(directory, self.clock, there), daemon=True
        )
        self.process.start()
        self._pipe.recv()

    def share(self, num_threads: int | None = None) -> CoreShare:
        return CoreShare(self.recorder, num_threads, directory=self.directory, clock_ns=lambda: self.clock.value)

    def tell(self, word: str) -> list[int]:
        """What the other one is to do; how many threads it has had."""
        self._pipe.send(word)
        counts: list[int] = self._pipe.recv()
        return counts

    def kill(self) -> None:
        self._pipe.send("die")
        self.process.join(10)

    def sleep_ms(self, ms: int) -> None:
        self.clock.value += ms * MS

    def step_ms(self, ms: int, *, prompts: bool = False) -> None:
        """A step of ours."""
        self.here.begin(prompts=prompts)
        self.sleep_ms(ms)
        self.here.end()

    def pauses_ms(self) -> int:
        """How long we pause if nothing else happens, asking every millisecond."""
        for waited in range(1000):
            if not self.here.decode_pause_s():
                return waited
            self.sleep_ms(1)
        raise AssertionError("for ever")


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(tmp_path)
    yield workers
    workers.process.kill()
    workers.process.join()


@SHARED
def test_who_steps_alone_has_all_cores_and_others_share_them(workers: Workers) -> None:
    assert workers.tell("prompts") == [CORES]
    workers.here.begin(prompts=True)
    assert workers.recorder.counts == [CORES // 2]
    assert workers.tell("adjust") == [CORES, CORES // 2], "another worker has begun a step"
    workers.tell("end")
    workers.here.adjust()
    assert workers.recorder.counts == [CORES // 2, CORES], "it has stopped"
    workers.here.end()

    workers.tell("prompts")
    workers.kill()
    share = workers.share()  # the next that comes takes the row of the one that died in a step
    share.begin(prompts=False)
    assert workers.recorder.counts[-1] == CORES


@SHARED
def test_prompts_keep_all_cores_beside_a_step_that_decodes_which_takes_a_share(workers: Workers) -> None:
    workers.here.begin(prompts=True)
    assert workers.tell("decode") == [CORES // 2]
    workers.here.adjust()
    assert workers.recorder.counts == [CORES]


@SHARED
def test_a_step_of_prompts_knows_whether_it_shares_the_cores_with_another(workers: Workers) -> None:
    workers.here.begin(prompts=True)
    assert not workers.here.shares_prompts()
    workers.tell("decode")
    assert not workers.here.shares_prompts()
    workers.tell("prompts")
    assert workers.here.shares_prompts()
    workers.here.end()
    workers.here.begin(prompts=False)
    assert not workers.here.shares_prompts()


@SHARED
def test_threads_that_have_to_go_during_a_step_are_put_to_sleep_first(workers: Workers) -> None:
    workers.here.begin(prompts=True)
    workers.tell("prompts")
    workers.here.adjust()
    assert workers.recorder.told == [CORES, "spin 1 ms", "sleep", CORES // 2, "spin 1 ms"]


@SHARED
def test_threads_of_a_step_that_only_decodes_spin_to_its_end(workers: Workers) -> None:
    workers.here.begin(prompts=False)
    assert workers.recorder.told == [CORES, "spin"]


@SHARED
def test_a_step_of_prompts_looks_more_often_than_one_that_decodes(workers: Workers) -> None:
    for prompts, counts in ((True, [CORES, CORES // 2]), (False, [CORES, CORES // 2, CORES])):
        workers.here.begin(prompts=prompts)
        workers.tell("prompts")
        workers.here.adjust_for_prompts()
        assert workers.recorder.counts == counts
        workers.tell("end")
        workers.here.end()


def test_decoding_pauses_for_eight_steps_while_another_worker_computes_prompts(workers: Workers) -> None:
    workers.tell("prompts")
    workers.step_ms(20)
    assert workers.pauses_ms() == 160
    workers.step_ms(20)
    workers.sleep_ms(25)
    assert workers.pauses_ms() == 135, "from the end of the step on"
    workers.step_ms(1000)
    assert workers.pauses_ms() == 220, "a stream does not wait for longer than that"


def test_the_pause_ends_soon_when_nobody_computes_prompts_any_more(workers: Workers) -> None:
    workers.tell("prompts")
    workers.step_ms(20)
    workers.tell("end")
    assert workers.pauses_ms() == 5, "another step of prompts may be about to begin"
    workers.tell("prompts")
    workers.step_ms(20)
    workers.kill()
    workers.share()
    assert not workers.here.decode_pause_s()


def test_decoding_pauses_for_nothing_but_prompts(workers: Workers) -> None:
    workers.step_ms(20)
    assert not workers.here.decode_pause_s(), "nobody else steps"
    workers.tell("decode")
    workers.step_ms(20)
    assert not workers.here.decode_pause_s(), "the other one decodes as well"
    workers.tell("end")
    workers.tell("prompts")
    workers.step_ms(200, prompts=True)
    assert not workers.here.decode_pause_s(), "prompts of our own held our streams up for long enough"
    workers.step_ms(20)
    assert workers.here.decode_pause_s()


def test_a_fixed_number_of_threads_is_kept_and_never_pauses(workers: Workers) -> None:
    workers.here = workers.share(3)
    workers.tell("prompts")
    workers.here.begin(prompts=False)
    workers.here.adjust()
    workers.sleep_ms(20)
    workers.here.end()
    assert workers.recorder.counts == [3]
    assert not workers.here.decode_pause_s()


@SHARED
def test_the_table_goes_with_the_last_worker(workers: Workers) -> None:
    def tables() -> list[Path]:
        return list(workers.directory.glob("baton-cores-*"))

    workers.here.leave()
    assert len(tables()) == 1  # the other worker's
    again = workers.share()
    workers.kill()
    again.leave()
    assert tables() == []
    workers.share().leave()
    assert tables() == []


def test_registrations_of_killed_processes_are_removed(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    of_killed, of_living, of_another_user = (
        tmp_path / f"__KMP_REGISTERED_LIB_{pid}_{user}"
        for pid, user in ((killed.pid, os.getuid()), (os.getpid(), os.getuid()), (killed.pid, os.getuid() + 1))
    )
    for file in (of_killed, of_living, of_another_user):
        file.touch()
    remove_registrations(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([of_living, of_another_user])


@pytest.mark.long
def test_no_thread_spins_that_its_worker_has_given_up_or_that_waits_in_a_step_of_prompts() -> None:
    """Intel's OpenMP: a thread that leaves the team while threads spin would spin until it belongs to it again."""
    script = """
        import ctypes, os, sys, tempfile, time
        from pathlib import Path
        from services.engine.kernels.cpu.openmp import load_openmp, loaded_openmp
        load_openmp()
        import torch
        from services.engine.runner.cpu.cores import CoreShare

        class Two(CoreShare):
            share = 2
            def _share(self):
                return self.share

        def running():
            states = [Path(f"/proc/self/task/{task}/stat").read_text().rsplit(")", 1)[1].split()[0]
                      for task in os.listdir("/proc/self/task")]
            return states.count("R")

        def until_one_runs():
            deadline = time.monotonic() + 10
            while running() > 1:
                assert time.monotonic() < deadline, "still spinning"

        if not hasattr(ctypes.CDLL(None), "kmp_set_blocktime"):
            sys.exit(77)
        openmp = loaded_openmp()
        many = torch.zeros(1 << 20)
        with tempfile.TemporaryDirectory() as directory:
            cores = Two(openmp, directory=Path(directory))
            cores.begin(prompts=False)
            many.add_(1)
            assert running() == 2, "a team that spins"
            cores.share = 1
            cores.adjust()
            until_one_runs()
            cores.end()
            cores.share = 2
            cores.begin(prompts=True)
            many.add_(1)
            until_one_runs()
            cores.end()
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    if ended.returncode == 77:
        pytest.skip("torch runs on another OpenMP here")
    assert ended.returncode == 0, ended.stderr


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
