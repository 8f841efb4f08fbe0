"""POST /v1/chat/completions: the assistant's message, in chunks or whole."""

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.api.chat import ChatRequest
from services.gateway.api.choice import Update, Usage
from services.gateway.openai.answer import LOWEST_LOGPROB, ChunkTemplate, json_array
from services.gateway.openai.neutral import CHAT_NEUTRAL
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.frames import TokenLogprobs


class ChatFormat:
    """See AnswerFormat."""

    neutral = CHAT_NEUTRAL

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def answer(self, request: ChatRequest, request_id: str, model: str, created: int) -> "ChatAnswer":
        """See AnswerFormat."""
        return ChatAnswer(self._tokenizer, f"chatcmpl-{request_id}", model, created, with_usage=request.include_usage)


class ChatAnswer:
    """See Answer."""

    def __init__(self, tokenizer: Tokenizer, answer_id: str, model: str, created: int, *, with_usage: bool) -> None:
        self._tokenizer = tokenizer
        self._about = {"id": answer_id, "created": created, "model": model}
        head = {**self._about, "object": "chat.completion.chunk"}
        self._chunks = ChunkTemplate(head, b'"delta":{"content":', b"}", with_usage=with_usage)
        self.text_chunk = self._chunks.plain
        self._opening = ChunkTemplate(head, b'"delta":{"role":"assistant","content":', b"}", with_usage=with_usage)

    def opening(self, num_choices: int) -> bytes:
        """See Answer."""
        return b"".join(self._opening.plain(choice, "") for choice in range(num_choices))

    def chunk(self, update: Update) -> bytes:
        """See Answer."""
        if update.logprobs is None and update.finish_reason is None:
            return self.text_chunk(update.choice, update.text)
        return self._chunks.full(update, self._logprobs(update))

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
            }
            for update in choices
        ]
        return orjson.dumps({**self._about, "object": "chat.completion", "choices": listed, "usage": usage.as_json()})

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
            "token": raw.decode("utf-8", "replace"),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(raw),
        }
