"""POST /v1/chat/completions: the assistant's message, in chunks or whole."""

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.api.chat import ChatRequest
from services.gateway.api.choice import ToolCallPart, Update, Usage
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
        self._arguments: dict[int, ChunkTemplate] = {}  # by call
        self._head, self._with_usage = head, with_usage
        self._deltas = ChunkTemplate(head, b'"delta":', b"", with_usage=with_usage)
        self._opening = ChunkTemplate(head, b'"delta":{"role":"assistant","content":', b"}", with_usage=with_usage)

    def opening(self, num_choices: int) -> bytes:
        """See Answer."""
        return b"".join(self._opening.plain(choice, "") for choice in range(num_choices))

    def chunk(self, update: Update) -> bytes:
        """See Answer."""
        if update.logprobs is None and update.finish_reason is None:
            if not update.reasoning and not update.tool_calls:
                return self.text_chunk(update.choice, update.text)
        elif not update.reasoning and not update.tool_calls:
            return self._chunks.full(update, self._logprobs(update))
        return self._parts(update)

    def _parts(self, update: Update) -> bytes:
        """An event for each part of an update; the last one has its logprobs and its finish reason."""
        if len(update.tool_calls) == 1 and not (update.reasoning or update.text or update.logprobs):
            (part,) = update.tool_calls
            if part.id is None and update.finish_reason is None:
                return self._arguments_of(part.call).plain(update.choice, part.arguments)
        *deltas, last = _deltas(update)
        end = self._deltas.of(update.choice, last, self._logprobs(update), update.finish_reason)
        return b"".join(self._deltas.of(update.choice, delta) for delta in deltas) + end

    def _arguments_of(self, call: int) -> ChunkTemplate:
        """The chunks with pieces of a call's arguments, which are most of those of a call."""
        if call not in self._arguments:
            before = b'"delta":{"tool_calls":[{"index":%d,"function":{"arguments":' % call
            self._arguments[call] = ChunkTemplate(self._head, before, b"}}]}", with_usage=self._with_usage)
        return self._arguments[call]

    def usage_chunk(self, usage: Usage) -> bytes:
        """See Answer."""
        return self._chunks.usage(usage)

    def body(self, choices: Sequence[Update], usage: Usage) -> bytes:
        """See Answer."""
        listed = [
            {
                "index": update.choice,
                "message": _message(update),
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


def _message(update: Update) -> dict[str, Any]:
    """The whole message. Its content is null where there are calls and no text."""
    content = None if update.tool_calls and not update.text else update.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if update.reasoning:
        message |= _reasoning(update.reasoning)
    if update.tool_calls:
        message["tool_calls"] = [_begun_call(part) for part in update.tool_calls]
    return message


def _deltas(update: Update) -> list[dict[str, Any]]:
    """The deltas of an update, at least one."""
    deltas: list[dict[str, Any]] = []
    if update.reasoning:
        deltas.append(_reasoning(update.reasoning))
    if update.text:
        deltas.append({"content": update.text})
    for part in update.tool_calls:
        call = {"function": {"arguments": part.arguments}} if part.id is None else _begun_call(part)
        deltas.append({"tool_calls": [{"index": part.call, **call}]})
    return deltas


def _reasoning(text: str) -> dict[str, Any]:
    return {"reasoning_content": text, "reasoning": text}  # the names of older and newer clients


def _begun_call(part: ToolCallPart) -> dict[str, Any]:
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
