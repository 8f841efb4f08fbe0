"""Completions: requests of texts or token ids, and the dialect that makes prompts of them."""

import asyncio
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BeforeValidator, SkipValidation
from pydantic_core import PydanticCustomError

from services.gateway.api.choice import PromptShown
from services.gateway.api.echo import echo_of_ids, echo_of_text
from services.gateway.api.errors import invalid
from services.gateway.api.prompts import Prompt, check_text_length, cut, too_long
from services.gateway.api.schema import CommonRequest, Top
from services.gateway.api.side_thread import SideThread
from services.gateway.text.tokenizer import Tokenizer

MAX_PROMPTS = 1024
_DEFAULT_TOKENS = 16

_SHORT = 16_384  # characters and token ids of all prompts together, which take 2 ms at most
_FEW_PROMPTS = 16
_SLICE = 16_384  # token ids that become an array at once


def _prompt_type(value: object) -> object:
    if isinstance(value, str | list):
        return value
    raise PydanticCustomError("prompt_type", "It must be a string or an array of token ids.")


class CompletionRequest(CommonRequest):
    """Texts or token ids, of which the continuations are wanted."""

    prompt_param: ClassVar[str] = "prompt"

    prompt: Annotated[SkipValidation[str | list[Any]], BeforeValidator(_prompt_type)]  # lists are not copied
    logprobs: Top | None = None

    @property
    def asked_tokens(self) -> int | None:
        """See CommonRequest."""
        return self.max_tokens

    def default_tokens(self, room: int) -> int:
        """See CommonRequest."""
        return min(room, _DEFAULT_TOKENS)

    @property
    def num_logprobs(self) -> int | None:
        """See CommonRequest."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """See CommonRequest: the larger one of those asked for by themselves and those of the echo."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((width for width in asked if width is not None), default=None)


class CompletionDialect:
    """See Dialect."""

    kind = CompletionRequest

    def __init__(self, tokenizer: Tokenizer, side: SideThread) -> None:
        self._tokenizer = tokenizer
        self._side = side

    async def prompts(self, request: CompletionRequest, max_tokens: int) -> list[Prompt]:
        """See Dialect. Token ids are taken as they are; a text gets the special tokens that its tokenizer adds."""
        prompts = _separate_prompts(request.prompt)
        if (kept := request.kept_tokens(max_tokens)) is None:
            for prompt in prompts:
                self._check_length(prompt, max_tokens, request.prompt_param)
        make_all = partial(self._make_all, prompts, request, kept)
        if len(prompts) <= _FEW_PROMPTS and sum(map(len, prompts)) <= _SHORT:
            return make_all()
        if all(isinstance(prompt, str) for prompt in prompts):
            return await asyncio.to_thread(make_all)  # tokenizing releases the interpreter lock
        return await self._side.run(make_all)

    def _check_length(self, prompt: str | list[Any], max_tokens: int, param: str) -> None:
        """Raises ApiError for a prompt that is too long for sure, before any work is done for it."""
        if isinstance(prompt, str):
            check_text_length(self._tokenizer, prompt, max_tokens, param)
        elif len(prompt) > max_tokens:
            raise too_long(max_tokens, f"your {param} have {len(prompt)} tokens", param)

    def _make_all(self, prompts: list[str | list[Any]], request: CompletionRequest, kept: int | None) -> list[Prompt]:
        """Makes the prompts, and empties the list: every garbage collection would look at a million ids again."""
        made = []
        for number, prompt in enumerate(prompts):
            made.append(self._make(prompt, request, kept))
            prompts[number] = ""
        return made

    def _make(self, prompt: str | list[Any], request: CompletionRequest, kept: int | None) -> Prompt:
        if isinstance(prompt, list):
            whole = _as_token_ids(prompt, request.prompt_param)
        else:
            add_special_tokens = True if request.add_special_tokens is None else request.add_special_tokens
            whole = self._tokenizer.encode_here(prompt, add_special_tokens=add_special_tokens)
        token_ids = cut(whole, kept, from_right=request.truncation_side == "right")
        if not request.echo:
            return Prompt(token_ids)
        with_tokens = request.logprobs is not None
        if isinstance(prompt, str) and token_ids is whole:
            return echo_of_text(self._tokenizer, prompt, token_ids, with_tokens=with_tokens)
        skip_special = request.skip_special_tokens is True
        return echo_of_ids(self._tokenizer, token_ids, skip_special=skip_special, with_tokens=with_tokens)

    def shown(self, request: CompletionRequest, prompt: Prompt) -> PromptShown | None:
        """See Dialect."""
        if not request.echo and request.prompt_logprobs is None and not request.return_token_ids:
            return None
        echo_logprobs = request.logprobs if request.echo else None
        return PromptShown(
            prompt.token_ids.tolist(),
            prompt.echo,
            prompt.echo_lengths,
            echo_logprobs,
            request.prompt_logprobs,
            shows_ids=bool(request.return_token_ids),
        )


def _separate_prompts(prompt: str | list[Any]) -> list[str | list[Any]]:
    """Returns the prompts, texts or token ids, of a field in any of the forms that OpenAI allows. Raises ApiError."""
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


def _as_token_ids(entries: list[Any], param: str) -> np.ndarray:
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
