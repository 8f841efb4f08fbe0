"""Finds stop strings in a text that still grows.

Text that could be the beginning of a stop string is withheld until it is known not to be one. The stop string that is
complete first wins, so the result does not depend on how the text is cut into pieces.
"""

from collections.abc import Sequence


class StopStrings:
    """Scans one growing text.

    matched: the stop string that ended it; None: none so far.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would end every text"
        self._stops = tuple(stops)
        self._withheld = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Takes more text, and returns the text that may be shown now. Once `matched` is set, the text is over."""
        assert self.matched is None
        text = self._withheld + text
        if found := self._first_complete(text):
            start, self.matched = found
            self._withheld = ""
            return text[:start]
        keep = self._pending_length(text)
        self._withheld = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns the text that was withheld, when no more will come."""
        withheld, self._withheld = self._withheld, ""
        return withheld

    def _first_complete(self, text: str) -> tuple[int, str] | None:
        hits = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(hits)[1:] if hits else None

    def _pending_length(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
