"""The names of single tokens in an answer's logprobs: their texts, or their ids where the client wants those."""

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.openai.answer import LOWEST_LOGPROB, json_array
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.frames import TokenLogprobs


class TokenNames:
    """Names tokens for one answer."""

    def __init__(self, tokenizer: Tokenizer, *, by_id: bool) -> None:
        """by_id: names are as in "token_id:7", which tells tokens apart that have the same text."""
        self._tokenizer = tokenizer
        self._by_id = by_id

    def name(self, token: int) -> str:
        """The token's name."""
        return f"token_id:{token}" if self._by_id else self.text(token)

    def ranked(self, entries: Sequence[tuple[int, TokenLogprobs]]) -> orjson.Fragment:
        """The logprobs of a prompt in vLLM's form, for a prompt whose tokens from the second on are `entries`."""
        return json_array([None, *(self._ranked(*entry) for entry in entries)])

    def _ranked(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """The alternatives and the token itself, by id. A worker of an older version does not say the token's rank,
        which is known then only among the alternatives.
        """
        ranks: dict[int, tuple[float, int | None]] = {}
        for rank, (other, logprob) in enumerate(logprobs.top, start=1):
            ranks[other] = logprob, rank
        ranks.setdefault(token, (logprobs.sampled, logprobs.rank))
        return {
            str(other): {"logprob": max(logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": self.text(other)}
            for other, (logprob, rank) in ranks.items()
        }

    def text(self, token: int) -> str:
        """The token's text."""
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")
