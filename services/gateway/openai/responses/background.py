"""Responses that are generated in the background: the client is answered at once, and may leave.

The handler of the request goes on after its answer. The server knows it as one that works, and so waits for it when it
drains, and cancels it when the drain's time is over.
"""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import orjson

from services.gateway.api.answers.updates import Updates
from services.gateway.api.side_thread import SideThread
from services.gateway.http.exchange import ClientGone, Exchange
from services.gateway.openai.answer import takes_long
from services.gateway.openai.logprobs import LogprobEntries
from services.gateway.openai.responses.answering import Turn, failure_of, usage_of
from services.gateway.openai.responses.background_kept import BackgroundResponse, BackgroundResponses
from services.gateway.openai.responses.following import follow
from services.gateway.openai.responses.output import Nobody, Output
from services.gateway.openai.responses.response import Outcome, Status, as_begun, finished
from services.gateway.openai.responses.running import ResponseCancelled, RunningResponse
from services.gateway.openai.responses.translation import in_words_of_responses

_UPDATES_AT_ONCE = 64  # take a millisecond


@dataclass(frozen=True, slots=True)
class Telling:
    """The client that asked for a background response. stream_s: how long it may read events; None: it wants none."""

    exchange: Exchange
    running: RunningResponse
    stream_s: float | None

    async def tell(self) -> None:
        """Answers with the response as it is now, or with its events until it ends or the client leaves."""
        if self.stream_s is None:
            await self.exchange.respond(200, orjson.dumps(self.running.described))
            return
        try:
            async with self.exchange.while_connected(self.stream_s):
                await follow(self.exchange, self.running)
        except ClientGone:
            return  # the response goes on


class BackgroundAnswering:
    """Generates responses in the background."""

    def __init__(self, entries: LogprobEntries, side: SideThread, kept: BackgroundResponses) -> None:
        self._entries = entries
        self._side = side
        self._kept = kept

    async def __call__(self, telling: Telling, turn: Turn, generating: AbstractAsyncContextManager[Updates]) -> None:
        """Answers the client, and returns when the response has ended. Raises ApiError where it does not begin."""
        running = telling.running
        output = turn.output(self._entries, Nobody())
        running.items = output.items
        async with self._kept.leased(turn.tenant, turn.head["id"], turn.conversation, running.cancel) as kept:
            work = _Work(telling, output, kept)
            try:
                outcome = await self._outcome(work, turn, generating)
                response = turn.ended(output, outcome, usage_of(telling.exchange, work.updates))
                await kept.end(response, output.items, running.end)
                await work.told()
            finally:
                work.close()

    async def _outcome(self, work: "_Work", turn: Turn, generating: AbstractAsyncContextManager[Updates]) -> Outcome:
        """Generates the response. Raises ApiError, and whatever else happens before the client is told."""
        record = work.telling.exchange.record
        try:
            with in_words_of_responses(turn.tools):
                async with work.telling.running.generating(), generating as work.updates:
                    await work.kept.begin(turn.head)
                    work.begin_telling()
                    await self._collect(work, turn)
            return finished(record.finish_reason)
        except ResponseCancelled:
            return Outcome(Status.CANCELLED)
        except Exception as error:
            if not work.telling_began:
                raise
            failure = failure_of(error)
            record.status, record.error = failure.status, failure.code or failure.type
            return Outcome(Status.FAILED, failure)

    async def _collect(self, work: "_Work", turn: Turn) -> None:
        assert work.updates is not None
        running, num_taken = work.telling.running, 0
        while not work.updates.done:
            update = await work.updates.next()
            await self._side.run_if(takes_long(update), work.output.take, update)
            if num_taken == 0:
                running.described = as_begun(turn.head, Status.IN_PROGRESS)
                await work.kept.note_progress(running.described)
            running.note_change()
            num_taken += 1
            if num_taken % _UPDATES_AT_ONCE == 0:
                await asyncio.sleep(0)


class _Work:
    """A response that is being generated, and its client, who is told at the same time."""

    def __init__(self, telling: Telling, output: Output, kept: BackgroundResponse) -> None:
        self.telling = telling
        self.output = output
        self.kept = kept
        self.updates: Updates | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def telling_began(self) -> bool:
        """True when the client is told that there is a response."""
        return self._task is not None

    def begin_telling(self) -> None:
        """Begins to answer the client, who may read slowly, or leave."""
        self._task = asyncio.create_task(self.telling.tell())

    async def told(self) -> None:
        """Returns when the client has its answer."""
        if self._task is None:  # the response was cancelled before it began
            self.begin_telling()
        assert self._task is not None
        await self._task

    def close(self) -> None:
        """Stops answering, where the answer is not complete."""
        if self._task is not None:
            self._task.cancel()
