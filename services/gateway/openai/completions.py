"""POST /v1/completions: a text or token ids in, what follows out."""

from typing import Any

import orjson

from services.gateway.openai.choice import Update, Usage
from services.gateway.openai.dialect import LOWEST_LOGPROB, ChunkTemplate
from services.gateway.openai.neutral import COMPLETIONS_NEUTRAL
from services.gateway.openai.prompts import check_text_length, single_prompt
from services.gateway.openai.schema import CompletionRequest
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.frames import TokenLogprobs


class CompletionDialect:
    """See Dialect."""

    endpoint = "completions"
    kind = CompletionRequest
    neutral = COMPLETIONS_NEUTRAL
    prompt_param = "prompt"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def prompt(self, request: CompletionRequest, max_tokens: int) -> list[int]:
        """See Dialect. Token ids are taken as they are; a text gets the special tokens that its tokenizer adds."""
        prompt = single_prompt(request.prompt)
        if isinstance(prompt, list):
            return prompt
        check_text_length(self._tokenizer, prompt, max_tokens, self.prompt_param)
        add_special_tokens = True if request.add_special_tokens is None else request.add_special_tokens
        return await self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    def answer(self, request: CompletionRequest, request_id: str, model: str, created: int) -> "CompletionAnswer":
        """See Dialect."""
        return CompletionAnswer(self._tokenizer, f"cmpl-{request_id}", model, created, with_usage=request.include_usage)


class CompletionAnswer:
    """See Answer."""

    def __init__(self, tokenizer: Tokenizer, answer_id: str, model: str, created: int, *, with_usage: bool) -> None:
        self._tokenizer = tokenizer
        self._head = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        self._chunks = ChunkTemplate(self._head, b'"text":', b"", with_usage=with_usage)
        self._offset = 0  # in characters, of the next token

    def opening(self) -> bytes:
        """See Answer: nothing comes before the text."""
        return b""

    def chunk(self, update: Update) -> bytes:
        """See Answer."""
        if update.logprobs is None and update.finish_reason is None:
            return self._chunks.plain(update.text)
        return self._chunks.full(update.text, self._logprobs(update), update.finish_reason)

    def usage_chunk(self, usage: Usage) -> bytes:
        """See Answer."""
        return self._chunks.usage(usage)

    def body(self, update: Update, usage: Usage) -> bytes:
        """See Answer."""
        choice = {
            "index": 0,
            "text": update.text,
            "logprobs": self._logprobs(update),
            "finish_reason": update.finish_reason,
        }
        return orjson.dumps({**self._head, "choices": [choice], "usage": usage.as_json()})

    def _logprobs(self, update: Update) -> dict[str, Any] | None:
        if update.logprobs is None:
            return None
        texts = [self._text(token) for token in update.tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [max(entry.sampled, LOWEST_LOGPROB) for entry in update.logprobs],
            "top_logprobs": [self._top(*pair) for pair in zip(update.tokens, update.logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, token: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The alternatives and, as OpenAI says, the token itself."""
        top: dict[str, float] = {}
        for other, logprob in (*logprobs.top, (token, logprobs.sampled)):
            top.setdefault(self._text(other), max(logprob, LOWEST_LOGPROB))
        return top

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")
