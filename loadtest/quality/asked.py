"""A running server as the parts of a quality run ask it: OpenAI's API, with what vLLM and Baton add to it."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from loadtest import http_stream
from loadtest.bench.server import first_model
from loadtest.cannot_run import CannotRun
from loadtest.http_stream import Address, HttpError, StatusError

Fields = Mapping[str, Any]  # of a request's body
Found = TypeVar("Found")

_AT_A_TIME = 16
_TIMEOUT_S = 600.0
_REFUSALS = (400, 404, 405, 422, 501)  # the server understood, and cannot do it


class Skipped(Exception):
    """A part that a server has no answers for; the text says why, on one line."""


@dataclass(frozen=True, slots=True)
class AskedServer:
    """A server, the model that it names first, and the most tokens of a prompt and its answer together.

    gate: bounds how many requests are with the server at a time.
    """

    address: Address
    model: str
    max_model_len: int
    gate: asyncio.Semaphore

    async def complete(self, fields: Fields) -> Any:
        """Asks for a completion, greedy, and returns its only choice. Raises HttpError, Skipped."""
        return (await self._post("/v1/completions", {"temperature": 0, **fields}))["choices"][0]

    async def chat(self, fields: Fields) -> Any:
        """Asks for a chat's answer, greedy, and returns its only choice. Raises HttpError, Skipped."""
        return (await self._post("/v1/chat/completions", {"temperature": 0, **fields}))["choices"][0]

    async def count(self, text: str) -> int:
        """Returns the number of a text's tokens, special ones included. Raises HttpError, Skipped."""
        return len((await self._post("/tokenize", {"prompt": text}))["tokens"])

    async def _post(self, path: str, fields: Fields) -> Any:
        body = orjson.dumps({"model": self.model, **fields})
        try:
            async with self.gate, asyncio.timeout(_TIMEOUT_S):
                answer = await http_stream.ask(self.address, path, body)
            return orjson.loads(answer.body())
        except StatusError as error:
            if error.status in _REFUSALS:
                raise Skipped(f"{path}: {_on_one_line(error)}") from error
            raise
        except TimeoutError as error:
            raise HttpError(f"{path} did not answer within {_TIMEOUT_S:g} s") from error


async def described(address: Address) -> AskedServer:
    """Finds a server's model and the most tokens that it takes. Raises HttpError, CannotRun."""
    model = await first_model(address)
    listed = orjson.loads((await http_stream.ask(address, "/v1/models", None)).body())["data"][0]
    longest = listed.get("max_model_len")
    if not isinstance(longest, int):
        raise CannotRun(f"{address.authority} does not say max_model_len at /v1/models")
    return AskedServer(address, model, longest, asyncio.Semaphore(_AT_A_TIME))


async def each(asked: Iterable[Awaitable[Found]]) -> list[Found]:
    """Awaits answers side by side, and returns them in order. Raises the first error, when all others have ended."""
    answers = [asyncio.ensure_future(one) for one in asked]
    try:
        return await asyncio.gather(*answers)
    finally:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


def _on_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
