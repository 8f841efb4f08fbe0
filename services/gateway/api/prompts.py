"""Prompts as the completions endpoint takes them, and what is too long to be looked at."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from services.gateway.api.errors import invalid
from services.gateway.text.tokenizer import Tokenizer

MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. token_ids: int32[n]. echo: what its answers begin with."""

    token_ids: np.ndarray
    echo: str = ""


def check_text_length(tokenizer: Tokenizer, text: str, max_tokens: int, param: str) -> None:
    """Raises ApiError for a text that cannot have as few as `max_tokens` tokens, before any time is spent on it."""
    if tokenizer.exceeds(text, max_tokens):
        message = f"This model's maximum context length is {max_tokens} tokens. However, your {param} is far longer."
        raise invalid(message, param, "context_length_exceeded")


def separate_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts, texts or token ids, of a request in any of the forms that OpenAI allows. Raises ApiError."""
    several = isinstance(prompt, list) and len(prompt) > 0 and all(isinstance(entry, str | list) for entry in prompt)
    prompts = prompt if several and isinstance(prompt, list) else [prompt]
    if len(prompts) > MAX_PROMPTS:
        raise invalid(
            f"Invalid 'prompt': it must have at most {MAX_PROMPTS} entries.", "prompt", "array_above_max_length"
        )
    for one in prompts:
        _check_prompt(one)
    return prompts


def _check_prompt(prompt: str | list[Any]) -> None:
    if len(prompt) == 0:
        code = "empty_array" if isinstance(prompt, list) else "empty_string"
        raise invalid("Invalid 'prompt': it must not be empty.", "prompt", code)
    if isinstance(prompt, list) and not all(type(entry) is int for entry in prompt):
        raise invalid("Invalid type for 'prompt': expected strings or arrays of token ids.", "prompt", "invalid_type")


def as_token_ids(numbers: list[int], param: str) -> np.ndarray:
    """A client's own token ids, int32[n]. Raises ApiError for what no model knows."""
    try:
        token_ids = np.array(numbers, np.int32)
    except OverflowError:
        token_ids = None
    if token_ids is None or token_ids.min() < 0:
        raise invalid(f"Invalid '{param}': it has numbers that are no token ids.", param, "invalid_value")
    return token_ids


def check_token_ids(token_ids: np.ndarray, vocab_size: int, param: str) -> None:
    """Raises ApiError for numbers beyond what the model knows."""
    if token_ids.max() >= vocab_size:
        raise invalid(f"Invalid '{param}': token ids must be 0 to {vocab_size - 1}.", param, "invalid_value")
