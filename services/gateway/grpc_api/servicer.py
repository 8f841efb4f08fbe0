"""baton.v1.Inference: gRPC in front of the runners that serve the OpenAI API too."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import grpc
import structlog

from protos import inference_pb2, inference_pb2_grpc
from services.config import Right
from services.gateway.api.caller import ANYBODY, Authenticator, Caller
from services.gateway.api.dialects.completions import CompletionRequest
from services.gateway.api.dialects.embedding_inputs import EmbeddingRequest
from services.gateway.api.errors import ApiError, from_generation_error, internal_error, invalid
from services.gateway.api.generation import Expired
from services.gateway.api.records.limits_left import limit_headers
from services.gateway.api.records.request_phases import server_timing
from services.gateway.api.records.request_record import IGNORED_FIELDS, TOOLS, RequestRecord, sane_or_new_id
from services.gateway.api.request_runner import READING_GRACE_S, RequestRunner
from services.gateway.api.requests.asked_logprobs import asks_for_many
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.requests.schema import Request
from services.gateway.api.requests.validation import Neutral, ignored_fields, unknown_field, validate_request
from services.gateway.api.runners import Runners
from services.gateway.api.served_models import Resolved
from services.gateway.api.terms import TTFT_SLO_HEADER, Terms, parse_ttft_slo
from services.gateway.grpc_api.answer_messages import embed_response, response_of
from services.gateway.grpc_api.authentication import CODES, Header, header_of
from services.gateway.grpc_api.names import grpc_message, own_name, unknown_fields
from services.gateway.grpc_api.requests import embedding_fields, other_fields, prompt_fields
from services.gateway.metrics import GatewayMetrics
from services.protocol.sampling import FEW_ALTERNATIVES

CODE_OF_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    **CODES,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_NO_FIELDS: Neutral = {}

_PromptRequest = inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest
_AnyRequest = _PromptRequest | inference_pb2.EmbedRequest | inference_pb2.ListModelsRequest

_SMALL_BYTES = 8 << 10  # of a message that is translated within 3 ms, whatever it holds
_SEARCHED_BYTES = 16 << 10  # of a message in which unknown fields are found within 2 ms

log = structlog.get_logger()


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Answers the calls of baton.v1.Inference."""

    def __init__(
        self,
        runners: Runners,
        metrics: GatewayMetrics,
        request_timeout_s: float,
        ttft_slo_s: float | None = None,
        strict_fields: bool = False,
        keys: Authenticator | None = None,
    ) -> None:
        """strict_fields: calls with fields that are not in inference.proto are refused. keys: None asks for no key."""
        self._keys = keys
        self._strict_fields = strict_fields
        self._runners = runners
        self._metrics = metrics
        self._request_timeout_s = request_timeout_s
        self._ttft_slo_s = ttft_slo_s

    async def Generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: "grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]",
    ) -> None:
        """Answers one call. inference.proto has its description."""
        async with self._answering("grpc.generate", request, context) as (record, header):
            caller = self._caller(record, header)
            self._runners.records.begin(record, header)
            if request.WhichOneof("prompt") == "chat":
                await self._generate(self._runners.of(ChatRequest), request, record, header, caller, context)
            else:
                await self._generate(self._runners.of(CompletionRequest), request, record, header, caller, context)

    async def Embed(
        self,
        request: inference_pb2.EmbedRequest,
        context: "grpc.aio.ServicerContext[inference_pb2.EmbedRequest, inference_pb2.EmbedResponse]",
    ) -> inference_pb2.EmbedResponse:
        """Answers one call. inference.proto has its description."""
        runner = self._runners.embeddings

        def translate() -> EmbeddingRequest:
            fields = {"model": request.model or None, **embedding_fields(request)}
            return validate_request(fields, EmbeddingRequest, _NO_FIELDS)

        async with self._answering("grpc.embed", request, context) as (record, header):
            caller = self._caller(record, header)
            self._runners.records.begin(record, header)
            translated = await runner.side.run_if(request.ByteSize() > _SMALL_BYTES, translate)
            asked = runner.check(translated)
            _take_request_id(record, translated.request_id, header, context)
            terms = self._terms(header, caller, context)
            async with asyncio.timeout(terms.timeout_s + READING_GRACE_S):
                return embed_response(await runner.run(asked, record, terms))

    async def Tokenize(
        self,
        request: inference_pb2.TokenizeRequest,
        context: "grpc.aio.ServicerContext[inference_pb2.TokenizeRequest, inference_pb2.TokenizeResponse]",
    ) -> inference_pb2.TokenizeResponse:
        """Answers one call. inference.proto has its description."""
        async with self._answering("grpc.tokenize", request, context) as (record, header):
            caller = self._caller(record, header)
            if request.WhichOneof("prompt") == "chat":
                token_ids = await self._tokenize(self._runners.of(ChatRequest), request, record, caller, context)
            else:
                token_ids = await self._tokenize(self._runners.of(CompletionRequest), request, record, caller, context)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def ListModels(
        self,
        request: inference_pb2.ListModelsRequest,
        context: "grpc.aio.ServicerContext[inference_pb2.ListModelsRequest, inference_pb2.ListModelsResponse]",
    ) -> inference_pb2.ListModelsResponse:
        """Answers one call. inference.proto has its description."""
        async with self._answering("grpc.models", request, context):
            max_model_len = await self._runners.of(ChatRequest).max_model_len()
        models = [
            inference_pb2.Model(id=name, created=model.base.created, max_model_len=max_model_len)
            for name, model in self._runners.models.by_name.items()
        ]
        return inference_pb2.ListModelsResponse(models=models)

    async def _checked(
        self,
        runner: RequestRunner[Request],
        request: _PromptRequest,
        record: RequestRecord,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> Resolved[Request]:
        """Returns the checked request of a message, with its model, and notes the fields that the model ignores.

        Raises ApiError.
        """

        def translate() -> Request:
            fields = {"model": request.model or None, **prompt_fields(request), **other_fields(request)}
            return validate_request(fields, runner.dialect.kind, _NO_FIELDS)

        translated = await runner.side.run_if(request.ByteSize() > _SMALL_BYTES, translate)
        asked = runner.check(translated)
        if (param := asks_for_many(translated)) is not None:
            words = f"over gRPC a token has at most {FEW_ALTERNATIVES} alternatives; the HTTP API gives more."
            raise invalid(f"Invalid '{param}': {words}", param, "integer_above_max_value")
        if ignored := ignored_fields(runner.dialect.ignored_fields(translated), self._strict_fields):
            record.note_ignored_fields([own_name(name, request) for name in ignored])
            context.set_trailing_metadata(_about(record))
        return asked

    async def _tokenize(
        self,
        runner: RequestRunner[Request],
        request: inference_pb2.TokenizeRequest,
        record: RequestRecord,
        caller: Caller,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> list[int]:
        asked = await self._checked(runner, request, record, context)
        (prompt,) = await runner.tokenize(asked, record, caller)
        token_ids: list[int] = prompt.token_ids.tolist()
        return token_ids

    async def _generate(
        self,
        runner: RequestRunner[Request],
        request: inference_pb2.GenerateRequest,
        record: RequestRecord,
        header: Header,
        caller: Caller,
        context: "grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]",
    ) -> None:
        asked = await self._checked(runner, request, record, context)
        _take_request_id(record, asked.request.request_id, header, context)
        terms = self._terms(header, caller, context)
        async with (
            asyncio.timeout(terms.timeout_s + READING_GRACE_S),
            runner.run(asked, record, terms) as updates,
        ):
            while not updates.done:
                update = await updates.next()
                if update.finish_reason is not None or update.tokens:
                    await context.write(response_of(update, updates.usage() if updates.done else None))

    def _terms(self, header: Header, caller: Caller, context: "grpc.aio.ServicerContext[Any, Any]") -> Terms:
        remaining_s = context.time_remaining()  # 0: the deadline passed; None: there is none
        timeout_s = self._request_timeout_s if remaining_s is None else min(self._request_timeout_s, remaining_s)
        return Terms(timeout_s, parse_ttft_slo(header(TTFT_SLO_HEADER), self._ttft_slo_s), caller)

    def _caller(self, record: RequestRecord, header: Header) -> Caller:
        """Returns who asks, and notes it. Raises ApiError."""
        caller = ANYBODY if self._keys is None else self._keys.caller(header, Right.API)
        record.key_id = caller.key_id
        return caller

    @asynccontextmanager
    async def _answering(
        self, endpoint: str, request: _AnyRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[tuple[RequestRecord, Header]]:
        """Gives the call its record, and its metadata by name; sees to it that it is answered and counted."""
        header = header_of(context.invocation_metadata())
        record = RequestRecord(sane_or_new_id(header("x-request-id")), endpoint)
        record.note_ignored_fields(unknown := _unknown_fields(request))
        context.set_trailing_metadata(_about(record))
        with structlog.contextvars.bound_contextvars(request_id=record.request_id):
            self._metrics.in_flight.inc()
            try:
                async with self._runners.in_progress.answering():
                    if self._strict_fields and unknown:
                        raise unknown_field(unknown[0])
                    yield record, header
                record.status = grpc.StatusCode.OK.name
                _show_figures(record, context)
            except ApiError as error:
                await _fail(record, error, request, context)
            except TimeoutError:
                await _fail(record, from_generation_error(Expired(), ""), request, context)
            except asyncio.CancelledError:
                record.status = grpc.StatusCode.CANCELLED.name
                raise
            except Exception:
                log.exception("request failed")
                await _fail(record, internal_error(), request, context)
            finally:
                self._metrics.in_flight.dec()
                self._runners.records.end(record)


def _take_request_id(
    record: RequestRecord, wanted: str | None, header: Header, context: "grpc.aio.ServicerContext[Any, Any]"
) -> None:
    """Gives the call the id that its message names, where its metadata name none. wanted: None where none is named."""
    if wanted is not None and not header("x-request-id"):
        record.request_id = wanted
        structlog.contextvars.bind_contextvars(request_id=wanted)
        context.set_trailing_metadata(_about(record))


def _show_figures(record: RequestRecord, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    """Sends, after a whole answer, the phases of a request and what is left of the key's limits."""
    if record.first_token is not None:
        phases = server_timing(record, monotonic())
        context.set_trailing_metadata((*_about(record), ("server-timing", phases)))
    elif record.limits_left:
        context.set_trailing_metadata(_about(record))


def _unknown_fields(request: _AnyRequest) -> tuple[str, ...]:
    """Names fields that a newer inference.proto has. In a large message, looking for them could take long."""
    return () if request.ByteSize() > _SEARCHED_BYTES else tuple(unknown_fields(request))


def _about(record: RequestRecord) -> tuple[tuple[str, str], ...]:
    """Makes the metadata that every answer ends with."""
    ignored = [(IGNORED_FIELDS, record.shown_ignored_fields)] if record.num_ignored_fields else []
    inserted = [(TOOLS, "inserted")] if record.tools_inserted else []
    return (("x-request-id", record.request_id), *ignored, *inserted, *limit_headers(record.limits_left))


async def _fail(
    record: RequestRecord, error: ApiError, request: _AnyRequest, context: "grpc.aio.ServicerContext[Any, Any]"
) -> None:
    """Ends the call with an error. Always raises."""
    code = CODE_OF_STATUS.get(error.status, grpc.StatusCode.INTERNAL)
    record.status = code.name
    record.error = error.code or error.type
    if error.status >= 500 and record.generates:
        log.warning("request failed", reason=str(error.__cause__ or error.message))
    trailing = [*_about(record), *error.headers.items()]
    await context.abort(code, grpc_message(error, request), tuple(trailing))
