"""POST /inference/v1/generate, vLLM's: token ids in, token ids out. A request runs as the completion of its tokens."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import BeforeValidator, Field, SkipValidation, create_model
from pydantic_core import PydanticCustomError

from services.gateway.api.answers.choice import Update, Usage
from services.gateway.api.dialects.completions import CompletionRequest
from services.gateway.api.errors import ApiError
from services.gateway.api.requests.large_json import takes_long
from services.gateway.api.requests.schema import Label, Priority, StreamOptions, TokenId, TopOrAll
from services.gateway.api.requests.strict import Nested, Open
from services.gateway.api.requests.validation import Neutral, ignored_fields, parse_request, validate_request
from services.gateway.api.runners import Runners
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits
from services.gateway.openai.answer import AnswerHead
from services.gateway.openai.endpoint import answer_over_http
from services.gateway.openai.logprobs import LogprobEntries
from services.gateway.openai.token_names import TokenNames
from services.gateway.text.tokenizer import Tokenizer

GENERATE_NEUTRAL: Neutral = {"features": ()}

# The fields of a completion that are sampling parameters in vLLM.
SAMPLING = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "stop", "stop_token_ids", "bad_words", "ignore_eos", "max_tokens", "min_tokens", "logprobs"),
    *("prompt_logprobs", "allowed_token_ids", "logprob_token_ids", "include_stop_str_in_output"),
    *("spaces_between_special_tokens", "skip_special_tokens", "logit_bias", "structured_outputs"),
)
_COMMON = ("model", "stream", "stream_options", "cache_salt", "priority", "request_id", "session_id")


class TokensRequest(CompletionRequest):
    """The completion of one prompt of token ids."""

    prompt_param: ClassVar[str] = "token_ids"

    logprobs: TopOrAll | None = None

    def default_tokens(self, room: int) -> int:
        """See CommonRequest: an answer may fill the context."""
        return room


_fields: dict[str, Any] = {
    name: (TokensRequest.model_fields[name].rebuild_annotation(), TokensRequest.model_fields[name]) for name in SAMPLING
}
SamplingFields = create_model("SamplingFields", __base__=Open, __doc__="vLLM's sampling parameters.", **_fields)


_TokenIdsJson = Annotated[list[TokenId], Field(min_length=1)]  # as they come


def _listed(value: object) -> object:
    if not isinstance(value, list):
        raise PydanticCustomError("list_type", "It must be an array.")
    return value


class GenerateRequest(Nested):
    """Token ids of which the continuation is wanted, in token ids. /v1/completions/render makes such requests."""

    token_ids: Annotated[  # checked when they become a prompt
        SkipValidation[list[Any]], BeforeValidator(_listed, json_schema_input_type=_TokenIdsJson)
    ]
    sampling_params: SamplingFields  # type: ignore[valid-type]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Label | None = None
    priority: Priority | None = None
    request_id: Label | None = None
    session_id: Label | None = None
    token_offsets: SkipValidation[list[Any]] | None = None  # what the render endpoints say of a text: asks for nothing


class GenerateEndpoint:
    """Answers requests of token ids."""

    def __init__(self, runners: Runners, limits: Limits) -> None:
        self._runner = runners.of(CompletionRequest)
        self._tokenizer = runners.tokenizer
        self._records = runners.records
        self._limits = limits

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        limits = self._limits
        terms = limits.terms(exchange.header, exchange.caller)
        self._records.begin(exchange.record, exchange.header)
        body = await exchange.read_json(limits.max_body_bytes)
        request, completion = await self._runner.side.run_if(takes_long(body), _parse, body)
        del body
        exchange.take_request_id(request.request_id)
        exchange.record.note_ignored_fields(ignored_fields(request.unknown_fields(), limits.strict_fields))
        with _in_words_of_generate():
            asked = self._runner.check(completion)
            head = AnswerHead.of(exchange.record.request_id, asked.model)
            answer = GenerateAnswer(self._tokenizer, completion, head)
            await answer_over_http(exchange, self._runner, asked, answer, terms)


def _parse(body: bytes) -> tuple[GenerateRequest, TokensRequest]:
    request = parse_request(body, GenerateRequest, GENERATE_NEUTRAL)
    given = {name: getattr(request.sampling_params, name) for name in SAMPLING}
    given |= {name: getattr(request, name) for name in _COMMON}
    fields = {name: value for name, value in given.items() if value is not None}
    prompt = [request.token_ids]  # one, whatever is in it
    with _in_words_of_generate():
        return request, validate_request({**fields, "prompt": prompt, "return_token_ids": True}, TokensRequest, {})


@contextmanager
def _in_words_of_generate() -> Iterator[None]:
    """Renames the fields that an ApiError of the `with` block names as a completion's."""
    try:
        yield
    except ApiError as error:
        path = error.param or ""
        root = path.partition(".")[0].partition("[")[0]
        own = f"sampling_params.{path}" if root in SAMPLING else path.replace("prompt", "token_ids", 1)
        if own != path:
            error.message, error.param = error.message.replace(f"'{path}'", f"'{own}'"), own
        raise


class GenerateAnswer:
    """See Answer. There is no text in it, so that every chunk is a full one."""

    def __init__(self, tokenizer: Tokenizer, request: TokensRequest, head: AnswerHead) -> None:
        self._names = TokenNames(tokenizer, by_id=False)
        self._entries = LogprobEntries(tokenizer, self._names, by_name=request.logprob_token_ids is not None)
        self._head = {"request_id": head.request_id, "created": head.created, "model": head.model}

    def text_chunk(self, choice: int, text: str) -> bytes:
        """See Answer. Text is not shown."""
        return b""

    def opening(self, num_choices: int, first: Update, usage: Usage | None = None) -> bytes:
        """See Answer: there are none."""
        return b""

    def chunk(self, update: Update, usage: Usage | None = None) -> bytes:
        """See Answer."""
        body: dict[str, Any] = {**self._head, "choices": [self._choice(update)]}
        if usage is not None:
            body["usage"] = usage.as_json()
        return b"data: %b\n\n" % orjson.dumps(body)

    def usage_chunk(self, usage: Usage) -> bytes:
        """See Answer."""
        return b"data: %b\n\n" % orjson.dumps({**self._head, "choices": [], "usage": usage.as_json()})

    def body(self, choices: Sequence[Update], usage: Usage) -> bytes:
        """See Answer."""
        scored = choices[0].prompt_logprobs
        listed = [self._choice(update) for update in choices]
        ranked = None if scored is None else self._names.ranked(scored)
        return orjson.dumps({**self._head, "choices": listed, "usage": usage.as_json(), "prompt_logprobs": ranked})

    def _choice(self, update: Update) -> Mapping[str, Any]:
        logprobs = None if update.logprobs is None else {"content": self._entries.of(update), "refusal": None}
        return {
            "index": update.choice,
            "token_ids": update.generated,
            "logprobs": logprobs,
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
        }
