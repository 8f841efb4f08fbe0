"""Parts of long texts, of which the first or the last tokens are those of the whole text.

A text is cut before a mark that follows a letter (`word| next`, `end|. Then`), where no token goes across: because the
tokenizer splits texts into words there, or because its vocabulary has no such token. The tokens on both sides are then
those that each side has alone: merges and searches for the best tokens stay within tokens, and the rules that split a
text into words begin anew at such a place. What a tokenizer adds at the beginning of a text, as SentencePiece's space,
reaches no further than the next place of the kind, so that the tokens before that are not used. Marks for which neither
reason holds are left out. That a tokenizer keeps to all this is tried at the start, with a text of everything unusual;
one that does not has no cuts.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

Encode = Callable[[str], np.ndarray]  # from a text to its tokens, int32[n], without special ones
Split = Callable[[str], Sequence[tuple[int, int]]]  # from a text to the beginnings and ends of its words, in characters

MOST_UNCUT = 1 << 18  # characters of a text that has no cuts where it needs one, and is tokenized all the same

_CANDIDATES = " \n,.;:!?()，。、！？；："  # of East Asian texts, too
_LETTERS = "aZß\u00e9ΑяİאعกあカЖ字한"  # of scripts and cases that rules tell apart
_LETTER_END = rb"[A-Za-z\x80-\xbf]"  # of a letter in UTF-8
_NO_BYTE = b"\xff"  # in no text
_CHARS_PER_TOKEN = 16  # at first
_MORE_CHARS = 256
_MORE_TOKENS = 8
_SEARCHED = 4096  # characters in which a cut is looked for
_NEAR = 64  # most cuts are not so far away


class NoCuts(Exception):
    """A text is long, and has no place where it could be cut."""


class TextCuts:
    """Cuts texts for one tokenizer."""

    def __init__(self, encode: Encode, split: Split, token_bytes: Iterable[bytes], probe: str) -> None:
        """token_bytes: of every token. probe: a text of everything unusual."""
        self._encode = encode
        joined = _NO_BYTE + _NO_BYTE.join(token_bytes) + _NO_BYTE
        marks = [mark for mark in _CANDIDATES if _ends_words(mark, split) or _stands_alone(mark.encode(), joined)]
        self._cut = re.compile(rf"(?<=[^\W\d_])[{re.escape(''.join(marks))}]") if marks else None
        if self._cut is not None and not self._holds(probe):
            self._cut = None

    def part(self, text: str, num_tokens: int, *, from_left: bool) -> str:
        """Returns a part of a text that has at least `num_tokens` tokens in common with it, and more tokens than those.

        They are the text's first ones, or, from_left, its last ones. Returns all of a short text. Raises NoCuts.
        """
        size, part = _CHARS_PER_TOKEN * num_tokens + _MORE_CHARS, None
        uncut = max(size, MOST_UNCUT)
        while size < len(text):
            part = self._end(text, size) if from_left else self._beginning(text, size)
            if part is not None and self._has_enough(part, num_tokens, from_left):
                return part
            size *= 2
        if part is None and len(text) > uncut:
            raise NoCuts
        return text  # its tokens are so long that half of it had too few, or it is short

    def _beginning(self, text: str, size: int) -> str | None:
        found = None if self._cut is None else self._cut.search(text, size, size + _SEARCHED)
        return None if found is None else text[: found.start()]

    def _end(self, text: str, size: int) -> str | None:
        start = len(text) - size
        for searched in (_NEAR, _SEARCHED):
            if self._cut is not None and (found := self._cut.search(text, max(0, start - searched), start)):
                return text[found.start() :]
        return None

    def _has_enough(self, part: str, num_tokens: int, from_left: bool) -> bool:
        unsure = _MORE_TOKENS + (self._unsure(part) if from_left else 0)
        return len(self._encode(part)) >= num_tokens + unsure

    def _unsure(self, part: str) -> int:
        """Returns the most tokens that the text up to the next cut can have: one for each byte."""
        assert self._cut is not None
        found = self._cut.search(part, 1)
        return len((part if found is None else part[: found.start()]).encode())

    def _holds(self, probe: str) -> bool:
        assert self._cut is not None
        whole = self._encode(probe)
        places = [found.start() for found in self._cut.finditer(probe)]
        for place, after in pairwise(places):
            before = self._encode(probe[:place])
            if not np.array_equal(whole[: len(before)], before):
                return False
            last = whole[len(self._encode(probe[:after])) :]
            if not np.array_equal(self._encode(probe[place:])[-len(last) :], last):
                return False
        return bool(places)


def _ends_words(mark: str, split: Split) -> bool:
    """True where no word goes on from a letter to the mark, whatever the letter is."""
    texts = [f"x{letter}{mark}{after}" for letter in _LETTERS for after in (letter, mark, "1")]
    return all((words := split(text)) and not any(start < 2 < end for start, end in words) for text in texts)


def _stands_alone(mark: bytes, joined: bytes) -> bool:
    """True where no token has the mark, or the beginning of its bytes, after a letter, and one has the mark."""
    parts = [re.escape(mark), *(re.escape(mark[:length]) + _NO_BYTE for length in range(1, len(mark)))]
    return mark in joined and re.search(_LETTER_END + b"(" + b"|".join(parts) + b")", joined) is None
