"""The names of single tokens in an answer's logprobs: their texts, or their ids where the client wants those."""

from collections.abc import Iterator, Sequence
from itertools import chain, starmap
from typing import Any

import orjson

from services.gateway.openai.answer import LOWEST_LOGPROB, has_many, json_array, json_object
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
        return json_array(chain([None], starmap(self._ranked, entries)))

    def _ranked(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any] | orjson.Fragment:
        fields = self._ranked_fields(token, logprobs)
        return json_object(fields) if has_many(logprobs) else dict(fields)

    def _ranked_fields(self, token: int, logprobs: TokenLogprobs) -> Iterator[tuple[str, dict[str, Any]]]:
        """The alternatives and the token itself, by id. A worker of an older version does not say the token's rank,
        which is known then only among the alternatives.
        """
        missing = True
        for rank, (other, logprob) in enumerate(logprobs.top, start=1):
            yield self._ranked_field(other, logprob, rank)
            missing = missing and other != token
        if missing:
            yield self._ranked_field(token, logprobs.sampled, logprobs.rank)

    def _ranked_field(self, token: int, logprob: float, rank: int | None) -> tuple[str, dict[str, Any]]:
        shown = {"logprob": max(logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": self.text(token)}
        return str(token), shown

    def text(self, token: int) -> str:
        """The token's text."""
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")
