"""Runs requests for scores of pairs of texts.

A model for embeddings scores a pair by the cosine of its vectors. A cross encoder reads both texts at once, and what it
makes of them instead of an embedding is one number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.gateway.api.dialects.scoring import ScoringRequest
from services.gateway.api.embeddings import EmbeddingRunner
from services.gateway.api.errors import unsupported
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.api.requests.large_json import takes_long
from services.gateway.api.requests.validation import Neutral, parse_request
from services.gateway.api.served_models import Resolved
from services.gateway.api.terms import Terms
from services.protocol.model_files.cross_encoder import PairForm


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """The scores of a request's pairs, in their order."""

    scores: list[float]
    prompt_tokens: int


class ScoreRunner:
    """Runs requests for scores."""

    def __init__(self, embeddings: EmbeddingRunner) -> None:
        self.side = embeddings.side
        self._embeddings = embeddings

    async def parse(self, body: bytes, kind: type[ScoringRequest], neutral: Neutral) -> Resolved[ScoringRequest]:
        """Returns the checked request of a body, with its model. Raises ApiError."""
        request = await self.side.run_if(takes_long(body), parse_request, body, kind, neutral)
        request.check_combinations()
        model = self._embeddings.check(request.inputs(), scores=True).model
        if model.base.cross_encoder is None and request.use_activation is False:
            raise unsupported("use_activation", "'use_activation' is for cross encoders: a cosine has no activation.")
        if request.instruction is not None and (
            model.base.cross_encoder is None or model.base.cross_encoder.form is not PairForm.JUDGED
        ):
            raise unsupported("instruction", "'instruction' is for models whose prompt has one, as Qwen3-Reranker's.")
        return Resolved(request, model)

    async def run(self, asked: Resolved[ScoringRequest], record: RequestRecord, terms: Terms) -> ScoreAnswer:
        """Asks workers for what the scores are made of. Raises ApiError."""
        cross_encoder, (first, second) = asked.model.base.cross_encoder, asked.request.sides
        if cross_encoder is not None:
            answer = await self._embeddings.run(
                Resolved(asked.request.pairs(cross_encoder.form), asked.model), record, terms
            )
            numbers = np.array(answer.vectors, np.float64)[:, 0]
            if cross_encoder.sigmoid and asked.request.use_activation is not False:
                numbers = 1 / (1 + np.exp(-numbers))
            return ScoreAnswer(numbers.tolist(), answer.prompt_tokens)
        answer = await self._embeddings.run(Resolved(asked.request.inputs(), asked.model), record, terms)
        scores = cosines(answer.vectors[: len(first.texts)], answer.vectors[len(first.texts) :])
        assert len(scores) == len(second.texts)
        return ScoreAnswer(scores, answer.prompt_tokens)


def cosines(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> list[float]:
    """Returns the products of vectors of length 1, float32[size]: of the only one in `first` with each in `second`, or
    of those at the same places.
    """
    products = np.einsum("ij,ij->i", *np.broadcast_arrays(np.array(first, np.float64), np.array(second, np.float64)))
    scores: list[float] = products.tolist()
    return scores
