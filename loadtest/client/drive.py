"""Sends a workload's requests and notes when each part of an answer came.

Answers are read when all have come, so that it costs the server under test nothing.
"""

import asyncio
import time
from dataclasses import dataclass, field

import orjson

from loadtest import http_stream
from loadtest.http_stream import Address, Answer, HttpError


@dataclass(slots=True)
class Outcome:
    """One request. Times are of one monotonic clock, in seconds."""

    sent_s: float = 0.0
    parts_s: list[float] = field(default_factory=list)  # when each part of the answer came
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds until the first part, which is the first token."""
        return self.parts_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None when there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.parts_s[-1] - self.parts_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Seconds between parts: between tokens, where the server sends each alone."""
        return [late - early for early, late in zip(self.parts_s, self.parts_s[1:], strict=False)]


async def drive(
    address: Address, model: str, prompts: list[list[int]], output_tokens: int, concurrency: int, timeout_s: float
) -> list[Outcome]:
    """Sends all prompts, `concurrency` at a time, and waits; a request that is open after `timeout_s` has failed."""
    places = asyncio.Semaphore(concurrency)
    outcomes = [Outcome() for _ in prompts]
    answers: list[tuple[Outcome, Answer]] = []
    deadline = asyncio.get_running_loop().time() + timeout_s

    async def one(prompt: list[int], outcome: Outcome) -> None:
        try:
            async with asyncio.timeout_at(deadline), places:
                body = request_body(model, prompt, output_tokens)
                answers.append((outcome, await send(address, body, outcome)))
        except TimeoutError:
            outcome.error = f"not finished after {timeout_s:g} s"
        except HttpError as error:
            outcome.error = str(error)

    async with asyncio.TaskGroup() as requests:
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            requests.create_task(one(prompt, outcome))
    read_answers(answers)
    return outcomes


async def send(address: Address, body: bytes, outcome: Outcome) -> Answer:
    """Sends a request, and returns its answer unread. Raises HttpError."""
    outcome.sent_s = time.perf_counter()
    return await http_stream.ask(address, "/v1/completions", body)


def read_answers(answers: list[tuple[Outcome, Answer]]) -> None:
    """Notes the parts, the tokens or the error of each answer in its outcome; of a refusal, when it came."""
    for outcome, answer in answers:
        try:
            _read_answer(answer, outcome)
        except HttpError as error:
            outcome.error = str(error)
            outcome.parts_s = outcome.parts_s or answer.times_s[-1:]


def request_body(model: str, prompt: list[int], output_tokens: int) -> bytes:
    """Builds a greedy request whose answer has exactly `output_tokens`, so that runs can be compared."""
    return orjson.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def _read_answer(answer: Answer, outcome: Outcome) -> None:
    for came_s, line in answer.lines():
        if not line.startswith(b"data: ") or line == b"data: [DONE]":
            continue
        event = orjson.loads(line[len(b"data: ") :])
        if "error" in event:
            raise HttpError(f"error in the stream: {event['error']}")
        if event["choices"]:
            outcome.parts_s.append(came_s)
        if event.get("usage"):
            outcome.output_tokens = event["usage"]["completion_tokens"]
    if not outcome.parts_s or not outcome.output_tokens:
        raise HttpError("the answer had no token or no usage")
