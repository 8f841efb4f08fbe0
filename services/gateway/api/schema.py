"""The requests that clients send, as typed values: every field checked, none unknown.

A field without a value (absent or null) is None here; defaults are `sampling`'s business.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from services.protocol.sampling import MAX_REPETITION, MAX_TEMPERATURE, MAX_TOP_K, MIN_REPETITION

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_CHOICES = 128
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_LOGPROBS = 20
MAX_MESSAGES = 16_384
TOKEN_ID_LIMIT = 2**31

_TOKEN_KEY = re.compile(r"[0-9]{1,10}")


def _logit_bias(value: object) -> object:
    """JSON's keys are strings; ours are token ids."""
    if not isinstance(value, dict) or not all(_TOKEN_KEY.fullmatch(str(key)) for key in value):
        raise PydanticCustomError("logit_bias", "It must be an object whose keys are token ids.")
    if len(value) > MAX_BIASES:
        raise PydanticCustomError("logit_bias", "It must have at most {limit} entries.", {"limit": MAX_BIASES})
    if not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()):
        raise PydanticCustomError("logit_bias", "Its values must be numbers from -100 to 100.")
    return {int(token): float(bias) for token, bias in value.items()}


def _as_list(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("stop_type", "It must be a string or a list of strings.")


def _stop_lengths(stops: list[str]) -> list[str]:
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise PydanticCustomError(
            "stop_length", "Each stop string must have 1 to {limit} characters.", {"limit": MAX_STOP_CHARS}
        )
    return stops


def _prompt_type(value: object) -> object:
    if isinstance(value, str | list):
        return value
    raise PydanticCustomError("prompt_type", "It must be a string or an array of token ids.")


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list) or value is None:
        return value
    raise PydanticCustomError("content_type", "It must be a string or a list of content parts.")


def _top_k(value: int) -> int:
    if value < -1:
        raise PydanticCustomError("top_k", "It must be -1 or 0 (off), or at least 1.")
    return value


Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_logit_bias)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[str], BeforeValidator(_as_list), Field(max_length=MAX_STOPS), AfterValidator(_stop_lengths)]
TokenId = Annotated[int, Field(ge=0, lt=TOKEN_ID_LIMIT)]
TokenCount = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """No conversions, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Strict):
    """How a stream reports beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None  # vLLM: usage in every chunk
    include_obfuscation: Literal[False] | None = None  # OpenAI: padding against an eavesdropper


class ResponseFormat(Strict):
    """Only plain text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Any = None

    @model_validator(mode="after")
    def _only_text(self) -> Self:
        if self.type != "text":
            raise PydanticCustomError("unsupported", "Only 'text' is supported by this server.")
        return self


class CommonRequest(Strict):
    """What both endpoints share."""

    model: str
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(le=MAX_TOP_K), AfterValidator(_top_k)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION, le=MAX_REPETITION, allow_inf_nan=False)] | None = None
    logit_bias: LogitBias | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # Notes of the client's own, which ask for nothing.
    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        """True: the stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ContentPart(Strict):
    """A part of a message; there is nothing but text."""

    type: Literal["text"]
    text: str


Parts = Annotated[list[ContentPart], Field(min_length=1)]


class Message(Strict):
    """One turn. A `developer` is what templates call `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Parts | None, BeforeValidator(_as_parts)] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # What an assistant's answer may carry when it is sent back.
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        """The content, parts joined by line breaks."""
        return "\n".join(part.text for part in self.content or ())

    @model_validator(mode="after")
    def _content_where_needed(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "Only an assistant's message may have no content.")
        return self


class ChatRequest(CommonRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(CommonRequest):
    """POST /v1/completions."""

    prompt: Annotated[str | list[Any], BeforeValidator(_prompt_type)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
