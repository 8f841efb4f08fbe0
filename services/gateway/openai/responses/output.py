"""The output of a response: its items, as they grow by the updates of its one choice.

One item grows at a time. Another kind of text, or the next call, ends the item before.

    update    reasoning      text        tool_calls
    item      reasoning      message     function_call or custom_tool_call, one for each call
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

import orjson

from services.gateway.api.answers.choice import ToolCallPart, Update
from services.gateway.openai.logprobs import LogprobEntries
from services.gateway.openai.responses.items import new_id, output_item_id
from services.gateway.openai.responses.offered_tools import OfferedTools


class Kind(StrEnum):
    """The kind of an output item. The values are the items' types."""

    REASONING = "reasoning"
    MESSAGE = "message"
    CALL = "function_call"
    CUSTOM_CALL = "custom_tool_call"

    @property
    def is_call(self) -> bool:
        """True for calls, which have no content parts."""
        return self in (Kind.CALL, Kind.CUSTOM_CALL)

    @property
    def text_field(self) -> str:
        """The field of a call that has its text."""
        return "arguments" if self is Kind.CALL else "input"


class ItemStatus(StrEnum):
    """OpenAI's status of an item."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"


_ID_PREFIXES = {Kind.REASONING: "rs", Kind.MESSAGE: "msg", Kind.CALL: "fc", Kind.CUSTOM_CALL: "ctc"}


@dataclass(slots=True)
class OutputItem:
    """One item of the output.

    pieces: of its text; of a call, of the arguments, or of the input. logprobs: JSON of entries, without brackets, by
    the number of the piece, for those that have some. call: the number of the call in the message. namespace: that the
    tool which is called is in.
    """

    kind: Kind
    index: int  # in the output
    id: str
    call: int = -1
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    status: ItemStatus = ItemStatus.IN_PROGRESS
    pieces: list[str] = field(default_factory=list)
    logprobs: dict[int, bytes] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All of its text; of a call, what it is called with."""
        return "".join(self.pieces)

    def begun(self) -> "OutputItem":
        """Returns the item as it began."""
        return replace(self, status=ItemStatus.IN_PROGRESS, pieces=[], logprobs={})

    def part(self) -> dict[str, Any]:
        """Returns the one content part, of an item that is no call, as JSON values."""
        if self.kind is Kind.REASONING:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.all_logprobs()}

    def all_logprobs(self) -> orjson.Fragment:
        """Returns the entries of all tokens, as JSON."""
        return orjson.Fragment(b"[%b]" % b",".join(self.logprobs.values()))

    def as_json(self) -> dict[str, Any]:
        """Returns the item as JSON values. One that has not begun to grow has no content."""
        about = {"id": self.id, "type": self.kind, "status": self.status}
        begun = self.status is not ItemStatus.IN_PROGRESS
        match self.kind:
            case Kind.CALL | Kind.CUSTOM_CALL:
                namespace = {} if self.namespace is None else {"namespace": self.namespace}
                call = {"call_id": self.call_id, **namespace, "name": self.name}
                return {**about, **call, self.kind.text_field: self.text if begun else ""}
            case Kind.REASONING:
                return {**about, "summary": [], "content": [self.part()] if begun else [], "encrypted_content": None}
            case Kind.MESSAGE:
                return {**about, "role": "assistant", "content": [self.part()] if begun else []}


class ItemListener(Protocol):
    """Is told how the items of an output grow."""

    def opened(self, item: OutputItem) -> None:
        """Takes note of an item that begins."""

    def grew(self, item: OutputItem, piece: str, logprobs: bytes) -> None:
        """Takes note of a further piece of the item. logprobs: JSON of its entries, without brackets."""

    def closed(self, item: OutputItem) -> None:
        """Takes note of an item that is as it will stay."""


class Nobody:
    """An ItemListener that needs no events."""

    def opened(self, item: OutputItem) -> None:
        """See ItemListener."""

    def grew(self, item: OutputItem, piece: str, logprobs: bytes) -> None:
        """See ItemListener."""

    def closed(self, item: OutputItem) -> None:
        """See ItemListener."""


class Output:
    """The items of one response.

    items: those that have begun; the last one may still grow.
    """

    def __init__(self, entries: LogprobEntries, listener: ItemListener, response_id: str, tools: OfferedTools) -> None:
        self._entries = entries
        self._listener = listener
        self._response_id = response_id
        self._tools = tools
        self.items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._unshown: list[bytes] = []  # logprobs of tokens that brought no text so far

    def take(self, update: Update) -> None:
        """Lets the items grow by an update."""
        if update.reasoning:
            self._grow(self._item(Kind.REASONING), update.reasoning)
        elif update.logprobs:
            self._unshown.append(orjson.dumps(self._entries.of(update))[1:-1])
        if update.text:
            self._grow(self._item(Kind.MESSAGE), update.text)
        for part in update.tool_calls:
            self._grow(self._called(part), part.arguments)

    def take_text(self, text: str) -> bool:
        """Lets the open message grow, in which case nobody is told. False: no message is open."""
        item = self._open
        if item is None or item.kind is not Kind.MESSAGE:
            return False
        item.pieces.append(text)
        return True

    def close(self, status: ItemStatus) -> None:
        """Ends the last item. A complete output has at least one: a message, which may be empty."""
        if not self.items and (status is ItemStatus.COMPLETED or self._unshown):
            self._item(Kind.MESSAGE)
        if self._open is not None and self._unshown:
            self._grow(self._open, "")
        self._close(status)

    def as_json(self) -> list[Mapping[str, Any]]:
        """Returns the items as JSON values."""
        return [item.as_json() for item in self.items]

    def _item(self, kind: Kind) -> OutputItem:
        """Returns the open item where it is of this kind, else a new one."""
        if self._open is None or self._open.kind is not kind:
            self._begin(self._new(kind))
        assert self._open is not None
        return self._open

    def _new(self, kind: Kind) -> OutputItem:
        index = len(self.items)
        return OutputItem(kind, index, output_item_id(_ID_PREFIXES[kind], self._response_id, index))

    def _called(self, part: ToolCallPart) -> OutputItem:
        if self._open is None or self._open.call != part.call:
            item = self._new(Kind.CUSTOM_CALL if part.custom else Kind.CALL)
            item.call, item.call_id, item.name = part.call, part.id or new_id("call"), part.name or ""
            if (tool := self._tools.called(item.name)) is not None:
                item.name, item.namespace = tool.tool.name, tool.namespace
            self._begin(item)
        assert self._open is not None
        return self._open

    def _begin(self, item: OutputItem) -> None:
        self._close(ItemStatus.COMPLETED)
        self.items.append(item)
        self._open = item
        self._listener.opened(item)

    def _grow(self, item: OutputItem, piece: str) -> None:
        logprobs = b",".join(self._unshown) if item.kind is Kind.MESSAGE else b""
        self._unshown.clear()
        if logprobs:
            item.logprobs[len(item.pieces)] = logprobs
        item.pieces.append(piece)  # last: who reads the item meanwhile finds a whole piece
        if piece or logprobs:
            self._listener.grew(item, piece, logprobs)

    def _close(self, status: ItemStatus) -> None:
        item, self._open = self._open, None
        if item is not None:
            item.status = status
            self._listener.closed(item)
