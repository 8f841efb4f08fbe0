"""Servers under test, as real processes: they answer while the block runs, and nothing of them is left after it."""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from loadtest import http_stream
from loadtest.compare.rounds import Comparison, Run, run_all
from loadtest.compare.servers import Launch, running
from loadtest.compare.workloads import Compared, Figure, shape
from loadtest.http_stream import Address, HttpError
from loadtest.processes import Process, ProcessError, free_ports
from tests.processes import is_alive

SCRIPT = Path(__file__).with_name("openai_server.py")
SMALL = Compared(shape(3, 5, 4), Figure.TOKENS_PER_S)
TWICE = Compared(shape(2, 5, 4, shared_tokens=8), Figure.REQUESTS_PER_S, twice=True)


@dataclass(frozen=True)
class StandIn:
    """openai_server.py with options, or another program."""

    name: str = "stand-in"
    options: tuple[str, ...] = ()
    program: tuple[str, ...] = (sys.executable, str(SCRIPT))
    setting: str = "as it is"
    num_ports: int = 1

    def launch(self, ports: Sequence[int]) -> Launch:
        address = Address("127.0.0.1", ports[0])
        command = (*self.program, str(ports[0]), *self.options)
        return Launch((Process(self.name, command),), address, ((address, "/v1/models"),))


async def page(address: Address, path: str) -> bytes:
    return (await http_stream.ask(address, path, None)).body()


async def until_dead(process: psutil.Process) -> None:
    """Its parent may be slow to take note."""
    while is_alive(process):
        await asyncio.sleep(0.01)


async def test_it_answers_and_then_it_is_gone() -> None:
    async with running(StandIn()) as launch:
        assert await page(launch.address, "/v1/models") == b"{}"
    with pytest.raises(HttpError):
        await page(launch.address, "/v1/models")


async def test_what_a_server_started_ends_with_it() -> None:
    async with running(StandIn(options=("--stay",))) as launch:
        child = psutil.Process(int(await page(launch.address, "/child")))
        assert child.is_running()
    await until_dead(child)


async def test_a_server_that_dies_while_it_starts_is_told_with_its_last_words() -> None:
    dies = StandIn(program=(sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"))
    with pytest.raises(ProcessError, match="stand-in ended with 3; its last lines:\nno such model"):
        async with running(dies):
            raise AssertionError("it never answered")


async def test_a_server_that_never_answers_is_given_up() -> None:
    silent = StandIn(program=(sys.executable, "-c", "import time; time.sleep(600)"))
    with pytest.raises(ProcessError, match=r"did not answer within 0\.5 s"):
        async with running(silent, start_timeout_s=0.5):
            raise AssertionError("it never answered")


async def die_under_load() -> None:
    async with running(StandIn()) as launch:
        server = psutil.Process(int(await page(launch.address, "/pid")))
        with pytest.raises(HttpError):
            await page(launch.address, "/die")
        # Its first thread is a zombie before the last one has ended; only then does its end have a code.
        while os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            await asyncio.sleep(0.01)


async def test_a_server_that_died_under_load_spoils_the_run() -> None:
    with pytest.raises(ProcessError, match="ended with 9"):
        await die_under_load()


async def test_an_interrupted_run_leaves_nothing() -> None:
    """Ctrl-C and SIGTERM cancel the task."""
    addresses: list[Address] = []

    async def run() -> None:
        async with running(StandIn()) as launch:
            addresses.append(launch.address)
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    while not addresses:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(HttpError):
        await page(addresses[0], "/v1/models")


def test_ports_are_different() -> None:
    assert len(set(free_ports(5))) == 5


async def runs_of(*servers: StandIn, rounds: int = 1, after_round: Callable[[list[Run]], None] = print) -> list[Run]:
    comparison = Comparison(servers=servers, workloads=(SMALL, TWICE), rounds=rounds, seed=0, vocabulary=512)
    return await run_all(comparison, lambda line: None, after_round)


async def test_servers_take_turns_in_every_round() -> None:
    so_far: list[int] = []
    runs = await runs_of(StandIn("a"), StandIn("b"), rounds=2, after_round=lambda runs: so_far.append(len(runs)))
    names = ("5/4", "8+5/4 cold", "8+5/4 warm")
    expected = [(number, server, name) for number in (1, 2) for server in "ab" for name in names]
    assert [(run.round, run.server, run.workload) for run in runs] == expected
    assert all(run.fault is None and run.value > 0 for run in runs)
    assert so_far == [6, 12]  # an interrupted run keeps its complete rounds
    assert runs[0].report.output_tokens == 12
    assert runs[0].report.handed_off is None  # it is no Baton


async def test_missing_tokens_are_a_fault() -> None:
    (first, *_) = await runs_of(StandIn(options=("--short",)))
    assert first.fault == "3 tokens short"


async def test_a_server_that_does_not_start_spoils_its_own_runs_alone() -> None:
    broken = StandIn("broken", program=(sys.executable, "-c", "import sys; sys.exit(3)"))
    runs = await runs_of(broken, StandIn("good"))
    assert {run.server: run.fault is None for run in runs} == {"broken": False, "good": True}
    assert len(runs) == 6
    assert "broken ended with 3" in str(runs[0].fault)
