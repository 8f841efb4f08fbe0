"""Completions: requests of texts or token ids, and the dialect that makes prompts of them."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, SkipValidation
from pydantic_core import PydanticCustomError

from services.gateway.api.answers.choice import PromptShown
from services.gateway.api.dialects.echo import echo_of_ids, echo_of_text
from services.gateway.api.dialects.prompts import (
    Prompt,
    TextTokens,
    as_token_ids,
    check_text_length,
    cut,
    separate_prompts,
    tokens_of_text,
)
from services.gateway.api.grammars.structured_output import grammar_of
from services.gateway.api.requests.schema import CommonRequest, ManyTop, OnePrompt
from services.gateway.api.requests.text_limits import TextLimits, too_long
from services.gateway.api.side_thread import SideThread
from services.gateway.text.tokenizer import Tokenizer

MAX_PROMPTS = 1024
_DEFAULT_TOKENS = 16

_SHORT = 16_384  # characters and token ids of all prompts together, which take 2 ms at most
_FEW_PROMPTS = 16


def _prompt_type(value: object) -> object:
    if isinstance(value, str | list):
        return value
    raise PydanticCustomError("prompt_type", "It must be a string or an array of token ids.")


# As it comes. What is in lists is checked when they become prompts.
_PromptJson = OnePrompt | Annotated[list[OnePrompt], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionRequest(CommonRequest):
    """Texts or token ids, of which the continuations are wanted."""

    prompt_param: ClassVar[str] = "prompt"
    top_params: ClassVar[tuple[str, ...]] = ("logprobs", "prompt_logprobs")

    prompt: Annotated[  # lists are not copied
        SkipValidation[str | list[Any]], BeforeValidator(_prompt_type, json_schema_input_type=_PromptJson)
    ]
    logprobs: ManyTop | None = None

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

    async def prompts(self, request: CompletionRequest, max_tokens: int, tenant: str) -> list[Prompt]:
        """See Dialect. Token ids are taken as they are; a text gets the special tokens that its tokenizer adds."""
        prompts = separate_prompts(request.prompt, request.prompt_param, MAX_PROMPTS)
        limits = request.text_limits(max_tokens)
        if limits.kept is None:
            for prompt in prompts:
                self._check_length(prompt, max_tokens, request.prompt_param)
        make_all = partial(self._make_all, prompts, request, limits)
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

    def _make_all(self, prompts: list[str | list[Any]], request: CompletionRequest, limits: TextLimits) -> list[Prompt]:
        """Makes the prompts, and empties the list: every garbage collection would look at a million ids again."""
        made = []
        for number, prompt in enumerate(prompts):
            made.append(self._make(prompt, request, limits))
            prompts[number] = ""
        return made

    def _make(self, prompt: str | list[Any], request: CompletionRequest, limits: TextLimits) -> Prompt:
        if isinstance(prompt, list):
            made = TextTokens(cut(as_token_ids(prompt, limits.param), limits.kept, from_right=limits.from_right), 0)
        else:
            special = True if request.add_special_tokens is None else request.add_special_tokens
            offsets = request.wants_token_offsets
            made = tokens_of_text(self._tokenizer, prompt, limits, add_special_tokens=special, with_offsets=offsets)
        token_ids = made.token_ids
        if not request.echo:
            return Prompt(token_ids, num_cut=made.num_cut, token_offsets=made.offsets)
        with_tokens = request.logprobs is not None
        if isinstance(prompt, str) and not made.num_cut:
            echo = echo_of_text(self._tokenizer, prompt, token_ids, with_tokens=with_tokens)
        else:
            skip_special = request.skip_special_tokens is True
            echo = echo_of_ids(self._tokenizer, token_ids, skip_special=skip_special, with_tokens=with_tokens)
        return replace(echo, num_cut=made.num_cut, token_offsets=made.offsets)

    def ignored_fields(self, request: CompletionRequest) -> Iterator[str]:
        """See Dialect."""
        return request.unknown_fields()

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

    def constrains(self, request: CompletionRequest) -> bool:
        """See Dialect."""
        return request.asks_for_a_form

    def grammar(self, request: CompletionRequest, prompt: Prompt) -> tuple[str, str]:
        """See Dialect."""
        return grammar_of(request.response_format, request.structured_outputs, self._tokenizer.marks)
