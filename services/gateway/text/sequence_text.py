"""The text of one generated sequence: detokenized, and ended by its first stop string."""

from typing import NamedTuple

from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_strings import StopStrings


class Piece(NamedTuple):
    """The text of some tokens.

    text: may be shown now.
    num_tokens: how many of the tokens count; those after the one that completed a stop string do not.
    stopped: the stop string that ended the text; None: none did.
    """

    text: str
    num_tokens: int
    stopped: str | None = None


class SequenceText:
    """Detokenizes one sequence and scans it for stop strings, which end it only after `min_tokens` tokens.

    extend: turns the next token into text where there are no stop strings; None: tokens have to go through `feed`.
    peek: returns the text of the next token where that changes nothing, else None; None as `extend` is.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: tuple[str, ...], min_tokens: int, *, shows_stop: bool = False
    ) -> None:
        """shows_stop: the stop string is part of the text."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None
        self._shows_stop = shows_stop
        self._unscanned = min_tokens
        self.extend = None if stops else detokenizer.feed_one
        self.peek = None if stops else detokenizer.peek

    def feed(self, tokens: list[int]) -> Piece:
        """Turns the next tokens into text. Must not be called again after a piece that stopped."""
        if self._stops is None:
            return Piece(self._detokenizer.feed(tokens), len(tokens))
        return self._scan(tokens, self._stops)

    def _scan(self, tokens: list[int], stops: StopStrings) -> Piece:
        shown = []
        for index, token in enumerate(tokens):
            text = self._detokenizer.feed_one(token)
            if self._unscanned > 0:
                self._unscanned -= 1
                shown.append(text)
                continue
            shown.append(stops.feed(text))
            if stops.matched is not None:
                if self._shows_stop:
                    shown.append(stops.matched)
                return Piece("".join(shown), index + 1, stops.matched)
        return Piece("".join(shown), len(tokens))

    def flush(self) -> str:
        """Returns the text that was withheld, after the sequence ended in another way."""
        return self._stops.flush() if self._stops is not None else ""
