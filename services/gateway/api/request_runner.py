"""Runs a checked request, for every API: tokenizes its prompts, has tokens generated, turns them into text.

What the kinds of request have in different forms is in their dialects.
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from time import monotonic
from typing import Generic

from services.gateway.api.chat import ChatDialect, ChatRequest
from services.gateway.api.choice import Choice
from services.gateway.api.completions import CompletionDialect, CompletionRequest
from services.gateway.api.dialect import Dialect
from services.gateway.api.errors import ApiError, from_generation_error, invalid, unavailable
from services.gateway.api.generation import GenerationError, GenerationRequest, Generator, Overloaded
from services.gateway.api.prompts import Prompt, check_token_ids
from services.gateway.api.request_record import RequestRecord
from services.gateway.api.sampling import bad_word_tokens, resolve_sampling, seed_of_choice
from services.gateway.api.schema import Request
from services.gateway.api.terms import Terms
from services.gateway.api.updates import Updates
from services.gateway.metrics import GatewayMetrics
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.detokenizer import make_detokenizer
from services.gateway.text.sequence_text import SequenceText
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.capsule import Capsule
from services.protocol.model_files.info import GenerationDefaults, ModelInfo

# A client that does not read its answer may keep the request open this much longer than the request may take.
READING_GRACE_S = 10.0

MAX_SEQUENCES = 1024  # choices of one request, of all its prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model behind this gateway. `created` is in seconds since 1970."""

    name: str
    vocab_size: int
    defaults: GenerationDefaults
    created: int

    def check(self, name: str) -> None:
        """Raises ApiError when `name` is another model's."""
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
        """Checks all that needs no tokens. Raises ApiError."""
        self.model.check(request.model)
        request.check_combinations()

    @asynccontextmanager
    async def run(
        self, request: Request, request_id: str, record: RequestRecord, terms: Terms
    ) -> AsyncIterator[Updates]:
        """Starts a request; leaving the context ends it in whatever state. Raises ApiError."""
        try:
            prompts, num_choices = await self.tokenize(request), request.n or 1
            capsules = self._capsules(request, prompts, num_choices)
            record.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
            self._metrics.prompt_tokens.inc(record.prompt_tokens)
            choices = [
                self._choice(index, request, prompts[index // num_choices], capsule)
                for index, capsule in enumerate(capsules)
            ]
            wanted = GenerationRequest(
                request_id, capsules, terms.timeout_s, num_choices, terms.ttft_slo_s, terms.tenant
            )
            async with self._generator.generate(wanted) as generation:
                updates = Updates(generation, choices, num_choices, record, self._metrics)
                try:
                    yield updates
                finally:
                    record.generated_tokens = updates.num_generated
            self._metrics.duration.observe(monotonic() - record.arrived)
        except GenerationError as error:
            if isinstance(error, Overloaded):
                self._metrics.refused(error.refusal)
            raise from_generation_error(error, request.prompt_param) from error

    async def tokenize(self, request: Request) -> list[Prompt]:
        """Returns the prompts, at least one, each of at least one token. Raises ApiError."""
        param = request.prompt_param
        prompts = await self.dialect.prompts(request, self.max_model_len)
        for prompt in prompts:
            if not len(prompt.token_ids):
                raise ApiError(400, f"Invalid '{param}': it has no tokens.", param, "empty_string")
            check_token_ids(prompt.token_ids, self.model.vocab_size, param)
        return prompts

    @property
    def max_model_len(self) -> int:
        """The context length of the workers, in tokens. Raises ApiError before a worker is connected."""
        max_model_len = self._generator.max_model_len
        if max_model_len is None:
            raise unavailable("No worker is ready yet. Try again later.", retry_after_s=1)
        return max_model_len

    def _capsules(self, request: Request, prompts: Sequence[Prompt], num_choices: int) -> tuple[Capsule, ...]:
        """Returns the capsules of all choices, ordered by prompt."""
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
    """One runner for each dialect, and the tokenizer of all of them."""

    chat: RequestRunner[ChatRequest]
    completions: RequestRunner[CompletionRequest]
    tokenizer: Tokenizer


def make_runners(
    model: ModelInfo,
    served_model_name: str,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    generator: Generator,
    metrics: GatewayMetrics,
) -> Runners:
    """Returns the runners for the one model that a gateway serves."""
    served = ServedModel(
        name=served_model_name, vocab_size=model.vocab_size, defaults=model.generation, created=int(time.time())
    )
    chat, completions = ChatDialect(tokenizer, chat_template), CompletionDialect(tokenizer)
    return Runners(
        RequestRunner(chat, served, tokenizer, generator, metrics),
        RequestRunner(completions, served, tokenizer, generator, metrics),
        tokenizer,
    )
