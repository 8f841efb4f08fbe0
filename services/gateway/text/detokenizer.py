"""Turns tokens into text as they come. A character whose bytes are spread over tokens appears with the last of them.

An incomplete character at the end is left out. The text does not depend on how the tokens were cut into pieces.
"""

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from services.gateway.text.tokenizer import Tokenizer

# Tokens of the prompt, and later of the text, that a decoder sees: enough to know that it is not at the beginning.
_CONTEXT_TOKENS = 4

# A character has at most four bytes. `DecodeStream` keeps tokens that decode to no character, and decodes all of them
# again with each token (4,000 took 14 s), so a new stream replaces it after this many.
_MAX_PENDING_TOKENS = 16

_AS_THEY_ARE: Mapping[int, str] = {}


class Detokenizer(Protocol):
    """The text of one sequence after its prompt."""

    def feed(self, tokens: list[int]) -> str:
        """Returns the text that these tokens complete."""

    def feed_one(self, token: int) -> str:
        """Returns the text that one token completes: the short form of `feed` for streams."""

    def peek(self, token: int) -> str | None:
        """Returns what `feed_one` would, where it would change nothing; else None."""


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
    shown: frozenset[int] = frozenset(),
    written: Mapping[int, str] = _AS_THEY_ARE,
) -> Detokenizer:
    """Returns the simplest detokenizer that is right for this tokenizer.

    spaces_between_special_tokens: False leaves out the spaces that some vocabularies write before a special token that
    follows another one. shown: special tokens that are text here. written: tokens that have another text here.
    """
    skipped = tokenizer.special_ids - shown if skip_special_tokens else frozenset[int]()
    joined = frozenset[int]() if spaces_between_special_tokens or skip_special_tokens else tokenizer.special_ids
    simplest: Detokenizer
    if tokenizer.byte_level:
        simplest = ByteDetokenizer(tokenizer, skipped)
    else:
        simplest = StreamDetokenizer(tokenizer, skipped, prompt, joined)
    return RewritingDetokenizer(simplest, written) if written else simplest


class ByteDetokenizer:
    """Joins the bytes of tokens, for byte-level vocabularies. Every token costs the same, whatever came before it."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._whole_texts = tokenizer.whole_texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._inside = False  # True: the last bytes of a character are still to come

    def feed(self, tokens: list[int]) -> str:
        """See Detokenizer. Bytes that cannot be UTF-8 become U+FFFD."""
        skipped = self._skipped
        text = self._decoder.decode(b"".join([self._token_bytes(token) for token in tokens if token not in skipped]))
        self._inside = bool(self._decoder.getstate()[0])
        return text

    def feed_one(self, token: int) -> str:
        """See Detokenizer."""
        text = None if self._inside else self._whole_texts[token]
        return self.feed([token]) if text is None else text

    def peek(self, token: int) -> str | None:
        """See Detokenizer."""
        return None if self._inside else self._whole_texts[token]


class StreamDetokenizer:
    """Decodes tokens in context, for vocabularies where a token's text depends on its neighbours: SentencePiece."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skipped: frozenset[int],
        prompt: Sequence[int],
        joined: frozenset[int] = frozenset(),
    ) -> None:
        """joined: tokens that have no space between each other."""
        self._joined = joined
        self._follows_joined = False
        self._backend = tokenizer.backend
        self._skipped = skipped
        self._context = [token for token in prompt[-2 * _CONTEXT_TOKENS :] if token not in skipped][-_CONTEXT_TOKENS:]
        self._pending: list[int] = []
        if self._backend.decode(self._context).endswith("\N{REPLACEMENT CHARACTER}"):
            self._context = []  # it would come again, whole, at the head of the text
        self._stream = self._new_stream()

    def feed(self, tokens: list[int]) -> str:
        """See Detokenizer. Bytes that do not become a character are dropped."""
        # One by one: DecodeStream holds back all of a piece whose last token is incomplete.
        return "".join([self._step(token) for token in tokens if token not in self._skipped])

    def feed_one(self, token: int) -> str:
        """See Detokenizer."""
        return self.feed([token])

    def peek(self, token: int) -> str | None:
        """See Detokenizer."""
        return None

    def _step(self, token: int) -> str:
        text = self._stream.step(self._backend, token)
        if self._joined:
            text = self._without_space(token, text)
        self._pending.append(token)
        if text is not None:
            self._context = [*self._context, *self._pending][-_CONTEXT_TOKENS:]
            self._pending.clear()
            return text
        if len(self._pending) >= _MAX_PENDING_TOKENS:
            self._pending.clear()
            self._stream = self._new_stream()
        return ""

    def _without_space(self, token: int, text: str | None) -> str | None:
        follows, self._follows_joined = self._follows_joined, token in self._joined
        return text.lstrip(" ") if follows and self._follows_joined and text is not None else text

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=False)


class RewritingDetokenizer:
    """Writes some tokens as other texts, and has another detokenizer write the others."""

    def __init__(self, others: Detokenizer, written: Mapping[int, str]) -> None:
        self._others = others
        self._written = written

    def feed(self, tokens: list[int]) -> str:
        """See Detokenizer."""
        return "".join([self.feed_one(token) for token in tokens])

    def feed_one(self, token: int) -> str:
        """See Detokenizer. A character that is incomplete before one of the other texts comes after it."""
        return self._written.get(token) or self._others.feed_one(token)

    def peek(self, token: int) -> str | None:
        """See Detokenizer."""
        return self._written.get(token) or self._others.peek(token)
