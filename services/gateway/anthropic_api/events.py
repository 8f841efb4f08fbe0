"""The events of a streamed message. Of an event with text only the text changes; the rest is made once for a block."""

from typing import Any

import orjson

from services.gateway.anthropic_api.answer import SIGNATURE, Head, ending, usage_json
from services.gateway.api.answers.answer_blocks import Act, AnswerBlock, BlockSteps, Kind, Step
from services.gateway.api.answers.choice import Update, Usage

_DELTAS = {
    Kind.THINKING: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}
_DELTA_END = b"}}\n\n"
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class MessageEvents:
    """Writes the events of one message."""

    def __init__(self, head: Head, shows_thinking: bool) -> None:
        self._head = head
        self._steps = BlockSteps(shows_thinking)
        self._before_piece = b""  # of the open block
        self._before_text: bytes | None = None  # the same where that block is text
        self._last: Update | None = None

    def opening(self, usage: Usage) -> bytes:
        """The events before the first block. usage: as it is with the first token; the last event has the final one."""
        begun = self._head.message([], None, usage)
        return _event("message_start", {"message": begun}) + _PING

    def take(self, update: Update) -> bytes:
        """Returns the events of an update."""
        if update.finish_reason is not None:
            self._last = update
        return b"".join([self._step(step) for step in self._steps.take(update)])

    def text(self, choice: int, text: str) -> bytes:
        """Returns the events of an update with text and nothing else: the short form of `take`."""
        if self._before_text is None:
            return self.take(Update(choice, text, [], None, None))
        return self._before_text + orjson.dumps(text) + _DELTA_END

    def closing(self, usage: Usage) -> bytes:
        """The events after the last update."""
        assert self._last is not None
        return _event("message_delta", {"delta": ending(self._last), "usage": usage_json(usage)}) + _MESSAGE_STOP

    def _step(self, step: Step) -> bytes:
        block = step.block
        if step.act is Act.ADD:
            return self._before_piece + orjson.dumps(step.piece) + _DELTA_END
        if step.act is Act.START:
            self._before_piece = _before_piece(block)
            self._before_text = self._before_piece if block.kind is Kind.TEXT else None
            return _event("content_block_start", {"index": block.index, "content_block": _empty(block)})
        self._before_text = None
        return self._signature(block) + _event("content_block_stop", {"index": block.index})

    def _signature(self, block: AnswerBlock) -> bytes:
        if block.kind is not Kind.THINKING:
            return b""
        delta = {"type": "signature_delta", "signature": SIGNATURE}
        return _event("content_block_delta", {"index": block.index, "delta": delta})


def _before_piece(block: AnswerBlock) -> bytes:
    kind, name = _DELTAS[block.kind]
    delta = b',"delta":{"type":"%b","%b":' % (kind.encode(), name.encode())
    return b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d' % block.index + delta


def _empty(block: AnswerBlock) -> dict[str, Any]:
    match block.kind:
        case Kind.THINKING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Kind.TEXT:
            return {"type": "text", "text": ""}
        case Kind.CALL:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))
