"""The answer to a chat in Cohere's form: blocks of content, calls of tools beside them, and logprobs of the text."""

from collections.abc import Sequence
from typing import Any

from services.gateway.api.answers.answer_blocks import Act, AnswerBlock, BlockSteps, Kind
from services.gateway.api.answers.choice import Update, Usage

_FINISH_REASONS = {"stop": "COMPLETE", "length": "MAX_TOKENS", "tool_calls": "TOOL_CALL"}
_LOWEST_LOGPROB = -9999.0  # lower ones are reported as this: JSON has no infinity


class Scores:
    """The logprobs of the content's text: tokens wait for the piece of text that they are in.

    Those of thinking and of calls are left out.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def add(self, update: Update) -> None:
        """Takes the tokens of an update; none where logprobs were not asked for."""
        for token, entry in zip(update.tokens, update.logprobs or (), strict=False):
            if entry is not None:
                self._tokens.append(token)
                self._logprobs.append(max(entry.sampled, _LOWEST_LOGPROB))

    def take(self, text: str) -> dict[str, Any] | None:
        """Returns the tokens that wait as those of a text, which wait no longer; None: there are none."""
        tokens, logprobs = self._tokens, self._logprobs
        if not tokens:
            return None
        self._tokens, self._logprobs = [], []
        return {"text": text, "token_ids": tokens, "logprobs": logprobs}


def whole_answer(updates: Sequence[Update], usage: Usage, answer_id: str, scored: bool) -> dict[str, Any]:
    """Returns a whole answer in JSON values. scored: logprobs were asked for."""
    steps, scores = BlockSteps(), Scores()
    pieces: list[tuple[AnswerBlock, list[str]]] = []
    items: list[dict[str, Any] | None] = []
    for update in updates:
        scores.add(update)
        for act, block, piece in steps.take(update):
            if act is Act.START:
                pieces.append((block, []))
            elif act is Act.ADD:
                pieces[-1][1].append(piece)
            item = scores.take(piece) if act is not Act.START else None
            items.append(item if block.kind is Kind.TEXT else None)
    content = [block_json(block, "".join(texts)) for block, texts in pieces if block.kind is not Kind.CALL]
    calls = [call_json(block, "".join(texts)) for block, texts in pieces if block.kind is Kind.CALL]
    message: dict[str, Any] = {"role": "assistant"}
    if content or not calls:
        message["content"] = content
    if calls:
        message["tool_calls"] = calls
    answer = {"id": answer_id, "finish_reason": finish_reason(updates[-1]), "message": message, "usage": used(usage)}
    return {**answer, "logprobs": [item for item in items if item is not None]} if scored else answer


def block_json(block: AnswerBlock, text: str) -> dict[str, str]:
    """A block of content in JSON values."""
    return {"type": block.kind.value, block.kind.value: text}


def call_json(block: AnswerBlock, arguments: str) -> dict[str, Any]:
    """A call of a tool in JSON values."""
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def finish_reason(last: Update) -> str:
    """The reason why an answer ended. `last` has OpenAI's."""
    if last.finish_reason == "stop" and isinstance(last.stop_reason, str):
        return "STOP_SEQUENCE"
    assert last.finish_reason is not None
    return _FINISH_REASONS[last.finish_reason]


def used(usage: Usage) -> dict[str, Any]:
    """The usage in Cohere's form. Nobody bills; units are tokens."""
    tokens = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    return {"billed_units": tokens, "tokens": tokens, "cached_tokens": usage.cached_tokens}
