"""POST /v1/chat/completions: the assistant's message, in chunks or whole."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from services.gateway.api.answers.choice import ToolCallPart, Update, Usage
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.openai.answer import AnswerHead, ChunkTemplate, PromptIds, json_array
from services.gateway.openai.logprobs import LogprobEntries
from services.gateway.openai.neutral import CHAT_NEUTRAL
from services.gateway.openai.token_names import TokenNames
from services.gateway.text.tokenizer import Tokenizer


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
        self._names = TokenNames(tokenizer, by_id=bool(request.return_tokens_as_token_ids))
        self._entries = LogprobEntries(tokenizer, self._names, by_name=request.logprob_token_ids is not None)
        self._about = head.as_json("chatcmpl")
        self._head = {**self._about, "object": "chat.completion.chunk"}
        self._shows_ids, self._with_usage = bool(request.return_token_ids), request.include_usage
        self._in_short = not self._shows_ids and not request.continuous_usage
        self._chunks = self._template(b'"delta":{"content":', b"}")
        self.text_chunk = self._chunks.plain
        self._arguments: dict[int, ChunkTemplate] = {}  # by call
        self._deltas = self._template(b'"delta":', b"")
        self._opening = ChunkTemplate(
            self._head,
            b'"delta":{"role":"assistant","content":',
            b"}",
            with_usage=self._with_usage,
            prompt_ids=PromptIds.BESIDE_CHOICES if self._shows_ids else None,
        )

    def _template(self, before: bytes, after: bytes) -> ChunkTemplate:
        prompt_ids = PromptIds.OPENED if self._shows_ids else None
        return ChunkTemplate(self._head, before, after, with_usage=self._with_usage, prompt_ids=prompt_ids)

    def opening(self, num_choices: int, first: Update, usage: Usage | None = None) -> bytes:
        """See Answer."""
        if self._in_short:
            return b"".join(self._opening.plain(choice, "") for choice in range(num_choices))
        opened = Update(0, "", [], None, None, prompt_token_ids=first.prompt_token_ids)
        usage = None if usage is None else replace(usage, completion_tokens=0)
        return b"".join(
            self._opening.full(opened._replace(choice=choice), None, usage) for choice in range(num_choices)
        )

    def chunk(self, update: Update, usage: Usage | None = None) -> bytes:
        """See Answer."""
        if update.reasoning or update.tool_calls:
            return self._parts(update, usage)
        if update.logprobs is None and update.finish_reason is None and self._in_short:
            return self.text_chunk(update.choice, update.text)
        return self._chunks.full(update, self._logprobs(update), usage)

    def _parts(self, update: Update, usage: Usage | None) -> bytes:
        """An event for each part of an update; the last one has its logprobs, its token ids and its finish reason."""
        if len(update.tool_calls) == 1 and self._in_short and not (update.reasoning or update.text or update.logprobs):
            (part,) = update.tool_calls
            if part.id is None and update.finish_reason is None and not part.custom:
                return self._arguments_of(part.call).plain(update.choice, part.arguments)
        alone = not (update.tool_calls or update.text) and update.logprobs is None and update.finish_reason is None
        if alone and self._in_short:
            return self._deltas.plain(update.choice, _reasoning(update.reasoning))
        *deltas, last = _deltas(update)
        bare = Update(update.choice, "", [], None, None)
        before = b"".join(self._deltas.of(bare, delta, usage=usage) for delta in deltas)
        return before + self._deltas.of(update, last, self._logprobs(update), usage)

    def _arguments_of(self, call: int) -> ChunkTemplate:
        """The chunks with pieces of a call's arguments, which are most of those of a call."""
        if call not in self._arguments:
            before = b'"delta":{"tool_calls":[{"index":%d,"function":{"arguments":' % call
            self._arguments[call] = self._template(before, b"}}]}")
        return self._arguments[call]

    def usage_chunk(self, usage: Usage) -> bytes:
        """See Answer."""
        return self._chunks.usage(usage)

    def body(self, choices: Sequence[Update], usage: Usage) -> bytes:
        """See Answer."""
        return self._body([*map(self._choice, choices)], usage, self._of_prompt(choices[0]))

    def _body(self, choices: Sequence[Any], usage: Usage, more: dict[str, Any]) -> bytes:
        body = {**self._about, "object": "chat.completion", "choices": choices, "usage": usage.as_json()}
        return orjson.dumps(body | more)

    def _choice(self, update: Update) -> dict[str, Any]:
        return {
            "index": update.choice,
            "message": _message(update),
            "logprobs": self._logprobs(update),
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
            **({"token_ids": update.generated} if self._shows_ids else {}),
        }

    def _of_prompt(self, update: Update) -> dict[str, Any]:
        """The parts of a choice's prompt that are shown."""
        scored = update.prompt_logprobs
        shown: dict[str, Any] = {"prompt_logprobs": None if scored is None else self._names.ranked(scored)}
        if self._shows_ids:
            shown["prompt_token_ids"] = json_array(update.prompt_token_ids or [])
        return shown

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
        call = _more_of_call(part) if part.id is None else _begun_call(part)
        deltas.append({"tool_calls": [{"index": part.call, **call}]})
    return deltas


def _reasoning(text: str) -> dict[str, Any]:
    return {"reasoning_content": text, "reasoning": text}  # the names of older and newer clients


def _more_of_call(part: ToolCallPart) -> dict[str, Any]:
    return {"custom": {"input": part.arguments}} if part.custom else {"function": {"arguments": part.arguments}}


def _begun_call(part: ToolCallPart) -> dict[str, Any]:
    if part.custom:
        return {"id": part.id, "type": "custom", "custom": {"name": part.name, "input": part.arguments}}
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
