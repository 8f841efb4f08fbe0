"""The operation of each route of the OpenAI API. /openapi.json is made of these."""

from services.gateway.api.chat import ChatRequest
from services.gateway.api.completions import CompletionRequest
from services.gateway.openai.answers import (
    AnyObject,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    DetokenizeAnswer,
    HealthAnswer,
    LoadAnswer,
    ModelDescription,
    ModelList,
    ReadyAnswer,
    Rendered,
    RenderedList,
    RequestList,
    TokenizeAnswer,
    TokenizerInfo,
    VersionAnswer,
)
from services.gateway.openai.neutral import CHAT_NEUTRAL, COMPLETIONS_NEUTRAL
from services.gateway.openai.openapi import GENERATING, READING, TOKENIZING, Operation
from services.gateway.openai.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

_NOT_FOUND = (404, 431, 500)
_NOT_READY = (431, 500, 503)

CHAT = Operation(
    summary="The assistant's next message in a chat, whole or as a stream",
    bodies={ChatRequest: CHAT_NEUTRAL},
    answer=ChatCompletion,
    chunk=ChatCompletionChunk,
    errors=GENERATING,
)
COMPLETIONS = Operation(
    summary="The continuation of texts or token ids, whole or as a stream",
    bodies={CompletionRequest: COMPLETIONS_NEUTRAL},
    answer=Completion,
    chunk=CompletionChunk,
    errors=GENERATING,
)
RENDER_CHAT = Operation(
    summary="A chat as token ids and sampling parameters, without an answer",
    bodies={ChatRequest: CHAT_NEUTRAL},
    answer=Rendered,
    errors=TOKENIZING,
)
RENDER_COMPLETIONS = Operation(
    summary="Prompts as token ids and sampling parameters, without an answer",
    bodies={CompletionRequest: COMPLETIONS_NEUTRAL},
    answer=RenderedList,
    errors=TOKENIZING,
)
TOKENIZE = Operation(
    summary="The token ids of a text or of a chat",
    bodies={TokenizeTextRequest: COMPLETIONS_NEUTRAL, TokenizeChatRequest: CHAT_NEUTRAL},
    answer=TokenizeAnswer,
    errors=TOKENIZING,
)
DETOKENIZE = Operation(
    summary="The text of token ids",
    bodies={DetokenizeRequest: {}},
    answer=DetokenizeAnswer,
    errors=(*READING, 404),
)
TOKENIZER_INFO = Operation(summary="What the model says of its tokenizer", answer=TokenizerInfo)
MODELS = Operation(summary="The model that is served, in a list", answer=ModelList)
MODEL = Operation(summary="The model of this name", answer=ModelDescription, errors=_NOT_FOUND)
VERSION = Operation(summary="The version of the server", answer=VersionAnswer)
LOAD = Operation(summary="How many requests are being answered", answer=LoadAnswer)
HEALTH = Operation(summary="200 while the process is alive", answer=HealthAnswer)
READY = Operation(summary="200 when a request would find a worker", answer=ReadyAnswer, errors=_NOT_READY)
METRICS = Operation(summary="Metrics in Prometheus' text format", media_type="text/plain")
LEDGER = Operation(summary="Every choice in flight, every worker, and what routing has learned", answer=AnyObject)
REQUESTS = Operation(summary="Recent requests, newest first", answer=RequestList)
REQUEST = Operation(summary="All that is known of one recent request", answer=AnyObject, errors=_NOT_FOUND)
OPENAPI = Operation(summary="This description, in OpenAPI 3.1", answer=AnyObject)
DOCS = Operation(summary="This description, as a page", media_type="text/html")
