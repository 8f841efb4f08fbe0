"""Runs requests for embeddings, for every API: inputs to tokens, and what workers make of them to vectors."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from services.config import Pooling
from services.gateway.api.caller import Caller
from services.gateway.api.dialects.embedding_inputs import EmbeddingInputs, EmbeddingRequest
from services.gateway.api.dialects.prompts import Prompt, note_prompts
from services.gateway.api.errors import from_generation_error, internal_error, invalid, unavailable
from services.gateway.api.generation import (
    GenerationError,
    GenerationRequest,
    Generator,
    Overloaded,
    RunningRequest,
    Unavailable,
    Unsupported,
)
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.api.requests.large_json import takes_long
from services.gateway.api.requests.validation import Neutral, parse_request
from services.gateway.api.served_models import Resolved, ServedModels
from services.gateway.api.side_thread import SideThread
from services.gateway.api.terms import Terms
from services.gateway.metrics import GatewayMetrics
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.capsule import Capsule
from services.protocol.model_files.text_preparation import TextPreparation
from services.protocol.sampling import SamplingParams

_SCORES_ALONE = "This model scores pairs of texts and makes no embeddings; ask it at /v1/rerank or /v1/score."
_AT_ONCE = 64  # embeddings that are taken before other requests get their turn
_NO_TOKENS = SamplingParams(max_tokens=0)


@dataclass(frozen=True, slots=True)
class EmbeddingAnswer:
    """The embeddings of a request's inputs, in order: float32[dimensions] each."""

    vectors: list[np.ndarray]
    prompt_tokens: int
    cached_tokens: int


class EmbeddingRunner:
    """Runs requests for embeddings."""

    def __init__(
        self,
        models: ServedModels,
        tokenizer: Tokenizer,
        generator: Generator,
        metrics: GatewayMetrics,
        side: SideThread,
    ) -> None:
        self.side = side
        self._models = models
        self._inputs = EmbeddingInputs(tokenizer, side, models.default.base.vocab_size)
        self._generator = generator
        self._metrics = metrics

    async def parse(self, body: bytes, kind: type[EmbeddingRequest], neutral: Neutral) -> Resolved[EmbeddingRequest]:
        """Returns the checked request of a body, with its model. Raises ApiError."""
        return self.check(await self.side.run_if(takes_long(body), parse_request, body, kind, neutral))

    def check(self, request: EmbeddingRequest, *, scores: bool = False) -> Resolved[EmbeddingRequest]:
        """Checks all that needs no tokens. Returns the request with its model. Raises ApiError.

        scores: they are made of what comes back, and so may those of a cross encoder be.
        """
        model = self._models.resolve(request.model)
        if model.base.cross_encoder is not None and not scores:
            raise invalid(_SCORES_ALONE, "model", "unsupported_model")
        request.check_combinations()
        return Resolved(request, model)

    def texts_of(self, model: str | None) -> TextPreparation:
        """Returns what becomes of the texts of requests for a model. Raises ApiError, 404."""
        return self._models.resolve(model).base.texts

    async def run(self, asked: Resolved[EmbeddingRequest], record: RequestRecord, terms: Terms) -> EmbeddingAnswer:
        """Asks workers to embed the inputs, and collects what they answer. Raises ApiError."""
        record.parsed, request = monotonic(), asked.request
        record.model, record.ttft_slo_s = asked.model.name, terms.ttft_slo_s
        await terms.caller.check(record)
        prompts = await self._inputs.prompts(request, await self._limits(request), asked.model.base.texts)
        num_prompt_tokens = note_prompts(prompts, record)
        self._metrics.prompt_tokens.inc(num_prompt_tokens)
        record.tokenized = monotonic()
        wanted = GenerationRequest(
            record.request_id,
            _capsules(asked, prompts, terms.caller),
            terms.timeout_s,
            ttft_slo_s=terms.ttft_slo_s,
            tenant=terms.tenant,
            attempts=record.attempts,
        )
        try:
            async with terms.caller.admit(record), self._generator.generate(wanted) as running:
                vectors, record.cached_tokens = await _collect(asked, running, len(prompts), record)
        except GenerationError as error:
            if isinstance(error, Overloaded):
                self._metrics.refused(error.refusal)
            raise from_generation_error(error, request.prompt_param) from error
        self._metrics.prompt_cached.inc(record.cached_tokens)
        return EmbeddingAnswer(vectors, num_prompt_tokens, record.cached_tokens)

    async def _limits(self, request: EmbeddingRequest) -> int:
        """Returns the context length. Raises ApiError for too many dimensions, and where no worker embeds."""
        try:
            max_model_len = await self._generator.until_model_len_known()
            size = await self._generator.until_embedding_size_known()
        except Unavailable as error:
            message = "No worker that makes embeddings is connected; prefill workers make them. Try again later."
            raise unavailable(message, error.retry_after_s) from error
        except Unsupported as error:
            raise from_generation_error(error, request.prompt_param) from error
        if (request.dimensions or 0) > size:
            message = f"Invalid 'dimensions': embeddings of this model have {size} numbers."
            raise invalid(message, "dimensions", "integer_above_max_value")
        return max_model_len


def _capsules(asked: Resolved[EmbeddingRequest], prompts: Sequence[Prompt], caller: Caller) -> tuple[Capsule, ...]:
    request, model = asked.request, asked.model
    pooling = model.base.pooling if request.pooling is None else Pooling(request.pooling)
    salt, priority = caller.cache_salt(request.cache_salt), caller.request_priority(request.priority)
    pairs = model.base.cross_encoder
    token_ids = [prompt.token_ids if pairs is None else pairs.without_padding(prompt.token_ids) for prompt in prompts]
    return tuple(
        Capsule(
            token_ids=tokens,
            num_prompt=len(tokens),
            sampling=_NO_TOKENS,
            cache_salt=salt,
            priority=priority,
            pooling=pooling,
            adapter=model.adapter,
            second_text=prompt.second_text if pairs is not None and pairs.token_types else 0,
        )
        for tokens, prompt in zip(token_ids, prompts, strict=True)
    )


async def _collect(
    asked: Resolved[EmbeddingRequest], running: RunningRequest, number: int, record: RequestRecord
) -> tuple[list[np.ndarray], int]:
    """Takes the embeddings as they come. Returns them in the order of the inputs, and the cached tokens of all."""
    request, normalizes = asked.request, asked.model.base.normalizes
    vectors: list[np.ndarray] = [np.empty(0)] * number
    cached_tokens = 0
    for num_taken in range(1, number + 1):
        delta = await running.next()
        if delta.embedding is None or not np.isfinite(delta.embedding).all():
            raise internal_error()
        record.first_token = record.first_token or monotonic()
        vectors[delta.choice] = finished(delta.embedding, request, normalizes=normalizes)
        cached_tokens += delta.cached_tokens
        if num_taken % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return vectors, cached_tokens


def finished(embedding: np.ndarray, request: EmbeddingRequest, *, normalizes: bool) -> np.ndarray:
    """Shortens and normalizes an embedding as a request wants it. Returns float32[dimensions]; zeros stay zeros.

    normalizes: where the request does not say.
    """
    shortened = embedding if request.dimensions is None else embedding[: request.dimensions]
    if not (normalizes if request.normalize is None else request.normalize):
        return shortened
    norm = float(np.linalg.norm(shortened.astype(np.float64)))
    normalized: np.ndarray = (shortened / (norm or 1.0)).astype(np.float32)
    return normalized
