"""Workers are told to end while requests run: nothing fails, no attempt is lost, and the tokens stay right."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos import worker_pb2, worker_pb2_grpc
from tests.e2e.conftest import clear_prompt
from tests.e2e.stack import Stack, running_stack, wait_until
from tests.e2e.streaming import NUM_TOKENS, Streaming

LONG = 400


@pytest.fixture(scope="module")
def running(llama: Path) -> Iterator[Stack]:
    options = ["--max-num-batched-tokens", "37", "--drain-timeout", "600"]
    with running_stack(llama, prefill=2, decode=2, options=options) as started:
        yield started


@pytest.fixture
def stack(running: Stack) -> Iterator[Stack]:
    yield running
    running.heal()
    running.gateway.wait_for_baseline()


class Load:
    """Streams that follow each other, until the context ends."""

    def __init__(self, stack: Stack, model: Path) -> None:
        self.stack = stack
        self.prompts = [clear_prompt(model, 80 + index, 50 + 10 * index, NUM_TOKENS) for index in range(4)]
        self.streams: list[Streaming] = []

    def top_up(self) -> None:
        """Begins a stream in the place of each that ended."""
        while sum(stream.is_alive() for stream in self.streams) < 3:
            self.streams.append(Streaming(self.stack, self.prompts[len(self.streams) % 4]))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.top_up()
        wait_until(lambda: any(stream.text for stream in self.streams), 240, "text")
        yield
        for stream in self.streams:
            stream.join(200)


@pytest.mark.long
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_under_load_a_worker_that_gets_sigterm_finishes_what_it_has_and_ends(stack: Stack, llama: Path, role: str):
    """No request is continued elsewhere: each has one attempt, but for those that crossed with the news."""
    attempts = stack.gateway.metric("baton_attempts_total")
    load, worker = Load(stack, llama), stack.workers[f"{role}-0"]
    with load.running():
        begin = time.monotonic()
        worker._process.terminate()
        while worker.running:
            assert time.monotonic() - begin < 300, "the drain hangs"
            load.top_up()
            time.sleep(0.01)
        print(f"{role} ended {time.monotonic() - begin:.2f} s after SIGTERM, {len(load.streams)} streams")
    assert worker._process.exitcode == 0
    for stream in load.streams:
        stream.expect(llama)
    refused = stack.gateway.metric("baton_handoffs_total", outcome="failed_not_now")
    assert stack.gateway.metric("baton_attempts_total") - attempts <= len(load.streams) + refused


def all_decode(stack: Stack) -> bool:
    """True when every stream is past its handoff; decode's first read of a producer takes a while."""
    rows = stack.gateway.ledger()["rows"]
    return len(rows) == 4 and all(row["phase"] == "decode" for row in rows)


@pytest.mark.long
def test_streams_that_outlast_the_drain_move_once_with_their_tokens(stack: Stack, llama: Path):
    prompts = [clear_prompt(llama, 200 + index, 40, LONG) for index in range(4)]
    attempts = stack.gateway.metric("baton_attempts_total")
    streams = [Streaming(stack, prompt, LONG) for prompt in prompts]
    wait_until(lambda: all_decode(stack), 240, "a token from decode on every stream")
    address = f"127.0.0.1:{stack.ports['decode-0']}"
    here = sum(row["decode"] == address for row in stack.gateway.ledger()["rows"])
    assert here, "no stream to be moved"
    with grpc.insecure_channel(address) as channel:
        begin = time.monotonic()
        reply = worker_pb2_grpc.WorkerStub(channel).Drain(worker_pb2.DrainRequest(timeout_s=0.3), timeout=120)
        print(f"{reply.moved} of {here} streams moved within {time.monotonic() - begin:.2f} s")
    for stream in streams:
        stream.expect(llama)
    print("longest pauses:", ", ".join(f"{stream.longest_pause_s * 1000:.0f} ms" for stream in streams))
    assert reply.done
    assert reply.moved
    assert stack.gateway.metric("baton_attempts_total") - attempts == len(streams) + reply.moved
    wait_until(lambda: not stack.workers["decode-0"].running, 240, "the end of the process")
    assert stack.workers["decode-0"]._process.exitcode == 0
    assert stack.gateway.metric("baton_handoffs_total", outcome="failed_draining") == 0, "none was in its handoff"


def test_a_worker_is_drained_by_the_command(stack: Stack):
    address = f"127.0.0.1:{stack.ports['prefill-1']}"
    command = [sys.executable, "-m", "services.cli", "drain", address, "--timeout", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{address} is drained and ends\n")
    wait_until(lambda: not stack.workers["prefill-1"].running, 240, "the end of the process")
    assert stack.workers["prefill-1"]._process.exitcode == 0
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 1
    assert again.stderr.startswith(f"baton: {address} cannot be drained: ")


@pytest.mark.long
def test_a_gateway_finishes_a_stream_that_fits_its_drain_and_ends_another_with_an_error_event(
    stack: Stack, llama: Path
):
    for drain_s, fits in (("600", True), ("0.2", False)):
        with stack.serving("--drain-timeout", drain_s) as gateway, contextlib.ExitStack() as standing:
            other = Stack(stack.model, stack.ports, stack.options, None)
            other.gateway = gateway
            streams = _in_midstream(stack, other, llama, standing)
            if fits:
                standing.close()
            gateway.process.terminate()
            assert gateway.process.wait(300) == 0
            for stream in streams:
                if fits:
                    stream.expect(llama)
                else:
                    stream.join(60)
                    assert stream.error is not None
                    assert "The server is restarting" in str(stream.error)


def _in_midstream(stack: Stack, asked: Stack, model: Path, standing: contextlib.ExitStack) -> list[Streaming]:
    """Streams that all have text and none of which has ended: the workers are frozen until `standing` is closed."""
    for worker in stack.workers.values():
        standing.callback(worker.thaw)
    for _ in range(20):
        streams = [Streaming(asked, clear_prompt(model, 200 + index, 40, LONG), LONG) for index in range(4)]
        wait_until(lambda: all(stream.text for stream in streams), 200, "text on every stream")  # noqa: B023
        for worker in stack.workers.values():
            worker.freeze()
        if len(asked.gateway.ledger()["rows"]) == len(streams):
            return streams
        for worker in stack.workers.values():
            worker.thaw()
        for stream in streams:
            stream.join(200)
    raise AssertionError("a stream was over, twenty times, before all were looked at")
