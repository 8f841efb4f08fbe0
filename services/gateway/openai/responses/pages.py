"""The paths below /v1/responses/{id}: a response read, deleted and cancelled, and its input."""

import asyncio
from typing import Any

import orjson

from services.gateway.api.errors import ApiError, invalid, unsupported
from services.gateway.http.exchange import Exchange
from services.gateway.openai.responses.kept import KeptResponses, not_found
from services.gateway.openai.responses.request import LOGPROBS
from services.gateway.openai.responses.response import Status
from services.gateway.openai.responses.running import RunningResponses

_CANCEL_TIMEOUT_S = 30.0
DEFAULT_ITEMS, MOST_ITEMS = 20, 100


class ResponsePages:
    """Reads and changes responses that are being generated here, or kept."""

    def __init__(self, kept: KeptResponses, running: RunningResponses) -> None:
        self._kept = kept
        self._running = running

    async def retrieve(self, exchange: Exchange) -> None:
        """Sends a response. Raises ApiError."""
        _check_query(exchange.query())
        response_id = exchange.path_params["response_id"]
        if running := self._running.find(exchange.caller.tenant, response_id):
            await exchange.respond(200, orjson.dumps(running.described))
            return
        await exchange.respond(200, (await self._kept.find(exchange.caller.tenant, response_id)).response)

    async def delete(self, exchange: Exchange) -> None:
        """Deletes a kept response. Raises ApiError."""
        response_id = exchange.path_params["response_id"]
        await self._kept.delete(exchange.caller.tenant, response_id)
        await exchange.respond(200, orjson.dumps({"id": response_id, "object": "response", "deleted": True}))

    async def cancel(self, exchange: Exchange) -> None:
        """Ends a response that is being generated here, and sends it as it ended. Raises ApiError."""
        response_id = exchange.path_params["response_id"]
        running = self._running.find(exchange.caller.tenant, response_id)
        if running is None:
            kept = await self._kept.find(exchange.caller.tenant, response_id)
            status = orjson.loads(kept.response)["status"]
            if status != Status.CANCELLED:
                raise invalid(f"A response that is {status} cannot be cancelled.", None, "response_ended")
            await exchange.respond(200, kept.response)
            return
        running.cancel()
        try:
            async with asyncio.timeout(_CANCEL_TIMEOUT_S):
                await running.ended.wait()
        except TimeoutError as error:
            raise ApiError(504, "The response did not end in time.", code="timeout") from error
        if running.described["status"] == Status.IN_PROGRESS:  # it ended in an error, or its client left
            raise not_found(response_id)
        await exchange.respond(200, orjson.dumps(running.described))

    async def input_items(self, exchange: Exchange) -> None:
        """Sends the items that a response answers, earlier turns included, newest first. Raises ApiError."""
        query = exchange.query()
        _check_query(query)
        items = await self._kept.input_items(exchange.caller.tenant, exchange.path_params["response_id"])
        await exchange.respond(200, orjson.dumps(_page(items, query)))


def _page(items: list[dict[str, Any]], query: dict[str, list[str]]) -> dict[str, Any]:
    """Returns the page of a list that the query asks for. Raises ApiError."""
    order = query.get("order", ["desc"])[-1]
    if order not in ("asc", "desc"):
        raise invalid("Invalid 'order': supported are 'asc' or 'desc'.", "order", "invalid_value")
    limit = query.get("limit", [str(DEFAULT_ITEMS)])[-1]
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MOST_ITEMS:
        raise invalid(f"Invalid 'limit': it must be from 1 to {MOST_ITEMS}.", "limit", "invalid_value")
    ordered = items if order == "asc" else items[::-1]
    if after := query.get("after", [""])[-1]:
        places = [number for number, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise invalid("Invalid 'after': the response has no item with this id.", "after", "invalid_value")
        ordered = ordered[places[0] + 1 :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(ordered),
    }


def _check_query(query: dict[str, list[str]]) -> None:
    """Raises ApiError for what is not supported. Logprobs are there where the response's request asked for them."""
    for name in ("include", "include[]"):
        for value in query.get(name, []):
            if value != LOGPROBS:
                raise unsupported("include", f"'include' may be '{LOGPROBS}' alone.")
    if query.get("stream", ["false"])[-1] not in ("false", ""):
        raise unsupported("stream", "'stream' is not supported for a response that was created before.")
    if "starting_after" in query:
        raise unsupported("starting_after")
