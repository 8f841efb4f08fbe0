"""Requests as typed values, every known field checked: the part that all kinds of request have.

A field without a value (absent or null) is None here; `sampling` fills in the defaults. Each kind of request extends
CommonRequest, in the module of its dialect.
"""

import re
from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
)
from pydantic_core import PydanticCustomError

from services.gateway.api.errors import invalid
from services.gateway.api.requests.strict import Open, Strict
from services.gateway.api.requests.structured import ResponseFormat, StructuredOutputs
from services.gateway.api.requests.text_limits import TextLimits
from services.protocol.sampling import MAX_REPETITION, MAX_TEMPERATURE, MAX_TOP_K, MIN_REPETITION

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_CHOICES = 128
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_CHARS = 8192  # of all of them together: each is tokenized twice
MAX_LOGPROBS = 20  # of the Responses API
MAX_NAMED_LOGPROBS = 128
MAX_ALLOWED = 1 << 16
TOKEN_ID_LIMIT = 2**31

_TOKEN_KEY = re.compile(r"[0-9]{1,10}")
_SHOWN_KEY_CHARS = 32
_LABEL = re.compile(r"[A-Za-z0-9._:@/+=~-]{1,128}")


def _logit_bias(value: object) -> object:
    """Converts JSON's keys, which are strings, to token ids."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise PydanticCustomError("logit_bias", "It must have at most {limit} entries.", {"limit": MAX_BIASES})
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "It must be an object whose keys are token ids.")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        named = {"key": str(key)[:_SHOWN_KEY_CHARS]}
        if not _TOKEN_KEY.fullmatch(str(key)):
            raise PydanticCustomError("logit_bias", "Its keys must be token ids, and '{key}' is none.", named)
        if int(key) in biases:
            raise PydanticCustomError("logit_bias", "It must not name a token twice, as '{key}'.", named)
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise PydanticCustomError("logit_bias", "The value of '{key}' must be a number from -100 to 100.", named)
        biases[int(key)] = float(bias)
    return biases


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


def _all_bad_words(words: list[str]) -> list[str]:
    if sum(map(len, words)) > MAX_BAD_WORDS_CHARS:
        limit = {"limit": MAX_BAD_WORDS_CHARS}
        raise PydanticCustomError("bad_words_length", "They must have at most {limit} characters in all.", limit)
    return words


def _whole(value: object) -> object:
    """Takes 5.0 for 5: some languages know no other numbers."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _kept_tokens(value: int) -> int:
    if value < -1 or value == 0:
        raise PydanticCustomError("truncate_prompt_tokens", "It must be -1 (as many as fit), or at least 1.")
    return value


def _label(value: str) -> str:
    if not _LABEL.fullmatch(value):
        words = "It must be 1 to 128 letters, digits or any of . _ : @ / + = ~ -"
        raise PydanticCustomError("label", words)
    return value


whole = BeforeValidator(_whole)

Label = Annotated[str, Field(json_schema_extra={"pattern": f"^{_LABEL.pattern}$"}), AfterValidator(_label)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_TokenKey = Annotated[str, Field(pattern=f"^{_TOKEN_KEY.pattern}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_LogitBiasJson = Annotated[  # as it comes
    dict[_TokenKey, _Bias], Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False})
]
LogitBias = Annotated[dict[int, float], BeforeValidator(_logit_bias, json_schema_input_type=_LogitBiasJson)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
BadWords = Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS), AfterValidator(_all_bad_words)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_StopsJson = _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
Stops = Annotated[
    list[str],
    BeforeValidator(_as_list, json_schema_input_type=_StopsJson),
    Field(max_length=MAX_STOPS),
    AfterValidator(_stop_lengths),
]
TokenId = Annotated[int, Field(ge=0, lt=TOKEN_ID_LIMIT), BeforeValidator(_whole)]
Top = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(_whole)]
ManyTop = Annotated[int, Field(ge=0, lt=TOKEN_ID_LIMIT), BeforeValidator(_whole)]  # see `asked_logprobs`
TopOrAll = Annotated[int, Field(ge=-1, lt=TOKEN_ID_LIMIT), BeforeValidator(_whole)]  # -1: the whole vocabulary
TopK = Annotated[int, Field(ge=-1, le=MAX_TOP_K), BeforeValidator(_whole)]
TokenCount = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
_KEPT_TOKENS = Field(json_schema_extra={"minimum": -1, "not": {"const": 0}})
OnePrompt = Annotated[str, Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1)]  # as it comes
AnswerTokens = Annotated[int, Field(ge=0), BeforeValidator(_whole)]  # 0: nothing is generated
WholeNumber = Annotated[int, BeforeValidator(_whole)]
Priority = Annotated[int, Field(gt=-(2**31), lt=2**31), BeforeValidator(_whole)]  # lower ones are served sooner


class StreamOptions(Strict):
    """The `stream_options` of a request: what a stream carries beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage in every chunk
    include_obfuscation: Literal[False] | None = None  # OpenAI: padding against an eavesdropper


class CommonRequest(Open, ABC):
    """The fields of every kind of request.

    prompt_param: the field that the prompt is made of. top_params: those that say how many alternatives are wanted.
    """

    prompt_param: ClassVar[str]
    top_params: ClassVar[tuple[str, ...]]

    model: str | None = None  # None: the one that is served
    max_tokens: AnswerTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: TopK | None = None  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), BeforeValidator(_whole)] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Annotated[int, Field(ge=0), BeforeValidator(_whole)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), BeforeValidator(_whole)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION, le=MAX_REPETITION, allow_inf_nan=False)] | None = None
    logit_bias: LogitBias | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    logprob_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_NAMED_LOGPROBS)] | None = None
    prompt_logprobs: TopOrAll | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=1, lt=TOKEN_ID_LIMIT), BeforeValidator(_whole)] | None = None  # tokens
    truncate_prompt_tokens: Annotated[WholeNumber, AfterValidator(_kept_tokens), _KEPT_TOKENS] | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Label | None = None
    request_id: Label | None = None
    session_id: Label | None = None
    priority: Priority | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in logprobs, instead of texts
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # The client's own notes, which ask for nothing.
    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def asks_for_a_form(self) -> bool:
        """True for structured output."""
        plain = self.response_format is None or self.response_format.type == "text"
        return not plain or self.structured_outputs is not None

    @property
    def include_usage(self) -> bool:
        """True: the stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True: every chunk holds the usage so far."""
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def wants_token_offsets(self) -> bool:
        """True: prompts say where in their texts their tokens are."""
        return False

    def kept_tokens(self, max_tokens: int) -> int | None:
        """The number of tokens that a prompt is cut to, in a context of `max_tokens`; None: prompts are not cut."""
        if self.truncate_prompt_tokens == -1:
            return max(1, max_tokens - (self.asked_tokens or 1))
        return self.truncate_prompt_tokens

    def text_limits(self, max_tokens: int) -> TextLimits:
        """The limits of each of its texts, in a context of `max_tokens`."""
        return TextLimits(
            max_tokens=max_tokens,
            kept=self.kept_tokens(max_tokens),
            from_right=self.truncation_side == "right",
            param=self.prompt_param,
        )

    _clamps_tokens: bool = PrivateAttr(False)

    @property
    def clamps_tokens(self) -> bool:
        """True: a request for more tokens than there is room for gets what fits; else it is refused."""
        return self._clamps_tokens

    @property
    @abstractmethod
    def asked_tokens(self) -> int | None:
        """The largest number of tokens that the client wants; None: the request does not say."""

    @abstractmethod
    def default_tokens(self, room: int) -> int:
        """The largest number of tokens where the request does not say. `room`: tokens left in the context."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives to report for each generated token; None: no logprobs."""

    @property
    def count_param(self) -> str:
        """The field that says how many tokens are wanted."""
        return "max_tokens"

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to report for each token of the prompt; None: no logprobs."""
        return self.prompt_logprobs

    @property
    def only_prompt(self) -> bool:
        """True: the answer shows parts of the prompt, and nothing is generated for it."""
        return self.asked_tokens == 0

    def check_combinations(self) -> None:
        """Checks fields that only make sense together. Raises ApiError."""
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("'prompt_logprobs' is only allowed when 'stream' is false.", "prompt_logprobs")
        if self.only_prompt and not self.echo and self.prompt_logprobs is None:
            param = self.count_param
            words = f"Invalid '{param}': it must be at least 1, or 0 with 'echo' or 'prompt_logprobs'."
            raise invalid(words, param, "integer_below_min_value")
        if self.logprob_token_ids is not None and self.num_logprobs is None:
            raise invalid("'logprob_token_ids' is only allowed where 'logprobs' are asked for.", "logprob_token_ids")
        if self.stream_options is not None and not self.stream:
            raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        if self.asks_for_a_form and self.ignore_eos:
            raise invalid("'ignore_eos' excludes structured output, which ends where its form does.", "ignore_eos")


Request = TypeVar("Request", bound=CommonRequest)
