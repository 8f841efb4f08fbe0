"""Ports for programs that tests and benchmarks start."""

import subprocess
import sys

from loadtest.processes import free_ports

CHOICE = "from loadtest.processes import free_ports; print(*free_ports({count})); input()"


def test_two_processes_never_get_the_same_port() -> None:
    """Nobody listens on any: the first process may not have come so far, or its server was killed."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHOICE.format(count=450)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    found: list[str] = []
    for child in children:
        assert child.stdout is not None
        found += child.stdout.readline().split()
    for child in children:
        child.communicate("\n", timeout=60)
        assert child.returncode == 0
    assert len(found) == 4 * 450
    assert len(set(found)) == len(found)


def test_a_process_that_takes_many_ports_keeps_its_claim_on_the_newest() -> None:
    for _ in range(3):
        assert len(set(free_ports(600))) == 600  # more in all than descriptors that a process may have by default
