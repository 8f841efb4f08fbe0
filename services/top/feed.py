"""A gateway's feed for consoles, and the record of one request, asked over HTTP.

GatewayError: the message is one line for a person
  NotTold: the gateway answered, and does not tell this; the status is in the message
  Lost: it cannot be reached, or its feed broke or fell silent
"""

import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx2

from services.config.hosts import is_loopback
from services.config.option import Refusal
from services.top.config import GatewayChoice
from services.top.told import End, Told, read_told

SILENCE_S = 15.0  # a feed says something every second
_TIMEOUT_S = 10.0  # of one question
_MAX_EVENT_BYTES = 64 << 20

_WORDS = {
    401: "it asks for a key: --api-key or BATON_API_KEY",
    403: "the key lacks the right to see this",
}


class GatewayError(Exception):
    """A question to a gateway that came to nothing."""


class NotTold(GatewayError):
    """The gateway answered, and not with what was asked for."""


class Lost(GatewayError):
    """The gateway cannot be reached, or its feed ended."""


class GatewayClient:
    """Asks one gateway. Raises Refusal for a key that others could read, and for a file without certificates."""

    def __init__(self, choice: GatewayChoice) -> None:
        self.url = choice.url.rstrip("/")
        key, parts = next(iter(choice.api_keys), None), urlsplit(choice.url)
        self.is_here = is_loopback(parts.hostname or "")
        if key is not None and parts.scheme == "http" and not self.is_here:
            raise Refusal(f"{self.url}: a key is not sent as plain text; name the gateway by https://")
        try:
            trusted = ssl.create_default_context(cafile=choice.ca)
        except OSError as error:  # an SSLError is one
            raise Refusal(f"--ca {choice.ca}: {error.strerror or error}") from error
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._client = httpx2.AsyncClient(
            base_url=self.url, headers=headers, verify=trusted, trust_env=False, timeout=_TIMEOUT_S
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def record(self, request_id: str, number: int | None = None) -> dict[str, Any]:
        """Returns all that the gateway knows of a request. Raises GatewayError.

        number: of the one that is meant, where several have this id; None: the newest.
        """
        path = f"/console/requests/{quote(request_id, safe='')}" + ("" if number is None else f"?n={number}")
        async with self._asked(path) as answer:
            if answer.status_code == httpx2.codes.NOT_FOUND:
                raise NotTold(f"{self.url} knows no recent request {request_id}, or it is another key's")
            self._check(answer)
            found = json.loads(await answer.aread())
        if not isinstance(found, dict):
            raise NotTold(f"{self.url} answered with no record")
        return found

    async def feed(self) -> AsyncGenerator[tuple[Told, Any], None]:
        """Yields what the gateway tells, and the same as JSON, until it ends. Raises GatewayError."""
        limits = httpx2.Timeout(_TIMEOUT_S, read=SILENCE_S)
        async with self._asked("/console/feed", timeout=limits) as answer:
            if answer.status_code == httpx2.codes.NOT_FOUND:
                raise NotTold(f"{self.url} has no feed: no gateway's admin port, or of a version without one")
            self._check(answer)
            async for name, data in _events(answer.aiter_bytes()):
                found = json.loads(data)
                if name == "end":
                    raise Lost(f"{self.url} ended its feed: {End.model_validate(found).why}")
                if (told := read_told(name, found)) is not None:
                    yield told, found
        raise Lost(f"{self.url} ended its feed")

    @asynccontextmanager
    async def _asked(self, path: str, timeout: httpx2.Timeout | None = None) -> AsyncIterator[httpx2.Response]:
        """Translates whatever goes wrong with a question and its answer."""
        asked = self._client.build_request("GET", path, timeout=timeout or httpx2.Timeout(_TIMEOUT_S))
        try:
            answer = await self._client.send(asked, stream=True)
            try:
                yield answer
            finally:
                await answer.aclose()
        except httpx2.ReadTimeout as error:
            raise Lost(f"{self.url} says nothing") from error
        except httpx2.HTTPError as error:
            raise Lost(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        except ValueError as error:  # of JSON, and of pydantic
            raise NotTold(f"{self.url} does not answer as a gateway: {_first_line(error)}") from error

    def _check(self, answer: httpx2.Response) -> None:
        if answer.status_code != httpx2.codes.OK:
            words = _WORDS.get(answer.status_code, f"it answered {answer.status_code}")
            raise NotTold(f"{self.url}: {words}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, str]]:
    """Yields the name and the data of each server-sent event. Raises ValueError for one that is too large."""
    name, data = "", list[str]()
    async for line in _lines(chunks):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield name, "\n".join(data)
            name, data = "", []
        elif field == "event":
            name = value
        elif field == "data":
            data.append(value)


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    pieces, num_bytes = list[bytes](), 0
    async for chunk in chunks:
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            yield b"".join([*pieces, piece]).removesuffix(b"\r").decode()
            pieces, num_bytes = [], 0
        pieces.append(rest)
        num_bytes += len(rest)
        if num_bytes > _MAX_EVENT_BYTES:
            raise ValueError("an event without an end")
