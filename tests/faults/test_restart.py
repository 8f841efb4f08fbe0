"""Every process of `baton up` is restarted while requests run."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.stack import wait_until
from tests.faults.case import Case
from tests.faults.rows import long, row
from tests.faults.up import UpStack


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpStack]:
    stack = UpStack(model, tmp_path_factory.mktemp("runtime"))
    with stack.running():
        yield stack


@long
@row(50)
def test_every_process_is_restarted_in_turn_and_no_request_fails(stack: UpStack, case: Case):
    before = stack.children()
    prompts = case.prompts(4)
    case.stream(2)
    case.fault()
    restarting = stack.restart()
    while restarting.poll() is None:
        for client in case.ask(prompts):
            client.join(60)
        case.stream(1)
    said = restarting.communicate()[0].splitlines()
    print("\n".join(said))
    assert restarting.returncode == 0
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "gateway"]
    assert [line.split()[0] for line in said] == names
    (redis,) = before & stack.children()  # the one process that `baton restart` leaves as it is
    case.ask(prompts)
    os.kill(redis, signal.SIGTERM)
    wait_until(lambda: len(stack.children() - {redis}) == len(before), 60, "another Redis")
    case.settle()
    assert not before & stack.children()


@long
def test_no_connection_is_refused_or_reset_while_the_gateway_is_replaced(stack: UpStack):
    """Opens connections one after the other, as clients without a pool do."""
    restarting = stack.restart()
    number = 0
    while restarting.poll() is None:
        with socket.create_connection(("127.0.0.1", stack.gateway.port), timeout=30) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert connection.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"
        number += 1
        time.sleep(0.001)
    assert len(restarting.communicate()[0].splitlines()) == 5
    print(f"{number} connections")


@long
def test_at_most_one_grpc_call_fails_while_the_gateway_is_replaced(stack: UpStack):
    """A call that crosses the server's GOAWAY on its way is cancelled by gRPC's core, whatever the server does."""
    restarting = stack.restart()
    address, options = f"127.0.0.1:{stack.gateway.grpc_port}", [("grpc.use_local_subchannel_pool", 1)]
    number, failed = 0, []
    with grpc.insecure_channel(address, options) as kept:
        while restarting.poll() is None:
            with grpc.insecure_channel(address, options) as fresh:
                for channel in (kept, fresh):
                    stub: Any = health_pb2_grpc.HealthStub(channel)
                    try:
                        stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
                    except grpc.RpcError as error:
                        failed.append(error)
                    number += 1
            time.sleep(0.001)
    assert len(restarting.communicate()[0].splitlines()) == 5
    print(f"{len(failed)} of {number} calls failed: {failed}")
    assert len(failed) <= 1
