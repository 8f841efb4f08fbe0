"""The logprobs of an answer's tokens as chats and responses have them."""

from itertools import starmap
from typing import Any

from services.gateway.api.answers.choice import Update
from services.gateway.openai.answer import LOWEST_LOGPROB, has_many, json_array
from services.gateway.openai.token_names import TokenNames
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.frames import TokenLogprobs


class LogprobEntries:
    """Makes the entries of tokens: name, bytes, logprob and the most likely alternatives."""

    def __init__(self, tokenizer: Tokenizer, names: TokenNames, *, by_name: bool = False) -> None:
        """by_name: the request names the alternatives, and the token itself is one of them too."""
        self._by_name = by_name
        self._tokenizer = tokenizer
        self._names = names

    def of(self, update: Update) -> list[dict[str, Any]]:
        """Returns an entry for each token of the update that has logprobs."""
        pairs = zip(update.tokens, update.logprobs or (), strict=True)
        return [self._token(token, logprobs) for token, logprobs in pairs if logprobs]

    def _token(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        own = self._entry(token, logprobs.sampled)
        if has_many(logprobs):
            return {**own, "top_logprobs": json_array(starmap(self._entry, logprobs.top))}
        top = [self._entry(other, logprob) for other, logprob in logprobs.top]
        if self._by_name and all(token != other for other, _ in logprobs.top):
            top.insert(0, own)
        return {**own, "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {
            "token": self._names.name(token),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(raw),
        }
