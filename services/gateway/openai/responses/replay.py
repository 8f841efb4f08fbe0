"""The events of a background response, made of its items for each client that asks, whether it is running or kept.

Events are a function of the items and their pieces, so every client gets the same ones, with the same numbers:
`response.created`, `response.queued`, `response.in_progress`, those of the items, and that of the end.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.openai.responses.events import Events
from services.gateway.openai.responses.output import ItemStatus, OutputItem
from services.gateway.openai.responses.response import Outcome, Status, as_begun

_AT_ONCE = 256  # events, which take a few milliseconds


class Replay:
    """The events of one response with a number above `after`.

    behind: more has come than `taken` has told.
    """

    def __init__(self, response: Mapping[str, Any], items: Sequence[OutputItem], after: int) -> None:
        """`response`: its JSON values, at whatever time; items: those that have begun, which may grow meanwhile."""
        self._response = response
        self._items = items
        self._after = after
        self.behind = False
        self._events = Events()
        self._begun = False  # response.in_progress is among the events
        self._num_closed = 0  # items
        self._open: OutputItem | None = None  # as the item began
        self._num_pieces = 0  # of the open item
        queued = as_begun(response, Status.QUEUED)
        self._events.lifecycle("response.created", queued)
        self._events.lifecycle("response.queued", queued)

    def taken(self) -> bytes:
        """Returns the events for what came since the last call, or where that is much, for a part of it."""
        self.behind = True
        while self.behind and self._events.num_pending < _AT_ONCE:
            self.behind = self._step()
        return self._events.taken_after(self._after)

    def end(self, response: Mapping[str, Any]) -> bytes:
        """Returns the last events of a response that has ended like this, when `taken` has returned all others.

        A failure is told in any case: its gateway may have died with events that nobody else knows.
        """
        self._begin()
        if response["status"] == Status.FAILED:
            self._events.go_on_after(self._after)
        self._events.lifecycle(Outcome(Status(response["status"])).event, response)
        return self._events.taken_after(self._after)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._events.lifecycle("response.in_progress", as_begun(self._response, Status.IN_PROGRESS))

    def _step(self) -> bool:
        """Adds the events of one piece, or of an item's beginning or end. False: no more has come."""
        if self._num_closed == len(self._items):
            return False
        item = self._items[self._num_closed]
        ended = item.status is not ItemStatus.IN_PROGRESS  # read first: no piece comes after that
        if self._open is None:
            self._begin()
            self._open = item.begun()
            self._num_pieces = 0
            self._events.opened(self._open)
        elif self._num_pieces < len(item.pieces):
            piece, logprobs = item.pieces[self._num_pieces], item.logprobs.get(self._num_pieces, b"")
            self._num_pieces += 1
            if piece or logprobs:
                self._events.grew(self._open, piece, logprobs)
        elif ended:
            self._open = None
            self._num_closed += 1
            self._events.closed(item)
        else:
            return False
        return True
