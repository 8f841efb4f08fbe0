"""The life of a generating request at the gateway: checked, tokenized, generated, written to its client."""

import time
from dataclasses import dataclass
from time import monotonic
from typing import Generic

import numpy as np

from services.gateway.generation import Generation, GenerationError, GenerationRequest, Generator
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.choice import Choice, Update, Usage
from services.gateway.openai.dialect import DONE, Answer, Dialect, Request
from services.gateway.openai.errors import ApiError, from_generation_error, unavailable
from services.gateway.openai.exchange import Exchange
from services.gateway.openai.prompts import check_token_ids
from services.gateway.openai.sampling import check_combinations, resolve_sampling
from services.gateway.openai.validation import parse_request
from services.gateway.text.detokenizer import make_detokenizer
from services.gateway.text.sequence_text import SequenceText
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.capsule import Capsule
from services.protocol.frames import TokenLogprobs
from services.protocol.model_dir import GenerationDefaults

# A client that does not read its answer keeps it this much longer than the answer may take.
_READING_GRACE_S = 10.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a client may ask of this gateway."""

    request_timeout_s: float
    max_body_bytes: int


class GenerationEndpoint(Generic[Request]):
    """Answers requests of one dialect."""

    def __init__(
        self,
        dialect: Dialect[Request],
        model: ServedModel,
        tokenizer: Tokenizer,
        generator: Generator,
        metrics: GatewayMetrics,
        limits: Limits,
    ) -> None:
        self._dialect = dialect
        self._model = model
        self._tokenizer = tokenizer
        self._generator = generator
        self._metrics = metrics
        self._limits = limits

    async def __call__(self, exchange: Exchange) -> None:
        """Raises ApiError, ClientGone."""
        body = await exchange.read_json(self._limits.max_body_bytes)
        request = parse_request(body, self._dialect.kind, self._dialect.neutral)
        del body
        self._model.check(request.model)
        check_combinations(request)
        async with exchange.while_connected(self._limits.request_timeout_s + _READING_GRACE_S):
            try:
                await self._generate(exchange, request)
            except GenerationError as error:
                raise from_generation_error(error, self._dialect.prompt_param) from error

    async def _generate(self, exchange: Exchange, request: Request) -> None:
        capsule = await self._capsule(request)
        exchange.record.prompt_tokens = capsule.num_prompt
        self._metrics.prompt_tokens.inc(capsule.num_prompt)
        skip_special_tokens = True if request.skip_special_tokens is None else request.skip_special_tokens
        detokenizer = make_detokenizer(
            self._tokenizer, capsule.token_ids[-16:].tolist(), skip_special_tokens=skip_special_tokens
        )
        choice = Choice(SequenceText(detokenizer, tuple(request.stop or ()), capsule.sampling.min_tokens))
        answer = self._dialect.answer(request, exchange.request_id, self._model.name, int(time.time()))
        wanted = GenerationRequest(exchange.request_id, capsule, self._limits.request_timeout_s)
        async with self._generator.generate(wanted) as generation:
            updates = Updates(generation, choice, exchange, self._metrics)
            if request.stream:
                await _stream(exchange, updates, answer, with_usage=request.include_usage)
            else:
                await _collect(exchange, updates, answer)
        self._metrics.duration.observe(monotonic() - exchange.arrived)

    async def _capsule(self, request: Request) -> Capsule:
        max_model_len = self._generator.max_model_len
        if max_model_len is None:
            raise unavailable("No worker is ready yet. Try again later.", retry_after_s=1)
        param = self._dialect.prompt_param
        token_ids = await self._dialect.prompt(request, max_model_len)
        if not token_ids:
            raise ApiError(400, f"Invalid '{param}': it has no tokens.", param, "empty_string")
        check_token_ids(token_ids, self._model.vocab_size, param)
        sampling = resolve_sampling(
            request, self._model.defaults, len(token_ids), max_model_len, self._model.vocab_size
        )
        return Capsule(np.array(token_ids, np.int32), len(token_ids), sampling)


class Updates:
    """The updates of one choice, counted and timed."""

    def __init__(self, generation: Generation, choice: Choice, exchange: Exchange, metrics: GatewayMetrics) -> None:
        self._generation = generation
        self._choice = choice
        self._record = exchange.record
        self._metrics = metrics
        self._last = exchange.arrived
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


async def _stream(exchange: Exchange, updates: Updates, answer: Answer, *, with_usage: bool) -> None:
    # The status waits for the first token: until then, an error can still be one.
    update = await updates.next()
    await exchange.start_events()
    events = answer.opening() + answer.chunk(update)
    while update.finish_reason is None:
        if events:
            await exchange.write(events)
        update = await updates.next()
        events = answer.chunk(update) if update.worth_a_chunk else b""
    if with_usage:
        events += answer.usage_chunk(updates.usage())
    await exchange.end_events(events + DONE)


async def _collect(exchange: Exchange, updates: Updates, answer: Answer) -> None:
    texts: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    while True:
        update = await updates.next()
        texts.append(update.text)
        tokens += update.tokens
        if update.logprobs is not None:
            logprobs = [*(logprobs or ()), *update.logprobs]
        if update.finish_reason is not None:
            break
    whole = Update("".join(texts), tokens, logprobs, update.finish_reason)
    await exchange.respond(200, answer.body(whole, updates.usage()))
