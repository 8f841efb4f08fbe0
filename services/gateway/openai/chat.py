"""POST /v1/chat/completions: the assistant's message, in chunks or whole."""

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.api.chat import ChatRequest
from services.gateway.api.choice import Update, Usage
from services.gateway.openai.answer import LOWEST_LOGPROB, AnswerHead, ChunkTemplate, PromptIds, json_array
from services.gateway.openai.neutral import CHAT_NEUTRAL
from services.gateway.openai.token_names import TokenNames
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.frames import TokenLogprobs


class ChatFormat:
    """See AnswerFormat."""

    neutral = CHAT_NEUTRAL

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def answer(self, request: ChatRequest, head: AnswerHead) -> "ChatAnswer":
        """See AnswerFormat."""
        return ChatAnswer(self._tokenizer, request, head)


class ChatAnswer:
    """See Answer."""

    def __init__(self, tokenizer: Tokenizer, request: ChatRequest, head: AnswerHead) -> None:
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, by_id=bool(request.return_tokens_as_token_ids))
        self._about = head.as_json("chatcmpl")
        self._shows_ids, with_usage = bool(request.return_token_ids), request.include_usage
        self._in_short = not self._shows_ids and not request.continuous_usage
        of_chunk = {**self._about, "object": "chat.completion.chunk"}
        prompt_ids = PromptIds.BESIDE_CHOICES if self._shows_ids else None
        self._chunks = ChunkTemplate(
            of_chunk, b'"delta":{"content":', b"}", with_usage=with_usage, prompt_ids=prompt_ids
        )
        self.text_chunk = self._chunks.plain
        self._opening = ChunkTemplate(of_chunk, b'"delta":{"role":"assistant","content":', b"}", with_usage=with_usage)

    def opening(self, num_choices: int) -> bytes:
        """See Answer."""
        return b"".join(self._opening.plain(choice, "") for choice in range(num_choices))

    def chunk(self, update: Update, usage: Usage | None = None) -> bytes:
        """See Answer."""
        if update.logprobs is None and update.finish_reason is None and self._in_short:
            return self.text_chunk(update.choice, update.text)
        return self._chunks.full(update, self._logprobs(update), usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        """See Answer."""
        return self._chunks.usage(usage)

    def body(self, choices: Sequence[Update], usage: Usage) -> bytes:
        """See Answer."""
        listed = [
            {
                "index": update.choice,
                "message": {"role": "assistant", "content": update.text, "refusal": None},
                "logprobs": self._logprobs(update),
                "finish_reason": update.finish_reason,
                "stop_reason": update.stop_reason,
                **({"token_ids": update.generated} if self._shows_ids else {}),
            }
            for update in choices
        ]
        body = {**self._about, "object": "chat.completion", "choices": listed, "usage": usage.as_json()}
        scored = choices[0].prompt_logprobs
        body["prompt_logprobs"] = None if scored is None else self._names.ranked(scored)
        if self._shows_ids:
            body["prompt_token_ids"] = json_array(choices[0].prompt_token_ids or [])
        return orjson.dumps(body)

    def _logprobs(self, update: Update) -> dict[str, Any] | None:
        if update.logprobs is None:
            return None
        pairs = zip(update.tokens, update.logprobs, strict=True)
        content = [self._token(token, entry) for token, entry in pairs if entry]
        return {"content": json_array(content), "refusal": None}

    def _token(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = [self._entry(other, logprob) for other, logprob in logprobs.top]
        return {**self._entry(token, logprobs.sampled), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {
            "token": self._names.name(token),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(raw),
        }
