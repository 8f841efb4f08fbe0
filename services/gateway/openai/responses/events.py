"""The events of a streamed response, in order and numbered.

Only the piece and the number of a delta change from token to token; the rest of its JSON is made once an item.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from services.gateway.openai.responses.output import Kind, OutputItem

_DELTAS = {
    Kind.REASONING: "response.reasoning_text.delta",
    Kind.MESSAGE: "response.output_text.delta",
    Kind.CALL: "response.function_call_arguments.delta",
    Kind.CUSTOM_CALL: "response.custom_tool_call_input.delta",
}


class Events:
    """Events of one stream, until they are taken. An ItemListener."""

    def __init__(self) -> None:
        self._number = 0
        self._pending: list[bytes] = []
        self._before_delta = b""  # of the open item
        self._after_delta = b""

    @property
    def pending(self) -> bool:
        """True where there are events that nobody has taken."""
        return bool(self._pending)

    def taken(self) -> bytes:
        """Returns the events since the last call, as server-sent events."""
        pending, self._pending = self._pending, []
        return b"".join(pending)

    @property
    def num_pending(self) -> int:
        """The number of events that nobody has taken, where none was made by `delta` alone."""
        return len(self._pending)

    def taken_after(self, number: int) -> bytes:
        """Returns those events since the last call whose number is above this one."""
        first = self._number - len(self._pending)
        pending, self._pending = self._pending, []
        return b"".join(pending[max(0, number + 1 - first) :])

    def go_on_after(self, number: int) -> None:
        """Lets the next event have a number above this one."""
        self._number = max(self._number, number + 1)

    def lifecycle(self, type: str, response: Mapping[str, Any]) -> None:
        """Adds an event with the whole response: `response.created` and the like."""
        self._add(type, response=response)

    def opened(self, item: OutputItem) -> None:
        """See ItemListener."""
        self._add("response.output_item.added", output_index=item.index, item=item.as_json())
        place = self._place(item)
        if not item.kind.is_call:
            self._add("response.content_part.added", **place, part=item.part())
        name = _DELTAS[item.kind]
        fields = orjson.dumps({"type": name, **place})[:-1]
        self._before_delta = b'event: %b\ndata: %b,"delta":' % (name.encode(), fields)
        self._after_delta = (
            b',"logprobs":[],"sequence_number":' if item.kind is Kind.MESSAGE else b',"sequence_number":'
        )

    def grew(self, item: OutputItem, piece: str, logprobs: bytes) -> None:
        """See ItemListener."""
        if not logprobs:
            self._pending.append(self.delta(piece))
            return
        entries = b',"logprobs":[%b],"sequence_number":%d}\n\n' % (logprobs, self._number)
        self._number += 1
        self._pending.append(self._before_delta + orjson.dumps(piece) + entries)

    def delta(self, piece: str) -> bytes:
        """Returns the event for a further piece of the open item, with nothing beside it."""
        number = self._number
        self._number = number + 1
        return b"%b%b%b%d}\n\n" % (self._before_delta, orjson.dumps(piece), self._after_delta, number)

    def closed(self, item: OutputItem) -> None:
        """See ItemListener."""
        place = self._place(item)
        match item.kind:
            case Kind.CALL:
                self._add("response.function_call_arguments.done", **place, name=item.name, arguments=item.text)
            case Kind.CUSTOM_CALL:
                self._add("response.custom_tool_call_input.done", **place, input=item.text)
            case Kind.REASONING:
                self._add("response.reasoning_text.done", **place, text=item.text)
            case Kind.MESSAGE:
                self._add("response.output_text.done", **place, text=item.text, logprobs=item.all_logprobs())
        if not item.kind.is_call:
            self._add("response.content_part.done", **place, part=item.part())
        self._add("response.output_item.done", output_index=item.index, item=item.as_json())

    def _place(self, item: OutputItem) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        return place if item.kind.is_call else {**place, "content_index": 0}

    def _add(self, type: str, **fields: Any) -> None:
        data = orjson.dumps({"type": type, **fields, "sequence_number": self._number})
        self._number += 1
        self._pending.append(b"event: %b\ndata: %b\n\n" % (type.encode(), data))
