"""A console's client: reads the feed as it comes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

PATIENCE_S = 60.0


class FeedReader:
    """The events of one stream, in order. rows: those that a page would show, by their numbers; newest wins."""

    def __init__(self, response: httpx2.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()
        self.seen: list[tuple[str, Any]] = []
        self.rows: dict[int, Any] = {}

    async def next(self, name: str, fits: Callable[[Any], bool] = lambda data: True) -> Any:
        """The data of the next event of this name that fits."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found, data = await self.any()
                if found == name and fits(data):
                    return data

    async def any(self) -> tuple[str, Any]:
        """The next event: its name and its data. Raises StopAsyncIteration where the stream ended as it should."""
        name = (await anext(self._lines)).removeprefix("event: ")
        data = json.loads((await anext(self._lines)).removeprefix("data: "))
        assert await anext(self._lines) == ""
        self.seen.append((name, data))
        if name == "hello":
            self.rows = {}
        for row in data[_ROWS[name]] if name in _ROWS else ():
            self.rows[row["n"]] = row
        return name, data

    async def row(self, fits: Callable[[Any], bool]) -> Any:
        """The first row that fits, of those that are known or come."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := [row for row in self.rows.values() if fits(row)]):
                await self.any()
        return found[0]

    async def rest(self) -> list[tuple[str, Any]]:
        """All events until the stream ends."""
        async with asyncio.timeout(PATIENCE_S):
            start = len(self.seen)
            try:
                while True:
                    await self.any()
            except StopAsyncIteration:
                return self.seen[start:]


_ROWS = {"hello": "requests", "requests": "rows"}


@asynccontextmanager
async def feed(client: httpx2.AsyncClient, headers: Mapping[str, str] | None = None) -> AsyncIterator[FeedReader]:
    """Listens at a port that answers."""
    async with client.stream("GET", "/console/feed", headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        yield FeedReader(response)
