"""The responses that this gateway is generating, which can be read and cancelled by their ids."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

from services.gateway.http.cut_short import cut_short
from services.gateway.openai.responses.output import OutputItem


class ResponseCancelled(Exception):
    """Somebody cancelled the response."""


class RunningResponse:
    """A response that is being generated.

    described: its JSON values, at last those of its end. items: those that have begun, of one that is generated in the
    background; None for others. changed: is set when more of it has come, and then replaced.
    """

    def __init__(self, described: Mapping[str, Any]) -> None:
        self.described = described
        self.items: Sequence[OutputItem] | None = None
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()
        self._cancelled = asyncio.Event()

    def generating(self) -> AbstractAsyncContextManager[None]:
        """Cancels the `async with` block and raises ResponseCancelled when the response is cancelled."""
        return cut_short(self._cancelled.wait, ResponseCancelled)

    def cancel(self) -> None:
        """Ends the work on the response, if it has not ended already; `ended` is set when it has."""
        self._cancelled.set()

    def note_change(self) -> None:
        """Wakes who follows the response."""
        self.changed.set()
        self.changed = asyncio.Event()

    def end(self, described: Mapping[str, Any]) -> None:
        """Takes note of how the response ended."""
        self.described = described
        self.ended.set()
        self.note_change()


class RunningResponses:
    """All that are being generated, by tenant and id."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], RunningResponse] = {}

    @contextmanager
    def added(
        self, tenant: str, response_ids: Sequence[str], described: Mapping[str, Any]
    ) -> Iterator[RunningResponse]:
        """Makes a response known by each of its ids during the `with` block. Of two with one id the newer is found."""
        keys = [(tenant, response_id) for response_id in response_ids]
        running = RunningResponse(described)
        self._running.update(dict.fromkeys(keys, running))
        try:
            yield running
        finally:
            running.ended.set()
            running.note_change()
            for key in keys:
                if self._running.get(key) is running:
                    del self._running[key]

    def find(self, tenant: str, response_id: str) -> RunningResponse | None:
        """Returns the response with this id; None: it is not being generated here."""
        return self._running.get((tenant, response_id))
