"""The marks of answers in channels, the format `harmony` of gpt-oss (https://github.com/openai/harmony).

A model has a token for each mark. Here such a token is one character, which no text has: a mark that a model spells in
letters, as it explains its own format, is then text like any other.
"""

import re
from collections.abc import Mapping

from services.gateway.text.tokenizer import Tokenizer

_FIRST = 0xFDD0  # of 32 code points that are no characters, and stay none: a program's own use is what they are for
_NAMES = ("start", "end", "message", "channel", "constrain", "call", "return")

# By how they are written in prompts and tokenizers.
MARKS: Mapping[str, str] = {f"<|{name}|>": chr(_FIRST + number) for number, name in enumerate(_NAMES)}
START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN = MARKS.values()
ALL = "".join(MARKS.values())

CHANNEL_TEXTS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>")  # that each answer in channels needs
_SPELLED = re.compile("|".join(map(re.escape, MARKS)))
_LONGEST = max(map(len, MARKS))


def as_marks(text: str) -> str:
    """Returns a prompt's text with its marks as characters."""
    return _SPELLED.sub(lambda found: MARKS[found.group()], text)


def mark_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Returns the tokens that are marks, with their characters."""
    added = tokenizer.added_tokens
    return {added[text]: mark for text, mark in MARKS.items() if text in added}


def are_spelled(tokenizer: Tokenizer) -> bool:
    """True when a tokenizer lacks tokens of marks, so that they are spelled in letters."""
    return any(text not in tokenizer.added_tokens for text in CHANNEL_TEXTS)


class SpelledMarks:
    """Finds marks that are spelled in letters, in a text that grows, and makes them characters."""

    def __init__(self) -> None:
        self._withheld = ""  # what may become a mark

    def passes(self, text: str) -> bool:
        """True when a text surely has no mark in it, nor a part of one."""
        return not self._withheld and "<" not in text

    def feed(self, text: str) -> str:
        """Returns the text that may be read now."""
        text = as_marks(self._withheld + text)
        begin = text.rfind("<", max(0, len(text) - _LONGEST + 1))
        may_grow = begin >= 0 and any(mark.startswith(text[begin:]) for mark in MARKS)
        text, self._withheld = (text[:begin], text[begin:]) if may_grow else (text, "")
        return text

    def flush(self) -> str:
        """Returns the text that was withheld, when no more will come."""
        withheld, self._withheld = self._withheld, ""
        return withheld
