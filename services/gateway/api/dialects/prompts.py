"""Prompts as token ids, and the checks that every prompt passes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.gateway.api.answers.reading import Reading
from services.gateway.api.errors import invalid
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.api.requests.text_limits import TextLimits, far_too_long
from services.gateway.text.tokenizer import Tokenizer

_SLICE = 16_384  # token ids that become an array at once


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    token_ids: int32[n]. echo: the text that its answers begin with. echo_lengths: of each token in that text, in
    characters, where answers begin with the tokens too. reading: how the parts of its answers are told apart; None: all
    of their text is content. num_cut: tokens that were made of its text, and are not in it. token_offsets: see
    `TextTokens`; None also for token ids of the client's own. second_text: of a pair of texts, where the second one
    begins by the tokenizer's types of tokens; 0: all have the type 0.
    """

    token_ids: np.ndarray
    echo: str = ""
    echo_lengths: tuple[int, ...] = ()
    reading: Reading | None = None
    num_cut: int = 0
    token_offsets: np.ndarray | None = None
    second_text: int = 0


@dataclass(frozen=True, slots=True)
class TextTokens:
    """The tokens that are left of a text.

    token_ids: int32[n]. num_cut: tokens that were made of the text, and are not among them. offsets: where each token
    is in the whole text, [start, end) in characters, int32[n, 2]; (0, 0) for a special token that was added. None: they
    were not asked for.
    """

    token_ids: np.ndarray
    num_cut: int
    offsets: np.ndarray | None = None


def tokens_of_text(
    tokenizer: Tokenizer, text: str, limits: TextLimits, *, add_special_tokens: bool, with_offsets: bool = False
) -> TextTokens:
    """Returns the tokens of a text, cut as they are to be.

    Takes as long as what is kept of the text. Raises ApiError, as `TextLimits.part_of` does.
    """
    part = limits.part_of(tokenizer, text)
    offsets = None
    if with_offsets:
        whole, offsets = tokenizer.encode_with_offsets(part, add_special_tokens=add_special_tokens)
        if limits.kept is not None and not limits.from_right:  # the part is the end of the text
            offsets[offsets[:, 1] > 0] += len(text) - len(part)
        offsets = cut(offsets, limits.kept, from_right=limits.from_right)
    else:
        whole = tokenizer.encode(part, add_special_tokens=add_special_tokens)
    kept = cut(whole, limits.kept, from_right=limits.from_right)
    return TextTokens(kept, len(whole) - len(kept), offsets)


def note_prompts(prompts: Sequence[Prompt], record: RequestRecord) -> int:
    """Notes how many tokens the prompts have, which it returns, and how many more were made of their texts."""
    record.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    record.cut_tokens = sum(prompt.num_cut for prompt in prompts)
    return record.prompt_tokens


def check_text_length(tokenizer: Tokenizer, text: str, max_tokens: int, param: str) -> None:
    """Raises ApiError for a text that surely has more than `max_tokens` tokens, without tokenizing it."""
    if tokenizer.exceeds(text, max_tokens):
        raise far_too_long(max_tokens, param)


def cut(token_ids: np.ndarray, kept: int | None, *, from_right: bool) -> np.ndarray:
    """Returns the last `kept` of int32[n] tokens, or of int32[n, 2] offsets, or the first ones; None: all of them."""
    if kept is None or len(token_ids) <= kept:
        return token_ids
    return token_ids[:kept] if from_right else token_ids[-kept:]


def check_token_ids(token_ids: np.ndarray, vocab_size: int, param: str) -> None:
    """Raises ApiError for numbers that are not below `vocab_size`."""
    if (largest := int(token_ids.max())) >= vocab_size:
        message = f"Invalid '{param}': token id {largest} is out of the vocabulary; ids are 0 to {vocab_size - 1}."
        raise invalid(message, param, "invalid_value")


def separate_prompts(value: str | list[Any], param: str, most: int) -> list[str | list[Any]]:
    """Returns the prompts, texts or token ids, of a field in any of the forms that OpenAI allows.

    Raises ApiError, also for more than `most` prompts.
    """
    several = isinstance(value, list) and len(value) > 0 and all(isinstance(entry, str | list) for entry in value)
    prompts = value if several and isinstance(value, list) else [value]
    if len(prompts) > most:
        raise invalid(f"Invalid '{param}': it must have at most {most} entries.", param, "array_above_max_length")
    for prompt in prompts:
        if len(prompt) == 0:
            code = "empty_array" if isinstance(prompt, list) else "empty_string"
            raise invalid(f"Invalid '{param}': it must not be empty.", param, code)
    return prompts


def as_token_ids(entries: list[Any], param: str) -> np.ndarray:
    """Returns a client's own token ids, int32[n]. Raises ApiError for what no model has as token ids.

    numpy's concatenate and min give the interpreter lock away and take it back at once. A thread that calls them again
    and again keeps it from one that waits: for a thousand prompts the event loop waited 30 to 100 ms.
    """
    if not all(type(entry) is int for entry in entries):
        raise invalid(f"Invalid type for '{param}': expected strings or arrays of token ids.", param, "invalid_type")
    try:
        slices = [np.array(entries[start : start + _SLICE], np.int32) for start in range(0, len(entries), _SLICE)]
    except OverflowError:
        slices = []
    if not slices or min(entries) < 0:
        raise invalid(f"Invalid '{param}': it has numbers that are no token ids.", param, "invalid_value")
    return slices[0] if len(slices) == 1 else np.concatenate(slices)
