"""A launcher as a real process over stand-ins, and commands to it."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from services.launcher import control
from services.launcher.ports import free_ports
from tests.processes import is_alive

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


class Stack:
    """A launcher process over a stand-in worker and a stand-in gateway."""

    def __init__(self, manner: str = "") -> None:
        self.ports = free_ports("127.0.0.1", 2)
        self._directory = tempfile.TemporaryDirectory()
        self.control = Path(self._directory.name) / "control"
        arguments = [str(self.control), *map(str, self.ports), manner]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "stand_in_stack.py"), *arguments],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        assert self.process.stdout is not None
        self.output: IO[str] = self.process.stdout
        self.seen: list[str] = []

    def read_until(self, start: str) -> str:
        """The next line that starts so. Fails when the output ends before."""
        for line in self.output:
            self.seen.append(line.strip())
            if line.startswith(start):
                return line.strip()
        pytest.fail(f"no {start!r} in {self.seen}")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def child(self, port: int) -> psutil.Process:
        return next(child for child in self.children() if str(port) in child.cmdline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()
        self._directory.cleanup()


def ask(stack: Stack, command: str = "restart") -> list[str]:
    """What a command says."""
    return list(answers(stack, command))


def answers(stack: Stack, command: str = "restart") -> Iterator[str]:
    """The lines of what a command says, as they come."""
    wait_for(lambda: listens(stack.control))  # the socket is there a moment before it is listened at
    yield from control.ask(stack.control, command)


class Client(threading.Thread):
    """A client that gives a command and waits for its end, beside the test."""

    def __init__(self, stack: Stack, command: str = "restart") -> None:
        super().__init__(daemon=True)
        self.said: list[str] = []  # so far
        self.failure: control.CommandFailed | None = None
        self._lines = answers(stack, command)
        self.start()

    def run(self) -> None:
        try:
            for line in self._lines:
                self.said.append(line)
        except control.CommandFailed as failure:
            self.failure = failure

    def wait(self) -> None:
        """Returns when the command has ended."""
        self.join(300)
        assert not self.is_alive(), "the command does not end"


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_busy(stack: Stack) -> bool:
    """True while a command is under way."""
    try:
        ask(stack, "scale")  # which changes nothing
    except control.CommandFailed as failure:
        if str(failure) == "another command is under way":
            return True
        raise
    return False


@contextlib.contextmanager
def asking(stack: Stack, command: str = "restart") -> Iterator[None]:
    """A client that gives a command, and leaves at the end of the context, as at Ctrl-C."""
    wait_for(lambda: listens(stack.control))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(stack.control))
        client.sendall(f"{command}\n".encode())
        yield
    wait_for(lambda: not is_busy(stack))  # the launcher has noticed


def living(stack: Stack) -> list[psutil.Process]:
    """The children that are no zombies."""
    return [child for child in stack.children() if is_alive(child)]
