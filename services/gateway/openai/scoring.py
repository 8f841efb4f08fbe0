"""POST /v1/rerank and POST /v1/score: how well texts belong together, as vLLM answers it."""

from collections.abc import Callable
from typing import Any

import orjson

from services.gateway.api.dialects.scoring import RerankRequest, ScoringRequest
from services.gateway.api.request_runner import READING_GRACE_S
from services.gateway.api.requests.validation import ignored_fields
from services.gateway.api.runners import Runners
from services.gateway.api.scores import ScoreAnswer
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits
from services.gateway.openai.answer import AnswerHead
from services.gateway.openai.neutral import SCORES_NEUTRAL

Write = Callable[[ScoreAnswer, Any, AnswerHead], bytes]


class ScoringEndpoint:
    """Answers requests for scores of one kind, each as `write` writes its answer."""

    def __init__(self, runners: Runners, limits: Limits, kind: type[ScoringRequest], write: Write) -> None:
        self._runner = runners.scores
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
        asked = await self._runner.parse(body, self._kind, SCORES_NEUTRAL)
        del body
        exchange.take_request_id(asked.request.request_id)
        record.note_ignored_fields(ignored_fields(asked.request.unknown_fields(), limits.strict_fields))
        async with exchange.while_connected(terms.timeout_s + READING_GRACE_S):
            answer = await self._runner.run(asked, record, terms)
            await exchange.respond(
                200, self._write(answer, asked.request, AnswerHead.of(record.request_id, asked.model))
            )


def score_list(answer: ScoreAnswer, request: ScoringRequest, head: AnswerHead) -> bytes:
    """Returns the JSON of an answer of /v1/score: scores in the order of the pairs."""
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(answer.scores)]
    about = {"id": f"score-{head.request_id}", "object": "list", "created": head.created, "model": head.model}
    return orjson.dumps({**about, "data": data, "usage": _usage(answer)})


def ranked_list(answer: ScoreAnswer, request: RerankRequest, head: AnswerHead) -> bytes:
    """Returns the JSON of an answer of /v1/rerank: the best documents first; of equal ones the first."""
    scores, texts = answer.scores, request.sides[1].texts
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
    shows = request.return_documents is not False
    results = [
        {"index": index, **({"document": {"text": texts[index]}} if shows else {}), "relevance_score": scores[index]}
        for index in order
    ]
    about = {"id": f"rerank-{head.request_id}", "model": head.model}
    return orjson.dumps({**about, "usage": _usage(answer), "results": results})


def _usage(answer: ScoreAnswer) -> dict[str, int]:
    return {"prompt_tokens": answer.prompt_tokens, "total_tokens": answer.prompt_tokens}
