"""Prompts as token ids, and the checks that every prompt passes."""

from dataclasses import dataclass

import numpy as np

from services.gateway.api.errors import ApiError, invalid
from services.gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    token_ids: int32[n]. echo: the text that its answers begin with. echo_lengths: of each token in that text, in
    characters, where answers begin with the tokens too.
    """

    token_ids: np.ndarray
    echo: str = ""
    echo_lengths: tuple[int, ...] = ()


def check_text_length(tokenizer: Tokenizer, text: str, max_tokens: int, param: str) -> None:
    """Raises ApiError for a text that surely has more than `max_tokens` tokens, without tokenizing it."""
    if tokenizer.exceeds(text, max_tokens):
        raise too_long(max_tokens, f"your {param} is far longer", param)


def cut(token_ids: np.ndarray, kept: int | None, *, from_right: bool) -> np.ndarray:
    """Returns the last `kept` of int32[n] tokens, or the first ones; None: all of them."""
    if kept is None or len(token_ids) <= kept:
        return token_ids
    return token_ids[:kept] if from_right else token_ids[-kept:]


def too_long(max_tokens: int, found: str, param: str) -> ApiError:
    """The error for what does not fit the context. `found`: the client's own number."""
    message = f"This model's maximum context length is {max_tokens} tokens. However, {found}."
    return invalid(message, param, "context_length_exceeded")


def check_token_ids(token_ids: np.ndarray, vocab_size: int, param: str) -> None:
    """Raises ApiError for numbers that are not below `vocab_size`."""
    if (largest := int(token_ids.max())) >= vocab_size:
        message = f"Invalid '{param}': token id {largest} is out of the vocabulary; ids are 0 to {vocab_size - 1}."
        raise invalid(message, param, "invalid_value")
