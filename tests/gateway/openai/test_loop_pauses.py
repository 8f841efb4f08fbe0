"""One request does not hold the event loop: the worst ones, beside a clock on the loop.

The clock counts CPU time of the loop's thread between its own turns. What a turn may take is said by another piece of
work, which that thread does just before and just after: a slow machine, or a busy one, is slow at both. The clock does
not see the time in which another thread has the interpreter lock: `python -m loadtest micro pauses` does.
"""

import asyncio
import gc
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
import pytest
import pytest_asyncio

from services.gateway.api.generation import Delta
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason
from tests.gateway.openai.test_http_limits import answer_to
from tests.gateway.running_api import MAX_BODY_BYTES, MODEL, Api, running_api
from tests.gateway.scripted_generator import Script, one_delta
from tests.gateway.tokenizer_files import CHATML

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONGEST = 1.0  # of the yardstick; usual are 0.05 to 0.5
_TRIES = 25
_YARDSTICK = json.dumps([7] * (MAX_BODY_BYTES // 3))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


@asynccontextmanager
async def watched_loop() -> AsyncIterator[list[float]]:
    """Yields the longest turn of the loop so far."""
    longest = [0.0]

    async def watch() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest[0] = max(longest[0], now - last)
            last = now

    gc.collect()
    gc.disable()  # the tests' own objects are many; a gateway has frozen its own
    watching = asyncio.create_task(watch())
    try:
        yield longest
    finally:
        watching.cancel()
        gc.enable()


def yardstick_s() -> float:
    """Returns this thread's CPU time for a body of the largest size, read by Python's own parser."""
    began = time.thread_time()
    json.loads(_YARDSTICK)
    return time.thread_time() - began


async def longest_turn(api: Api, path: str, body: bytes) -> tuple[float, int]:
    """Returns the longest turn of the loop while it answers this body, as a multiple of the yardstick, and the status.

    A turn that is too long is so each time; one that others on the machine made long is not. So the least of many
    counts, where the first is too long.
    """
    assert len(body) <= MAX_BODY_BYTES
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    least = math.inf
    for _ in range(_TRIES):
        before_s = yardstick_s()
        async with watched_loop() as longest:
            status, _ = await answer_to(api, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        least = min(least, longest[0] / max(before_s, yardstick_s()))
        if least < LONGEST:
            break
    return least, status


def completion(**fields: Any) -> tuple[str, bytes]:
    return "/v1/completions", orjson.dumps({"model": MODEL, "prompt": "x", **fields})


def chat(messages: list[Any]) -> tuple[str, bytes]:
    return "/v1/chat/completions", orjson.dumps({"model": MODEL, "messages": messages})


HELLO = {"role": "user", "content": "Hi"}
PART = {"type": "text", "text": ""}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (completion(prompt=[7] * 500_000, echo=True), 400),
        (completion(prompt=[[7] * 250] * 1000, echo=True, max_tokens=1), 200),
        (completion(prompt=["word " * 100] * 1000, max_tokens=1), 200),
        (completion(prompt=[[7] * 2] * 8, n=128), 200),
        (completion(bad_words=["word " * 200] * 128), 400),
        (completion(bad_words=["word " * 12] * 128), 200),
        (completion(n=128, logit_bias={str(token): 1 for token in range(256)}), 200),
        (completion(**{str(number): 1 for number in range(70_000)}), 400),
        (completion(stop=["x"] * 200_000), 400),
        (completion(logit_bias={str(number): 1 for number in range(70_000)}), 400),
        (chat([HELLO] * 16_384), 400),
        (chat([HELLO] * 2048), 400),  # more than the context
        (chat([5] * 16_384), 400),
        (chat([{**HELLO, **{str(number): 1 for number in range(70_000)}}]), 400),
        (chat([{"role": "user", "content": [PART] * 20_000}]), 400),
        (("/v1/completions", b'{"model":"m","prompt":[' + b"{}," * 300_000 + b"1]}"), 400),
        (("/v1/completions", b'{"model":"m","prompt":[' + b"[1]," * 200_000 + b"}"), 400),
    ],
    ids=[
        "ids",
        "prompts of ids",
        "prompts",
        "choices",
        "long bad words",
        "bad words",
        "biases",
        "fields",
        "stops",
        "too many biases",
        "too many messages",
        "messages",
        "wrong messages",
        "fields of a message",
        "parts of a message",
        "objects",
        "broken",
    ],
)
async def test_a_large_request_does_not_hold_the_loop(api: Api, request_: tuple[str, bytes], status: int):
    longest, answered = await longest_turn(api, *request_)
    assert answered == status
    assert longest < LONGEST


@pytest.mark.few(1)
@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_the_logprobs_of_a_long_prompt_do_not_hold_the_loop(api: Api, fields: dict[str, Any]):
    api.generator.max_model_len = 20_000
    entry = TokenLogprobs(-1.0, tuple((token, -2.0) for token in range(20)))
    api.generator.script = Script([Delta([7], [entry], FinishReason.LENGTH, 0, 0, [entry] * 9999)])
    longest, answered = await longest_turn(
        api, *completion(prompt=[7] * 10_000, echo=True, logprobs=20, max_tokens=1, **fields)
    )
    api.generator.script = Script(one_delta([7]))
    assert answered == 200
    assert longest < LONGEST


@pytest.mark.parametrize("form", ["float", "base64"])
@pytest.mark.parametrize("inputs", [["word " * 50] * 2048, [[7] * 50] * 2048], ids=["texts", "ids"])
async def test_many_embeddings_do_not_hold_the_loop(api: Api, inputs: list[Any], form: str):
    embedding = np.linspace(-1, 1, 64, dtype=np.float32)
    api.generator.script = Script([Delta([], None, FinishReason.LENGTH, 0, embedding=embedding)])
    body = orjson.dumps({"model": MODEL, "input": inputs, "encoding_format": form})
    longest, answered = await longest_turn(api, "/v1/embeddings", body)
    api.generator.script = Script(one_delta([7]))
    assert answered == 200
    assert longest < LONGEST


TOOL = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
HERMES = CHATML + "{# tools <tool_call> </think> #}"
QWEN_CODER = CHATML + "{# tools <function= #}"
PARAMETERS = "<tool_call><function=f>" + "<parameter=a>" * 4600


def continued(prefix: str, **fields: Any) -> tuple[str, bytes]:
    path, body = chat([HELLO, {"role": "assistant", "content": prefix}])
    asked = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 1, **fields}
    return path, orjson.dumps({**orjson.loads(body), **asked})


def message(prefix: str) -> tuple[str, bytes]:
    turns = [HELLO, {"role": "assistant", "content": prefix}]
    tools = [{"name": "f", "input_schema": TOOL["parameters"]}]
    return "/v1/messages", orjson.dumps({"model": MODEL, "max_tokens": 1, "messages": turns, "tools": tools})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("template", "request_"),
    [
        (HERMES, continued('<tool_call>{"x":' + "[" * 60_000, n=32, **TOOLS)),
        (HERMES, continued('<tool_call>{"x": "' + "a" * 60_000, n=32, **TOOLS)),
        (HERMES, continued('<tool_call>{"name": "f", "arguments": ' + "[" * 60_000, n=32, **TOOLS)),
        (HERMES, continued("<think></think>" * 4000, n=32)),
        (HERMES, continued("<think></think>" * 4000, thinking_token_budget=5)),
        (HERMES, message('<tool_call>{"x":' + "[" * 60_000)),
        (QWEN_CODER, continued(PARAMETERS, n=32, **TOOLS)),
        (QWEN_CODER, continued(PARAMETERS + "</function></tool_call>", **TOOLS)),
    ],
    ids=["nested", "string", "arguments", "thoughts", "budget", "messages", "parameters", "call"],
)
async def test_a_message_that_the_prompt_has_begun_does_not_hold_the_loop(template: str, request_: tuple[str, bytes]):
    async with running_api(template=template) as api:
        api.generator.max_model_len = 200_000
        longest, answered = await longest_turn(api, *request_)
    assert answered == 200
    assert longest < LONGEST


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, '<tool_call>{"x":' + "[" * 16_000),
        (HERMES, "<think></think>" * 1000),
        (QWEN_CODER, "<tool_call><function=f>" + "<parameter=a>" * 1200 + "</function></tool_call>"),
    ],
    ids=["nested", "thoughts", "parameters"],
)
async def test_what_a_model_writes_does_not_hold_the_loop(template: str, text: str):
    async with running_api(template=template) as api:
        api.generator.max_model_len = 200_000
        tokens = api.tokens(text)
        deltas = [Delta(tokens[at : at + 8], None, FinishReason.NONE, 0) for at in range(0, len(tokens), 8)]
        api.generator.script = Script([*deltas, Delta([1], None, FinishReason.STOP, 0)])
        path, body = chat([HELLO])
        longest, answered = await longest_turn(api, path, orjson.dumps({**orjson.loads(body), **TOOLS}))
    assert answered == 200
    assert longest < LONGEST
