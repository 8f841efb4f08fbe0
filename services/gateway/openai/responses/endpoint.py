"""POST /v1/responses: a request read, checked, turned into a chat, run and answered."""

import re
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from services.gateway.api.errors import invalid
from services.gateway.api.large_json import takes_long
from services.gateway.api.request_record import RequestRecord
from services.gateway.api.request_runner import READING_GRACE_S, Runners
from services.gateway.api.terms import TTFT_SLO_HEADER, Terms, parse_ttft_slo
from services.gateway.api.validation import ignored_fields, parse_request
from services.gateway.openai.endpoint import Limits
from services.gateway.openai.exchange import Exchange
from services.gateway.openai.logprobs import LogprobEntries
from services.gateway.openai.neutral import RESPONSES_NEUTRAL
from services.gateway.openai.responses.answering import Answering, Turn
from services.gateway.openai.responses.items import MAX_ITEMS, Item, new_id
from services.gateway.openai.responses.kept import KeptResponses
from services.gateway.openai.responses.request import ResponsesRequest
from services.gateway.openai.responses.response import head
from services.gateway.openai.responses.running import RunningResponses
from services.gateway.openai.responses.translation import ResponseChat, chat_of, in_words_of_responses

_FEW_ITEMS = 128  # become messages in a millisecond or two
_IN_A_PATH = re.compile(r"[A-Za-z0-9._:@+=~-]{1,128}")

P = ParamSpec("P")
T = TypeVar("T")


class ResponsesEndpoint:
    """Answers requests for responses, which are chats for the workers."""

    def __init__(self, runners: Runners, limits: Limits, kept: KeptResponses, running: RunningResponses) -> None:
        self._runner = runners.chat
        self._side = runners.side
        self._records = runners.records
        self._limits = limits
        self._kept = kept
        self._running = running
        self._answering = Answering(LogprobEntries(runners.tokenizer), runners.side, kept)

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        limits = self._limits
        slo_s = parse_ttft_slo(exchange.header(TTFT_SLO_HEADER), limits.ttft_slo_s)
        terms = Terms(limits.request_timeout_s, slo_s)
        self._records.begin(exchange.record, exchange.header)
        request = await self._read(exchange)
        conversation = await self._conversation(request, terms.tenant)
        chat = await self._chat(request, conversation)
        turn = self._turn(request, exchange.record, conversation, terms.tenant)
        with self._running.added(terms.tenant, turn.head["id"], turn.head) as running:
            async with exchange.while_connected(terms.timeout_s + READING_GRACE_S):
                answer = self._answering.stream if request.stream else self._answering.whole
                await answer(exchange, turn, running, self._runner.run(chat, exchange.record, terms))

    async def _read(self, exchange: Exchange) -> ResponsesRequest:
        """Returns the checked request. Raises ApiError, ClientGone."""
        body = await exchange.read_json(self._limits.max_body_bytes)
        request = await self._call(takes_long(body), parse_request, body, ResponsesRequest, RESPONSES_NEUTRAL)
        exchange.record.ignored_fields = ignored_fields(request, self._limits.strict_fields)
        self._runner.model.check(request.model)
        request.check_combinations()
        return request

    async def _conversation(self, request: ResponsesRequest, tenant: str) -> list[Item]:
        """Returns the items of earlier turns and of this one. Raises ApiError."""
        earlier: list[Item] = []
        if request.previous_response_id is not None:
            earlier = await self._kept.conversation(tenant, request.previous_response_id)
        if len(earlier) + len(request.input) > MAX_ITEMS:
            message = f"Invalid 'input': the conversation must have at most {MAX_ITEMS} items."
            raise invalid(message, "input", "array_above_max_length")
        return [*earlier, *request.input]

    async def _chat(self, request: ResponsesRequest, conversation: list[Item]) -> ResponseChat:
        chat = await self._call(len(conversation) > _FEW_ITEMS, chat_of, request, conversation)
        with in_words_of_responses():
            self._runner.check(chat)
        return chat

    def _turn(self, request: ResponsesRequest, record: RequestRecord, conversation: list[Item], tenant: str) -> Turn:
        request_id = record.request_id
        response_id = f"resp_{request_id}" if _IN_A_PATH.fullmatch(request_id) else new_id("resp")
        about = {
            "id": response_id,
            "created_at": int(time.time()),
            "model": self._runner.model.name,
            "store": self._kept.asked(request.store),
        }
        return Turn(head(request, about, self._runner.model.defaults), conversation, tenant)

    async def _call(self, takes_long: bool, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what the call returns, which is made beside the event loop where it takes long."""
        return await self._side.run(call, *args, **kwargs) if takes_long else call(*args, **kwargs)
