"""The operation of each route of the OpenAI API, but for responses. /openapi.json is made of these."""

from services.gateway.api.dialects.chat_batch import BatchChatRequest
from services.gateway.api.dialects.completions import CompletionRequest
from services.gateway.api.dialects.embedding_inputs import EmbeddingRequest, PoolingRequest
from services.gateway.api.dialects.scoring import RerankRequest, ScoreRequest
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.http.operation import GENERATING, READING, TOKENIZING, Operation
from services.gateway.http.rendered import Rendered, RenderedList
from services.gateway.openai.answer_models import (
    AnyObject,
    ChatBatch,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    DetokenizeAnswer,
    EmbeddingList,
    Generated,
    GeneratedChunk,
    HealthAnswer,
    LoadAnswer,
    ModelDescription,
    ModelList,
    PoolingList,
    RankedList,
    ReadyAnswer,
    RequestList,
    ScoreList,
    TokenizeAnswer,
    TokenizerInfo,
    VersionAnswer,
)
from services.gateway.openai.generate import GENERATE_NEUTRAL, GenerateRequest
from services.gateway.openai.neutral import CHAT_NEUTRAL, COMPLETIONS_NEUTRAL, EMBEDDINGS_NEUTRAL, SCORES_NEUTRAL
from services.gateway.openai.render import (
    RENDER_CHAT_NEUTRAL,
    RENDER_COMPLETIONS_NEUTRAL,
    RenderChatRequest,
    RenderCompletionRequest,
)
from services.gateway.openai.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

_NOT_FOUND = (404, 431, 500)
_NOT_READY = (431, 500, 503)

CHAT = Operation(
    summary="The assistant's next message in a chat, whole or as a stream",
    bodies={ChatRequest: CHAT_NEUTRAL},
    answer=ChatCompletion,
    chunk=ChatCompletionChunk,
    last_data="[DONE]",
    errors=GENERATING,
)
CHAT_BATCH = Operation(
    summary="The assistant's next message in each of several chats, whole",
    bodies={BatchChatRequest: CHAT_NEUTRAL},
    answer=ChatBatch,
    errors=GENERATING,
)
COMPLETIONS = Operation(
    summary="The continuation of texts or token ids, whole or as a stream",
    bodies={CompletionRequest: COMPLETIONS_NEUTRAL},
    answer=Completion,
    chunk=CompletionChunk,
    last_data="[DONE]",
    errors=GENERATING,
)
GENERATE = Operation(
    summary="The continuation of token ids, as token ids, whole or as a stream",
    bodies={GenerateRequest: GENERATE_NEUTRAL},
    answer=Generated,
    chunk=GeneratedChunk,
    last_data="[DONE]",
    errors=GENERATING,
)
EMBEDDINGS = Operation(
    summary="A vector for each input, made by prefill workers",
    bodies={EmbeddingRequest: EMBEDDINGS_NEUTRAL},
    answer=EmbeddingList,
    bytes_too=True,
    errors=GENERATING,
)
POOLING = Operation(
    summary="A vector for each input, as vLLM's endpoint for pooled outputs answers",
    bodies={PoolingRequest: EMBEDDINGS_NEUTRAL},
    answer=PoolingList,
    bytes_too=True,
    errors=GENERATING,
)
SCORE = Operation(
    summary="A score for each pair of texts: how well they belong together",
    bodies={ScoreRequest: SCORES_NEUTRAL},
    answer=ScoreList,
    errors=GENERATING,
)
RERANK = Operation(
    summary="Documents in the order of how well they belong to a query, the best first",
    bodies={RerankRequest: SCORES_NEUTRAL},
    answer=RankedList,
    errors=GENERATING,
)
RENDER_CHAT = Operation(
    summary="A chat as token ids and sampling parameters, without an answer",
    bodies={RenderChatRequest: RENDER_CHAT_NEUTRAL},
    answer=Rendered,
    errors=TOKENIZING,
)
RENDER_COMPLETIONS = Operation(
    summary="Prompts as token ids and sampling parameters, without an answer",
    bodies={RenderCompletionRequest: RENDER_COMPLETIONS_NEUTRAL},
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
    errors=(*READING, 404, 429),
)
TOKENIZER_INFO = Operation(summary="What the model says of its tokenizer", answer=TokenizerInfo)
MODELS = Operation(summary="The model that is served, in a list", answer=ModelList)
MODEL = Operation(summary="The model of this name", answer=ModelDescription, errors=_NOT_FOUND)
VERSION = Operation(summary="The version of the server", answer=VersionAnswer)
LOAD = Operation(summary="How many requests are being answered", answer=LoadAnswer)
HEALTH = Operation(summary="200 while the process is alive", answer=HealthAnswer)
ROOT = Operation(
    summary="200 while the process is alive, for clients that look whether there is a server", answer=HealthAnswer
)
READY = Operation(summary="200 when a request would find a worker", answer=ReadyAnswer, errors=_NOT_READY)
METRICS = Operation(summary="Metrics in Prometheus' text format", media_type="text/plain")
LEDGER = Operation(summary="Every choice in flight, every worker, and what routing has learned", answer=AnyObject)
REQUESTS = Operation(summary="Recent requests, newest first", answer=RequestList)
REQUEST = Operation(summary="All that is known of one recent request", answer=AnyObject, errors=_NOT_FOUND)
OPENAPI = Operation(summary="This description, in OpenAPI 3.1", answer=AnyObject)
DOCS = Operation(summary="This description, as a page", media_type="text/html")
DOCS_STYLE = Operation(summary="How that page looks", media_type="text/css")
DOCS_SCRIPT = Operation(summary="The program of that page", media_type="text/javascript")
