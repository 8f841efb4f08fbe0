"""Requests for a console to show."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import openai

from tests.e2e.stack import Gateway


def ask(gateway: Gateway, prompt: str = "a prompt", num_tokens: int = 4, key: str = "none", **fields: Any) -> str:
    """One completion. Returns the request's id."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
        answer = client.completions.with_raw_response.create(
            model="tiny", prompt=prompt, max_tokens=num_tokens, temperature=0, extra_body={"ignore_eos": True}, **fields
        )
        request_id: str = answer.headers["x-request-id"]
        return request_id


@contextlib.contextmanager
def asking(gateway: Gateway, num_tokens: int = 4) -> Iterator[None]:
    """One request after the other, each with another prompt, until the context ends."""
    over = threading.Event()

    def run() -> None:
        number = 0
        while not over.is_set():
            with contextlib.suppress(openai.APIError):  # a worker may be away: what the console shows of it is the test
                ask(gateway, f"{number} is a number " * 8, num_tokens)
            number += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
