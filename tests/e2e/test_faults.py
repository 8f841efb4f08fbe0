"""Workers die, freeze and come back while requests run: each ends once, with the tokens of an undisturbed run."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.conftest import clear_prompt, generate
from tests.e2e.stack import Stack, running_stack, wait_until
from tests.e2e.test_pair import GREEDY, text_of

NUM_TOKENS = 150


class Streaming(threading.Thread):
    """A client that reads a stream to its end."""

    def __init__(self, stack: Stack, prompt: list[int], num_tokens: int = NUM_TOKENS) -> None:
        super().__init__(daemon=True)
        self.stack, self.prompt, self.num_tokens = stack, prompt, num_tokens
        self.text = ""
        self.longest_pause_s = 0.0
        self.error: openai.APIError | None = None
        self.start()

    def run(self) -> None:
        try:
            stream = self.stack.gateway.client.completions.create(
                prompt=self.prompt, max_tokens=self.num_tokens, stream=True, **GREEDY
            )
            heard: float | None = None
            for chunk in stream:
                self.text += chunk.choices[0].text
                now = time.monotonic()
                self.longest_pause_s = max(self.longest_pause_s, now - (heard or now))
                heard = now
        except openai.APIError as error:
            self.error = error

    def expect(self, model: Path) -> None:
        """The stream ended, complete and right."""
        self.join(200)
        assert not self.is_alive(), "the request hangs"
        assert self.error is None
        assert self.text.rstrip("\ufffd") == text_of(model, generate(model, self.prompt, self.num_tokens).tokens)


@contextlib.contextmanager
def streams(stack: Stack, number: int = 4) -> Iterator[list[Streaming]]:
    """Some streams, all of which have brought text."""
    prompts = [clear_prompt(stack.model, 80 + index, 50 + 10 * index, NUM_TOKENS) for index in range(number)]
    running = [Streaming(stack, prompt) for prompt in prompts]
    wait_until(lambda: all(each.text for each in running), 200, "text on every stream")
    yield running
    for each in running:
        each.join(200)


@pytest.fixture(scope="module")
def running(llama: Path) -> Iterator[Stack]:
    with running_stack(llama, prefill=2, decode=2, options=["--max-num-batched-tokens", "37"]) as started:
        yield started


@pytest.fixture
def stack(running: Stack) -> Iterator[Stack]:
    """Two of each role. Whatever a test does to them: a healed stack serves, and nothing is held anywhere."""
    yield running
    running.heal()
    with streams(running, 2) as again:
        pass
    assert all(each.error is None for each in again)
    running.gateway.wait_for_baseline()


def test_requests_outlive_a_decode_worker_that_is_killed(stack: Stack, llama: Path):
    with streams(stack) as clients:
        stack.workers["decode-0"].kill()
        for each in clients:
            each.expect(llama)


def test_prompts_under_way_at_a_prefill_worker_that_is_killed_go_elsewhere(stack: Stack, llama: Path):
    prompts = [clear_prompt(llama, 90 + index, 180, NUM_TOKENS) for index in range(6)]
    stack.workers["prefill-0"].freeze()  # what it is given stays under way there
    clients = [Streaming(stack, prompt) for prompt in prompts]
    address = f"127.0.0.1:{stack.ports['prefill-0']}"
    wait_until(lambda: any(row["prefill"] == address for row in stack.gateway.ledger()["rows"]), 120, "a prompt there")
    stack.workers["prefill-0"].kill()
    for each in clients:
        each.expect(llama)


def test_a_frozen_decode_worker_is_noticed_and_its_late_words_are_dropped(stack: Stack, llama: Path):
    with streams(stack) as clients:
        stack.workers["decode-0"].freeze()
        noticed_s = stack.gateway.wait_for_workers(3, 120)
        for each in clients:
            each.expect(llama)
        stack.workers["decode-0"].thaw()
    print(f"a frozen worker was noticed after {noticed_s:.1f} s")


def test_with_every_decode_worker_dead_new_requests_are_refused_and_running_ones_wait(stack: Stack, llama: Path):
    with streams(stack, 2) as clients:
        stack.workers["decode-0"].kill()
        stack.workers["decode-1"].kill()
        stack.gateway.wait_for_workers(2, 120)
        with pytest.raises(openai.InternalServerError) as error:
            stack.gateway.client.completions.create(prompt=[5, 6, 7], max_tokens=5, **GREEDY)
        assert error.value.status_code == 503
        assert error.value.response.headers["retry-after"]
        stack.start("decode-0")
        for each in clients:
            each.expect(llama)


def test_with_every_prefill_worker_dead_decode_serves_alone(stack: Stack, llama: Path):
    for name in ("prefill-0", "prefill-1"):
        stack.workers[name].kill()
    stack.gateway.wait_for_workers(2, 120)
    with streams(stack, 2) as clients:
        for each in clients:
            each.expect(llama)


def test_a_gateway_that_is_killed_leaves_nothing_on_the_workers(stack: Stack):
    with streams(stack):
        stack.gateway.kill()
    stack.gateway.start()
    stack.gateway.wait_for_workers(4)
    stack.gateway.wait_for_baseline()
