"""The rule for signals, in a process that follows it."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from services.process.signals import ENDING

PROCESS = """
import asyncio
from services.process.signals import ignore_meaningless, on_ending_signals

async def main():
    ended = asyncio.Event()
    on_ending_signals(lambda: print("drains", flush=True), ended.set)
    print("ready", flush=True)
    await ended.wait()
    print("ends", flush=True)

ignore_meaningless()
asyncio.run(main())
"""


@contextmanager
def process(prepare: Callable[[], object] | None = None) -> Iterator[subprocess.Popen[str]]:
    """prepare: is called in the process before it begins."""
    command = [sys.executable, "-c", PROCESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=prepare) as started:
        try:
            assert said(started) == "ready"
            yield started
        finally:
            started.kill()


def said(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


def test_each_signal_that_ends_a_process_drains_it_first():
    for first in ENDING:
        with process() as started:
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
                started.send_signal(number)
            started.send_signal(first)
            assert said(started) == "drains"
            started.send_signal(signal.SIGTERM)
            assert said(started) == "ends"
            assert started.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_was_ignored_at_the_beginning_stays_ignored(number: signal.Signals):
    """As SIGHUP is under nohup, and SIGINT in the background jobs of a shell's script."""
    with process(lambda: signal.signal(number, signal.SIG_IGN)) as started:
        started.send_signal(number)
        started.send_signal(signal.SIGTERM)
        assert said(started) == "drains"
        started.send_signal(number)
        started.send_signal(signal.SIGTERM)
        assert said(started) == "ends"


def test_a_process_that_is_left_to_its_parent_takes_no_notice_of_signals():
    program = (
        "from services.process.signals import leave_to_parent; leave_to_parent(); print('ready', flush=True); input()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert said(started) == "ready"
        for number in (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
            started.send_signal(number)
        started.communicate("\n")
        assert started.returncode == 0
