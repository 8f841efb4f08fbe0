"""The content blocks of an answer: which of them an update opens, adds to and closes.

For APIs whose messages are made of blocks. Streams write these steps as events, and whole answers collect them, so both
have the same blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from services.gateway.api.answers.choice import ToolCallPart, Update


class Kind(StrEnum):
    """The types of content blocks."""

    THINKING = "thinking"
    TEXT = "text"
    CALL = "call"


class Act(StrEnum):
    """The ways in which a step changes a block."""

    START = "start"
    ADD = "add"
    STOP = "stop"


@dataclass(slots=True)
class AnswerBlock:
    """A content block of an answer. call: of a tool, its number; id, name: of a call."""

    index: int
    kind: Kind
    call: int = -1
    id: str = ""
    name: str = ""


class Step(NamedTuple):
    """A change of one block. piece: the text that is added."""

    act: Act
    block: AnswerBlock
    piece: str = ""


@dataclass(slots=True)
class BlockSteps:
    """Turns the updates of a choice into steps. At most one block is open, the last one.

    shows_thinking: False leaves the text of thinking out, and not its blocks.
    """

    shows_thinking: bool = True
    open: AnswerBlock | None = None
    _num_blocks: int = 0

    def take(self, update: Update) -> Iterator[Step]:
        """Yields the steps of an update. The one with a finish reason closes the last block."""
        if update.reasoning:
            yield from self._add(Kind.THINKING, update.reasoning if self.shows_thinking else "")
        if update.text:
            yield from self._add(Kind.TEXT, update.text)
        for part in update.tool_calls:
            yield from self._add_call(part)
        if update.finish_reason is not None:
            yield from self._close()

    def _add(self, kind: Kind, piece: str) -> Iterator[Step]:
        if self.open is None or self.open.kind is not kind:
            yield from self._begin(kind)
        yield from self._added(piece)

    def _add_call(self, part: ToolCallPart) -> Iterator[Step]:
        if self.open is None or self.open.call != part.call:
            yield from self._begin(Kind.CALL, part.call, part.id or "", part.name or "")
        yield from self._added(part.arguments)

    def _added(self, piece: str) -> Iterator[Step]:
        assert self.open is not None
        if piece:
            yield Step(Act.ADD, self.open, piece)

    def _begin(self, kind: Kind, call: int = -1, call_id: str = "", name: str = "") -> Iterator[Step]:
        yield from self._close()
        self.open = AnswerBlock(self._num_blocks, kind, call, call_id, name)
        self._num_blocks += 1
        yield Step(Act.START, self.open)

    def _close(self) -> Iterator[Step]:
        if self.open is not None:
            yield Step(Act.STOP, self.open)
        self.open = None
