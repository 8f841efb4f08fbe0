"""The endpoints that generate nothing: models, probes, metrics, the ledger, recent requests, documents."""

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST

from services.gateway.api.errors import ApiError, unavailable
from services.gateway.api.generation import Generator
from services.gateway.api.records.request_records import KEPT, RequestRecords
from services.gateway.api.served_models import ServedModel, ServedModels
from services.gateway.http.exchange import Exchange
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.docs_page import SCRIPT, STYLE, DocsPage

HTML = "text/html; charset=utf-8"


class Models:
    """GET /v1/models and GET /v1/models/{model}."""

    def __init__(self, models: ServedModels, generator: Generator) -> None:
        self._models = models
        self._generator = generator

    async def list(self, exchange: Exchange) -> None:
        """Sends a list of the models by all their names, in OpenAI's form and in Anthropic's."""
        names = [*self._models.by_name]
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        listed = {"object": "list", "data": [self._describe(*each) for each in self._models.by_name.items()], **pages}
        await exchange.respond(200, orjson.dumps(listed))

    async def retrieve(self, exchange: Exchange) -> None:
        """Sends a model by its name. Raises ApiError."""
        name = self._models.listed_name(exchange.path_params["model"])
        await exchange.respond(200, orjson.dumps(self._describe(name, self._models.by_name[name])))

    def _describe(self, name: str, model: ServedModel) -> dict[str, object]:
        created = datetime.fromtimestamp(model.base.created, UTC)
        return {
            "id": name,
            "object": "model",
            "created": model.base.created,
            "owned_by": "baton",
            "root": model.base.name,
            "parent": model.parent,
            "max_model_len": self._generator.max_model_len,
            "type": "model",
            "display_name": name,
            "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "max_input_tokens": self._generator.max_model_len,
        }


class Probes:
    """The pages for a supervisor, for Prometheus, and for people who look into the gateway."""

    def __init__(self, generator: Generator, metrics: GatewayMetrics, describe_ledger: Callable[[], object]) -> None:
        self._generator = generator
        self._metrics = metrics
        self._describe_ledger = describe_ledger

    async def health(self, exchange: Exchange) -> None:
        """Answers 200: the process is alive."""
        await exchange.respond(200, b'{"status":"ok"}')

    async def ready(self, exchange: Exchange) -> None:
        """Answers 200 when a request would find a worker. Raises ApiError.

        The answer tells which process it is, for a launcher that starts one gateway beside another, and how long a
        sequence may be.
        """
        if not self._generator.ready():
            raise unavailable("No worker is ready yet. Try again later.", retry_after_s=1)
        answer = {"status": "ready", "pid": os.getpid(), "max_model_len": self._generator.max_model_len}
        await exchange.respond(200, orjson.dumps(answer))

    async def version(self, exchange: Exchange) -> None:
        """Sends the version of this program."""
        await exchange.respond(200, orjson.dumps({"version": version("baton-serve")}))

    async def load(self, exchange: Exchange) -> None:
        """Sends the number of requests that are being answered, this one not counted."""
        await exchange.respond(200, orjson.dumps({"server_load": self._metrics.num_in_flight() - 1}))

    async def metrics(self, exchange: Exchange) -> None:
        """Sends the metrics in Prometheus' text format."""
        await exchange.respond(200, self._metrics.render(), CONTENT_TYPE_LATEST)

    async def ledger(self, exchange: Exchange) -> None:
        """Sends the dispatch side's description of the requests in flight."""
        await exchange.respond(200, orjson.dumps(self._describe_ledger()))


class Documents:
    """The description of the API, its page, and GET /tokenizer_info: the same for the life of the process."""

    def __init__(
        self, document: Mapping[str, Any], page: DocsPage, tokenizer_info: Mapping[str, object] | None
    ) -> None:
        self._document = orjson.dumps(document)
        self._page = page
        self._policy = {"content-security-policy": page.policy}
        self._tokenizer_info = tokenizer_info

    async def openapi(self, exchange: Exchange) -> None:
        """Sends the description of all endpoints."""
        await exchange.respond(200, self._document)

    async def page(self, exchange: Exchange) -> None:
        """Sends the same as a page."""
        await exchange.respond(200, self._page.html, HTML, self._policy)

    async def style(self, exchange: Exchange) -> None:
        """Sends the page's style."""
        await exchange.respond(200, self._page.files[STYLE], "text/css; charset=utf-8")

    async def script(self, exchange: Exchange) -> None:
        """Sends the page's program."""
        await exchange.respond(200, self._page.files[SCRIPT], "text/javascript; charset=utf-8")

    async def tokenizer_info(self, exchange: Exchange) -> None:
        """Sends what the model says of its tokenizer."""
        await exchange.respond(200, orjson.dumps(self._tokenizer_info))


class RecentRequests:
    """GET /debug/requests and GET /debug/requests/{request_id}."""

    def __init__(self, records: RequestRecords) -> None:
        self._records = records

    async def list(self, exchange: Exchange) -> None:
        """Sends the recent requests, newest first."""
        await exchange.respond(200, orjson.dumps({"requests": self._records.recent()}))

    async def retrieve(self, exchange: Exchange) -> None:
        """Sends all that is known of one request. Raises ApiError."""
        record = self._records.find(exchange.path_params["request_id"])
        if record is None:
            raise ApiError(404, f"None of the last {KEPT} requests has this id.", code="unknown_request")
        await exchange.respond(200, orjson.dumps(record))
