"""Recall: whether a model finds codes again that were planted in a long text."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.quality.asked import AskedServer, Skipped, each
from loadtest.quality.book import paragraphs
from loadtest.quality.lines import Line, shares

_CONTEXTS, _CODES = 4, 10
_ANSWER_TOKENS = 8
_TRIES = 8
_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "grey", "brown", "golden", "silver")
_THINGS = ("door", "box", "gate", "drawer", "key", "chest", "room", "book", "bag", "shelf")


@dataclass(frozen=True, slots=True)
class Planted:
    """A thing in a text, and its code."""

    thing: str
    code: str

    @property
    def sentence(self) -> str:
        """The sentence that the text has."""
        return f"The code of the {self.thing} is {self.code}."


class Recall:
    """The share of codes found again in contexts of so many tokens.

    Each context has all codes of its own, at places spread over a text that begins elsewhere in the book. The texts of
    one context differ in their last line alone, which asks for one code.
    """

    def __init__(self, num_tokens: int, num_contexts: int = _CONTEXTS, num_codes: int = _CODES) -> None:
        self._num_tokens, self._num_contexts, self._num_codes = num_tokens, num_contexts, num_codes
        self.name = f"recall-{num_tokens}"

    async def ask(self, server: AskedServer) -> list[bool]:
        """Asks one server, as `Part.ask` says."""
        needed = self._num_tokens + _ANSWER_TOKENS
        if server.max_model_len < needed:
            raise Skipped(f"max_model_len is {server.max_model_len}, and {needed} tokens are needed")
        found: list[bool] = []
        for number in range(self._num_contexts):
            planted = codes(self._num_codes, seed=number)
            text = await self._fitting(server, number / self._num_contexts, planted)
            # The first one leaves the text in the server's cache of prompts, for the others.
            found.append(await _recalled(server, text, planted[0]))
            found += await each(_recalled(server, text, one) for one in planted[1:])
        return found

    def compare(self, a: Sequence[bool], b: Sequence[bool]) -> list[Line]:
        """Compares the answers of two servers, as `Part.compare` says."""
        return [shares(f"codes recalled at {self._num_tokens} tokens", a, b)]

    async def _fitting(self, server: AskedServer, start: float, planted: Sequence[Planted]) -> str:
        """Finds the longest text whose prompts have at most the wanted tokens, to a hundredth or so."""
        longest = max((question(one) for one in planted), key=len)
        num_chars = 3 * self._num_tokens
        best = ""
        for _ in range(_TRIES):
            text = context(start, num_chars, planted)
            tokens = await server.count(text + longest)
            if tokens <= self._num_tokens:
                best = max(best, text, key=len)
                if tokens > 0.97 * self._num_tokens:
                    break
            num_chars = int(num_chars * 0.99 * self._num_tokens / tokens)
        if not best:
            raise Skipped(f"no text of {self._num_tokens} tokens was found in {_TRIES} tries")
        return best


def codes(count: int, seed: int) -> list[Planted]:
    """Makes different things with codes of four digits."""
    draw = random.Random(seed)
    things = draw.sample([f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS], count)
    return [Planted(thing, str(draw.randrange(1000, 10_000))) for thing in things]


def context(start: float, num_chars: int, planted: Sequence[Planted]) -> str:
    """Makes a text of the book from a share of it on, of some `num_chars` characters, with the sentences between.

    The sentences stand before paragraphs, at equal distances; a text longer than the book goes on at its beginning.
    """
    book = paragraphs()
    begin = int(start * len(book))
    parts: list[str] = []
    length, waiting = 0, list(planted)
    while length < num_chars:
        if waiting and length >= num_chars * (len(planted) - len(waiting) + 0.5) / len(planted):
            parts.append(waiting.pop(0).sentence)
        parts.append(book[begin % len(book)][: num_chars - length])
        length += len(parts[-1])
        begin += 1
    return "\n\n".join([*parts, *(one.sentence for one in waiting)])


def question(planted: Planted) -> str:
    """Begins the sentence that a model is to complete, after the text."""
    return f"\n\n{planted.sentence.partition(' is ')[0]} is"


async def _recalled(server: AskedServer, text: str, planted: Planted) -> bool:
    fields = {"prompt": text + question(planted), "max_tokens": _ANSWER_TOKENS}
    answer: str = (await server.complete(fields))["text"]
    return answer.strip().startswith(planted.code)
