"""The events of a streamed chat. Of an event with text only the text changes; the rest is made once for a block."""

from typing import Any

import orjson

from services.gateway.api.answers.answer_blocks import Act, AnswerBlock, BlockSteps, Kind, Step
from services.gateway.api.answers.choice import Update, Usage
from services.gateway.cohere_api.chat_answer import Scores, block_json, call_json, finish_reason, used
from services.gateway.cohere_api.errors import event

_DELTA_END = b"}}}}\n\n"


class ChatEvents:
    """Writes the events of one answer. Content blocks and calls are numbered apart."""

    def __init__(self, answer_id: str) -> None:
        self._id = answer_id
        self._steps = BlockSteps()
        self._scores = Scores()
        self._num_content = 0  # blocks that have begun, calls aside
        self._before_piece = b""  # of the open block
        self._before_text: bytes | None = None  # the same where that block is text
        self._last: Update | None = None

    def opening(self, usage: Usage) -> bytes:
        """The event before the first block, which says nothing of usage."""
        return event("message-start", {"id": self._id, "delta": {"message": {"role": "assistant"}}})

    def take(self, update: Update) -> bytes:
        """Returns the events of an update."""
        if update.finish_reason is not None:
            self._last = update
        self._scores.add(update)
        return b"".join([self._step(step) for step in self._steps.take(update)])

    def text(self, choice: int, text: str) -> bytes:
        """Returns the events of an update with text and nothing else: the short form of `take`."""
        if self._before_text is None:
            return self.take(Update(choice, text, [], None, None))
        return self._before_text + orjson.dumps(text) + _DELTA_END

    def closing(self, usage: Usage) -> bytes:
        """The event after the last update."""
        assert self._last is not None
        delta = {"finish_reason": finish_reason(self._last), "usage": used(usage)}
        return event("message-end", {"id": self._id, "delta": delta})

    def _step(self, step: Step) -> bytes:
        if step.block.kind is Kind.CALL:
            return self._call_step(step)
        block, index = step.block, self._num_content - 1
        if step.act is Act.START:
            return self._begun(block)
        score = self._scores.take(step.piece)
        scored = score is not None and block.kind is Kind.TEXT
        if step.act is Act.ADD:
            return self._scored(index, step.piece, score) if scored else self._plain(step.piece)
        self._before_text = None
        rest = self._scored(index, "", score) if scored else b""  # of tokens without text, as the model's end
        return rest + event("content-end", {"index": index})

    def _begun(self, block: AnswerBlock) -> bytes:
        index = self._num_content
        self._num_content += 1
        kind = block.kind.value.encode()
        delta = b'"index":%d,"delta":{"message":{"content":{"%b":' % (index, kind)
        self._before_piece = b'event: content-delta\ndata: {"type":"content-delta",' + delta
        self._before_text = self._before_piece if block.kind is Kind.TEXT else None
        return event("content-start", {"index": index, "delta": {"message": {"content": block_json(block, "")}}})

    def _plain(self, piece: str) -> bytes:
        return self._before_piece + orjson.dumps(piece) + _DELTA_END

    def _scored(self, index: int, piece: str, score: dict[str, Any] | None) -> bytes:
        delta = {"message": {"content": {"text": piece}}}
        return event("content-delta", {"index": index, "delta": delta, "logprobs": score})

    def _call_step(self, step: Step) -> bytes:
        block = step.block
        match step.act:
            case Act.START:
                calls = call_json(block, "")
                return event("tool-call-start", {"index": block.call, "delta": {"message": {"tool_calls": calls}}})
            case Act.ADD:
                self._scores.take(step.piece)
                calls = {"function": {"arguments": step.piece}}
                return event("tool-call-delta", {"index": block.call, "delta": {"message": {"tool_calls": calls}}})
            case Act.STOP:
                return event("tool-call-end", {"index": block.call})
