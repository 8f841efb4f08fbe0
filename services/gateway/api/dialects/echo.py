"""The echo of a prompt: the text that answers begin with, and the length of each of its tokens in that text.

A text is echoed as it was sent, without the special tokens that its tokenizer adds. Token ids are echoed as the text of
all of them; `skip_special_tokens: true` leaves the special ones out.
"""

from collections.abc import Sequence

import numpy as np

from services.gateway.api.dialects.prompts import Prompt
from services.gateway.text.tokenizer import Tokenizer


def echo_of_ids(tokenizer: Tokenizer, token_ids: np.ndarray, *, skip_special: bool, with_tokens: bool) -> Prompt:
    """Returns a prompt of int32[n] token ids with its echo. with_tokens: the tokens are echoed too."""
    ids: list[int] = token_ids.tolist()
    text = tokenizer.decode(ids, skip_special_tokens=skip_special)
    left_out = tokenizer.special_ids if skip_special else frozenset[int]()
    lengths = (0 if token in left_out else len(_text(tokenizer, token)) for token in ids)
    return Prompt(token_ids, text, tuple(lengths) if with_tokens else ())


def echo_of_text(tokenizer: Tokenizer, text: str, token_ids: np.ndarray, *, with_tokens: bool) -> Prompt:
    """Returns the prompt of a text with its echo. with_tokens: the tokens, int32[n], are echoed too."""
    if not with_tokens:
        return Prompt(token_ids, text)
    ids: list[int] = token_ids.tolist()
    before = _num_added(tokenizer, ids, text)
    after = _num_added(tokenizer, ids[:before:-1], text, at_end=True)
    lengths = [len(_text(tokenizer, token)) for token in ids]
    lengths[:before] = [0] * before
    lengths[len(lengths) - after :] = [0] * after
    return Prompt(token_ids, text, tuple(lengths))


def _num_added(tokenizer: Tokenizer, ids: Sequence[int], text: str, *, at_end: bool = False) -> int:
    """Counts the first of `ids` that are special tokens and not written in the text."""
    written = text.endswith if at_end else text.startswith
    for number, token in enumerate(ids):
        if token not in tokenizer.special_ids or written(_text(tokenizer, token)):
            return number
    return len(ids)


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")
