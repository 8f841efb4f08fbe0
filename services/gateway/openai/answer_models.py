"""The answers as they are described in /openapi.json, field by field."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from services.gateway.http.operation import Described


class PromptTokensDetails(Described):
    """The tokens of the prompt that a prefix cache had."""

    cached_tokens: int


class CompletionTokensDetails(Described):
    """The tokens of the answer that are the model's reasoning."""

    reasoning_tokens: int


class Usage(Described):
    """The tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


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


class RankedToken(Described):
    """A token that could have been in a prompt. Its rank is null where it is not among the best."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, RankedToken] | None]
FinishReason = Literal["stop", "length"]
StopReason = str | int | None  # the stop string, or the stop token
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class Called(Described):
    """The function of a call. arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


class CalledCustom(Described):
    """The custom tool of a call. input: text, as the model wrote it."""

    name: str
    input: str


class ToolCall(Described):
    """A call of a tool: `function` or `custom`, as its type says."""

    id: str
    type: Literal["function", "custom"]
    function: Called | None = None
    custom: CalledCustom | None = None


class ChatMessage(Described):
    """The assistant's message. The reasoning has two names, of older and newer clients."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Described):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: list[int] | None = None


class ChatCompletion(Described):
    """The whole answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None = None


class BatchedChoice(ChatChoice):
    """The answer of one of several chats, with what is shown of its prompt."""

    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None = None


class ChatBatch(Described):
    """The answers to several chats, in order."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[BatchedChoice]
    usage: Usage


class CalledPart(Described):
    """The part of a call's function that a chunk adds. Only the first one of a call has the name."""

    name: str | None = None
    arguments: str


class CalledCustomPart(Described):
    """The part of a call's custom tool that a chunk adds. Only the first one of a call has the name."""

    name: str | None = None
    input: str


class ToolCallPart(Described):
    """The part of a call that a chunk adds. Only the first one of a call has its id."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledPart | None = None
    custom: CalledCustomPart | None = None


class ChatDelta(Described):
    """The part of the assistant's message that a chunk adds. The first one of a choice has the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChatChunkChoice(Described):
    """The part of a choice that a chunk adds."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReason = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Described):
    """An event of a chat's stream. The last one before `[DONE]` has the usage where `include_usage` is true."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Described):
    """The logprobs of a text. Of a prompt's first token there are none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Described):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    prompt_logprobs: PromptLogprobs | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Described):
    """The whole answer to a completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Described):
    """The part of a text that a chunk adds."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChunk(Described):
    """An event of a completion's stream. The last one before `[DONE]` has the usage where `include_usage` is true."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class GeneratedChoice(Described):
    """The tokens of a choice: all of them, or those that a chunk adds."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason


class Generated(Described):
    """The whole answer to a request of token ids."""

    request_id: str
    created: int
    model: str
    choices: list[GeneratedChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None


class GeneratedChunk(Described):
    """An event of a stream of token ids."""

    request_id: str
    created: int
    model: str
    choices: list[GeneratedChoice]
    usage: Usage | None = None


class EmbeddingUsage(Described):
    """The tokens of a request for embeddings."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Described):
    """The vector of one input: numbers, or their bytes as float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Described):
    """The vectors of all inputs, in order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Score(Described):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(Described):
    """The scores of all pairs, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedDocument(Described):
    """A document of the request."""

    text: str


class RankedResult(Described):
    """A document's place in the request, and its score; without the document where the request wants none."""

    index: int
    document: RankedDocument | None = None
    relevance_score: float


class RankedList(Described):
    """Documents, the best first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedResult]


class PooledOutput(Described):
    """The vector of one input, as in an `Embedding`."""

    object: Literal["pooling"]
    index: int
    data: list[float] | str


class PoolingList(Described):
    """The vectors of all inputs, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledOutput]
    usage: EmbeddingUsage


class ModelDescription(Described):
    """The model that is served, in OpenAI's fields and in Anthropic's. Lengths are null before a worker has come."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    type: Literal["model"]
    display_name: str
    created_at: str
    max_input_tokens: int | None


class ModelList(Described):
    """The names of the one model, in OpenAI's form and in Anthropic's."""

    object: Literal["list"]
    data: list[ModelDescription]
    has_more: Literal[False]
    first_id: str
    last_id: str


class TokenizeAnswer(Described):
    """The token ids of a prompt, and their texts where these were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


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
    """A request would find a worker. `pid` is the gateway's process, `max_model_len` the most tokens of a sequence."""

    status: Literal["ready"]
    pid: int
    max_model_len: int | None


class RequestList(Described):
    """The recent requests."""

    requests: list[dict[str, object]]


class AnyObject(BaseModel):
    """An object whose fields docs/api.md lists."""

    model_config = ConfigDict(extra="allow")
