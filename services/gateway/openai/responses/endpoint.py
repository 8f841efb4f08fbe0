"""POST /v1/responses: a request read, checked, turned into a chat, run and answered."""

import time
from typing import Any

from services.gateway.api.errors import invalid, unsupported
from services.gateway.api.large_json import takes_long
from services.gateway.api.request_runner import READING_GRACE_S, Runners
from services.gateway.api.validation import ignored_fields, parse_request
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits
from services.gateway.openai.logprobs import LogprobEntries
from services.gateway.openai.neutral import RESPONSES_NEUTRAL
from services.gateway.openai.responses.answering import Answering, Turn
from services.gateway.openai.responses.background import BackgroundAnswering, Telling
from services.gateway.openai.responses.background_kept import BackgroundResponses
from services.gateway.openai.responses.items import MAX_ITEMS, Item, new_id, num_parts
from services.gateway.openai.responses.kept import FEW_PARTS, KeptResponses
from services.gateway.openai.responses.request import ResponsesRequest
from services.gateway.openai.responses.response import head
from services.gateway.openai.responses.running import RunningResponses
from services.gateway.openai.responses.translation import ResponseChat, chat_of, in_words_of_responses, own_name
from services.gateway.openai.token_names import TokenNames


class ResponsesEndpoint:
    """Answers requests for responses, which are chats for the workers."""

    def __init__(
        self,
        runners: Runners,
        limits: Limits,
        kept: KeptResponses,
        background: BackgroundResponses | None,
        running: RunningResponses,
    ) -> None:
        """`background`: None generates no response in the background."""
        self._runner = runners.chat
        self._side = runners.side
        self._records = runners.records
        self._limits = limits
        self._kept = kept
        self._running = running
        names = TokenNames(runners.tokenizer, by_id=False)
        entries = LogprobEntries(runners.tokenizer, names)
        self._answering = Answering(entries, runners.side, kept)
        self._background = None if background is None else BackgroundAnswering(entries, runners.side, background)

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        limits = self._limits
        terms = limits.terms(exchange.header, exchange.caller)
        self._records.begin(exchange.record, exchange.header)
        body = await exchange.read_json(limits.max_body_bytes)
        request = await self._side.run_if(takes_long(body), self._read, body)
        exchange.take_request_id(request.request_id)
        about = self._about(request)
        conversation = await self._conversation(request, terms.tenant)
        long = takes_long(body) or num_parts(conversation) > FEW_PARTS
        del body
        chat, described, ignored = await self._side.run_if(long, self._begin, request, conversation, about)
        exchange.record.note_ignored_fields(ignored)
        turn = Turn(described, conversation, terms.tenant)
        ids = turn.head["id"], f"resp_{exchange.record.request_id}"
        with self._running.added(terms.tenant, ids, turn.head) as running:
            generating, at_most_s = self._runner.run(chat, exchange.record, terms), terms.timeout_s + READING_GRACE_S
            if request.background and self._background is not None:
                telling = Telling(exchange, running, at_most_s if request.stream else None)
                await self._background(telling, turn, generating)
                return
            async with exchange.while_connected(at_most_s):
                answer = self._answering.stream if request.stream else self._answering.whole
                await answer(exchange, turn, running, generating)

    def _read(self, body: bytes) -> ResponsesRequest:
        """Returns the checked request of a body. Raises ApiError."""
        request = parse_request(body, ResponsesRequest, RESPONSES_NEUTRAL)
        self._runner.model.check(request.model)
        request.check_combinations()
        return request

    def _about(self, request: ResponsesRequest) -> dict[str, Any]:
        """Returns what only the gateway knows of a response, as JSON values. Raises ApiError."""
        if request.background and self._background is None:
            raise unsupported("background", "This server keeps no responses: 'background' must be false, or left out.")
        return {
            "id": new_id("resp"),
            "created_at": int(time.time()),
            "model": self._runner.model.name,
            "store": self._kept.asked(request.store),
        }

    async def _conversation(self, request: ResponsesRequest, tenant: str) -> list[Item]:
        """Returns the items of earlier turns and of this one. Raises ApiError."""
        earlier: list[Item] = []
        if request.previous_response_id is not None:
            earlier = await self._kept.conversation(tenant, request.previous_response_id)
        if len(earlier) + len(request.input) > MAX_ITEMS:
            message = f"Invalid 'input': the conversation must have at most {MAX_ITEMS} items."
            raise invalid(message, "input", "array_above_max_length")
        return [*earlier, *request.input]

    def _begin(
        self, request: ResponsesRequest, conversation: list[Item], about: dict[str, Any]
    ) -> tuple[ResponseChat, dict[str, Any], tuple[str, ...]]:
        """Returns the chat for the workers, the response that has just begun, and the names of ignored fields.

        Raises ApiError.
        """
        chat = chat_of(request, conversation)
        with in_words_of_responses():
            self._runner.check(chat)
        of_chat = map(own_name, self._runner.dialect.ignored_fields(chat))
        ignored = ignored_fields((*request.unknown_fields(), *of_chat), self._limits.strict_fields)
        return chat, head(request, about, self._runner.model.defaults), ignored
