"""Greedy agreement: how far two servers continue the same texts with the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.quality import intervals
from loadtest.quality.asked import AskedServer, Skipped, each
from loadtest.quality.book import openings
from loadtest.quality.lines import Line

_PROMPTS, _TOKENS = 200, 64


@dataclass(frozen=True, slots=True)
class Continued:
    """A prompt and its greedy continuation, in token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Agreement:
    """The share of equal answers, and of the tokens that come before the first difference."""

    name = "agreement"

    def __init__(self, num_prompts: int = _PROMPTS, num_tokens: int = _TOKENS) -> None:
        self._prompts, self._num_tokens = openings(num_prompts), num_tokens

    async def ask(self, server: AskedServer) -> list[Continued]:
        """Asks one server, as `Part.ask` says."""
        return await each(self._continued(server, prompt) for prompt in self._prompts)

    def compare(self, a: Sequence[Continued], b: Sequence[Continued]) -> list[Line]:
        """Compares the answers of two servers, as `Part.compare` says."""
        if [one.prompt for one in a] != [one.prompt for one in b]:
            raise Skipped("the two sides tokenize differently")
        equal = [one.answer == other.answer for one, other in zip(a, b, strict=True)]
        kept = [equal_share(one.answer, other.answer) for one, other in zip(a, b, strict=True)]
        whole, first = sum(equal) / len(equal), sum(kept) / len(kept)
        return [
            Line("answers equal", len(a), None, None, whole, intervals.of_share(sum(equal), len(equal))),
            Line("tokens before a difference", len(a), None, None, first, intervals.of_mean(kept)),
        ]

    async def _continued(self, server: AskedServer, prompt: str) -> Continued:
        fields = {"prompt": prompt, "max_tokens": self._num_tokens, "return_token_ids": True}
        choice: dict[str, Any] = await server.complete(fields)
        if choice.get("token_ids") is None or choice.get("prompt_token_ids") is None:
            raise Skipped("the server gives no token_ids")
        return Continued(tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"]))


def equal_share(a: Sequence[int], b: Sequence[int]) -> float:
    """Returns how many tokens two answers have in common from their beginning, of the longer one's; 1 for none."""
    longer = max(len(a), len(b))
    pairs = enumerate(zip(a, b, strict=False))
    common = next((place for place, (one, other) in pairs if one != other), min(len(a), len(b)))
    return common / longer if longer else 1.0
