"""The server under test, as it describes itself: its models, its version."""

import asyncio
from typing import Any

import orjson

from loadtest import http_stream
from loadtest.cannot_run import CannotRun
from loadtest.http_stream import Address, HttpError

ANSWER_TIMEOUT_S = 10.0  # of a request that costs nothing
_LONGEST = 60


async def first_model(address: Address) -> str:
    """The first model that a server names. Raises HttpError, and CannotRun where it names none."""
    try:
        return str((await _first(address))["id"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CannotRun(f"{address.authority} names no model at /v1/models: say --model") from error


async def describe(address: Address) -> str:
    """The server's name and version in a few words, as far as it tells them."""
    found = []
    for asked in (_owner, _version):
        try:
            found.append(str(await asked(address))[:_LONGEST])
        except (HttpError, ValueError, KeyError, TypeError, IndexError):
            continue  # a server need not tell
    return " ".join(found) or "it tells neither name nor version"


async def _owner(address: Address) -> object:
    return (await _first(address))["owned_by"]


async def _version(address: Address) -> object:
    return orjson.loads((await _get(address, "/version")).body())["version"]


async def _first(address: Address) -> Any:
    return orjson.loads((await _get(address, "/v1/models")).body())["data"][0]


async def _get(address: Address, path: str) -> http_stream.Answer:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await http_stream.ask(address, path, None)
    except TimeoutError as error:
        raise HttpError(f"{address.authority} does not answer at {path} within {ANSWER_TIMEOUT_S:g} s") from error
