"""Runs a request, for every API: checks it, tokenizes its prompts, has tokens generated, turns them into text.

What the kinds of request have in different forms is in their dialects.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic
from typing import Generic

from services.gateway.api.answers.choice import Choice, Ending, PromptShown
from services.gateway.api.answers.pace import pace_of
from services.gateway.api.answers.parsed_choice import ParsedChoice
from services.gateway.api.answers.updates import Updates
from services.gateway.api.caller import Caller
from services.gateway.api.dialects.dialect import Dialect
from services.gateway.api.dialects.prompts import Prompt, check_token_ids, note_prompts
from services.gateway.api.errors import ApiError, from_generation_error, invalid, unavailable
from services.gateway.api.generation import GenerationError, GenerationRequest, Generator, Overloaded, Unavailable
from services.gateway.api.grammars.checks import GrammarChecks
from services.gateway.api.records.kept_text import MAX_PROMPT_TOKENS, KeptText
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.api.requests.asked_logprobs import check_alternatives, check_logprobs, with_whole_vocabulary
from services.gateway.api.requests.large_json import takes_long
from services.gateway.api.requests.sampling import bad_word_tokens, for_prompt, resolve_sampling, seed_of_choice
from services.gateway.api.requests.schema import Request
from services.gateway.api.requests.validation import Neutral, ignored_fields, parse_request
from services.gateway.api.served_models import Resolved, ServedModels
from services.gateway.api.side_thread import SideThread
from services.gateway.api.terms import Terms
from services.gateway.metrics import GatewayMetrics
from services.gateway.text.detokenizer import make_detokenizer
from services.gateway.text.sequence_text import SequenceText
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.capsule import Capsule
from services.protocol.sampling import SamplingParams

# A client that does not read its answer may keep the request open this much longer than the request may take.
READING_GRACE_S = 10.0

MAX_SEQUENCES = 1024  # choices of one request, of all its prompts
# Tokens that sampling parameters name (biases, stop tokens, bad words), of all choices together.
MAX_NAMED_TOKENS = 1 << 17

_EMBEDS_ALONE = "This model makes embeddings and generates nothing; ask for them at /v1/embeddings."
_AT_ONCE = 64  # choices that are made before other requests get their turn
_SHORT_WORDS = 1024  # characters of bad words that are tokenized in less than a millisecond


class RequestRunner(Generic[Request]):
    """Runs requests of one dialect."""

    def __init__(
        self,
        dialect: Dialect[Request],
        models: ServedModels,
        tokenizer: Tokenizer,
        generator: Generator,
        metrics: GatewayMetrics,
        side: SideThread,
        grammars: GrammarChecks,
    ) -> None:
        self.dialect = dialect
        self._grammars = grammars
        self.models = models
        self._tokenizer = tokenizer
        self._generator = generator
        self._metrics = metrics
        self.side = side

    async def parse(
        self, body: bytes, neutral: Neutral, strict: bool, kind: type[Request] | None = None
    ) -> tuple[Resolved[Request], tuple[str, ...]]:
        """Returns the checked request of a body, and the names of its fields that nothing acts on. Raises ApiError.

        strict: see `ignored_fields`. kind: of the request; None: the dialect's own.
        """

        def read() -> tuple[Resolved[Request], tuple[str, ...]]:
            request = parse_request(body, kind or self.dialect.kind, neutral)
            return self.check(request), ignored_fields(self.dialect.ignored_fields(request), strict)

        return await self.side.run_if(takes_long(body), read)

    def check(self, request: Request) -> Resolved[Request]:
        """Checks all that needs no tokens. Returns the request with its model. Raises ApiError."""
        model = self.models.resolve(request.model)
        if not model.base.generates:
            raise invalid(_EMBEDS_ALONE, "model", "unsupported_model")
        request.check_combinations()
        check_logprobs(request, model.base.max_logprobs, model.base.vocab_size)
        return Resolved(request, model)

    @asynccontextmanager
    async def run(self, asked: Resolved[Request], record: RequestRecord, terms: Terms) -> AsyncIterator[Updates]:
        """Starts a request; leaving the context ends it in whatever state. Raises ApiError."""
        record.parsed, record.model, record.ttft_slo_s = monotonic(), asked.model.name, terms.ttft_slo_s
        asked = _with_whole_vocabulary(asked)
        request, num_choices = asked.request, asked.request.n or 1
        try:
            await terms.caller.check(record)
            max_model_len = await self.max_model_len()
            prompts = await self._tokenize(asked, max_model_len, terms.caller)
            capsules = await self._capsules(asked, prompts, num_choices, max_model_len, terms.caller)
            self._metrics.prompt_tokens.inc(note_prompts(prompts, record))
            if record.text is not None:
                self._keep_prompt(record.text, prompts)
            choices = await self._choices(request, prompts, capsules, record)
            record.tokenized = monotonic()
            wanted = GenerationRequest(
                record.request_id,
                capsules,
                terms.timeout_s,
                num_choices,
                terms.ttft_slo_s,
                terms.tenant,
                record.attempts,
                request.session_id or "",
            )
            async with terms.caller.admit(record), self._generator.generate(wanted) as running:
                updates = Updates(running, choices, num_choices, record, self._metrics, pace_of(request))
                record.running = updates
                try:
                    yield updates
                finally:
                    record.running = None
                    record.generated_tokens = updates.num_generated
            self._metrics.duration.observe(monotonic() - record.arrived)
        except GenerationError as error:
            if isinstance(error, Overloaded):
                self._metrics.refused(error.refusal)
            raise from_generation_error(error, request.prompt_param) from error

    async def tokenize(self, asked: Resolved[Request], record: RequestRecord, caller: Caller) -> list[Prompt]:
        """Returns the prompts, at least one, each of at least one token. They count against the caller's limits.

        Raises ApiError.
        """
        await caller.check(record)
        prompts = await self._tokenize(asked, await self.max_model_len(), caller)
        await _count(prompts, record, caller)
        return prompts

    async def rendered(
        self, asked: Resolved[Request], record: RequestRecord, caller: Caller
    ) -> list[tuple[Prompt, Capsule]]:
        """Returns each prompt, with what a worker would be sent for its first choice. Raises ApiError.

        The prompts count against the caller's limits.
        """
        await caller.check(record)
        asked = _with_whole_vocabulary(asked)
        max_model_len, num_choices = await self.max_model_len(), asked.request.n or 1
        prompts = await self._tokenize(asked, max_model_len, caller)
        capsules = await self._capsules(asked, prompts, num_choices, max_model_len, caller)
        await _count(prompts, record, caller)
        return list(zip(prompts, capsules[::num_choices], strict=True))

    def _keep_prompt(self, kept: KeptText, prompts: Sequence[Prompt]) -> None:
        tokens, most = prompts[0].token_ids, MAX_PROMPT_TOKENS
        beginning, end = (tokens, tokens[:0]) if len(tokens) <= 2 * most else (tokens[:most], tokens[-most:])
        texts = [self._tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in (beginning, end)]
        kept.note_prompt(*texts)
        kept.cut = kept.cut or len(prompts) > 1

    async def max_model_len(self) -> int:
        """Returns the context length of the workers, in tokens. Raises ApiError where no worker comes in time."""
        try:
            return await self._generator.until_model_len_known()
        except Unavailable as error:
            raise unavailable("No worker is ready yet. Try again later.", error.retry_after_s) from error

    async def _tokenize(self, asked: Resolved[Request], max_model_len: int, caller: Caller) -> list[Prompt]:
        param = asked.request.prompt_param
        prompts = await self.dialect.prompts(asked.request, max_model_len, caller.tenant)
        for prompt in prompts:
            if not len(prompt.token_ids):
                raise ApiError(400, f"Invalid '{param}': it has no tokens.", param, "empty_string")
            check_token_ids(prompt.token_ids, asked.model.base.vocab_size, param)
        return prompts

    async def _capsules(
        self,
        asked: Resolved[Request],
        prompts: Sequence[Prompt],
        num_choices: int,
        max_model_len: int,
        caller: Caller,
    ) -> tuple[Capsule, ...]:
        """Returns the capsules of all choices, ordered by prompt."""
        request, base, adapter = asked.request, asked.model.base, asked.model.adapter
        num_sequences = len(prompts) * num_choices
        if num_sequences > MAX_SEQUENCES:
            raise invalid(f"'n' times the number of prompts must be at most {MAX_SEQUENCES}.", "n")
        bad_words = await self._bad_words(request.bad_words or [])
        grammar = await self._grammar(request, prompts[0], caller)
        first = resolve_sampling(
            request, base.defaults, len(prompts[0].token_ids), max_model_len, base.vocab_size, bad_words, grammar
        )
        if num_sequences * _named_tokens(first) > MAX_NAMED_TOKENS:
            names = "'logit_bias', 'stop_token_ids', 'bad_words' and lists of token ids name more than"
            raise invalid(f"{names} {MAX_NAMED_TOKENS} tokens, counted once for each of {num_sequences} choices.", "n")
        capsules = []
        salt, priority = caller.cache_salt(request.cache_salt), caller.request_priority(request.priority)
        for number, prompt in enumerate(prompts):
            token_ids = prompt.token_ids
            sampling = for_prompt(first, request, len(token_ids), max_model_len) if number else first
            for index in range(num_choices):
                own = replace(sampling, seed=seed_of_choice(sampling.seed, index)) if index else sampling
                capsules.append(Capsule(token_ids, len(token_ids), own, salt, priority, adapter=adapter))
                await _let_others_run(len(capsules))
        check_alternatives(request, capsules)
        return tuple(capsules)

    async def _grammar(self, request: Request, prompt: Prompt, caller: Caller) -> str:
        if not self.dialect.constrains(request):
            return ""
        grammar, param = await asyncio.to_thread(self.dialect.grammar, request, prompt)
        if grammar:
            await self._grammars.check(grammar, param, caller.tenant)
        return grammar

    async def _bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        if sum(map(len, words)) <= _SHORT_WORDS:
            return bad_word_tokens(self._tokenizer, words)
        return await asyncio.to_thread(bad_word_tokens, self._tokenizer, words)

    async def _choices(
        self, request: Request, prompts: Sequence[Prompt], capsules: Sequence[Capsule], record: RequestRecord
    ) -> Sequence[Choice]:
        choices: list[Choice] = []
        num_choices = len(capsules) // len(prompts)
        for number, prompt in enumerate(prompts):
            shown = self.dialect.shown(request, prompt)
            record.tools_inserted = prompt.reading is not None and prompt.reading.inserted
            for capsule in capsules[number * num_choices : (number + 1) * num_choices]:
                choices.append(self._choice(len(choices), request, prompt, capsule, shown))
                await _let_others_run(len(choices))
        return choices

    def _choice(
        self, index: int, request: Request, prompt: Prompt, capsule: Capsule, shown: PromptShown | None
    ) -> Choice:
        reading = prompt.reading
        skip_special_tokens = True if request.skip_special_tokens is None else request.skip_special_tokens
        last = prompt.token_ids[-16:].tolist()
        marks, written = (frozenset[int](), {}) if reading is None else (reading.marks, reading.written)
        detokenizer = make_detokenizer(
            self._tokenizer,
            last,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
            shown=marks,
            written=written,
        )
        ending = Ending(
            frozenset(request.stop_token_ids or ()),
            bool(request.include_stop_str_in_output),
            request.only_prompt,
        )
        stops, min_tokens = tuple(request.stop or ()), capsule.sampling.min_tokens
        text = SequenceText(detokenizer, stops, min_tokens, shows_stop=ending.shows_stop)
        if reading is None:
            return Choice(index, text, shown, ending)
        return ParsedChoice(index, text, shown, ending, reading)


def _with_whole_vocabulary(asked: Resolved[Request]) -> Resolved[Request]:
    return Resolved(with_whole_vocabulary(asked.request, asked.model.base.vocab_size), asked.model)


async def _count(prompts: Sequence[Prompt], record: RequestRecord, caller: Caller) -> None:
    """Counts prompts that nothing is generated for against the caller's limits. Raises ApiError, 429."""
    note_prompts(prompts, record)
    async with caller.admit(record):
        pass


async def _let_others_run(num_made: int) -> None:
    if num_made % _AT_ONCE == 0:
        await asyncio.sleep(0)


def _named_tokens(sampling: SamplingParams) -> int:
    lists = (sampling.logit_bias, sampling.stop_token_ids, sampling.allowed_token_ids, sampling.logprob_token_ids)
    return sum(map(len, (*lists, *sampling.bad_words)))
