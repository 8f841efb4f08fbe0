"""vLLM's endpoints for tokens: /tokenize, which also shows what a chat's prompt is, and /detokenize."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from pydantic import Field

from services.gateway.api.dialects.completions import CompletionRequest
from services.gateway.api.dialects.prompts import Prompt
from services.gateway.api.errors import invalid
from services.gateway.api.request_runner import RequestRunner
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.requests.large_json import takes_long
from services.gateway.api.requests.schema import Request, TokenId
from services.gateway.api.requests.strict import Open
from services.gateway.api.requests.validation import (
    check_object,
    ignored_fields,
    not_json,
    read_value,
    validate_request,
)
from services.gateway.api.runners import Runners
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits
from services.gateway.openai.neutral import CHAT_NEUTRAL, COMPLETIONS_NEUTRAL

_MAX_TOKENS = 1 << 17  # of one call of /detokenize


class TokenizeTextRequest(CompletionRequest):
    """The body of /tokenize, with a text."""

    prompt: str
    return_token_strs: bool | None = None  # the tokens' texts too


class TokenizeChatRequest(ChatRequest):
    """The body of /tokenize, with a chat."""

    return_token_strs: bool | None = None


class DetokenizeRequest(Open):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(min_length=1, max_length=_MAX_TOKENS)]


class Tokens:
    """POST /tokenize and POST /detokenize."""

    def __init__(self, runners: Runners, limits: Limits) -> None:
        self._runners = runners
        self._limits = limits

    async def tokenize(self, exchange: Exchange) -> None:
        """Sends the token ids of a text or of a chat. Raises ApiError, ClientGone."""
        value = await self._read(exchange)
        request: TokenizeChatRequest | TokenizeTextRequest
        if "messages" in value:
            request = validate_request(value, TokenizeChatRequest, CHAT_NEUTRAL)
            prompt = await self._prompt(exchange, self._runners.of(ChatRequest), request)
        else:
            request = validate_request(value, TokenizeTextRequest, COMPLETIONS_NEUTRAL)
            prompt = await self._prompt(exchange, self._runners.of(CompletionRequest), request)
        ids: list[int] = prompt.token_ids.tolist()
        backend = self._runners.tokenizer.backend
        answer = {
            "count": len(ids),
            "max_model_len": await self._runners.of(ChatRequest).max_model_len(),
            "tokens": ids,
            "token_strs": [backend.id_to_token(token) for token in ids] if request.return_token_strs else None,
        }
        await exchange.respond(200, orjson.dumps(answer))

    async def detokenize(self, exchange: Exchange) -> None:
        """Sends the text of token ids, with the special tokens. Raises ApiError, ClientGone."""
        request = validate_request(await self._read(exchange), DetokenizeRequest, {})
        exchange.record.note_ignored_fields(ignored_fields(request.unknown_fields(), self._limits.strict_fields))
        model, record = self._runners.models.resolve(request.model), exchange.record
        if (largest := max(request.tokens)) >= model.base.vocab_size:
            raise invalid(f"Invalid 'tokens': token id {largest} is out of the vocabulary.", "tokens", "invalid_value")
        record.prompt_tokens = len(request.tokens)
        async with exchange.caller.admit(record):
            decode = self._runners.tokenizer.backend.decode_batch
            (text,) = await asyncio.to_thread(decode, [request.tokens], skip_special_tokens=False)
        await exchange.respond(200, orjson.dumps({"prompt": text}))

    async def _read(self, exchange: Exchange) -> Mapping[str, Any]:
        body = await exchange.read_json(self._limits.max_body_bytes)
        try:
            value = await self._runners.side.run_if(takes_long(body), read_value, body)
        except orjson.JSONDecodeError as error:
            raise not_json() from error
        return check_object(value)

    async def _prompt(self, exchange: Exchange, runner: RequestRunner[Request], request: Request) -> Prompt:
        ignored = runner.dialect.ignored_fields(request)
        exchange.record.note_ignored_fields(ignored_fields(ignored, self._limits.strict_fields))
        (prompt,) = await runner.tokenize(runner.check(request), exchange.record, exchange.caller)
        return prompt
