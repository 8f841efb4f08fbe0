"""The updates of a running request on their way to a client: written as events as they come, or collected."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from services.gateway.api.answers.choice import Update, Usage
from services.gateway.api.answers.updates import Updates
from services.gateway.http.exchange import Exchange
from services.gateway.http.http_protocol import StreamWriter

_UPDATES_AT_ONCE = 64  # take a millisecond


class EventSink:
    """An UpdateSink that writes events to a client.

    unwritten: the events of the last update, where the client did not read fast enough, and at the end of the answer.
    """

    __slots__ = ("_events_of", "_events_of_text", "_updates", "_write", "ready", "unwritten")

    def __init__(
        self,
        stream: StreamWriter,
        updates: Updates,
        events_of: Callable[[Update], bytes],
        events_of_text: Callable[[int, str], bytes],
    ) -> None:
        """events_of: of an update, empty where it shows nothing; events_of_text: of a choice's text by itself."""
        self._write = stream.write
        self._updates = updates
        self._events_of = events_of
        self._events_of_text = events_of_text
        self.ready = stream.ready
        self.unwritten = b""

    def take(self, update: Update) -> bool:
        """See UpdateSink."""
        self.unwritten = self._events_of(update)
        if self.unwritten and not self._updates.done:
            if not self.ready():
                return False
            self._write(self.unwritten)
        return True

    def take_text(self, choice: int, text: str) -> None:
        """See UpdateSink."""
        self._write(self._events_of_text(choice, text))


class AnswerEvents(Protocol):
    """Writes the events of an answer that is one choice."""

    def opening(self, usage: Usage) -> bytes:
        """The events before the first update. usage: as it is with the first token."""

    def take(self, update: Update) -> bytes:
        """The events of an update."""

    def text(self, choice: int, text: str) -> bytes:
        """The events of an update with text and nothing else: the short form of `take`."""

    def closing(self, usage: Usage) -> bytes:
        """The events after the last update."""


async def stream_events(exchange: Exchange, updates: Updates, events: AnswerEvents) -> None:
    """Answers with a stream of events. Raises GenerationError, ClientGone."""
    # The status waits for the first token: until then, an error can still be one.
    update = await updates.next()
    await exchange.start_events()
    sink = EventSink(exchange.stream, updates, events.take, events.text)
    sink.unwritten = events.opening(updates.usage()) + events.take(update)
    while not updates.done:
        await exchange.write(sink.unwritten)
        await updates.relay(sink)
    await exchange.end_events(sink.unwritten + events.closing(updates.usage()))


async def collected(updates: Updates) -> list[Update]:
    """Waits for all updates of all choices. Raises GenerationError."""
    taken: list[Update] = []
    while not updates.done:
        taken.append(await updates.next())
        if len(taken) % _UPDATES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return taken
