"""The runners of all kinds of requests, by kind, and what they share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.api.dialects.chat import ChatDialect
from services.gateway.api.dialects.chat_answers import ChatModel
from services.gateway.api.dialects.chat_batch import BatchChatDialect
from services.gateway.api.dialects.completions import CompletionDialect
from services.gateway.api.dialects.dialect import Dialect
from services.gateway.api.embeddings import EmbeddingRunner
from services.gateway.api.generation import Generator
from services.gateway.api.grammars.checks import GrammarChecks
from services.gateway.api.in_progress import InProgress
from services.gateway.api.records.request_records import RequestRecords
from services.gateway.api.records.tracing import Tracing
from services.gateway.api.request_runner import RequestRunner
from services.gateway.api.requests.schema import CommonRequest, Request
from services.gateway.api.scores import ScoreRunner
from services.gateway.api.served_models import ServedModels
from services.gateway.api.side_thread import SideThread
from services.gateway.metrics import GatewayMetrics
from services.gateway.side.processes import SideProcesses
from services.gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Runners:
    """One runner for each kind of generating request, those for embeddings and scores, and what all of them share."""

    by_kind: Mapping[type[CommonRequest], RequestRunner[Any]]  # each under its dialect's `kind`
    embeddings: EmbeddingRunner
    scores: ScoreRunner
    models: ServedModels
    tokenizer: Tokenizer
    side: SideThread
    processes: SideProcesses
    records: RequestRecords
    in_progress: InProgress

    def of(self, kind: type[Request]) -> RequestRunner[Request]:
        """Returns the runner of requests of a dialect's kind."""
        return self.by_kind[kind]


def make_runners(
    models: ServedModels,
    tokenizer: Tokenizer,
    chat_model: ChatModel,
    generator: Generator,
    metrics: GatewayMetrics,
    tracing: Tracing | None = None,
    *,
    keeps_text: bool = False,
) -> Runners:
    """Returns the runners of a gateway. tracing: None makes no spans. keeps_text: see RequestRecords."""
    side, processes = SideThread(), SideProcesses(tokenizer.backend.to_str)
    grammars = GrammarChecks(processes)
    chats = ChatDialect(tokenizer, chat_model, side, processes)
    dialects: tuple[Dialect[Any], ...] = (chats, BatchChatDialect(chats), CompletionDialect(tokenizer, side))
    embeddings = EmbeddingRunner(models, tokenizer, generator, metrics, side)
    return Runners(
        {
            dialect.kind: RequestRunner(dialect, models, tokenizer, generator, metrics, side, grammars)
            for dialect in dialects
        },
        embeddings,
        ScoreRunner(embeddings),
        models,
        tokenizer,
        side,
        processes,
        RequestRecords(metrics, tracing, keeps_text=keeps_text),
        InProgress(),
    )
