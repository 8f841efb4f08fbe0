"""POST /v1/completions: the continuation of each prompt, in chunks or whole."""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import orjson

from services.gateway.api.answers.choice import Update, Usage
from services.gateway.api.dialects.completions import CompletionRequest
from services.gateway.openai.answer import (
    LOWEST_LOGPROB,
    AnswerHead,
    ChunkTemplate,
    PromptIds,
    has_many,
    json_array,
    json_object,
)
from services.gateway.openai.neutral import COMPLETIONS_NEUTRAL
from services.gateway.openai.token_names import TokenNames
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.frames import TokenLogprobs


class CompletionFormat:
    """See AnswerFormat."""

    neutral = COMPLETIONS_NEUTRAL

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def answer(self, request: CompletionRequest, head: AnswerHead) -> "CompletionAnswer":
        """See AnswerFormat."""
        return CompletionAnswer(self._tokenizer, request, head)


class CompletionAnswer:
    """See Answer."""

    def __init__(self, tokenizer: Tokenizer, request: CompletionRequest, head: AnswerHead) -> None:
        self._names = TokenNames(tokenizer, by_id=bool(request.return_tokens_as_token_ids))
        self._left_out = frozenset[int]() if request.skip_special_tokens is False else tokenizer.special_ids
        self._shows_ids = bool(request.return_token_ids)
        self._in_short = not self._shows_ids and not request.continuous_usage
        self._head = {**head.as_json("cmpl"), "object": "text_completion"}
        prompt_ids = PromptIds.IN_CHOICE if self._shows_ids else None
        self._chunks = ChunkTemplate(
            self._head, b'"text":', b"", with_usage=request.include_usage, prompt_ids=prompt_ids
        )
        self.text_chunk = self._chunks.plain
        self._offsets: dict[int, int] = {}  # by choice: in characters, of its next token

    def opening(self, num_choices: int, first: Update, usage: Usage | None = None) -> bytes:
        """See Answer: there are none."""
        return b""

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
        listed = [self._choice(update) for update in choices]
        return orjson.dumps({**self._head, "choices": listed, "usage": usage.as_json()})

    def _choice(self, update: Update) -> dict[str, Any]:
        choice = {
            "index": update.choice,
            "text": update.text,
            "logprobs": self._logprobs(update),
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
            "prompt_logprobs": None,
        }
        if update.prompt_logprobs is not None:  # vLLM's field, in its form
            choice["prompt_logprobs"] = self._names.ranked(update.prompt_logprobs)
        if self._shows_ids:
            choice["token_ids"] = update.generated
            choice["prompt_token_ids"] = json_array(update.prompt_token_ids or [])
        return choice

    def _logprobs(self, update: Update) -> dict[str, Any] | None:
        if update.logprobs is None:
            return None
        lengths = chain(update.echoed, map(self._length, update.generated))
        *offsets, end = accumulate(lengths, initial=self._offsets.get(update.choice, 0))
        self._offsets[update.choice] = end
        return {
            "tokens": [self._names.name(token) for token in update.tokens],
            "token_logprobs": [entry and max(entry.sampled, LOWEST_LOGPROB) for entry in update.logprobs],
            "top_logprobs": json_array(
                entry and self._top(token, entry) for token, entry in zip(update.tokens, update.logprobs, strict=True)
            ),
            "text_offset": offsets,
        }

    def _top(self, token: int, logprobs: TokenLogprobs) -> dict[str, float] | orjson.Fragment:
        """The token itself and, as in OpenAI's answers, the alternatives, by text."""
        top: dict[str, float] = {}
        for other, logprob in ((token, logprobs.sampled), *logprobs.top):
            top.setdefault(self._names.name(other), max(logprob, LOWEST_LOGPROB))
        return json_object(top.items()) if has_many(logprobs) else top

    def _length(self, token: int) -> int:
        """The length of a generated token in the text, in characters."""
        return 0 if token in self._left_out else len(self._names.text(token))
