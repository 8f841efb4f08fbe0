"""Answers generating requests over HTTP: reads, checks and runs each, and writes its answer."""

import asyncio
import time
from dataclasses import dataclass
from typing import Generic

import structlog

from services.gateway.api.choice import Update, Usage, joined
from services.gateway.api.request_records import RequestRecords
from services.gateway.api.request_runner import READING_GRACE_S, RequestRunner
from services.gateway.api.schema import CommonRequest, Request
from services.gateway.api.side_thread import SideThread
from services.gateway.api.terms import TTFT_SLO_HEADER, Terms, parse_ttft_slo
from services.gateway.api.updates import Updates
from services.gateway.api.validation import ignored_fields
from services.gateway.openai.answer import DONE, Answer, AnswerFormat, AnswerHead, takes_long
from services.gateway.openai.exchange import Exchange
from services.gateway.openai.http_protocol import StreamWriter

_UPDATES_AT_ONCE = 64  # take a millisecond
_FEW_CHOICES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a client's request."""

    request_timeout_s: float
    ttft_slo_s: float | None = None
    max_body_bytes: int = 8 << 20
    strict_fields: bool = False  # fields that nobody knows are refused, and not ignored


class GenerationEndpoint(Generic[Request]):
    """Answers requests of one dialect."""

    def __init__(
        self,
        runner: RequestRunner[Request],
        format: AnswerFormat[Request],
        limits: Limits,
        records: RequestRecords,
    ) -> None:
        self._runner = runner
        self._records = records
        self._format = format
        self._limits = limits

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        limits = self._limits
        slo_s = parse_ttft_slo(exchange.header(TTFT_SLO_HEADER), limits.ttft_slo_s)
        terms = Terms(limits.request_timeout_s, slo_s)
        self._records.begin(exchange.record, exchange.header)
        body = await exchange.read_json(self._limits.max_body_bytes)
        request = await self._runner.parse(body, self._format.neutral)
        del body
        if request.request_id is not None and not exchange.header("x-request-id"):
            exchange.record.request_id = request.request_id
            structlog.contextvars.bind_contextvars(request_id=request.request_id)
        exchange.record.ignored_fields = ignored_fields(request, limits.strict_fields)
        model = self._runner.model
        head = AnswerHead(exchange.record.request_id, model.name, int(time.time()), model.fingerprint)
        answer = self._format.answer(request, head)
        async with (
            exchange.while_connected(terms.timeout_s + READING_GRACE_S),
            self._runner.run(request, exchange.record, terms) as updates,
        ):
            if request.stream:
                await _stream(exchange, updates, answer, self._runner.side, request)
            else:
                await _collect(exchange, updates, answer, self._runner.side)


async def _stream(
    exchange: Exchange, updates: Updates, answer: Answer, side: SideThread, request: CommonRequest
) -> None:
    # The status waits for the first token: until then, an error can still be one.
    update = await updates.next()
    await exchange.start_events()
    stream = _EventStream(exchange.stream, updates, answer, request)
    usage = stream.usage()
    first = await side.run(answer.chunk, update, usage) if takes_long(update) else answer.chunk(update, usage)
    stream.unwritten = answer.opening(updates.num_choices) + first
    while not updates.done:
        await exchange.write(stream.unwritten)
        await updates.relay(stream)
    end = answer.usage_chunk(updates.usage()) if request.include_usage else b""
    await exchange.end_events(stream.unwritten + end + DONE)


class _EventStream:
    """An UpdateSink that writes events to a client.

    unwritten: the events of the last update, where the client did not read fast enough, and at the end of the answer.
    """

    __slots__ = ("_answer", "_each_usage", "_shows_ids", "_text_chunk", "_updates", "_write", "ready", "unwritten")

    def __init__(self, stream: StreamWriter, updates: Updates, answer: Answer, request: CommonRequest) -> None:
        self._each_usage = request.continuous_usage
        self._shows_ids = bool(request.return_token_ids)
        self._write = stream.write
        self._updates = updates
        self._answer = answer
        self._text_chunk = answer.text_chunk
        self.ready = stream.ready
        self.unwritten = b""

    def take(self, update: Update) -> bool:
        """See UpdateSink."""
        worth_a_chunk = update.worth_a_chunk or (self._shows_ids and update.tokens)
        self.unwritten = self._answer.chunk(update, self.usage()) if worth_a_chunk else b""
        if self.unwritten and not self._updates.done:
            if not self.ready():
                return False
            self._write(self.unwritten)
        return True

    def usage(self) -> Usage | None:
        """The usage so far, where every event has it."""
        return self._updates.usage() if self._each_usage else None

    def take_text(self, choice: int, text: str) -> None:
        """See UpdateSink."""
        self._write(self._text_chunk(choice, text))


async def _collect(exchange: Exchange, updates: Updates, answer: Answer, side: SideThread) -> None:
    parts: list[list[Update]] = [[] for _ in range(updates.num_choices)]
    num_taken = 0
    while not updates.done:
        update = await updates.next()
        parts[update.choice].append(update)
        num_taken += 1
        if num_taken % _UPDATES_AT_ONCE == 0:
            await asyncio.sleep(0)
    choices = [joined(choice) for choice in parts]
    if len(choices) > _FEW_CHOICES or any(map(takes_long, choices)):
        body = await side.run(answer.body, choices, updates.usage())
    else:
        body = answer.body(choices, updates.usage())
    await exchange.respond(200, body)
