"""The runners of all kinds of requests, and what they share."""

from dataclasses import dataclass

from services.gateway.api.dialects.chat import ChatDialect
from services.gateway.api.dialects.chat_answers import ChatModel
from services.gateway.api.dialects.chat_batch import BatchChatDialect, BatchChatRequest
from services.gateway.api.dialects.completions import CompletionDialect, CompletionRequest
from services.gateway.api.embeddings import EmbeddingRunner
from services.gateway.api.generation import Generator
from services.gateway.api.grammars.checks import GrammarChecks
from services.gateway.api.in_progress import InProgress
from services.gateway.api.records.request_records import RequestRecords
from services.gateway.api.records.tracing import Tracing
from services.gateway.api.request_runner import RequestRunner
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.served_models import ServedModels
from services.gateway.api.side_thread import SideThread
from services.gateway.metrics import GatewayMetrics
from services.gateway.side.processes import SideProcesses
from services.gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Runners:
    """One runner for each kind of generating request, one for embeddings, and what all of them share."""

    chat: RequestRunner[ChatRequest]
    chat_batches: RequestRunner[BatchChatRequest]
    completions: RequestRunner[CompletionRequest]
    embeddings: EmbeddingRunner
    models: ServedModels
    tokenizer: Tokenizer
    side: SideThread
    processes: SideProcesses
    records: RequestRecords
    in_progress: InProgress


def make_runners(
    models: ServedModels,
    tokenizer: Tokenizer,
    chat_model: ChatModel,
    generator: Generator,
    metrics: GatewayMetrics,
    tracing: Tracing | None = None,
) -> Runners:
    """Returns the runners of a gateway. tracing: None makes no spans."""
    side, processes = SideThread(), SideProcesses(tokenizer.backend.to_str)
    grammars = GrammarChecks(processes)
    chat, completions = ChatDialect(tokenizer, chat_model, side, processes), CompletionDialect(tokenizer, side)
    return Runners(
        RequestRunner(chat, models, tokenizer, generator, metrics, side, grammars),
        RequestRunner(BatchChatDialect(chat), models, tokenizer, generator, metrics, side, grammars),
        RequestRunner(completions, models, tokenizer, generator, metrics, side, grammars),
        EmbeddingRunner(models, tokenizer, generator, metrics, side),
        models,
        tokenizer,
        side,
        processes,
        RequestRecords(metrics, tracing),
        InProgress(),
    )
