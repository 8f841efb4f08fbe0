"""POST /v1/chat/completions: messages in, the assistant's message out."""

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.api.choice import PromptShown, Update, Usage
from services.gateway.api.dialect import LOWEST_LOGPROB, ChunkTemplate
from services.gateway.api.errors import invalid
from services.gateway.api.prompts import Prompt, check_text_length
from services.gateway.api.schema import ChatRequest, Message
from services.gateway.openai.neutral import CHAT_NEUTRAL
from services.gateway.text.chat_template import RESERVED_KWARGS, ChatTemplate, TemplateError
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.frames import TokenLogprobs


class ChatDialect:
    """See Dialect. Without a template there is no chat."""

    endpoint = "chat.completions"
    kind = ChatRequest
    neutral = CHAT_NEUTRAL
    prompt_param = "messages"

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    async def prompts(self, request: ChatRequest, max_tokens: int) -> list[Prompt]:
        """See Dialect. The template writes the BOS itself, so tokenizing adds no second one unless asked to."""
        text = self._render(request)
        check_text_length(self._tokenizer, text, max_tokens, self.prompt_param)
        return [Prompt(await self._tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens)))]

    def _render(self, request: ChatRequest) -> str:
        if self._template is None:
            raise invalid("This model has no chat template; use /v1/completions.", "messages")
        kwargs = request.chat_template_kwargs or {}
        if reserved := sorted(RESERVED_KWARGS & kwargs.keys()):
            raise invalid(f"'{reserved[0]}' cannot be given to the chat template.", "chat_template_kwargs")
        continued = bool(request.continue_final_message)
        prompted = not continued if request.add_generation_prompt is None else request.add_generation_prompt
        try:
            return self._template.render(
                [_as_dict(message) for message in request.messages],
                add_generation_prompt=prompted,
                continue_final_message=continued,
                kwargs=kwargs,
            )
        except TemplateError as error:
            raise invalid(str(error), "messages") from error

    def shown(self, request: ChatRequest, prompt: Prompt) -> PromptShown | None:
        """See Dialect."""
        return None

    def answer(self, request: ChatRequest, request_id: str, model: str, created: int) -> "ChatAnswer":
        """See Dialect."""
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
        return {"content": [self._token(token, entry) for token, entry in pairs if entry], "refusal": None}

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


def _as_dict(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    extra = {"name": message.name, "reasoning_content": message.reasoning_content, "reasoning": message.reasoning}
    return {"role": role, "content": message.text, **{key: value for key, value in extra.items() if value is not None}}
