"""Answers the requests of the Messages API: reads and checks each, runs it as a chat, and writes the message."""

from typing import TypeVar

import orjson

from services.gateway.anthropic_api.answer import Head, content_of
from services.gateway.anthropic_api.errors import in_words_of_messages, own_name
from services.gateway.anthropic_api.events import MessageEvents
from services.gateway.anthropic_api.request import NEUTRAL, CountRequest, MessagesRequest
from services.gateway.anthropic_api.translation import MessagesChat, chat_fields
from services.gateway.api.answers.updates import Updates
from services.gateway.api.errors import unsupported
from services.gateway.api.request_runner import READING_GRACE_S
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.requests.large_json import takes_long
from services.gateway.api.requests.validation import ignored_fields, parse_request, validate_request
from services.gateway.api.runners import Runners
from services.gateway.api.served_models import Resolved
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits
from services.gateway.http.rendered import rendered
from services.gateway.http.streams import collected, stream_events

_FEW_BYTES = 16 << 10  # of a body, which become messages in a millisecond or two

Asked = TypeVar("Asked", bound=CountRequest)


class Messages:
    """POST /v1/messages, POST /v1/messages/count_tokens and POST /v1/messages/render."""

    def __init__(self, runners: Runners, limits: Limits) -> None:
        self._runner = runners.of(ChatRequest)
        self._side = runners.side
        self._records = runners.records
        self._limits = limits

    async def create(self, exchange: Exchange) -> None:
        """Answers one request with a message. Raises ApiError, ClientGone."""
        terms = self._limits.terms(exchange.header, exchange.caller)
        self._records.begin(exchange.record, exchange.header)
        request, asked = await self._read(exchange, MessagesRequest)
        head = Head(f"msg_{exchange.record.request_id}", asked.model.name)
        with in_words_of_messages(request):
            async with (
                exchange.while_connected(terms.timeout_s + READING_GRACE_S),
                self._runner.run(asked, exchange.record, terms) as updates,
            ):
                if request.stream:
                    await stream_events(exchange, updates, MessageEvents(head, request.shows_thinking))
                else:
                    await _answer_whole(exchange, updates, head, request.shows_thinking)

    async def count_tokens(self, exchange: Exchange) -> None:
        """Sends the number of a prompt's tokens. Raises ApiError, ClientGone."""
        request, asked = await self._read(exchange, CountRequest)
        with in_words_of_messages(request):
            (prompt,) = await self._runner.tokenize(asked, exchange.record, exchange.caller)
        await exchange.respond(200, orjson.dumps({"input_tokens": len(prompt.token_ids)}))

    async def render(self, exchange: Exchange) -> None:
        """Sends what a worker would be sent for a request. Raises ApiError, ClientGone."""
        request, asked = await self._read(exchange, MessagesRequest)
        with in_words_of_messages(request):
            (made,) = await self._runner.rendered(asked, exchange.record, exchange.caller)
        answer = rendered(asked.request, *made, f"msg_{exchange.record.request_id}", asked.model.name)
        await exchange.respond(200, await self._side.run(orjson.dumps, answer, None, orjson.OPT_SERIALIZE_NUMPY))

    async def _read(self, exchange: Exchange, kind: type[Asked]) -> tuple[Asked, Resolved[ChatRequest]]:
        body = await exchange.read_json(self._limits.max_body_bytes)
        long = takes_long(body) or len(body) > _FEW_BYTES
        request, chat, ignored = await self._side.run_if(long, self._parse, body, kind)
        exchange.record.note_ignored_fields(ignored)
        with in_words_of_messages(request):
            return request, self._runner.check(chat)

    def _parse(self, body: bytes, kind: type[Asked]) -> tuple[Asked, ChatRequest, tuple[str, ...]]:
        """Returns the request in a body, the chat that it asks for, and the ignored fields. Raises ApiError."""
        request = parse_request(body, kind, NEUTRAL)
        request.check_combinations()
        with in_words_of_messages(request):
            chat = validate_request(chat_fields(request), MessagesChat, {})
        for name in chat.unknown_fields():  # a request asks for what chats do not have
            raise unsupported(own_name(name, request))
        of_chat = (own_name(name, request) for name in self._runner.dialect.ignored_fields(chat))
        return request, chat, ignored_fields((*request.unknown_fields(), *of_chat), self._limits.strict_fields)


async def _answer_whole(exchange: Exchange, updates: Updates, head: Head, shows_thinking: bool) -> None:
    taken = await collected(updates)
    content = content_of(taken, shows_thinking)
    await exchange.respond(200, orjson.dumps(head.message(content, taken[-1], updates.usage())))
