"""A rank of a worker dies, stands still, or computes nonsense: its worker ends at once, and nothing is lost."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.worker.engine_watch import LEAST_S
from tests.e2e.stack import Stack, running_stack, wait_until
from tests.faults.case import Case, in_midstream
from tests.faults.rank_hooks.sitecustomize import HANG, SIGNAL
from tests.faults.rows import long, row
from tests.faults.supervised import supervised

HOOKS = Path(__file__).parent / "rank_hooks"
_SOON_S = 5.0  # of a loaded machine; the watch looks five times a second


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Stack]:
    """Two of each role, of two ranks each."""
    path = os.pathsep.join([str(HOOKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ["--max-num-batched-tokens", "37", "--tensor-parallel-size", "2"]
    with running_stack(model, prefill=2, decode=2, options=options, environment={"PYTHONPATH": path}) as stack:
        yield stack


@pytest.fixture
def stack(running: Stack) -> Stack:
    """Healed after each case."""
    return running


def rank_of(stack: Stack, name: str) -> psutil.Process:
    """The process of a worker's rank 1."""
    (rank,) = psutil.Process(stack.workers[name].pid).children()
    return rank


def kill(rank: psutil.Process) -> None:
    rank.kill()


def stop(rank: psutil.Process) -> None:
    rank.suspend()


def compute_nonsense(rank: psutil.Process) -> None:
    os.kill(rank.pid, SIGNAL)


@pytest.mark.long
@row(55)
@pytest.mark.parametrize("hurt", [kill, stop, compute_nonsense])
def test_a_worker_ends_with_any_of_its_ranks_and_its_streams_go_on_elsewhere(
    stack: Stack, case: Case, hurt: Callable[[psutil.Process], None]
):
    with in_midstream(stack, case) as victim:
        rank = rank_of(stack, victim)
        hurt(rank)
    wait_until(lambda: not stack.workers[victim].running, _SOON_S, f"the end of {victim}")
    wait_until(lambda: not rank.is_running(), _SOON_S, f"the end of the rank of {victim}")
    case.settle()


@long
@row(55)
def test_a_rank_that_hangs_ends_its_worker_by_the_watch_on_its_engine(stack: Stack, case: Case):
    """It looks as if it worked: only the steps that do not end tell."""
    with in_midstream(stack, case) as victim:
        rank = rank_of(stack, victim)
        os.kill(rank.pid, HANG)
    wait_until(lambda: not stack.workers[victim].running, LEAST_S + 30, f"the end of {victim}")
    wait_until(lambda: not rank.is_running(), _SOON_S, f"the end of the rank of {victim}")
    case.settle()


@long
@row(55)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ranks_end_with_a_worker_that_is_killed(stack: Stack, case: Case, role: str):
    name = f"{role}-0"
    with in_midstream(stack, case):
        rank = rank_of(stack, name)
        stack.workers[name].kill()
    wait_until(lambda: not rank.is_running(), _SOON_S, f"the end of the rank of {name}")
    case.settle()


@long
@row(55)
def test_a_rank_of_an_idle_worker_that_dies_ends_it_and_a_new_one_serves(stack: Stack, case: Case):
    prompts = case.prompts(4)
    case.fault()
    with supervised(stack) as started:
        for name in ("prefill-0", "decode-0"):
            os.kill(rank_of(stack, name).pid, signal.SIGKILL)
        wait_until(lambda: sorted(started) == ["decode-0", "prefill-0"], 60, "both workers' new starts")
        for client in case.ask(prompts):
            client.join(120)
        stack.gateway.wait_for_workers(4)
    case.settle()
