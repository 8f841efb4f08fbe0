"""A client that reads a stream to its end, and knows what it should have got."""

import threading
import time
from pathlib import Path

import openai

from tests.e2e.conftest import generate
from tests.e2e.stack import Stack
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
