"""`baton scale` at a running `baton up`, under streams that follow each other: none fails, and all tokens are right."""

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil
import pytest

from tests.e2e.conftest import clear_prompt
from tests.e2e.stack import Gateway, Stack, wait_until
from tests.e2e.streaming import NUM_TOKENS, Streaming
from tests.faults.up import UpStack

# tests/launcher/test_scale.py has the command over stand-ins, in a short time.
pytestmark = pytest.mark.long

STREAMS = 3


@pytest.fixture(scope="module")
def running(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpStack]:
    up = UpStack(llama, tmp_path_factory.mktemp("runtime"), each=1)
    with up.running():
        yield up
        children = [psutil.Process(pid) for pid in up.children()]
    assert not any(child.is_running() for child in children), "a process is left over"


@dataclass
class Load:
    """Streams that follow each other, of a few prompts."""

    up: UpStack
    prompts: list[list[int]]
    streams: list[Streaming] = field(default_factory=list)

    def top_up(self) -> None:
        """Begins a stream in the place of each that ended."""
        while sum(stream.is_alive() for stream in self.streams) < STREAMS:
            served = Stack(self.up.model, {}, [], None)
            served.gateway = cast(Gateway, self.up.gateway)  # of which a stream uses the client alone
            self.streams.append(Streaming(served, self.prompts[len(self.streams) % len(self.prompts)]))

    def scale(self, *numbers: str) -> str:
        """Scales under this load; returns the last line of what is said."""
        return self._until_ended(self.up.scale(*numbers))[-1]

    def restart(self) -> list[str]:
        """Restarts all under this load; returns what is said."""
        return self._until_ended(self.up.restart())

    def _until_ended(self, command: "subprocess.Popen[str]") -> list[str]:
        while command.poll() is None:
            self.top_up()
            time.sleep(0.01)
        said, refused = command.communicate()
        print(said)
        assert (command.returncode, refused) == (0, "")
        return said.splitlines()


@pytest.fixture
def load(running: UpStack) -> Iterator[Load]:
    """Streams, of which all have to be right."""
    prompts = [clear_prompt(running.model, 80 + index, 50 + 10 * index, NUM_TOKENS) for index in range(4)]
    load = Load(running, prompts)
    load.top_up()
    wait_until(lambda: any(stream.text for stream in load.streams), 300, "text")
    yield load
    for stream in load.streams:
        stream.expect(running.model)
    running.gateway.wait_for_baseline()
    print(f"{len(load.streams)} streams")


def expect_workers(up: UpStack, prefill: int, decode: int) -> None:
    """So many processes run, and the gateway lists as many."""
    wait_until(lambda: roles_at(up) == ["decode"] * decode + ["prefill"] * prefill, 300, "the workers at the gateway")
    assert (len(up.pids_of("prefill")), len(up.pids_of("decode"))) == (prefill, decode)
    assert len(up.children()) == prefill + decode + 2  # the gateway, and Redis


def roles_at(up: UpStack) -> list[str]:
    """The roles of the workers that the gateway is connected to."""
    return sorted(worker["role"] for worker in up.gateway.ledger()["workers"])


def test_workers_come_and_go_under_load_and_no_request_notices(running: UpStack, load: Load):
    assert load.scale("prefill=2", "decode=2") == "2 prefill (prefill-0, prefill-1); 2 decode (decode-0, decode-1)"
    expect_workers(running, 2, 2)
    assert load.scale("prefill=0", "decode=1") == "0 prefill; 1 decode (decode-0)"
    expect_workers(running, 0, 1)


def test_workers_come_and_go_again_and_again_beside_restarts(running: UpStack, load: Load):
    load.scale("prefill=1", "decode=1")
    for _ in range(2):
        for role in ("prefill", "decode"):
            load.scale(f"{role}=2")
        assert len(load.restart()) == 5
        for role in ("decode", "prefill"):
            load.scale(f"{role}=1")
        expect_workers(running, 1, 1)
        load.scale("prefill=0")
        expect_workers(running, 0, 1)
        load.scale("prefill=1")
