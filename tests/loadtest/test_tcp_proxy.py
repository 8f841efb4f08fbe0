"""The proxy spoils the connections of those for whom a fault is meant, and no others."""

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from loadtest.processes import free_ports
from loadtest.tcp_proxy import Proxy, ProxyThread, Way


class Echo(threading.Thread):
    """A server that sends everything back."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=[connection], daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(4096):
                    connection.sendall(data)
            except OSError:  # a reset
                return


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    echo = Echo()
    with ProxyThread() as thread:
        (port,) = free_ports(1)
        made = Proxy(thread, ("127.0.0.1", port), ("127.0.0.1", echo.port), lambda: {"test-0": os.getpid()})
        yield made
        made.close()
    echo.listening.close()


def connect(proxy: Proxy) -> socket.socket:
    connection = socket.create_connection(proxy._address, timeout=60)
    assert ask(connection, b"hello") == b"hello"
    return connection


def ask(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    return connection.recv(4096)


def test_a_connection_belongs_to_the_process_that_has_its_socket(proxy: Proxy):
    with connect(proxy):
        assert proxy.clients() == ["test-0"]
        assert proxy.num_passed("test", Way.TO_CLIENT) == 5


def test_a_client_is_known_by_a_socket_of_ipv6_too(proxy: Proxy):
    """gRPC dials IPv4 addresses so."""
    with socket.socket(socket.AF_INET6) as connection:
        connection.settimeout(60)
        connection.connect(("::ffff:127.0.0.1", proxy._address[1]))
        assert ask(connection, b"hello") == b"hello"
        assert proxy.clients() == ["test-0"]


@pytest.mark.parametrize("way", Way)
def test_silence_is_for_one_client_and_ends_with_what_came_meanwhile(proxy: Proxy, way: Way):
    with connect(proxy) as connection:
        proxy.silence("other")
        assert ask(connection, b"a") == b"a"
        proxy.silence("test", (way,))
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            ask(connection, b"b")
        proxy.heal()
        connection.settimeout(60)
        assert connection.recv(10) == b"b"


def test_a_reset_is_one(proxy: Proxy):
    with connect(proxy) as connection:
        assert proxy.reset("other") == 0
        assert proxy.reset("test") == 1
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_who_is_refused_is_told_at_once_and_others_go_on(proxy: Proxy):
    with connect(proxy) as connection:
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(proxy._address, timeout=60)
        assert ask(connection, b"still") == b"still"
        proxy.heal()
        connect(proxy).close()


def test_a_slow_or_late_link_takes_its_time(proxy: Proxy):
    with connect(proxy) as connection:
        proxy.delay("", 0.2, (Way.TO_SERVER,))
        start = time.monotonic()
        assert ask(connection, b"x") == b"x"
        assert time.monotonic() - start >= 0.2
        proxy.heal()
        proxy.slow("", 1000, (Way.TO_CLIENT,))
        start = time.monotonic()
        connection.sendall(b"y" * 500)
        received = 0
        while received < 500:
            received += len(connection.recv(4096))
        assert time.monotonic() - start >= 0.4


def test_bytes_are_replaced(proxy: Proxy):
    with connect(proxy) as connection:
        proxy.replace("test", b"abc", b"xyz", Way.TO_SERVER)
        assert ask(connection, b"..abc..") == b"..xyz.."
