"""POST /v2/embed: a vector for each text, in one or more of Cohere's types."""

from base64 import b64encode

import numpy as np
import orjson

from services.gateway.api.dialects.embedding_inputs import EmbeddingRequest
from services.gateway.api.embeddings import EmbeddingAnswer
from services.gateway.api.request_runner import READING_GRACE_S
from services.gateway.api.requests.large_json import takes_long
from services.gateway.api.requests.validation import ignored_fields, parse_request, validate_request
from services.gateway.api.runners import Runners
from services.gateway.api.served_models import Resolved
from services.gateway.cohere_api.embed_request import (
    EMBED_NEUTRAL,
    EmbeddedTexts,
    EmbeddingType,
    EmbedRequest,
    check_bits,
)
from services.gateway.cohere_api.errors import in_words_of_cohere
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits

_FEW_NUMBERS = 16_384  # are written in 2 ms


class CohereEmbeddings:
    """Answers requests of /v2/embed."""

    def __init__(self, runners: Runners, limits: Limits) -> None:
        self._runner = runners.embeddings
        self._records = runners.records
        self._limits = limits

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        record, side = exchange.record, self._runner.side
        terms = self._limits.terms(exchange.header, exchange.caller)
        self._records.begin(record, exchange.header)
        body = await exchange.read_json(self._limits.max_body_bytes)
        request, asked = await side.run_if(takes_long(body), self._parse, body)
        del body
        ignored = request.ignored(asked.model.base.texts)
        record.note_ignored_fields(ignored_fields(ignored, self._limits.strict_fields))
        with in_words_of_cohere(request.names):
            async with exchange.while_connected(terms.timeout_s + READING_GRACE_S):
                answer = await self._runner.run(asked, record, terms)
                if request.packs_bits:
                    check_bits(len(answer.vectors[0]), "embedding_types")
                long = sum(map(len, answer.vectors)) > _FEW_NUMBERS
                await exchange.respond(200, await side.run_if(long, written, answer, request, record.request_id))

    def _parse(self, body: bytes) -> tuple[EmbedRequest, Resolved[EmbeddingRequest]]:
        """Returns the request in a body, and the request for embeddings that it is. Raises ApiError."""
        request = parse_request(body, EmbedRequest, EMBED_NEUTRAL)
        request.check_combinations()
        with in_words_of_cohere(request.names):
            texts = self._runner.texts_of(request.model)
            return request, self._runner.check(validate_request(request.fields(texts), EmbeddedTexts, {}))


def written(answer: EmbeddingAnswer, request: EmbedRequest, answer_id: str) -> bytes:
    """Returns the JSON of an answer. No part of it keeps the interpreter lock for long."""
    of_types = (b'"%b":[%b]' % (name.encode(), _listed(answer.vectors, name)) for name in request.types)
    tokens = {"input_tokens": answer.prompt_tokens}
    about = {
        "texts": request.own_texts,
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": tokens,
            "tokens": tokens,
            "cached_tokens": answer.cached_tokens,
        },
    }
    head = orjson.dumps({"id": answer_id, "response_type": "embeddings_by_type"})[:-1]
    return b'%b,"embeddings":{%b},%b' % (head, b",".join(of_types), orjson.dumps(about)[1:])


def _listed(vectors: list[np.ndarray], kind: EmbeddingType) -> bytes:
    return b",".join(_as_type(vector, kind) for vector in vectors)


def _as_type(vector: np.ndarray, kind: EmbeddingType) -> bytes:
    """Returns the JSON of a vector, float32[n]. Bits are 1 for numbers from 0 on, a byte's highest first."""
    numbers: np.ndarray
    match kind:
        case "float":
            numbers = np.ascontiguousarray(vector, np.float32)
        case "base64":
            return b'"%b"' % b64encode(vector.astype("<f4").tobytes())
        case "ubinary":
            numbers = np.packbits(vector >= 0)
        case "binary":  # the same, 128 less
            numbers = (np.packbits(vector >= 0) ^ np.uint8(128)).view(np.int8)
    return orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)
