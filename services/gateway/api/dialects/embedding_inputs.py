"""Requests for embeddings: their fields, and their inputs as token ids."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, SkipValidation
from pydantic_core import PydanticCustomError

from services.gateway.api.dialects.prompts import (
    Prompt,
    as_token_ids,
    check_text_length,
    check_token_ids,
    separate_prompts,
)
from services.gateway.api.errors import invalid
from services.gateway.api.requests.schema import Label, OnePrompt, Priority, TokenCount, WholeNumber
from services.gateway.api.requests.strict import Open
from services.gateway.api.requests.text_limits import TextLimits, too_long
from services.gateway.api.side_thread import SideThread
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.model_files.text_preparation import TextPreparation

MAX_INPUTS = 2048
MAX_IN_HEADER = 256  # inputs whose vectors a header of the answer can list: clients take headers of 64 KiB

_SHORT = 16_384  # characters and token ids of all inputs together, which take 2 ms at most
_FEW_INPUTS = 16
_AT_ONCE = 256  # inputs that are checked before other requests get their turn


def _input_type(value: object) -> object:
    if isinstance(value, str | list):
        return value
    raise PydanticCustomError("input_type", "It must be a string or an array.")


def _truncation(value: int) -> int:
    if value < -1 or value == 0:
        raise PydanticCustomError("truncation", "It must be -1 (as many as the model takes), or at least 1.")
    return value


Truncation = Annotated[WholeNumber, AfterValidator(_truncation)]  # tokens of an input that stay; -1: all that fit

# As it comes. What is in lists is checked when they become token ids.
_InputJson = OnePrompt | Annotated[list[OnePrompt], Field(min_length=1, max_length=MAX_INPUTS)]


@dataclass(frozen=True, slots=True)
class FramedText:
    """A text between two others. Where there are too many tokens, some of its own go."""

    before: str
    text: str
    after: str


Input = str | list[Any] | tuple[str, str] | FramedText  # a text, token ids, or a pair of texts


class EmbeddingRequest(Open):
    """Texts or token ids, of which embeddings are wanted."""

    prompt_param: ClassVar[str] = "input"

    model: str | None = None  # None: the one that is served
    input: Annotated[  # lists are not copied
        SkipValidation[str | list[Any]], BeforeValidator(_input_type, json_schema_input_type=_InputJson)
    ]
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16"] | None = None  # of the bytes, in base64 or plain
    endianness: Literal["native", "little", "big"] | None = None  # of these bytes; native: little
    dimensions: TokenCount | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    normalize: bool | None = None  # None: yes
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None  # whose tokens go; None: right
    cache_salt: Label | None = None
    priority: Priority | None = None
    request_id: Label | None = None
    user: str | None = None  # the client's own note, which asks for nothing

    def pairs(self) -> list[Input] | None:
        """Returns pairs of texts, each of which is one input, in the place of `input`; None: there are none."""
        return None

    def prompt(self, texts: TextPreparation) -> str:
        """Returns what comes before each text that is an input."""
        return texts.default_prompt

    def param_of(self, index: int) -> str:
        """Returns the name of the field that an input comes from."""
        return self.prompt_param

    def check_combinations(self) -> None:
        """Checks fields that only make sense together. Raises ApiError."""
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise invalid("'truncation_side' is only allowed beside 'truncate_prompt_tokens'.", "truncation_side")
        several = isinstance(self.input, list) and bool(self.input) and isinstance(self.input[0], str | list)
        if self.encoding_format == "bytes" and several and len(self.input) > MAX_IN_HEADER:
            words = f"'bytes' is for at most {MAX_IN_HEADER} inputs, which a header lists; 'bytes_only' is for more."
            raise invalid(f"Invalid 'encoding_format': {words}", "encoding_format", "invalid_value")


class PoolingRequest(EmbeddingRequest):
    """Texts or token ids, of which vLLM's /pooling makes embeddings. task: its name for that."""

    task: Literal["embed"] | None = None


class EmbeddingInputs:
    """Makes token ids of the inputs of requests."""

    def __init__(self, tokenizer: Tokenizer, side: SideThread, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._side = side
        self._vocab_size = vocab_size

    async def prompts(self, request: EmbeddingRequest, max_tokens: int, texts: TextPreparation) -> list[Prompt]:
        """Returns the prompt of each input, of 1 to `max_tokens` tokens. texts: says what becomes of texts before that.
        Raises ApiError.
        """
        param = request.prompt_param
        if (request.truncate_prompt_tokens or 0) > max_tokens:
            message = f"Invalid 'truncate_prompt_tokens': it must be at most the context length of {max_tokens} tokens."
            raise invalid(message, "truncate_prompt_tokens", "integer_above_max_value")
        pairs = request.pairs()
        inputs: list[Input] = [*(separate_prompts(request.input, param, MAX_INPUTS) if pairs is None else pairs)]
        if (before := request.prompt(texts)) or texts.lower_cases:
            inputs = [texts.prepared(one, before) if isinstance(one, str) else one for one in inputs]
        for number, one in enumerate(inputs):
            for text in () if isinstance(one, list) else _texts(one):
                if request.truncate_prompt_tokens is None:
                    check_text_length(self._tokenizer, text, max_tokens, request.param_of(number))
        make_all = partial(self._make_all, inputs, request, max_tokens)
        if len(inputs) <= _FEW_INPUTS and sum(map(_size, inputs)) <= _SHORT:
            made = make_all()
        elif not any(isinstance(one, list) for one in inputs):
            made = await asyncio.to_thread(make_all)  # tokenizing releases the interpreter lock
        else:
            made = await self._side.run(make_all)
        for number, prompt in enumerate(made):
            self._check(prompt.token_ids, max_tokens, request.param_of(number))
            if (number + 1) % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return made

    def _check(self, token_ids: np.ndarray, max_tokens: int, param: str) -> None:
        if not len(token_ids):
            raise invalid(f"Invalid '{param}': it has no tokens.", param, "empty_string")
        if len(token_ids) > max_tokens:
            raise too_long(max_tokens, f"your {param} has {len(token_ids)} tokens", param)
        check_token_ids(token_ids, self._vocab_size, param)

    def _make_all(self, inputs: list[Input], request: EmbeddingRequest, max_tokens: int) -> list[Prompt]:
        """Makes the prompts, and empties the list: every garbage collection would look at a million ids again."""
        made = []
        for number, one in enumerate(inputs):
            made.append(self._make(one, request, max_tokens, request.param_of(number)))
            inputs[number] = ""
        return made

    def _make(self, one: Input, request: EmbeddingRequest, max_tokens: int, param: str) -> Prompt:
        most, from_left = request.truncate_prompt_tokens, request.truncation_side == "left"
        most = max_tokens if most == -1 else most
        if isinstance(one, tuple):
            pair = self._tokenizer.encode_pair(one, most, from_left=from_left)
            return Prompt(pair.token_ids, num_cut=pair.num_cut, second_text=pair.second_text)
        if isinstance(one, FramedText):
            return self._frame(one, most, from_left=from_left)
        if isinstance(one, list):
            kept = one if most is None else one[-most:] if from_left else one[:most]
            return Prompt(as_token_ids(kept, param))
        special = True if request.add_special_tokens is None else request.add_special_tokens
        limits = TextLimits(max_tokens=max_tokens, kept=most, from_right=not from_left, param=param)
        part = limits.part_of(self._tokenizer, one)
        if most is None:
            return Prompt(self._tokenizer.encode(part, add_special_tokens=special))
        token_ids, num_cut = self._tokenizer.encode_truncated(
            part, most, from_left=from_left, add_special_tokens=special
        )
        return Prompt(token_ids, num_cut=num_cut)

    def _frame(self, framed: FramedText, most: int | None, *, from_left: bool) -> Prompt:
        before, after = (
            self._tokenizer.encode(text, add_special_tokens=False) for text in (framed.before, framed.after)
        )
        if most is None:
            text, num_cut = self._tokenizer.encode(framed.text, add_special_tokens=False), 0
        else:
            room = most - len(before) - len(after)
            if room < 1:
                words = f"the prompt of this model has {len(before) + len(after)} tokens beside the texts."
                raise invalid(
                    f"Invalid 'truncate_prompt_tokens': {words}", "truncate_prompt_tokens", "integer_below_min_value"
                )
            text, num_cut = self._tokenizer.encode_truncated(
                framed.text, room, from_left=from_left, add_special_tokens=False
            )
        return Prompt(np.concatenate([before, text, after]), num_cut=num_cut)


def _texts(one: str | tuple[str, str] | FramedText) -> tuple[str, ...]:
    """Returns the texts of an input that tokens are made of."""
    if isinstance(one, FramedText):
        return one.before, one.text, one.after
    return (one,) if isinstance(one, str) else one


def _size(one: Input) -> int:
    """Returns the characters or token ids of an input."""
    return len(one) if isinstance(one, list) else sum(map(len, _texts(one)))
