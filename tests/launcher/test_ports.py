"""Which ports are free."""

import socket

import pytest

from services.launcher import ports


def test_a_port_in_use_is_named_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ports.PortUnavailable, match=rf":{port}: address already in use$"):
            ports.check("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ports.PortUnavailable, match=r"192\.0\.2\.1:8000"):
        ports.check("192.0.2.1", 8000)


def test_a_checked_port_is_free_afterwards() -> None:
    port = ports.free_ports("127.0.0.1", 1)[0]
    ports.check("127.0.0.1", port)
    socket.create_server(("127.0.0.1", port)).close()


def test_free_ports_differ_and_lie_outside_of_what_outgoing_connections_use() -> None:
    found = ports.free_ports("127.0.0.1", 20)
    assert len(set(found)) == 20
    assert max(found) < 32768
