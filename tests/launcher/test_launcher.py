"""A launcher as a real process, over real children that die real deaths."""

import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from services.launcher import control
from tests.launcher.launched import Stack, ask, asking, assert_gone, is_alive, listens, living, wait_for


@pytest.fixture
def stack() -> Iterator[Stack]:
    """A stack that is ready."""
    stack = Stack()
    stack.read_until("all ready")
    yield stack
    stack.close()


def test_the_gateway_starts_only_when_the_worker_is_ready(stack: Stack) -> None:
    assert stack.seen.index("ready worker") < stack.seen.index("starting gateway")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_children_first_and_the_launcher_with_success(stack: Stack, number: signal.Signals) -> None:
    children = stack.children()
    assert len(children) == 2
    stack.process.send_signal(number)
    stack.read_until("ended")
    assert not any(is_alive(child) for child in children)
    assert stack.process.wait(60) == 0


def test_the_gateway_ends_before_the_worker_that_it_needs() -> None:
    stack = Stack("deaf")
    try:
        stack.read_until("all ready")
        worker, gateway = (stack.child(port) for port in stack.ports)
        stack.process.terminate()
        gateway.wait(60)
        assert is_alive(worker)
    finally:
        stack.close()


def test_children_end_with_a_launcher_that_is_killed(stack: Stack) -> None:
    children = stack.children()
    stack.process.kill()
    assert_gone(children, within_s=30)


def test_frozen_children_end_with_a_launcher_that_is_killed(stack: Stack) -> None:
    children = stack.children()
    for child in children:
        child.suspend()
    stack.process.kill()
    assert_gone(children, within_s=30)


def test_a_child_that_dies_is_started_again(stack: Stack) -> None:
    worker, gateway = stack.ports
    for port, name in ((worker, "worker"), (gateway, "gateway"), (worker, "worker")):
        stack.child(port).kill()
        assert stack.read_until("died") == f"died {name} signal 9, Killed"
        stack.read_until(f"ready {name}")
    assert stack.process.poll() is None


def test_a_child_that_refuses_to_start_ends_everything_with_its_reason() -> None:
    stack = Stack("refuse")
    try:
        assert stack.read_until("failed") == "failed worker did not start: missing tensor model.norm.weight"
        assert "starting gateway" not in stack.seen
        assert stack.process.wait(60) == 1
    finally:
        stack.close()


def test_a_second_signal_does_not_wait_for_a_deaf_child() -> None:
    stack = Stack("deaf")
    try:
        stack.read_until("all ready")
        gateway = stack.child(stack.ports[1])
        stack.process.send_signal(signal.SIGINT)
        gateway.wait(60)  # the first signal reached whoever listens
        assert stack.child(stack.ports[0]).is_running()
        stack.process.send_signal(signal.SIGINT)
        stack.read_until("ended")
    finally:
        stack.close()


def test_a_restart_replaces_a_child_once_its_successor_is_ready(stack: Stack) -> None:
    worker, gateway = (stack.child(port) for port in stack.ports)
    for _ in range(2):  # a successor has successors too
        (line,) = ask(stack)
        assert line.startswith("worker is replaced: the new one was ready in ")
        assert not is_alive(worker)
        assert is_alive(gateway)
        stack.read_until("ready worker")
        worker = stack.child(stack.ports[0])
    worker.kill()  # a successor is started again as any child is
    assert stack.read_until("died") == "died worker signal 9, Killed"
    stack.read_until("ready worker")
    stack.process.terminate()
    stack.read_until("ended")


def test_a_restart_says_once_what_a_successor_waits_for(stack: Stack) -> None:
    stack.control.with_name("manner").write_text("late")
    told, replaced = ask(stack)
    assert told == "worker is not ready yet: nobody knows it"
    assert replaced.startswith("worker is replaced: ")


def test_a_child_whose_successor_does_not_start_goes_on(stack: Stack) -> None:
    worker = stack.child(stack.ports[0])
    stack.control.with_name("manner").write_text("refuse")
    with pytest.raises(
        control.CommandFailed, match=r"worker did not start: missing tensor model.norm.weight; the old one goes on"
    ):
        ask(stack)
    assert is_alive(worker)
    stack.control.with_name("manner").unlink()
    ask(stack)
    assert not is_alive(worker)


def test_a_stack_that_ends_during_a_restart_ends_all_and_says_so() -> None:
    stack = Stack("deaf")  # its worker does not end when it is replaced
    try:
        stack.read_until("all ready")
        failed: list[control.CommandFailed] = []

        def restart() -> None:
            try:
                ask(stack)
            except control.CommandFailed as failure:
                failed.append(failure)

        client = threading.Thread(target=restart)
        client.start()
        stack.read_until("ready worker")
        wait_for(lambda: len(stack.children()) == 3)
        children = stack.children()
        time.sleep(0.2)  # the old worker is told to end
        stack.process.terminate()
        client.join(60)
        assert str(failed[0]) == "baton up ended before it had answered"
        stack.process.terminate()
        stack.read_until("ended")
        assert not any(is_alive(child) for child in children)
    finally:
        stack.close()


def test_a_restart_that_is_interrupted_again_and_again_leaves_as_many_children_as_there_were(stack: Stack) -> None:
    """While the successor loads, and when it is ready."""
    manner = stack.control.with_name("manner")
    for stage in ("slow", "", "slow", "", ""):
        manner.write_text(stage)
        with asking(stack):
            wait_for(lambda: len(living(stack)) == 3)
            if stage != "slow":
                stack.read_until("ready worker")
    ask(stack)
    wait_for(lambda: len(living(stack)) == 2)
    ask(stack)
    assert len(living(stack)) == 2


def test_a_restart_first_waits_for_what_an_earlier_one_told_to_end() -> None:
    stack = Stack("deaf")
    try:
        stack.read_until("all ready")
        worker = stack.child(stack.ports[0])
        with asking(stack):
            stack.read_until("ready worker")
            time.sleep(0.2)  # the old worker is told to end, and does not
        said: list[str] = []
        client = threading.Thread(target=lambda: said.extend(ask(stack)))
        client.start()
        time.sleep(0.2)  # for the second restart to begin
        worker.kill()
        client.join(60)
        assert len(living(stack)) == 2
        assert said[0] == "worker of an earlier command has not ended yet: waiting for it"
        assert said[1].startswith("worker is replaced: ")
    finally:
        stack.close()


def test_a_restart_whose_client_leaves_ends_the_successor_and_leaves_the_old_child(stack: Stack) -> None:
    worker = stack.child(stack.ports[0])
    stack.control.with_name("manner").write_text("slow")
    wait_for(lambda: listens(stack.control))  # the socket is there a moment before it is listened at
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(stack.control))
        client.sendall(b"restart\n")
        wait_for(lambda: len(stack.children()) == 3)
    wait_for(lambda: len([child for child in stack.children() if is_alive(child)]) == 2)
    assert is_alive(worker)
    stack.control.with_name("manner").unlink()
    ask(stack)
    assert not is_alive(worker)
