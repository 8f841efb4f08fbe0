"""A launcher as a real process, over real children that die real deaths."""

import signal
from collections.abc import Iterator

import pytest

from services.launcher import control
from tests.launcher.launched import Client, Stack, answers, ask, asking, is_busy, living, wait_for
from tests.processes import is_alive


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
    assert stack.process.wait(300) == 0


def test_the_gateway_ends_before_the_worker_that_it_needs() -> None:
    stack = Stack("deaf")
    try:
        stack.read_until("all ready")
        worker, gateway = (stack.child(port) for port in stack.ports)
        stack.process.terminate()
        gateway.wait(300)
        assert is_alive(worker)
    finally:
        stack.close()


def test_children_end_with_a_launcher_that_is_killed(stack: Stack) -> None:
    children = stack.children()
    stack.process.kill()
    wait_for(lambda: not any(map(is_alive, children)))


def test_frozen_children_end_with_a_launcher_that_is_killed(stack: Stack) -> None:
    children = stack.children()
    for child in children:
        child.suspend()
    stack.process.kill()
    wait_for(lambda: not any(map(is_alive, children)))


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
        assert stack.process.wait(300) == 1
    finally:
        stack.close()


def test_a_second_signal_does_not_wait_for_a_deaf_child() -> None:
    stack = Stack("deaf")
    try:
        stack.read_until("all ready")
        gateway = stack.child(stack.ports[1])
        stack.process.send_signal(signal.SIGINT)
        gateway.wait(300)  # the first signal reached whoever listens
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
    lines = answers(stack)
    assert next(lines) == "worker is not ready yet: nobody knows it"
    stack.control.with_name("known").touch()
    (replaced,) = lines
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
        client = Client(stack)
        stack.read_until("ready worker")
        stack.read_until("line worker told to end")
        children = living(stack)
        assert len(children) == 3
        stack.process.terminate()
        client.wait()
        assert str(client.failure) == "baton up ended before it had answered"
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
            stack.read_until("loading worker" if stage == "slow" else "ready worker")
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
            stack.read_until("line worker told to end")
        client = Client(stack)
        wait_for(lambda: bool(client.said))
        assert is_busy(stack)
        assert len(living(stack)) == 3  # no further successor
        worker.kill()
        client.wait()
        assert len(living(stack)) == 2
        assert client.said[0] == "worker of an earlier command has not ended yet: waiting for it"
        assert client.said[1].startswith("worker is replaced: ")
    finally:
        stack.close()


def test_a_restart_whose_client_leaves_ends_the_successor_and_leaves_the_old_child(stack: Stack) -> None:
    worker = stack.child(stack.ports[0])
    stack.control.with_name("manner").write_text("slow")
    with asking(stack):
        stack.read_until("loading worker")
        assert len(living(stack)) == 3
    wait_for(lambda: len(living(stack)) == 2)
    assert is_alive(worker)
    stack.control.with_name("manner").unlink()
    ask(stack)
    assert not is_alive(worker)
