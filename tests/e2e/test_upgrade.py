"""A version beside an older one, both in use, while one worker after the other is drained: nothing is lost.

tests/protocol/test_older_version.py holds the wire to bytes of the older version, where its history is not at hand.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import cast

import grpc
import pytest

from protos import worker_pb2, worker_pb2_grpc
from tests.e2e.conftest import clear_prompt
from tests.e2e.older import Older, OlderGateway, take_out
from tests.e2e.stack import Endpoint, Gateway, Stack, worker_ports
from tests.e2e.streaming import Streaming

NUM_TOKENS = 400
STREAMS = 4  # at each gateway


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Older:
    taken = take_out(tmp_path_factory.mktemp("older"))
    if taken is None:
        pytest.skip("the older version's history is not at hand")
    return taken


@dataclass
class Mixed:
    """Workers 0 are of the older version and workers 1 of this one; a gateway of each version knows all four."""

    stack: Stack
    older: OlderGateway
    prompts: list[list[int]]
    streams: list[Streaming] = field(default_factory=list)
    used: set[tuple[Endpoint, str, str]] = field(default_factory=set)  # gateway, prefill, decode

    @property
    def gateways(self) -> tuple[Endpoint, ...]:
        return self.older, self.stack.gateway

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.stack.ports[name]}"

    def keep_busy(self) -> None:
        """Begins a stream in the place of each that ended, and notes which workers streams are at."""
        for gateway in self.gateways:
            here = [stream for stream in self.streams if stream.stack.gateway is gateway and stream.is_alive()]
            for _ in range(STREAMS - len(here)):
                self._begin(gateway)
            self.used |= {
                (gateway, row["prefill"], row["decode"])
                for row in gateway.ledger()["rows"]
                if row["prefill"] and row["decode"]
            }

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Keeps both gateways busy until a condition holds."""
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() - begin < 300, f"{what} did not come about"
            self.keep_busy()
            time.sleep(0.05)

    def drain(self, name: str) -> None:
        """Drains a worker while both gateways are busy. Streams that outlast that move."""
        address = self.address(name)
        self.until(lambda: all(self._generating_at(gateway, address) for gateway in self.gateways), f"work at {name}")
        with grpc.insecure_channel(address) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Drain.future(worker_pb2.DrainRequest(timeout_s=0.2))
            self.until(call.done, f"the drain of {name}")
            reply = call.result()
        print(f"{name} drained: {reply.done}, {reply.moved} streams moved")  # how many, says the machine

    def _generating_at(self, gateway: Endpoint, address: str) -> bool:
        rows = gateway.ledger()["rows"]
        return any(address in (row["prefill"], row["decode"]) for row in rows)

    def _begin(self, gateway: Endpoint) -> None:
        served = Stack(self.stack.model, self.stack.ports, [], None)
        served.gateway = cast(Gateway, gateway)  # of which a stream uses the client alone
        self.streams.append(Streaming(served, self.prompts[len(self.streams) % len(self.prompts)], NUM_TOKENS))


@contextlib.contextmanager
def _running(older: Older, model: Path) -> Iterator[Mixed]:
    stack = Stack(model, worker_ports(2, 2), [], None)
    common = ["--model", str(model), "--num-threads", "1", "--device", "cpu", "--kv-memory", stack.kv_memory]
    old = [
        older.start(name.partition("-")[0], "--port", str(stack.ports[name]), *common, "--kernels", "torch")
        for name in ("prefill-0", "decode-0")
    ]
    addresses = ",".join(f"127.0.0.1:{port}" for port in stack.ports.values())
    gateway = OlderGateway(older, model, addresses)
    try:
        for name in ("prefill-1", "decode-1"):
            stack.start(name)
        prompts = [clear_prompt(model, 200 + index, 40, NUM_TOKENS) for index in range(4)]
        with stack.serving() as stack.gateway:
            gateway.wait_for_workers(4)
            yield Mixed(stack, gateway, prompts)
    finally:
        gateway.close()
        for process in old:
            process.kill()
            process.wait()
        for worker in stack.workers.values():
            worker.stop()


def test_the_bytes_that_are_kept_are_those_of_the_older_version(older: Older):
    """tests/protocol/older holds them."""
    folder = Path(__file__).parents[1] / "protocol/older"
    assert older.output_of(folder / "examples.py") == (folder / "vectors.json").read_text()


@pytest.mark.long
def test_an_upgrade_and_a_way_back_under_load_lose_nothing(older: Older, llama: Path):
    """Gateways and workers of both versions work with each other, and each version's workers are drained."""
    with _running(older, llama) as mixed:
        workers = {name: mixed.address(name) for name in mixed.stack.ports}
        pairs = product((workers["prefill-0"], workers["prefill-1"]), (workers["decode-0"], workers["decode-1"]))
        ways = {(gateway, *pair) for gateway, pair in product(mixed.gateways, list(pairs))}
        mixed.until(lambda: ways <= mixed.used, "every pair of workers at either gateway")
        mixed.drain("prefill-0")
        mixed.drain("decode-1")
        mixed.stack.workers["decode-1"].stop()
        mixed.stack.start("decode-1")
        mixed.until(lambda: all(each.num_connected() == 3 for each in mixed.gateways), "decode-1 again")
        mixed.drain("decode-0")
        mixed.older.process.terminate()
        assert mixed.older.process.wait(60) == 0
        for stream in mixed.streams:
            stream.expect(llama)
        mixed.stack.gateway.wait_for_baseline()
