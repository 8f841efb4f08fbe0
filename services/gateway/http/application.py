"""An HTTP application: a key asked for, one log line and one count for every request, and errors as envelopes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog
from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from services.config import Right
from services.gateway.api.caller import Authenticator
from services.gateway.api.errors import ApiError, internal_error
from services.gateway.api.runners import Runners
from services.gateway.http.exchange import STATUS_CLIENT_GONE, ClientGone, Exchange
from services.gateway.http.routes import announce
from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Gate:
    """The condition of every request: a key that has a right.

    open_paths: those at which no key is asked for. any_key: how paths begin at which any known key will do. second:
    rights that a key needs too, by how paths begin.
    """

    keys: Authenticator
    right: Right
    open_paths: frozenset[str]
    any_key: str | None = None
    second: Mapping[str, Right] = field(default_factory=dict)

    def rights_at(self, path: str) -> list[Right | None]:
        """Returns the rights that a key needs for a path, at least one; None: none, but it must be known."""
        first = None if self.any_key is not None and path.startswith(self.any_key) else self.right
        return [first, *(right for beginning, right in self.second.items() if path.startswith(beginning))]


class Application:
    """Gives every HTTP request its Exchange, and sees to it that each is answered and counted."""

    def __init__(
        self,
        router: Router,
        metrics: GatewayMetrics,
        runners: Runners,
        gate: Gate | None = None,
        elsewhere: Mapping[str, str] | None = None,
        *,
        for_clients: bool = True,
        pages: str | None = None,
    ) -> None:
        """gate: None asks for no key. elsewhere: by how paths begin that are not here, the port that has them.

        for_clients: False leaves requests out of `baton_requests_in_flight`; so does a path that begins with `pages`.
        """
        self.router = router
        self._metrics = metrics
        self._in_flight = int(for_clients)  # by how much a request raises the gauge
        self._pages = pages
        self._records = runners.records
        self._in_progress = runners.in_progress
        self._gate = gate
        self._elsewhere = elsewhere or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        # With an app in its scope the router raises for unknown paths, instead of answering in plain text.
        inner = {**scope, "app": self, "exchange": exchange}
        raised = 0 if self._pages is not None and scope["path"].startswith(self._pages) else self._in_flight
        with structlog.contextvars.bound_contextvars(request_id=exchange.record.request_id):
            self._metrics.in_flight.inc(raised)
            try:
                await self._answer(exchange, inner, receive, send)
            finally:
                self._metrics.in_flight.dec(raised)
                self._records.end(exchange.record)

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._gate is not None:
                self._admit(self._gate, exchange, scope)
            async with self._in_progress.answering():
                await self.router(scope, receive, send)
        except ClientGone:
            exchange.record.status = STATUS_CLIENT_GONE
        except ApiError as error:
            if error.status >= 500 and exchange.record.generates:
                log.warning("request failed", reason=str(error.__cause__ or error.message))
            await exchange.fail(error)
        except HTTPException as error:
            await exchange.fail(self._from_router(error, scope["path"]))
        except Exception:
            log.exception("request failed")
            await exchange.fail(internal_error())

    def _admit(self, gate: Gate, exchange: Exchange, scope: Scope) -> None:
        """Notes who asks, before anything of the body is read. Raises ApiError."""
        if scope["path"] in gate.open_paths:
            return
        try:
            for right in gate.rights_at(scope["path"]):
                exchange.caller = gate.keys.caller(exchange.header, right)
        except ApiError as error:
            announce(self.router.routes, scope)
            if exchange.has_body:
                error.headers["connection"] = "close"  # instead of reading what a stranger sends
            raise
        exchange.record.key_id = exchange.caller.key_id

    def _from_router(self, error: HTTPException, path: str) -> ApiError:
        headers: Mapping[str, str] = error.headers or {}
        if error.status_code == 405:
            return ApiError(
                405, f"This path takes {headers.get('Allow')} only.", headers={"allow": headers.get("Allow", "")}
            )
        port = next((port for start, port in self._elsewhere.items() if path.startswith(start)), None)
        there = "" if port is None else f" Paths like it are at {port}."
        return ApiError(error.status_code, f"There is nothing at this path.{there}", code="unknown_url")
