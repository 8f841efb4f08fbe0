"""POST /v1/completions: texts or token ids in, what follows each of them out."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import orjson

from services.gateway.api.choice import PromptShown, Update, Usage
from services.gateway.api.dialect import LOWEST_LOGPROB, ChunkTemplate
from services.gateway.api.prompts import Prompt, as_token_ids, check_text_length, separate_prompts
from services.gateway.api.schema import CompletionRequest
from services.gateway.openai.neutral import COMPLETIONS_NEUTRAL
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

    async def prompts(self, request: CompletionRequest, max_tokens: int) -> list[Prompt]:
        """See Dialect. Token ids are taken as they are; a text gets the special tokens that its tokenizer adds."""
        return [await self._prompt(prompt, request, max_tokens) for prompt in separate_prompts(request.prompt)]

    async def _prompt(self, prompt: str | list[int], request: CompletionRequest, max_tokens: int) -> Prompt:
        if isinstance(prompt, list):
            token_ids = as_token_ids(prompt, self.prompt_param)
            return Prompt(token_ids, self._tokenizer.backend.decode(prompt) if request.echo else "")
        check_text_length(self._tokenizer, prompt, max_tokens, self.prompt_param)
        add_special_tokens = True if request.add_special_tokens is None else request.add_special_tokens
        token_ids = await self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return Prompt(token_ids, prompt if request.echo else "")

    def shown(self, request: CompletionRequest, prompt: Prompt) -> PromptShown | None:
        """See Dialect."""
        if not request.echo and request.prompt_logprobs is None:
            return None
        echo_logprobs = request.logprobs if request.echo else None
        return PromptShown(prompt.token_ids.tolist(), prompt.echo, echo_logprobs, request.prompt_logprobs)

    def answer(self, request: CompletionRequest, request_id: str, model: str, created: int) -> "CompletionAnswer":
        """See Dialect."""
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
        """See Answer: nothing comes before the text."""
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
            choice["prompt_logprobs"] = [None, *(self._ranked(*entry) for entry in update.prompt_logprobs)]
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
            "top_logprobs": [
                entry and self._top(token, entry) for token, entry in zip(update.tokens, update.logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _ranked(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """The alternatives and the token itself, by id. Beyond the alternatives, a token's rank is not known."""
        ranks: dict[int, tuple[float, int | None]] = {}
        for rank, (other, logprob) in enumerate(logprobs.top, start=1):
            ranks[other] = logprob, rank
        ranks.setdefault(token, (logprobs.sampled, None))
        return {
            str(other): {"logprob": max(logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": self._text(other)}
            for other, (logprob, rank) in ranks.items()
        }

    def _top(self, token: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The alternatives and, as OpenAI says, the token itself."""
        top: dict[str, float] = {}
        for other, logprob in (*logprobs.top, (token, logprobs.sampled)):
            top.setdefault(self._text(other), max(logprob, LOWEST_LOGPROB))
        return top

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")
