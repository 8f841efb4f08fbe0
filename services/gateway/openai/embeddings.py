"""POST /v1/embeddings and POST /pooling: a vector for each input, as numbers or as their bytes, in base64 or plain."""

import json
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import numpy as np
import orjson

from services.gateway.api.dialects.embedding_inputs import EmbeddingRequest
from services.gateway.api.embeddings import EmbeddingAnswer
from services.gateway.api.request_runner import READING_GRACE_S
from services.gateway.api.requests.validation import ignored_fields
from services.gateway.api.runners import Runners
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits
from services.gateway.http.operation import BINARY
from services.gateway.openai.answer import AnswerHead
from services.gateway.openai.neutral import EMBEDDINGS_NEUTRAL

_FEW_NUMBERS = 16_384  # are written in 2 ms


Write = Callable[[EmbeddingAnswer, EmbeddingRequest, AnswerHead], bytes]


class EmbeddingEndpoint:
    """Answers requests for embeddings of one kind, each as `write` writes its answer."""

    def __init__(
        self,
        runners: Runners,
        limits: Limits,
        kind: type[EmbeddingRequest],
        write: Write,
    ) -> None:
        self._runner = runners.embeddings
        self._limits = limits
        self._records = runners.records
        self._kind = kind
        self._write = write

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        limits, record = self._limits, exchange.record
        terms = limits.terms(exchange.header, exchange.caller)
        self._records.begin(record, exchange.header)
        body = await exchange.read_json(limits.max_body_bytes)
        asked = await self._runner.parse(body, self._kind, EMBEDDINGS_NEUTRAL)
        request = asked.request
        del body
        exchange.take_request_id(request.request_id)
        record.note_ignored_fields(ignored_fields(request.unknown_fields(), limits.strict_fields))
        async with exchange.while_connected(terms.timeout_s + READING_GRACE_S):
            answer = await self._runner.run(asked, record, terms)
            long = sum(map(len, answer.vectors)) > _FEW_NUMBERS
            side, head = self._runner.side, AnswerHead.of(record.request_id, asked.model)
            if request.encoding_format in ("bytes", "bytes_only"):
                body, headers = await side.run_if(long, plain_bytes, answer, request, head)
                await exchange.respond(200, body, BINARY, headers)
            else:
                await exchange.respond(200, await side.run_if(long, self._write, answer, request, head))


def embedding_list(answer: EmbeddingAnswer, request: EmbeddingRequest, head: AnswerHead) -> bytes:
    """Returns the JSON of an answer of OpenAI's API."""
    return _list(answer, request, b'{"object":"embedding","index":%d,"embedding":%b}', {"model": head.model})


def pooling_list(answer: EmbeddingAnswer, request: EmbeddingRequest, head: AnswerHead) -> bytes:
    """Returns the JSON of an answer of vLLM's /pooling."""
    about = {"id": f"pool-{head.request_id}", "created": head.created, "model": head.model}
    return _list(answer, request, b'{"object":"pooling","index":%d,"data":%b}', about)


def plain_bytes(answer: EmbeddingAnswer, request: EmbeddingRequest, head: AnswerHead) -> tuple[bytes, dict[str, str]]:
    """Returns the bytes of all vectors and, where they are to be listed, vLLM's header that does."""
    vectors = [_bytes(vector, request) for vector in answer.vectors]
    if request.encoding_format == "bytes_only":
        return b"".join(vectors), {}
    ends = [*accumulate(map(len, vectors), initial=0)]
    listed = [
        {
            "index": index,
            "embed_dtype": request.embed_dtype or "float32",
            "endianness": request.endianness or "native",
            "start": ends[index],
            "end": ends[index + 1],
            "shape": [len(vector)],
        }
        for index, vector in enumerate(answer.vectors)
    ]
    about = {"id": head.request_id, "created": head.created, "model": head.model}
    return b"".join(vectors), {"metadata": json.dumps({**about, "data": listed, "usage": _usage(answer)})}


def _usage(answer: EmbeddingAnswer) -> dict[str, int]:
    return {"prompt_tokens": answer.prompt_tokens, "total_tokens": answer.prompt_tokens}


def _list(answer: EmbeddingAnswer, request: EmbeddingRequest, entry: bytes, about: dict[str, object]) -> bytes:
    """Returns the JSON of a list of vectors. No part of it keeps the interpreter lock for long."""
    write = partial(_base64, request=request) if request.encoding_format == "base64" else _numbers
    data = [entry % (index, write(vector)) for index, vector in enumerate(answer.vectors)]
    end = orjson.dumps({**about, "usage": _usage(answer)})[1:]
    return b'{"object":"list","data":[%b],%b' % (b",".join(data), end)


def _numbers(vector: np.ndarray) -> bytes:
    return orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)


def _base64(vector: np.ndarray, request: EmbeddingRequest) -> bytes:
    return b'"%b"' % b64encode(_bytes(vector, request))


def _bytes(vector: np.ndarray, request: EmbeddingRequest) -> bytes:
    return vector_bytes(vector, request.embed_dtype or "float32", big_endian=request.endianness == "big")


def vector_bytes(vector: np.ndarray, dtype: str, *, big_endian: bool) -> bytes:
    """Returns the numbers of a vector, float32, as bytes of another type, each rounded to the nearest one."""
    order = ">" if big_endian else "<"
    if dtype != "bfloat16":
        return vector.astype(f"{order}f{4 if dtype == 'float32' else 2}").tobytes()
    bits = np.ascontiguousarray(vector, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(f"{order}u2").tobytes()
