"""The text of one generated sequence: tokens in, text that may be shown out, the stop string noticed."""

from typing import NamedTuple

from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_strings import StopStrings


class Piece(NamedTuple):
    """What became of some tokens.

    text: may be shown now.
    num_tokens: how many of them count; those after the one that completed a stop string do not.
    stopped: a stop string ended the text.
    """

    text: str
    num_tokens: int
    stopped: bool = False


class SequenceText:
    """Detokenizes one sequence and scans it for stop strings, which end it only after `min_tokens` tokens.

    extend: turns the next token into text, where there are no stop strings to look for; None: `feed` has to.
    """

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None
        self._unscanned = min_tokens
        self.extend = None if stops else detokenizer.feed_one

    def feed(self, tokens: list[int]) -> Piece:
        """Takes the next tokens. Not to be called again after a piece that stopped."""
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
                return Piece("".join(shown), index + 1, stopped=True)
        return Piece("".join(shown), len(tokens))

    def flush(self) -> str:
        """What was held back, when the sequence ended in another way."""
        return self._stops.flush() if self._stops is not None else ""
