"""What becomes of a checked request, before its answer is written: tokenized, generated, turned into text.

The HTTP endpoints and the gRPC service both run their requests here.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from time import monotonic
from typing import Generic

from services.gateway.api.choice import Choice, Update, Usage
from services.gateway.api.dialect import Dialect, Request
from services.gateway.api.errors import ApiError, from_generation_error, invalid, unavailable
from services.gateway.api.generation import (
    Delta,
    Generation,
    GenerationError,
    GenerationRequest,
    Generator,
    TakeToken,
    never,
)
from services.gateway.api.prompts import Prompt, check_token_ids
from services.gateway.api.request_record import RequestRecord
from services.gateway.api.sampling import bad_word_tokens, check_combinations, resolve_sampling, seed_of_choice
from services.gateway.api.schema import ChatRequest, CompletionRequest
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.chat import ChatDialect
from services.gateway.openai.completions import CompletionDialect
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.detokenizer import make_detokenizer
from services.gateway.text.sequence_text import SequenceText
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.capsule import Capsule
from services.protocol.model_files.info import GenerationDefaults, ModelInfo
from services.protocol.outcomes import FinishReason

# A client that does not read its answer keeps it this much longer than the answer may take.
READING_GRACE_S = 10.0

MAX_SEQUENCES = 1024  # choices of one request, of all its prompts


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
            prompts, num_choices = await self.tokenize(request), request.n or 1
            capsules = self._capsules(request, prompts, num_choices)
            record.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
            self._metrics.prompt_tokens.inc(record.prompt_tokens)
            choices = [
                self._choice(index, request, prompts[index // num_choices], capsule)
                for index, capsule in enumerate(capsules)
            ]
            wanted = GenerationRequest(request_id, capsules, timeout_s, num_choices)
            async with self._generator.generate(wanted) as generation:
                updates = Updates(generation, choices, num_choices, record, self._metrics)
                try:
                    yield updates
                finally:
                    record.generated_tokens = updates.num_generated
            self._metrics.duration.observe(monotonic() - record.arrived)
        except GenerationError as error:
            raise from_generation_error(error, self.dialect.prompt_param) from error

    async def tokenize(self, request: Request) -> list[Prompt]:
        """The prompts, at least one, each of at least one token. Raises ApiError."""
        param = self.dialect.prompt_param
        prompts = await self.dialect.prompts(request, self.max_model_len)
        for prompt in prompts:
            if not len(prompt.token_ids):
                raise ApiError(400, f"Invalid '{param}': it has no tokens.", param, "empty_string")
            check_token_ids(prompt.token_ids, self.model.vocab_size, param)
        return prompts

    @property
    def max_model_len(self) -> int:
        """Of the workers. Raises ApiError before any answered."""
        max_model_len = self._generator.max_model_len
        if max_model_len is None:
            raise unavailable("No worker is ready yet. Try again later.", retry_after_s=1)
        return max_model_len

    def _capsules(self, request: Request, prompts: Sequence[Prompt], num_choices: int) -> tuple[Capsule, ...]:
        """Of all choices, one prompt's next to each other."""
        if len(prompts) * num_choices > MAX_SEQUENCES:
            raise invalid(f"'n' times the number of prompts must be at most {MAX_SEQUENCES}.", "n")
        bad_words = bad_word_tokens(self._tokenizer, request.bad_words or ())
        capsules = []
        for prompt in prompts:
            token_ids = prompt.token_ids
            sampling = resolve_sampling(
                request, self.model.defaults, len(token_ids), self.max_model_len, self.model.vocab_size, bad_words
            )
            for index in range(num_choices):
                own = replace(sampling, seed=seed_of_choice(sampling.seed, index)) if index else sampling
                capsules.append(Capsule(token_ids, len(token_ids), own))
        return tuple(capsules)

    def _choice(self, index: int, request: Request, prompt: Prompt, capsule: Capsule) -> Choice:
        skip_special_tokens = True if request.skip_special_tokens is None else request.skip_special_tokens
        last = prompt.token_ids[-16:].tolist()
        detokenizer = make_detokenizer(self._tokenizer, last, skip_special_tokens=skip_special_tokens)
        text = SequenceText(detokenizer, tuple(request.stop or ()), capsule.sampling.min_tokens)
        return Choice(index, text, self.dialect.shown(request, prompt))


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
    """The updates of a request's choices, counted and timed."""

    def __init__(
        self,
        generation: Generation,
        choices: Sequence[Choice],
        choices_per_prompt: int,
        record: RequestRecord,
        metrics: GatewayMetrics,
    ) -> None:
        self._generation = generation
        self._choices = choices
        self._choices_per_prompt = choices_per_prompt
        self._record = record
        self._metrics = metrics
        self._last: list[float | None] = [None] * len(choices)  # when each one's last update came
        self._num_open = len(choices)

    @property
    def num_choices(self) -> int:
        """Of all prompts."""
        return len(self._choices)

    @property
    def done(self) -> bool:
        """True when every choice has its finish reason."""
        return self._num_open == 0

    async def next(self) -> Update:
        """Waits for the next one, of any choice that goes on. Raises GenerationError."""
        return self._update(await self._generation.next())

    async def relay(
        self, take: Callable[[Update], bool], can_send: Callable[[], bool], send_text: Callable[[int, str], None]
    ) -> None:
        """Hands on every update as it comes, until the last one or until `take` returns False. Raises GenerationError.

        What is text of a choice and nothing else may go to `send_text` instead, when `can_send`. None must wait.
        """

        def take_delta(delta: Delta) -> bool:
            return take(self._update(delta)) and self._num_open > 0

        if not self.done:
            takers = [self._taker(index, can_send, send_text) for index in range(len(self._choices))]
            await self._generation.relay(take_delta, takers)

    def _taker(self, index: int, can_send: Callable[[], bool], send_text: Callable[[int, str], None]) -> TakeToken:
        """What every streamed token goes through: as little as possible."""
        choice, metrics, last = self._choices[index], self._metrics.tokens, self._last
        extend = choice.extend
        if extend is None:
            return never

        def take_token(token: int) -> bool:
            since = last[index]
            if since is None or not can_send():
                return False
            last[index] = now = monotonic()
            metrics.note_token(now - since)
            choice.num_generated += 1
            if text := extend(token):
                send_text(index, text)
            return True

        return take_token

    @property
    def num_generated(self) -> int:
        """Tokens so far, of all choices."""
        return sum(choice.num_generated for choice in self._choices)

    def _update(self, delta: Delta) -> Update:
        self._note_time(delta)
        choice = self._choices[delta.choice]
        before = choice.num_generated
        update = choice.take(delta)
        self._metrics.tokens.generated += choice.num_generated - before
        if update.finish_reason is not None:
            self._num_open -= 1
            self._record.finish_reason = update.finish_reason
            if delta.finish is FinishReason.NONE:
                self._generation.end(delta.choice)
        return update

    def _note_time(self, delta: Delta) -> None:
        if self._note_gap(delta.choice):
            return
        if delta.choice % self._choices_per_prompt == 0:
            self._record.cached_tokens = (self._record.cached_tokens or 0) + delta.cached_tokens
            self._metrics.prompt_cached.inc(delta.cached_tokens)
        if self._record.ttft_s is None:
            self._record.ttft_s = monotonic() - self._record.arrived
            self._metrics.ttft.observe(self._record.ttft_s)

    def _note_gap(self, choice: int) -> bool:
        """False: there is none, it is the choice's first news."""
        now, last = monotonic(), self._last[choice]
        self._last[choice] = now
        if last is not None:
            self._metrics.tokens.note_gap(now - last)
        return last is not None

    def usage(self) -> Usage:
        """So far. A prompt counts once, however many choices it has."""
        return Usage(self._record.prompt_tokens or 0, self.num_generated, self._record.cached_tokens or 0)
