"""POST /v1/completions: the continuation of each prompt, in chunks or whole."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import orjson

from services.gateway.api.choice import Update, Usage
from services.gateway.api.completions import CompletionRequest
from services.gateway.openai.answer import LOWEST_LOGPROB, ChunkTemplate, json_array
from services.gateway.openai.neutral import COMPLETIONS_NEUTRAL
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.frames import TokenLogprobs


class CompletionFormat:
    """See AnswerFormat."""

    neutral = COMPLETIONS_NEUTRAL

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def answer(self, request: CompletionRequest, request_id: str, model: str, created: int) -> "CompletionAnswer":
        """See AnswerFormat."""
        return CompletionAnswer(self._tokenizer, f"cmpl-{request_id}", model, created, with_usage=request.include_usage)


class CompletionAnswer:
    """See Answer."""

    def __init__(self, tokenizer: Tokenizer, answer_id: str, model: str, created: int, *, with_usage: bool) -> None:
        self._tokenizer = tokenizer
        self._head = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        self._chunks = ChunkTemplate(self._head, b'"text":', b"", with_usage=with_usage)
        self.text_chunk = self._chunks.plain
        self._offsets: dict[int, int] = {}  # by choice: in characters, of its next token

    def opening(self, num_choices: int) -> bytes:
        """See Answer: there are none."""
        return b""

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
        listed = [self._choice(update) for update in choices]
        return orjson.dumps({**self._head, "choices": listed, "usage": usage.as_json()})

    def _choice(self, update: Update) -> dict[str, Any]:
        choice = {
            "index": update.choice,
            "text": update.text,
            "logprobs": self._logprobs(update),
            "finish_reason": update.finish_reason,
        }
        if update.prompt_logprobs is not None:  # vLLM's field, in its form
            choice["prompt_logprobs"] = json_array([None, *(self._ranked(*entry) for entry in update.prompt_logprobs)])
        return choice

    def _logprobs(self, update: Update) -> dict[str, Any] | None:
        if update.logprobs is None:
            return None
        texts = [self._text(token) for token in update.tokens]
        *offsets, end = accumulate(map(len, texts), initial=self._offsets.get(update.choice, 0))
        self._offsets[update.choice] = end
        return {
            "tokens": texts,
            "token_logprobs": [entry and max(entry.sampled, LOWEST_LOGPROB) for entry in update.logprobs],
            "top_logprobs": json_array(
                [entry and self._top(token, entry) for token, entry in zip(update.tokens, update.logprobs, strict=True)]
            ),
            "text_offset": offsets,
        }

    def _ranked(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """The alternatives and the token itself, by id. The token's rank is known only among the alternatives."""
        ranks: dict[int, tuple[float, int | None]] = {}
        for rank, (other, logprob) in enumerate(logprobs.top, start=1):
            ranks[other] = logprob, rank
        ranks.setdefault(token, (logprobs.sampled, None))
        return {
            str(other): {"logprob": max(logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": self._text(other)}
            for other, (logprob, rank) in ranks.items()
        }

    def _top(self, token: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The alternatives and, as in OpenAI's answers, the token itself, by text."""
        top: dict[str, float] = {}
        for other, logprob in (*logprobs.top, (token, logprobs.sampled)):
            top.setdefault(self._text(other), max(logprob, LOWEST_LOGPROB))
        return top

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")
