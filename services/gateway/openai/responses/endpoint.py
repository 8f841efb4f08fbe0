"""POST /v1/responses: a request read, run and answered. POST /v1/responses/render: what workers would be sent."""

import time
from typing import Any

import orjson

from services.gateway.api.errors import unsupported
from services.gateway.api.request_runner import READING_GRACE_S
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.runners import Runners
from services.gateway.api.served_models import ServedModel
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits
from services.gateway.http.rendered import rendered
from services.gateway.openai.logprobs import LogprobEntries
from services.gateway.openai.responses.answering import Answering, Turn
from services.gateway.openai.responses.asking import Asked, Asking
from services.gateway.openai.responses.background import BackgroundAnswering, Telling
from services.gateway.openai.responses.background_kept import BackgroundResponses
from services.gateway.openai.responses.items import new_id
from services.gateway.openai.responses.kept import KeptResponses
from services.gateway.openai.responses.request import ResponsesRequest
from services.gateway.openai.responses.response import head
from services.gateway.openai.responses.running import RunningResponses
from services.gateway.openai.responses.translation import in_words_of_responses
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
        self._runner = runners.of(ChatRequest)
        self._side = runners.side
        self._records = runners.records
        self._limits = limits
        self._kept = kept
        self._asking = Asking(runners, limits, kept)
        self._running = running
        names = TokenNames(runners.tokenizer, by_id=False)
        entries = LogprobEntries(runners.tokenizer, names)
        self._answering = Answering(entries, runners.side, kept)
        self._background = None if background is None else BackgroundAnswering(entries, runners.side, background)

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        terms = self._limits.terms(exchange.header, exchange.caller)
        self._records.begin(exchange.record, exchange.header)
        asked = await self._asking.read(exchange)
        request, turn = asked.request, await self._turn(asked, terms.tenant)
        ids = turn.head["id"], f"resp_{exchange.record.request_id}"
        with self._running.added(terms.tenant, ids, turn.head) as running:
            generating = self._runner.run(asked.resolved, exchange.record, terms)
            at_most_s = terms.timeout_s + READING_GRACE_S
            if request.background and self._background is not None:
                telling = Telling(exchange, running, at_most_s if request.stream else None)
                await self._background(telling, turn, generating)
                return
            async with exchange.while_connected(at_most_s):
                answer = self._answering.stream if request.stream else self._answering.whole
                await answer(exchange, turn, running, generating)

    async def render(self, exchange: Exchange) -> None:
        """Sends the token ids and the sampling parameters, and has nothing generated. Raises ApiError, ClientGone."""
        asked = await self._asking.read(exchange)
        with in_words_of_responses(asked.tools):
            (made,) = await self._runner.rendered(asked.resolved, exchange.record, exchange.caller)
        streamed = {name: getattr(asked.request, name) for name in ("stream", "stream_options")}
        request, request_id = asked.chat.model_copy(update=streamed), f"resp_{exchange.record.request_id}"
        answer = rendered(request, *made, request_id, asked.model.name)
        await exchange.respond(200, await self._side.run(orjson.dumps, answer, None, orjson.OPT_SERIALIZE_NUMPY))

    async def _turn(self, asked: Asked, tenant: str) -> Turn:
        """Returns the turn that begins. Raises ApiError."""
        about, defaults = self._about(asked.request, asked.model), asked.model.base.defaults
        described = await self._side.run_if(asked.long, head, asked.request, about, defaults)
        return Turn(described, asked.conversation, tenant, asked.tools)

    def _about(self, request: ResponsesRequest, model: ServedModel) -> dict[str, Any]:
        """Returns what only the gateway knows of a response, as JSON values. Raises ApiError."""
        if request.background and self._background is None:
            raise unsupported("background", "This server keeps no responses: 'background' must be false, or left out.")
        return {
            "id": new_id("resp"),
            "created_at": int(time.time()),
            "model": model.name,
            "store": self._kept.asked(request.store),
        }
