"""Answers generating requests over HTTP: reads, checks and runs each, and writes its answer."""

from typing import Generic

from services.gateway.api.answers.choice import Update, Usage, joined
from services.gateway.api.answers.updates import Updates
from services.gateway.api.request_runner import READING_GRACE_S, RequestRunner
from services.gateway.api.requests.asked_logprobs import asks_for_many
from services.gateway.api.requests.schema import CommonRequest, Request
from services.gateway.api.runners import Runners
from services.gateway.api.served_models import Resolved
from services.gateway.api.side_thread import SideThread
from services.gateway.api.terms import Terms
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits
from services.gateway.http.streams import EventSink, collected
from services.gateway.openai.answer import DONE, Answer, AnswerFormat, AnswerHead, takes_long

_FEW_CHOICES = 64


class GenerationEndpoint(Generic[Request]):
    """Answers requests of one dialect."""

    def __init__(
        self,
        runners: Runners,
        limits: Limits,
        kind: type[Request],
        format: AnswerFormat[Request],
    ) -> None:
        self._runner = runners.of(kind)
        self._records = runners.records
        self._format = format
        self._limits = limits

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        limits = self._limits
        terms = limits.terms(exchange.header, exchange.caller)
        self._records.begin(exchange.record, exchange.header)
        body = await exchange.read_json(self._limits.max_body_bytes)
        asked, ignored = await self._runner.parse(body, self._format.neutral, limits.strict_fields)
        del body
        exchange.take_request_id(asked.request.request_id)
        exchange.record.note_ignored_fields(ignored)
        asked = Resolved(limits.defaults.applied(asked.request), asked.model)
        answer = self._format.answer(asked.request, AnswerHead.of(exchange.record.request_id, asked.model))
        await answer_over_http(exchange, self._runner, asked, answer, terms)


async def answer_over_http(
    exchange: Exchange, runner: RequestRunner[Request], asked: Resolved[Request], answer: Answer, terms: Terms
) -> None:
    """Runs a checked request and sends its answer, as a stream or whole. Raises ApiError, ClientGone."""
    async with (
        exchange.while_connected(terms.timeout_s + READING_GRACE_S),
        runner.run(asked, exchange.record, terms) as updates,
    ):
        if asked.request.stream:
            await _stream(exchange, updates, answer, runner.side, asked.request)
        else:
            await _collect(exchange, updates, answer, runner.side)


async def _stream(
    exchange: Exchange, updates: Updates, answer: Answer, side: SideThread, request: CommonRequest
) -> None:
    # The status waits for the first token: until then, an error can still be one.
    update = await updates.next()
    await exchange.start_events()
    events = _Events(answer, updates, request)
    sink = EventSink(exchange.stream, updates, events.of, answer.text_chunk)
    usage = events.usage()
    first = await side.run_if(takes_long(update), answer.chunk, update, usage)
    sink.unwritten = answer.opening(updates.num_choices, update, usage) + first
    while not updates.done:
        await exchange.write(sink.unwritten)
        if asks_for_many(request) is None:
            await updates.relay(sink)
        else:  # each update's JSON is made beside the event loop
            sink.unwritten = await side.run_if(takes_long(update := await updates.next()), events.of, update)
    end = answer.usage_chunk(updates.usage()) if request.include_usage else b""
    await exchange.end_events(sink.unwritten + end + DONE)


class _Events:
    """The events of a request's updates."""

    def __init__(self, answer: Answer, updates: Updates, request: CommonRequest) -> None:
        self._answer = answer
        self._updates = updates
        self._each_usage = request.continuous_usage
        self._shows_ids = bool(request.return_token_ids)

    def of(self, update: Update) -> bytes:
        """The event of an update; empty where it shows nothing."""
        if update.worth_a_chunk or (self._shows_ids and update.tokens):
            return self._answer.chunk(update, self.usage())
        return b""

    def usage(self) -> Usage | None:
        """The usage so far, where every event has it."""
        return self._updates.usage() if self._each_usage else None


async def _collect(exchange: Exchange, updates: Updates, answer: Answer, side: SideThread) -> None:
    parts: list[list[Update]] = [[] for _ in range(updates.num_choices)]
    for update in await collected(updates):
        parts[update.choice].append(update)
    choices = [joined(choice) for choice in parts]
    long = len(choices) > _FEW_CHOICES or any(map(takes_long, choices))
    await exchange.respond(200, await side.run_if(long, answer.body, choices, updates.usage()))
