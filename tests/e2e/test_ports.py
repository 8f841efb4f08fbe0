"""Every port of a running `baton up`: those that docs/reference.md has, no other, and what strangers hear there."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import SecureUp
from tests.e2e.listening import Listener, is_own_port_of_worker, listeners_of
from tests.e2e.stack import Stack
from tests.e2e.strangers import NOTHING, answer_of, documented_paths, side_by_side
from tests.e2e.up import Up, running_up
from tests.test_docs import REFERENCE, rows

UCX = "UCX's"


@dataclass(frozen=True)
class Port:
    """A line of the table, for one process."""

    name: str
    process: str
    address: str


def table(column: int) -> dict[Port, str]:
    """What a stranger gets, by column, at each port that is open unless a user says otherwise."""
    found: dict[Port, str] = {}
    for name, processes, address, _, *answers in rows(REFERENCE, "## Ports"):
        if address != "none":
            names = [Port(name.partition(",")[0], process, address) for process in processes.split(", ")]
            found |= dict.fromkeys(names, answers[column])
    return found


def name_of(listener: Listener, up: Up) -> Port:
    """The line of the table that a socket belongs to. Fails for one that belongs to none."""
    process = process_of(listener)
    if listener.kind == "unix":
        path = Path(listener.address)
        assert path.is_absolute(), f"{listener} is in the abstract namespace"
        assert path.parent.stat().st_mode & 0o077 == 0, f"{path} is open to other users"
        return Port(f"`{re.sub(str(up.port), 'PORT', path.name)}`", process, "a Unix socket")
    gateway = {up.port: "`--port`", up.grpc_port: "`--grpc-port`", up.admin_port: "`--admin-port`"}
    if listener.kind == "tcp" and process == "gateway" and listener.port in gateway:
        return Port(gateway[listener.port], process, listener.address)
    if listener.kind == "tcp" and process in ("prefill", "decode"):
        name = "`--port` of a worker" if is_own_port_of_worker(listener) else UCX
        return Port(name, process, listener.address)
    raise AssertionError(f"{listener} is in no line of the table")


def process_of(listener: Listener) -> str:
    """The name that the table has for a process."""
    words = listener.command
    if "redis-server" in words[0]:
        return "redis"
    (command,) = {"up", "gateway", "prefill", "decode"} & set(words)
    return "`baton up`" if command == "up" else command


def check(up: Up, documented: dict[Port, str]) -> None:
    """TCP, UDP and others, Unix sockets and abstract ones."""
    paths = documented_paths()
    assert len(paths) > 20
    listeners = listeners_of(up.process.pid)
    found = {name_of(listener, up): listener for listener in listeners}
    assert len(found) == len(listeners)
    assert found.keys() == documented.keys()
    heard = side_by_side(lambda each: heard_at(each, paths), list(found.values()))
    assert dict(zip(found, heard, strict=True)) == documented


@pytest.mark.long
def test_the_ports_are_those_of_the_table_and_say_to_strangers_what_it_says(llama: Path, tmp_path: Path) -> None:
    with running_up(llama, tmp_path) as up:
        check(up, table(0))


@pytest.mark.long
def test_with_tls_and_keys_no_port_serves_a_stranger(secure: SecureUp) -> None:
    """Health, and metrics at the admin port, are open."""
    check(secure.up, table(1))


def heard_at(listener: Listener, paths: set[str]) -> str:
    """What a stranger hears; nobody else can open the directory of a Unix socket."""
    return NOTHING if listener.kind == "unix" else answer_of(listener.address, listener.port, paths)


def test_workers_that_are_started_alone_listen_at_loopback_and_nowhere_else(stack: Stack) -> None:
    """These workers have NIXL, whose port is the second one."""
    for worker in stack.workers.values():
        found = listeners_of(worker.pid)
        assert [(each.kind, each.address) for each in found] == [("tcp", "127.0.0.1")] * 2
