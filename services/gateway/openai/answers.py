"""The answers as they are described in /openapi.json, field by field.

Answers are written as plain JSON, for speed; tests hold what is written to these models. None of them is ever made.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel


class Described(BaseModel):
    """The base of all: an object that has no other fields."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetails(Described):
    """The error. `param` is the field at fault, as a path."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class ErrorAnswer(Described):
    """The envelope of every error."""

    error: ErrorDetails


class PromptTokensDetails(Described):
    """The tokens of the prompt that a prefix cache had."""

    cached_tokens: int


class Usage(Described):
    """The tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Described):
    """A token that could have come, with its text and its bytes in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of a chat's answer, with its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Described):
    """The logprobs of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None


FinishReason = Literal["stop", "length"]


class ChatMessage(Described):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Described):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Described):
    """The whole answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Described):
    """The text that a chunk adds to the assistant's message. The first one of a choice has the role."""

    role: Literal["assistant"] | None = None
    content: str


class ChatChunkChoice(Described):
    """The part of a choice that a chunk adds."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Described):
    """An event of a chat's stream. The last one before `[DONE]` has the usage where `include_usage` is true."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(Described):
    """The logprobs of a text. Of a prompt's first token there are none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedToken(Described):
    """A token that could have been in a prompt. Its rank is null where it is not among the best."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(Described):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: list[dict[str, RankedToken] | None] | None = None


class Completion(Described):
    """The whole answer to a completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Described):
    """The part of a text that a chunk adds."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunk(Described):
    """An event of a completion's stream. The last one before `[DONE]` has the usage where `include_usage` is true."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class ModelDescription(Described):
    """The model that is served. `max_model_len` is null before a worker has come."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(Described):
    """The one model."""

    object: Literal["list"]
    data: list[ModelDescription]


class TokenizeAnswer(Described):
    """The token ids of a prompt, and their texts where these were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class RenderedParams(Described):
    """The sampling parameters of a prompt, under vLLM's names."""

    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    bad_words: list[str]
    ignore_eos: bool
    max_tokens: int
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool
    logit_bias: dict[str, float] | None
    structured_outputs: dict[str, Any] | None


class Rendered(Described):
    """A prompt as a worker would be sent it, in the form of a request to vLLM's `/inference/v1/generate`."""

    request_id: str
    token_ids: list[int]
    sampling_params: RenderedParams
    model: str
    stream: bool
    stream_options: dict[str, bool] | None


class RenderedList(RootModel[list[Rendered]]):
    """One entry for each prompt."""


class DetokenizeAnswer(Described):
    """The text of token ids."""

    prompt: str


class TokenizerInfo(BaseModel):
    """The values of tokenizer_config.json, and at least these."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | None


class VersionAnswer(Described):
    """The version of the program."""

    version: str


class LoadAnswer(Described):
    """The number of requests that are being answered."""

    server_load: int


class HealthAnswer(Described):
    """The process is alive."""

    status: Literal["ok"]


class ReadyAnswer(Described):
    """A request would find a worker. `pid` is the gateway's process."""

    status: Literal["ready"]
    pid: int


class RequestList(Described):
    """The recent requests."""

    requests: list[dict[str, object]]


class AnyObject(BaseModel):
    """An object whose fields docs/operations.md lists."""

    model_config = ConfigDict(extra="allow")
