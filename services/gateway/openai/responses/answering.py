"""Answers a request with its response: as a stream of events, or whole."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import orjson
import structlog

from services.gateway.api.answers.choice import Update, Usage
from services.gateway.api.answers.updates import Updates
from services.gateway.api.errors import ApiError, internal_error
from services.gateway.api.side_thread import SideThread
from services.gateway.http.exchange import ClientGone, Exchange
from services.gateway.http.http_protocol import StreamWriter
from services.gateway.openai.answer import takes_long
from services.gateway.openai.logprobs import LogprobEntries
from services.gateway.openai.responses.events import Events
from services.gateway.openai.responses.items import Item
from services.gateway.openai.responses.kept import KeptResponses
from services.gateway.openai.responses.offered_tools import OfferedTools
from services.gateway.openai.responses.output import ItemListener, Nobody, Output
from services.gateway.openai.responses.response import Outcome, Status, finished, usage_json
from services.gateway.openai.responses.running import ResponseCancelled, RunningResponse
from services.gateway.openai.responses.translation import in_words_of_responses

_UPDATES_AT_ONCE = 64  # take a millisecond

log = structlog.get_logger()

Generating = AbstractAsyncContextManager[Updates]


@dataclass(frozen=True, slots=True)
class Turn:
    """A response that begins. head: its JSON values; conversation: the items that it answers; tools: it may call."""

    head: dict[str, Any]
    conversation: Sequence[Item]
    tenant: str
    tools: OfferedTools

    def output(self, entries: LogprobEntries, listener: ItemListener) -> Output:
        """Returns its output, which has no item so far."""
        return Output(entries, listener, self.head["id"], self.tools)

    def ended(self, output: Output, outcome: Outcome, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON values of the response as it ended, and closes its output."""
        output.close(outcome.last_item)
        return {
            **self.head,
            **outcome.as_json(),
            "completed_at": int(time.time()) if outcome.status is Status.COMPLETED else None,
            "output": output.as_json(),
            "usage": usage,
        }


class Answering:
    """Writes responses to clients, and has them kept."""

    def __init__(self, entries: LogprobEntries, side: SideThread, kept: KeptResponses) -> None:
        self._entries = entries
        self._side = side
        self._kept = kept

    async def whole(self, exchange: Exchange, turn: Turn, running: RunningResponse, generating: Generating) -> None:
        """Answers with the whole response. Raises ApiError."""
        output = turn.output(self._entries, Nobody())
        updates: Updates | None = None
        try:
            with in_words_of_responses(turn.tools):
                async with running.generating(), generating as updates:
                    await self._collect(updates, output)
            outcome = finished(exchange.record.finish_reason)
        except ResponseCancelled:
            outcome = Outcome(Status.CANCELLED)
        response = await self._end(turn, running, turn.ended(output, outcome, usage_of(exchange, updates)))
        await exchange.respond(200, orjson.dumps(response))

    async def stream(self, exchange: Exchange, turn: Turn, running: RunningResponse, generating: Generating) -> None:
        """Answers with events. An error before the first one is raised; a later one is the response's own."""
        events = Events()
        output = turn.output(self._entries, events)
        begun = False
        updates: Updates | None = None
        try:
            with in_words_of_responses(turn.tools):
                async with running.generating(), generating as updates:
                    update = await updates.next()
                    begun = True
                    await _begin(exchange, turn, events)
                    await self._side.run_if(takes_long(update), output.take, update)
                    sink = _EventSink(exchange.stream, updates, output, events)
                    while not updates.done:
                        await exchange.write(events.taken())
                        await updates.relay(sink)
            outcome = finished(exchange.record.finish_reason)
        except ResponseCancelled:
            outcome = Outcome(Status.CANCELLED)
            if not begun:
                await _begin(exchange, turn, events)
        except Exception as error:
            if not begun or isinstance(error, ClientGone):
                raise
            failure = failure_of(error)
            outcome = Outcome(Status.FAILED, failure)
            exchange.record.status, exchange.record.error = failure.status, failure.code or failure.type
        response = await self._end(turn, running, turn.ended(output, outcome, usage_of(exchange, updates)))
        events.lifecycle(outcome.event, response)
        await exchange.end_events(events.taken())

    async def _collect(self, updates: Updates, output: Output) -> None:
        num_taken = 0
        while not updates.done:
            update = await updates.next()
            await self._side.run_if(takes_long(update), output.take, update)
            num_taken += 1
            if num_taken % _UPDATES_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _end(self, turn: Turn, running: RunningResponse, response: dict[str, Any]) -> dict[str, Any]:
        """Returns the response as it ended, which is kept before anybody is told."""
        if response["store"]:
            response["store"] = await self._kept.keep(turn.tenant, response, turn.conversation)
        running.end(response)
        return response


async def _begin(exchange: Exchange, turn: Turn, events: Events) -> None:
    events.lifecycle("response.created", turn.head)
    events.lifecycle("response.in_progress", turn.head)
    await exchange.start_events()


def usage_of(exchange: Exchange, updates: Updates | None) -> dict[str, Any]:
    """Returns a response's usage. updates: None where the response was cancelled before there were any."""
    usage = Usage(exchange.record.prompt_tokens or 0, 0, 0) if updates is None else updates.usage()
    return usage_json(usage)


def failure_of(error: Exception) -> ApiError:
    """Returns the error that the client gets, and logs the reason of one that is the server's."""
    if not isinstance(error, ApiError):
        log.exception("request failed", exc_info=error)
        return internal_error()
    if error.status >= 500:
        log.warning("request failed", reason=str(error.__cause__ or error.message))
    return error


class _EventSink:
    """An UpdateSink that writes the events of a response to a client."""

    __slots__ = ("_events", "_output", "_updates", "_write", "ready")

    def __init__(self, stream: StreamWriter, updates: Updates, output: Output, events: Events) -> None:
        self._write = stream.write
        self._updates = updates
        self._output = output
        self._events = events
        self.ready = stream.ready

    def take(self, update: Update) -> bool:
        """See UpdateSink."""
        self._output.take(update)
        if self._events.pending and not self._updates.done:
            if not self.ready():
                return False
            self._write(self._events.taken())
        return True

    def take_text(self, choice: int, text: str) -> None:
        """See UpdateSink."""
        if self._output.take_text(text):
            self._write(self._events.delta(text))
            return
        self._output.take(Update(choice, text, [], None, None))
        self._write(self._events.taken())
