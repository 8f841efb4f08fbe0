"""Prompts as the completions endpoint takes them, and what is too long to be looked at."""

from typing import Any

from services.gateway.openai.errors import invalid, unsupported
from services.gateway.text.tokenizer import Tokenizer


def check_text_length(tokenizer: Tokenizer, text: str, max_tokens: int, param: str) -> None:
    """Raises ApiError for a text that cannot have as few as `max_tokens` tokens, before any time is spent on it."""
    if tokenizer.exceeds(text, max_tokens):
        message = f"This model's maximum context length is {max_tokens} tokens. However, your {param} is far longer."
        raise invalid(message, param, "context_length_exceeded")


def single_prompt(prompt: str | list[Any]) -> str | list[int]:
    """The one prompt, text or token ids, in any of the forms that OpenAI allows. Raises ApiError."""
    if isinstance(prompt, list) and prompt and all(isinstance(entry, str | list) for entry in prompt):
        if len(prompt) > 1:
            raise unsupported("prompt", "Several prompts in one request are not supported by this server.")
        prompt = prompt[0]
    if len(prompt) == 0:
        code = "empty_array" if isinstance(prompt, list) else "empty_string"
        raise invalid("Invalid 'prompt': it must not be empty.", "prompt", code)
    if isinstance(prompt, list) and not all(type(entry) is int for entry in prompt):
        raise invalid(
            "Invalid type for 'prompt': expected a string or an array of token ids.", "prompt", "invalid_type"
        )
    return prompt


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises ApiError unless the model knows all of them."""
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise invalid(f"Invalid '{param}': token ids must be 0 to {vocab_size - 1}.", param, "invalid_value")
