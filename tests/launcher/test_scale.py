"""`baton scale` at a launcher that is a real process, over stand-ins that die real deaths."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.launcher import control
from tests.launcher.launched import ROOT, Client, Stack, ask, asking, living, wait_for
from tests.processes import is_alive

ALONE = "0 prefill; 1 decode (worker)"


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    """A decode worker called `worker` and a gateway, which are ready."""
    stack = Stack()
    try:
        stack.read_until("all ready")
        yield stack
    finally:
        stack.close()


@pytest.fixture
def stack(running: Stack) -> Iterator[Stack]:
    """The same; tests leave it as they found it."""
    yield running
    for name in ("manner", "full"):
        running.control.with_name(name).unlink(missing_ok=True)
    assert ask(running, "scale") == [ALONE]
    assert len(living(running)) == 2


def later(stack: Stack) -> list[psutil.Process]:
    """The living children that the stack did not begin with."""
    return [child for child in living(stack) if not set(map(str, stack.ports)) & set(child.cmdline())]


def test_workers_come_and_go_and_have_the_first_free_names(stack: Stack) -> None:
    first, more = living(stack), "1 prefill (prefill-0); 2 decode (worker, decode-1)"
    for _ in range(2):
        assert ask(stack, "scale prefill=1 decode=2") == [more]
        assert len(later(stack)) == 2
        assert ask(stack, "scale") == ask(stack, "scale decode=2") == [more]
        *ended, last = ask(stack, "scale prefill=0 decode=1")
        assert sorted(line.split()[0] for line in ended) == ["decode-1", "prefill-0"]
        assert all(re.search(r" has ended, \d+\.\d s after it was told to$", line) for line in ended)
        assert last == ALONE
        assert living(stack) == first


def test_a_later_worker_is_replaced_and_started_again_as_those_of_the_start_are(stack: Stack) -> None:
    ask(stack, "scale prefill=1")
    (begun,) = later(stack)
    assert [line.split()[0] for line in ask(stack)] == ["prefill-0", "worker"]
    (successor,) = later(stack)
    assert not is_alive(begun)
    successor.kill()
    assert stack.read_until("died") == "died prefill-0 signal 9, Killed"
    stack.read_until("ready prefill-0")
    assert len(living(stack)) == 3
    assert ask(stack, "scale prefill=0")[-1] == ALONE


def baton_scale(stack: Stack, directory: Path, number: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command, which finds the socket in a directory."""
    runtime = directory / "baton"
    if not runtime.exists():
        runtime.mkdir(mode=0o700)
        (runtime / "8000.sock").symlink_to(stack.control)
    command = [sys.executable, "-m", "services.cli", "scale", number]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(directory)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    return result.returncode, result.stdout, result.stderr


def test_the_command_prints_what_it_is_told_and_ends_with_1_where_it_went_no_further(
    stack: Stack, tmp_path: Path
) -> None:
    assert baton_scale(stack, tmp_path, "prefill=1") == (0, "1 prefill (prefill-0); 1 decode (worker)\n", "")
    assert len(later(stack)) == 1
    code, said, refused = baton_scale(stack, tmp_path, "decode=0")
    assert (code, said) == (1, "")
    assert refused.startswith("baton: the scaling went no further: decode=0: every request ends at a decode worker")
    assert ask(stack, "scale prefill=0")[-1] == ALONE


REFUSALS = {
    "scale decode=0": "there is at least one",
    "scale gateway=2": "scale knows no 'gateway'; it knows prefill and decode",
    "scale decode=-1": "decode=-1 is no number of workers",
    "scale decode=1e3": "decode=1e3 is no number of workers",
    "scale decode=99999": "decode=99999 is no number of workers",
    "scale decode=2 decode=3": "'decode=3' is not NAME=VALUE, or has a name that was there already",
    "scale decode": "'decode' is not NAME=VALUE",
    "restart decode=2": "restart takes no arguments, and has decode",
    "shrink decode=2": "there is no command 'shrink': this `baton up` is of another version",
}


def test_what_makes_no_sense_is_refused_and_changes_nothing(stack: Stack) -> None:
    children = living(stack)
    for command, refusal in REFUSALS.items():
        with pytest.raises(control.CommandFailed, match=re.escape(refusal)):
            ask(stack, command)
    assert living(stack) == children


def test_where_there_is_no_room_nothing_is_started_and_nothing_ends(stack: Stack) -> None:
    ask(stack, "scale prefill=2")
    children = living(stack)
    stack.control.with_name("full").write_text("it is full")
    with pytest.raises(control.CommandFailed, match="it is full"):
        ask(stack, "scale prefill=1 decode=2")
    assert living(stack) == children
    assert ask(stack, "scale prefill=0")[-1] == ALONE


def test_a_worker_that_does_not_start_ends_its_command_and_changes_nothing(stack: Stack) -> None:
    ask(stack, "scale prefill=1")
    children, manner = living(stack), stack.control.with_name("manner")
    manner.write_text("refuse")
    with pytest.raises(control.CommandFailed, match=r"^decode-1 did not start: missing tensor model.norm.weight\. "):
        ask(stack, "scale prefill=0 decode=2")
    assert living(stack) == children
    manner.unlink()
    assert ask(stack, "scale prefill=0 decode=2")[-1] == "0 prefill; 2 decode (worker, decode-1)"
    ask(stack, "scale decode=1")


def test_a_worker_that_dies_while_it_starts_ends_its_command(stack: Stack) -> None:
    stack.control.with_name("manner").write_text("slow")
    client = Client(stack, "scale decode=2")
    wait_for(lambda: bool(later(stack)))
    later(stack)[0].kill()
    client.wait()
    assert str(client.failure).startswith("decode-1 did not start: ")
    assert ask(stack, "scale") == [ALONE]


def test_a_worker_that_dies_while_it_drains_has_ended_and_meanwhile_other_commands_are_refused(stack: Stack) -> None:
    stack.control.with_name("manner").write_text("deaf")
    ask(stack, "scale decode=2")
    (leaving,) = later(stack)
    client = Client(stack, "scale decode=1")
    stack.read_until("line decode-1 told to end")
    for command in ("restart", "scale prefill=1"):
        with pytest.raises(control.CommandFailed, match=r"^another command is under way$"):
            ask(stack, command)
    assert is_alive(leaving)
    leaving.kill()
    client.wait()
    assert client.said[0].startswith("decode-1 has ended, ")
    assert client.said[1:] == [ALONE]


def test_a_client_that_leaves_ends_what_is_not_ready(stack: Stack) -> None:
    children = living(stack)
    stack.control.with_name("manner").write_text("slow")
    with asking(stack, "scale prefill=1 decode=3"):
        wait_for(lambda: len(later(stack)) == 3)
    wait_for(lambda: living(stack) == children)
    assert ask(stack, "scale") == [ALONE]


def test_a_name_is_free_only_when_the_worker_that_had_it_is_gone(stack: Stack) -> None:
    """A client leaves while a worker drains; the next command waits for that one."""
    manner = stack.control.with_name("manner")
    manner.write_text("deaf")
    ask(stack, "scale decode=2")
    (leaving,) = later(stack)
    with asking(stack, "scale decode=1"):
        stack.read_until("line decode-1 told to end")
    manner.unlink()
    client = Client(stack, "scale decode=2")
    wait_for(lambda: bool(client.said))
    leaving.kill()
    client.wait()
    assert client.said == [
        "decode-1 of an earlier command has not ended yet: waiting for it",
        "0 prefill; 2 decode (worker, decode-1)",
    ]
    ask(stack, "scale decode=1")


def test_of_a_role_first_ends_who_does_not_serve(tmp_path: Path) -> None:
    """The stack's first worker died, and does not come back."""
    stack = Stack(f"once:{tmp_path / 'once'}")
    try:
        stack.read_until("all ready")
        stack.child(stack.ports[0]).kill()
        stack.read_until("died worker")
        assert ask(stack, "scale decode=2") == ["0 prefill; 2 decode (worker, decode-1)"]
        said = ask(stack, "scale decode=1")
        assert said[0].startswith("worker has ended, ")
        assert said[1:] == ["0 prefill; 1 decode (decode-1)"]
    finally:
        stack.close()


def test_a_stack_that_ends_while_it_is_scaled_ends_all_and_says_so() -> None:
    stack = Stack()
    try:
        stack.read_until("all ready")
        stack.control.with_name("manner").write_text("slow")
        client = Client(stack, "scale decode=3")
        wait_for(lambda: len(later(stack)) == 2)
        children = living(stack)
        stack.process.terminate()
        client.wait()
        assert str(client.failure) == "baton up ended before it had answered"
        stack.read_until("ended")
        assert not any(map(is_alive, children))
    finally:
        stack.close()
