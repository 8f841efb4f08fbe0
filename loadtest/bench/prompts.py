"""Prompts of a given length: token ids, or words that a tokenizer counts, or words that nobody counts."""

from pathlib import Path
from typing import Protocol

import numpy as np

from loadtest.bench.words import WORDS
from loadtest.cannot_run import CannotRun

LOWEST_TOKEN_ID = 100  # below are special tokens, in most vocabularies
HIGHEST_TOKEN_ID = 4000
_FEWEST_WORDS = 50  # with one token each, from which prompts are made

Prompt = list[int] | str


class Prompts(Protocol):
    """A way to make prompts of random contents."""

    def make(self, random: np.random.Generator, tokens: int) -> Prompt:
        """Makes one of this length."""

    def join(self, *parts: Prompt) -> Prompt:
        """Puts prompts one behind the other."""


class TokenIds:
    """Random ids up to the highest."""

    def __init__(self, highest: int = HIGHEST_TOKEN_ID) -> None:
        self._highest = highest

    def make(self, random: np.random.Generator, tokens: int) -> Prompt:
        """See `Prompts.make`."""
        ids: list[int] = random.integers(LOWEST_TOKEN_ID, self._highest + 1, tokens).tolist()
        return ids

    def join(self, *parts: Prompt) -> Prompt:
        """See `Prompts.join`."""
        assert not any(isinstance(part, str) for part in parts)
        return [id for part in parts if isinstance(part, list) for id in part]


class Words:
    """Random words of a list, each of which counts as one token."""

    def __init__(self, words: tuple[str, ...] = WORDS) -> None:
        self._words = np.array(words, dtype=object)

    def make(self, random: np.random.Generator, tokens: int) -> Prompt:
        """See `Prompts.make`."""
        return " ".join(self._words[random.integers(0, len(self._words), tokens)])

    def join(self, *parts: Prompt) -> Prompt:
        """See `Prompts.join`."""
        assert all(isinstance(part, str) for part in parts)
        return " ".join(part for part in parts if isinstance(part, str))


class Counter:
    """The tokens of a text by a tokenizer's file."""

    def __init__(self, path: Path) -> None:
        """Reads `tokenizer.json` in a directory, or a file. Raises CannotRun."""
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise CannotRun(f"--tokenizer {path}: there is no file {file}")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers has no class of its own for a file that it cannot read
            raise CannotRun(f"--tokenizer {path}: {error}") from error

    def count(self, text: str) -> int:
        """The number of a text's tokens, without those that a model puts before it."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def single_words(self) -> tuple[str, ...]:
        """The words that are one token each behind a space. Raises CannotRun where they are too few for prompts."""
        singles = tuple(word for word in WORDS if self.count(f"a {word}") == self.count("a") + 1)
        if len(singles) < _FEWEST_WORDS:
            raise CannotRun(f"--tokenizer: {len(singles)} words are one token in its vocabulary, too few for prompts")
        return singles
