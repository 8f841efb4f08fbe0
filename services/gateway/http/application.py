"""An HTTP application: one log line and one count for every request, and errors as envelopes."""

from collections.abc import Awaitable, Mapping

import structlog
from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from services.gateway.api.errors import ApiError, internal_error
from services.gateway.api.request_records import RequestRecords
from services.gateway.http.exchange import STATUS_CLIENT_GONE, ClientGone, Exchange
from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger()


class Application:
    """Gives every HTTP request its Exchange, and sees to it that each is answered and counted."""

    def __init__(self, router: Router, metrics: GatewayMetrics, records: RequestRecords) -> None:
        self._router = router
        self._metrics = metrics
        self._records = records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        # With an app in its scope the router raises for unknown paths, instead of answering in plain text.
        inner = {**scope, "app": self, "exchange": exchange}
        with structlog.contextvars.bound_contextvars(request_id=exchange.record.request_id):
            self._metrics.in_flight.inc()
            try:
                await self._answer(exchange, self._router(inner, receive, send))
            finally:
                self._metrics.in_flight.dec()
                self._records.end(exchange.record)

    async def _answer(self, exchange: Exchange, handling: Awaitable[None]) -> None:
        try:
            await handling
        except ClientGone:
            exchange.record.status = STATUS_CLIENT_GONE
        except ApiError as error:
            if error.status >= 500 and exchange.record.generates:
                log.warning("request failed", reason=str(error.__cause__ or error.message))
            await exchange.fail(error)
        except HTTPException as error:
            await exchange.fail(_from_router(error))
        except Exception:
            log.exception("request failed")
            await exchange.fail(internal_error())


def _from_router(error: HTTPException) -> ApiError:
    headers: Mapping[str, str] = error.headers or {}
    if error.status_code == 405:
        return ApiError(
            405, f"This path takes {headers.get('Allow')} only.", headers={"allow": headers.get("Allow", "")}
        )
    return ApiError(error.status_code, "There is nothing at this path.", code="unknown_url")
