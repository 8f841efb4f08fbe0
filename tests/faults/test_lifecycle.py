"""Processes are told to end, and restarts go wrong, while requests run."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.e2e.stack import Endpoint, Stack, running_stack, wait_until
from tests.faults.case import Case, Starts
from tests.faults.clients import BackgroundClient, Client, GrpcClient
from tests.faults.rows import long, row
from tests.faults.up import UpStack
from tests.redis_server import running_redis


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A pair that gateways find in a Redis."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server, running_stack(model, redis_url=server.url) as stack:
        yield stack


@pytest.fixture(scope="module")
def up(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpStack]:
    """A stack over a directory with the model of its own."""
    directory = tmp_path_factory.mktemp("own")
    stack = UpStack(Path(shutil.copytree(model, directory / "model")), directory)
    with stack.running():
        yield stack


@pytest.fixture
def stack(request: pytest.FixtureRequest) -> Stack | UpStack:
    """The stack of the test's case."""
    found: Stack | UpStack = request.getfixturevalue("served" if "served" in request.fixturenames else "up")
    return found


DOORS: dict[str, Callable[[Endpoint], list[Starts]]] = {
    "grpc": lambda _: [GrpcClient],
    "http": lambda _: [Client],
    "both": lambda _: [GrpcClient, Client],
    "background": lambda reader: [partial(BackgroundClient, reader=reader)],
}


@long
@row(61)
@pytest.mark.parametrize("door", DOORS)
def test_a_gateway_that_drains_waits_for_all_its_doors(served: Stack, case: Case, door: str):
    with served.serving() as drained:
        for kind in DOORS[door](served.gateway):
            case.stream(2, drained, kind)
        case.fault()
        drained.process.terminate()
        assert drained.process.wait(60) == 0
        case.settle()


@long
@row(62)
def test_a_restart_with_another_model_in_the_directory_ends_with_the_reason(up: UpStack, case: Case):
    before = up.children()
    file = up.model / "config.json"
    original = file.read_text()
    file.write_text(json.dumps({**json.loads(original), "max_position_embeddings": 1024}))
    try:
        case.fault()
        restarting = up.restart()
        while restarting.poll() is None:
            case.stream(1)
        _, error = restarting.communicate()
    finally:
        file.write_text(original)
    assert restarting.returncode == 1
    assert "prefill-0 did not start: the gateway refuses the worker at 127.0.0.1:" in error
    assert "it serves model " in error
    assert "the old one goes on" in error
    assert up.children() == before
    case.settle()
    wait_until(lambda: up.gateway.metric("baton_worker_refused") == 0, 30, "the end of the refused worker's lease")


@long
@row(63)
def test_a_restart_that_is_interrupted_twice_leaves_as_many_processes_as_there_were(up: UpStack, case: Case):
    """Once while a successor loads, once while an old process drains."""
    before = up.children()
    case.fault()
    loading = up.restart()
    wait_until(lambda: len(up.children()) == len(before) + 1, 60, "a successor")
    interrupt(loading)
    draining = up.restart()
    while not any(worker["draining"] for worker in up.gateway.ledger()["workers"]):
        assert draining.poll() is None, "no drain was seen"
        if not any(client.is_alive() for client in case.clients):
            case.stream(2)
    interrupt(draining)
    last = up.restart()
    while last.poll() is None:
        case.stream(1)
    last.communicate()
    assert last.returncode == 0
    wait_until(lambda: len(up.children()) == len(before), 60, "as many processes as there were")
    case.settle()


def interrupt(restarting: "subprocess.Popen[str]") -> None:
    """Ctrl-C."""
    restarting.send_signal(signal.SIGINT)
    restarting.communicate(timeout=60)
    assert restarting.returncode != 0
    time.sleep(2)  # until the launcher has noticed


@long
@row(64)
def test_sighup_drains_each_process_and_sigusr1_does_nothing(up: UpStack, case: Case):
    """The launcher starts each of them again."""
    case.fault()
    for role in ("prefill", "decode", "gateway"):
        for pid in up.pids_of(role):
            os.kill(pid, signal.SIGUSR1)
            case.stream(2)
            case.stream(2, kind=GrpcClient)
            os.kill(pid, signal.SIGHUP)
            wait_until(lambda pid=pid: not psutil.pid_exists(pid), 60, "the end of a drain")  # type: ignore[misc]
            up.heal()
    case.settle()


@long
@row(64)
def test_sighup_to_the_launcher_ends_every_process_in_order(model: Path, tmp_path: Path):
    stack = UpStack(model, tmp_path)
    with stack.running():
        children, case = stack.children(), Case(stack, lambda _: None)
        clients = [*case.stream(2), *case.stream(2, kind=GrpcClient)]
        stack.process.send_signal(signal.SIGHUP)
        assert stack.process.wait(60) == 0
    assert not any(client.is_lost() or client.is_wrong() for client in clients)
    assert not any(psutil.pid_exists(pid) for pid in children)
