"""POST /v1/chat/completions: the assistant's message, in chunks or whole."""

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.api.chat import ChatRequest
from services.gateway.api.choice import Update, Usage
from services.gateway.openai.answer import ChunkTemplate, json_array
from services.gateway.openai.logprobs import LogprobEntries
from services.gateway.openai.neutral import CHAT_NEUTRAL
from services.gateway.text.tokenizer import Tokenizer


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
        self._entries = LogprobEntries(tokenizer)
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
        return {"content": json_array(self._entries.of(update)), "refusal": None}
