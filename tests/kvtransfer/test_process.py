"""Whether a process is seen to be gone: its id is not enough, and what cannot be looked up may be alive."""

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.process import ProcessIdentity

WAITS = "import sys; sys.stdin.read()"
EXIT_OF_ONE_THREAD = {"x86_64": 60, "aarch64": 93}
FIRST_THREAD_ENDS = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).syscall({exit_of_one_thread}, 0)
"""


@contextlib.contextmanager
def child(script: str = WAITS) -> Iterator[tuple[subprocess.Popen, ProcessIdentity]]:
    """A process that runs until it is killed, or its input ends."""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        identity = ProcessIdentity.of(process.pid)
        assert identity is not None
        yield process, identity


def wait_for_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + 60
    while f"State:\t{state}" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_living_process_is_seen_alive() -> None:
    own = ProcessIdentity.own()
    assert own is not None
    assert own.pid == os.getpid()
    with child() as (_, identity):
        for living in (own, identity):
            assert living.is_seen_alive()
            assert not living.is_seen_gone()


def test_a_process_that_ended_is_seen_gone_before_its_parent_looks_and_after() -> None:
    with child() as (process, identity):
        process.kill()
        wait_for_state(process.pid, "Z")
        assert identity.is_seen_gone()
        assert ProcessIdentity.of(process.pid) is None
    assert identity.is_seen_gone()
    assert not identity.is_seen_alive()


def test_a_process_whose_first_thread_ended_before_others_is_not_gone() -> None:
    """It is a zombie by its state, and has its memory and its connections."""
    script = FIRST_THREAD_ENDS.format(exit_of_one_thread=EXIT_OF_ONE_THREAD[platform.machine()])
    with child(script) as (process, identity):
        wait_for_state(process.pid, "Z")
        assert not identity.is_seen_gone()
        process.kill()
    assert identity.is_seen_gone()


def test_a_stopped_process_is_not_gone() -> None:
    with child() as (process, identity):
        process.send_signal(signal.SIGSTOP)
        wait_for_state(process.pid, "T")
        assert identity.is_seen_alive()
        assert not identity.is_seen_gone()
        process.kill()


def test_another_process_with_the_same_id_is_another_life() -> None:
    with child() as (_, identity):
        earlier = replace(identity, start_ticks=identity.start_ticks - 1)
        assert earlier.is_seen_gone()
        assert not earlier.is_seen_alive()


def test_a_process_of_another_host_or_namespace_is_never_seen() -> None:
    """Whatever its id means here."""
    with child() as (_, identity):
        elsewhere = [replace(identity, boot_id="0" * 36), replace(identity, pid_namespace=1)]
        assert not any(there.is_seen_alive() for there in elsewhere)
    assert identity.is_seen_gone()
    assert not any(there.is_seen_gone() for there in elsewhere)


@pytest.mark.parametrize("pid", [0, -1, 1 << 31])
def test_an_id_of_no_single_process_is_refused(pid: int) -> None:
    with pytest.raises(ValueError, match="no process id"):
        ProcessIdentity("", 1, pid, 1)
