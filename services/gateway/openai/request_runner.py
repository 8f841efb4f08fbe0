"""What becomes of a checked request, before its answer is written: tokenized, generated, turned into text.

The HTTP endpoints and the gRPC service both run their requests here.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Generic

import numpy as np

from services.gateway.generation import Generation, GenerationError, GenerationRequest, Generator
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.chat import ChatDialect
from services.gateway.openai.choice import Choice, Update, Usage
from services.gateway.openai.completions import CompletionDialect
from services.gateway.openai.dialect import Dialect, Request
from services.gateway.openai.errors import ApiError, from_generation_error, unavailable
from services.gateway.openai.prompts import check_token_ids
from services.gateway.openai.sampling import check_combinations, resolve_sampling
from services.gateway.openai.schema import ChatRequest, CompletionRequest
from services.gateway.request_record import RequestRecord
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.detokenizer import make_detokenizer
from services.gateway.text.sequence_text import SequenceText
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.capsule import Capsule
from services.protocol.model_dir import GenerationDefaults, ModelInfo

# A client that does not read its answer keeps it this much longer than the answer may take.
READING_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model behind this gateway. `created` is in seconds since 1970."""

    name: str
    vocab_size: int
    defaults: GenerationDefaults
    created: int

    def check(self, name: str) -> None:
        """Raises ApiError when a client means another model."""
        if name != self.name:
            message = f"The model '{name[:200]}' does not exist; this server serves '{self.name}'."
            raise ApiError(404, message, "model", "model_not_found")


class RequestRunner(Generic[Request]):
    """Runs requests of one dialect."""

    def __init__(
        self,
        dialect: Dialect[Request],
        model: ServedModel,
        tokenizer: Tokenizer,
        generator: Generator,
        metrics: GatewayMetrics,
    ) -> None:
        self.dialect = dialect
        self.model = model
        self._tokenizer = tokenizer
        self._generator = generator
        self._metrics = metrics

    def check(self, request: Request) -> None:
        """What needs no tokens. Raises ApiError."""
        self.model.check(request.model)
        check_combinations(request)

    @asynccontextmanager
    async def run(
        self, request: Request, request_id: str, record: RequestRecord, timeout_s: float
    ) -> AsyncIterator["Updates"]:
        """Starts a request; leaving the context ends it, wherever it is. Raises ApiError."""
        try:
            capsule = await self._capsule(request)
            record.prompt_tokens = capsule.num_prompt
            self._metrics.prompt_tokens.inc(capsule.num_prompt)
            async with self._generator.generate(GenerationRequest(request_id, capsule, timeout_s)) as generation:
                yield Updates(generation, self._choice(request, capsule), record, self._metrics)
            self._metrics.duration.observe(monotonic() - record.arrived)
        except GenerationError as error:
            raise from_generation_error(error, self.dialect.prompt_param) from error

    async def tokenize(self, request: Request) -> list[int]:
        """The prompt's token ids, at least one. Raises ApiError."""
        param = self.dialect.prompt_param
        token_ids = await self.dialect.prompt(request, self.max_model_len)
        if not token_ids:
            raise ApiError(400, f"Invalid '{param}': it has no tokens.", param, "empty_string")
        check_token_ids(token_ids, self.model.vocab_size, param)
        return token_ids

    @property
    def max_model_len(self) -> int:
        """Of the workers. Raises ApiError before any answered."""
        max_model_len = self._generator.max_model_len
        if max_model_len is None:
            raise unavailable("No worker is ready yet. Try again later.", retry_after_s=1)
        return max_model_len

    async def _capsule(self, request: Request) -> Capsule:
        token_ids = await self.tokenize(request)
        sampling = resolve_sampling(
            request, self.model.defaults, len(token_ids), self.max_model_len, self.model.vocab_size
        )
        return Capsule(np.array(token_ids, np.int32), len(token_ids), sampling)

    def _choice(self, request: Request, capsule: Capsule) -> Choice:
        skip_special_tokens = True if request.skip_special_tokens is None else request.skip_special_tokens
        detokenizer = make_detokenizer(
            self._tokenizer, capsule.token_ids[-16:].tolist(), skip_special_tokens=skip_special_tokens
        )
        return Choice(SequenceText(detokenizer, tuple(request.stop or ()), capsule.sampling.min_tokens))


@dataclass(frozen=True, slots=True)
class Runners:
    """One for each dialect."""

    chat: RequestRunner[ChatRequest]
    completions: RequestRunner[CompletionRequest]


def make_runners(
    model: ModelInfo,
    served_model_name: str,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    generator: Generator,
    metrics: GatewayMetrics,
) -> Runners:
    """For the one model that a gateway serves."""
    served = ServedModel(
        name=served_model_name, vocab_size=model.vocab_size, defaults=model.generation, created=int(time.time())
    )
    chat, completions = ChatDialect(tokenizer, chat_template), CompletionDialect(tokenizer)
    return Runners(
        RequestRunner(chat, served, tokenizer, generator, metrics),
        RequestRunner(completions, served, tokenizer, generator, metrics),
    )


class Updates:
    """The updates of one choice, counted and timed."""

    def __init__(self, generation: Generation, choice: Choice, record: RequestRecord, metrics: GatewayMetrics) -> None:
        self._generation = generation
        self._choice = choice
        self._record = record
        self._metrics = metrics
        self._last = record.arrived
        self._started = False

    async def next(self) -> Update:
        """Waits for the next one. Raises GenerationError."""
        delta = await self._generation.next()
        now = monotonic()
        elapsed, self._last = now - self._last, now
        before = self._choice.num_generated
        update = self._choice.take(delta)
        self._record.generated_tokens = self._choice.num_generated
        self._record.finish_reason = update.finish_reason
        self._metrics.generated_tokens.inc(self._choice.num_generated - before)
        if self._started:
            self._metrics.itl.observe(elapsed)
        else:
            self._note_first(elapsed, delta.cached_tokens)
        return update

    def _note_first(self, ttft_s: float, cached_tokens: int) -> None:
        self._started = True
        self._record.ttft_s = ttft_s
        self._record.cached_tokens = cached_tokens
        self._metrics.ttft.observe(ttft_s)
        self._metrics.prompt_cached.inc(cached_tokens)

    def usage(self) -> Usage:
        """So far."""
        prompt_tokens = self._record.prompt_tokens or 0
        return Usage(prompt_tokens, self._choice.num_generated, self._choice.cached_tokens)
