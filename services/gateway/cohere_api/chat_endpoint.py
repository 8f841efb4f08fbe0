"""POST /v2/chat: reads and checks a request, runs it as a chat, and writes its answer."""

import orjson

from services.gateway.api.answers.updates import Updates
from services.gateway.api.request_runner import READING_GRACE_S
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.requests.large_json import takes_long
from services.gateway.api.requests.validation import ignored_fields, parse_request, validate_request
from services.gateway.api.runners import Runners
from services.gateway.api.served_models import Resolved
from services.gateway.cohere_api.chat_answer import whole_answer
from services.gateway.cohere_api.chat_events import ChatEvents
from services.gateway.cohere_api.chat_request import CHAT_NEUTRAL, CohereChatRequest
from services.gateway.cohere_api.chat_translation import CohereChat, chat_fields
from services.gateway.cohere_api.errors import CHAT_NAMES, in_words_of_cohere, own_name
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits
from services.gateway.http.streams import collected, stream_events

_FEW_BYTES = 16 << 10  # of a body, which become messages in a millisecond or two
_FEW_UPDATES = 128  # are joined in a millisecond


class CohereChats:
    """Answers requests of /v2/chat."""

    def __init__(self, runners: Runners, limits: Limits) -> None:
        self._runner = runners.of(ChatRequest)
        self._side = runners.side
        self._records = runners.records
        self._limits = limits

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        terms = self._limits.terms(exchange.header, exchange.caller)
        self._records.begin(exchange.record, exchange.header)
        asked = await self._read(exchange)
        with in_words_of_cohere(CHAT_NAMES):
            async with (
                exchange.while_connected(terms.timeout_s + READING_GRACE_S),
                self._runner.run(asked, exchange.record, terms) as updates,
            ):
                if asked.request.stream:
                    await stream_events(exchange, updates, ChatEvents(exchange.record.request_id))
                else:
                    await self._answer_whole(exchange, updates, bool(asked.request.logprobs))

    async def _read(self, exchange: Exchange) -> Resolved[ChatRequest]:
        body = await exchange.read_json(self._limits.max_body_bytes)
        long = takes_long(body) or len(body) > _FEW_BYTES
        asked, ignored = await self._side.run_if(long, self._parse, body)
        exchange.record.note_ignored_fields(ignored)
        return asked

    def _parse(self, body: bytes) -> tuple[Resolved[ChatRequest], tuple[str, ...]]:
        """Returns the chat that the request in a body asks for, and the ignored fields. Raises ApiError."""
        request = parse_request(body, CohereChatRequest, CHAT_NEUTRAL)
        with in_words_of_cohere(CHAT_NAMES):
            chat = validate_request(chat_fields(request), CohereChat, {})
            asked = self._runner.check(chat)
        of_chat = (own_name(name, CHAT_NAMES) for name in self._runner.dialect.ignored_fields(chat))
        names = dict.fromkeys((*request.unknown_fields(), *of_chat))  # a call's own are those of both
        return asked, ignored_fields(names, self._limits.strict_fields)

    async def _answer_whole(self, exchange: Exchange, updates: Updates, scored: bool) -> None:
        taken, answer_id = await collected(updates), exchange.record.request_id
        long = len(taken) > _FEW_UPDATES
        answer = await self._side.run_if(long, whole_answer, taken, updates.usage(), answer_id, scored)
        await exchange.respond(200, orjson.dumps(answer))
