"""Workers die, freeze and come back while requests run: each request ends once, with the tokens of an undisturbed run."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.conftest import generate
from tests.e2e.stack import Stack, running_stack, wait_until
from tests.e2e.test_pair import GREEDY, client_of, prompt_of, text_of

NUM_TOKENS = 300


class Streaming(threading.Thread):
    """A client that reads a stream to its end."""

    def __init__(self, stack: Stack, prompt: list[int]) -> None:
        super().__init__(daemon=True)
        self.stack, self.prompt = stack, prompt
        self.text = ""
        self.error: openai.APIError | None = None
        self.start()

    def run(self) -> None:
        try:
            stream = client_of(self.stack).completions.create(
                prompt=self.prompt, max_tokens=NUM_TOKENS, stream=True, **GREEDY
            )
            for chunk in stream:
                self.text += chunk.choices[0].text
        except openai.APIError as error:
            self.error = error

    def expect(self, model: Path) -> None:
        """The stream ended, complete and right."""
        self.join(30)
        assert not self.is_alive(), "the request hangs"
        assert self.error is None
        assert self.text.rstrip("\ufffd") == text_of(model, generate(model, self.prompt, NUM_TOKENS)[0])


@contextlib.contextmanager
def streams(stack: Stack, number: int = 4) -> Iterator[list[Streaming]]:
    """Some streams, all of which have brought text."""
    running = [Streaming(stack, prompt_of(80 + index, 50 + 10 * index)) for index in range(number)]
    wait_until(lambda: all(each.text for each in running), 20, "text on every stream")
    yield running


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_requests_outlive_a_worker_that_is_killed_and_the_restarted_one_serves(llama: Path, victim: str):
    with running_stack(llama) as stack:
        with streams(stack) as running:
            stack.kill(victim)
            wait_until(lambda: stack.num_connected() == 1, 5, "the loss")
            stack.start(victim)
            for each in running:
                each.expect(llama)
        wait_until(lambda: stack.num_connected() == 2, 30, "the restarted worker")
        with streams(stack, 1) as running:
            running[0].expect(llama)
        stack.wait_for_baseline()


def test_prompts_under_way_at_a_prefill_worker_that_is_killed_go_elsewhere(llama: Path):
    with running_stack(llama, prefill=2, worker_options=["--max-num-batched-tokens", "16"]) as stack:
        running = [Streaming(stack, prompt_of(90 + index, 200)) for index in range(16)]
        time.sleep(0.05)
        stack.kill("prefill-0")
        for each in running:
            each.expect(llama)
        stack.wait_for_baseline()


def test_a_frozen_decode_worker_is_noticed_and_its_late_words_are_dropped(llama: Path):
    with running_stack(llama, decode=2) as stack:
        with streams(stack) as running:
            stack.processes["decode-0"].send_signal(signal.SIGSTOP)
            noticed = wait_until(lambda: stack.num_connected() == 2, 10, "the freeze")
            for each in running:
                each.expect(llama)
            stack.processes["decode-0"].send_signal(signal.SIGCONT)
        print(f"a frozen worker was noticed after {noticed:.1f} s")
        wait_until(lambda: stack.num_connected() == 3, 20, "the thawed worker")
        stack.wait_for_baseline()


def test_with_every_decode_worker_dead_new_requests_are_refused_and_running_ones_wait(llama: Path):
    with running_stack(llama) as stack:
        with streams(stack, 2) as running:
            stack.kill("decode-0")
            wait_until(lambda: stack.num_connected() == 1, 5, "the loss")
            with pytest.raises(openai.InternalServerError) as error:
                client_of(stack).completions.create(prompt=[5, 6, 7], max_tokens=5, **GREEDY)
            assert error.value.status_code == 503
            assert error.value.response.headers["retry-after"]
            stack.start("decode-0")
            for each in running:
                each.expect(llama)
        stack.wait_for_baseline()


def test_a_gateway_that_is_killed_leaves_nothing_on_the_workers(llama: Path):
    with running_stack(llama) as stack:
        with streams(stack):
            stack.kill("gateway")
        stack.start("gateway")
        wait_until(lambda: stack.num_connected() == 2, 20, "the new gateway")
        stack.wait_for_baseline()
        with streams(stack, 1) as running:
            running[0].expect(llama)
