"""Perplexity: how well a model foretells a book.

Each passage is a prompt of its own, of which the server tells the logprobs. A passage's first token has no logprob,
unless the tokenizer puts another one before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.quality import intervals
from loadtest.quality.asked import AskedServer, Skipped, each
from loadtest.quality.book import passages
from loadtest.quality.lines import Line

_PASSAGE_CHARS = 1200  # some 300 tokens


@dataclass(frozen=True, slots=True)
class Scored:
    """A passage. logprob: the sum over `num_tokens` tokens, natural; num_bytes: of the whole passage in UTF-8."""

    logprob: float
    num_tokens: int
    num_bytes: int


class Perplexity:
    """Perplexity per token where both servers tokenize alike, and bits per byte of text, which need not that."""

    name = "perplexity"

    def __init__(self, passage_chars: int = _PASSAGE_CHARS) -> None:
        self._passages = passages(passage_chars)

    async def ask(self, server: AskedServer) -> list[Scored]:
        """Asks one server, as `Part.ask` says."""
        return await each(_scored(server, passage) for passage in self._passages)

    def compare(self, a: Sequence[Scored], b: Sequence[Scored]) -> list[Line]:
        """Compares the answers of two servers, as `Part.compare` says."""
        tokens = [one.num_tokens for one in a]
        lines = [_line("bits per byte", [one.num_bytes * math.log(2) for one in a], a, b, exponent=False)]
        if tokens == [one.num_tokens for one in b]:
            lines.insert(0, _line("perplexity", tokens, a, b, exponent=True))
        return lines


async def _scored(server: AskedServer, passage: str) -> Scored:
    choice = await server.complete({"prompt": passage, "max_tokens": 1, "prompt_logprobs": 0})
    told: list[dict[str, Any] | None] | None = choice.get("prompt_logprobs")
    if told is None:
        raise Skipped("the server gives no prompt_logprobs")
    logprobs = [own_logprob(token) for token in told if token is not None]
    return Scored(math.fsum(logprobs), len(logprobs), len(passage.encode()))


def own_logprob(token: dict[str, Any]) -> float:
    """Returns the logprob of the prompt's own token, by vLLM's form: an entry for each token id, here one alone."""
    (entry,) = token.values()
    return float(entry["logprob"])


def _line(name: str, weights: Sequence[float], a: Sequence[Scored], b: Sequence[Scored], *, exponent: bool) -> Line:
    """Makes a line of mean losses over the weights; with `exponent`, of their exponentials."""
    total = math.fsum(weights)
    first, second = (-math.fsum(one.logprob for one in side) / total for side in (a, b))
    losses = [(one.logprob - other.logprob) / weight for one, other, weight in zip(a, b, weights, strict=True)]
    low, high = intervals.of_mean(losses, weights)
    if exponent:
        interval = (math.expm1(low), math.expm1(high))
        return Line(
            name, len(a), math.exp(first), math.exp(second), math.expm1(second - first), interval, relative=True
        )
    return Line(name, len(a), first, second, second / first - 1, (low / first, high / first), relative=True)
