"""The paths below /v1/responses/{id}: a response read, deleted and cancelled, and its input."""

import asyncio
from typing import Any

import orjson

from services.gateway.api.errors import ApiError, invalid, unsupported
from services.gateway.api.requests.validation import ignored_fields
from services.gateway.http.exchange import Exchange
from services.gateway.openai.responses.following import follow, send_kept
from services.gateway.openai.responses.kept import KeptResponses, not_found, unended
from services.gateway.openai.responses.kept_response import KeptResponse
from services.gateway.openai.responses.request import LOGPROBS
from services.gateway.openai.responses.response import GOING_ON, Status
from services.gateway.openai.responses.running import RunningResponse, RunningResponses

_CANCEL_TIMEOUT_S = 30.0
_LOOK_EVERY_S = 0.5  # for the end of a response that another gateway generates
_MAX_DIGITS = 9
DEFAULT_ITEMS, MOST_ITEMS = 20, 100


class ResponsePages:
    """Reads and changes responses that are being generated here, or kept."""

    def __init__(self, kept: KeptResponses, running: RunningResponses, stream_s: float, strict_fields: bool) -> None:
        """stream_s: how long a client may read the events of a response. strict_fields: see Limits."""
        self._kept = kept
        self._running = running
        self._stream_s = stream_s
        self._strict_fields = strict_fields

    def _query(self, exchange: Exchange) -> dict[str, list[str]]:
        """Returns the query, and notes what cannot be included. Raises ApiError.

        Logprobs are there where the response's request asked for them.
        """
        query = exchange.query()
        included = [*query.get("include", []), *query.get("include[]", [])]
        names = (f"include[{number}]" for number, name in enumerate(included) if name != LOGPROBS)
        exchange.record.note_ignored_fields(ignored_fields(names, self._strict_fields))
        return query

    async def retrieve(self, exchange: Exchange) -> None:
        """Sends a response, or its events. Raises ApiError, ClientGone."""
        query = self._query(exchange)
        response_id = exchange.path_params["response_id"]
        if _wants_stream(query):
            async with exchange.while_connected(self._stream_s):
                await self._stream(exchange, response_id, _starting_after(query))
            return
        if "starting_after" in query:
            raise invalid("'starting_after' is only allowed when 'stream' is true.", "starting_after")
        if running := self._running.find(exchange.caller.tenant, response_id):
            await exchange.respond(200, orjson.dumps(running.described))
            return
        await exchange.respond(200, (await self._kept.find(exchange.caller.tenant, response_id)).response)

    async def _stream(self, exchange: Exchange, response_id: str, after: int) -> None:
        if running := self._running.find(exchange.caller.tenant, response_id):
            if running.items is None:
                raise _not_in_background()
            await follow(exchange, running, after)
            return
        kept = await self._until_ended(exchange.caller.tenant, response_id)
        if not kept.pieces:
            raise _not_in_background()
        items = await self._kept.cut_items(response_id, kept)
        await send_kept(exchange, orjson.loads(kept.response), items, after)

    async def _until_ended(self, tenant: str, response_id: str) -> KeptResponse:
        """Returns a kept response when it has ended: another gateway may generate it. Raises ApiError."""
        while not (kept := await self._kept.find(tenant, response_id)).ended:
            await asyncio.sleep(_LOOK_EVERY_S)
        return kept

    async def delete(self, exchange: Exchange) -> None:
        """Deletes a kept response. Raises ApiError."""
        response_id = exchange.path_params["response_id"]
        running = self._running.find(exchange.caller.tenant, response_id)
        if running is not None and running.items is not None and not running.ended.is_set():
            raise unended(response_id, "deleted")
        await self._kept.delete(exchange.caller.tenant, response_id)
        await exchange.respond(200, orjson.dumps({"id": response_id, "object": "response", "deleted": True}))

    async def cancel(self, exchange: Exchange) -> None:
        """Ends a response that is being generated, and sends it as it ended. Raises ApiError."""
        response_id = exchange.path_params["response_id"]
        running = self._running.find(exchange.caller.tenant, response_id)
        try:
            async with asyncio.timeout(_CANCEL_TIMEOUT_S):
                if running is not None and (running.items is None or not running.ended.is_set()):
                    cancelled = await _cancelled(response_id, running)
                else:
                    cancelled = await self._cancelled(exchange.caller.tenant, response_id)
        except TimeoutError as error:
            raise ApiError(504, "The response did not end in time.", code="timeout") from error
        await exchange.respond(200, cancelled)

    async def _cancelled(self, tenant: str, response_id: str) -> bytes:
        """Returns a response as it ended that no request of this gateway generates. Raises ApiError."""
        kept = await self._kept.find(tenant, response_id)
        if not kept.ended:
            while not (kept := await self._kept.find(tenant, response_id)).ended:
                await self._kept.ask_for_end(tenant, response_id)  # again: the store may have lost the question
                await asyncio.sleep(_LOOK_EVERY_S)
            return kept.response
        status = orjson.loads(kept.response)["status"]
        if status != Status.CANCELLED:
            raise invalid(f"A response that is {status} cannot be cancelled.", None, "response_ended")
        return kept.response

    async def input_items(self, exchange: Exchange) -> None:
        """Sends the items that a response answers, earlier turns included, newest first. Raises ApiError."""
        query = self._query(exchange)
        if _wants_stream(query):
            raise unsupported("stream", "'stream' is not supported for the items that a response answers.")
        if "starting_after" in query:
            raise unsupported("starting_after")
        items = await self._kept.input_items(exchange.caller.tenant, exchange.path_params["response_id"])
        await exchange.respond(200, orjson.dumps(_page(items, query)))


def _page(items: list[dict[str, Any]], query: dict[str, list[str]]) -> dict[str, Any]:
    """Returns the page of a list that the query asks for. Raises ApiError."""
    order = query.get("order", ["desc"])[-1]
    if order not in ("asc", "desc"):
        raise invalid("Invalid 'order': supported are 'asc' or 'desc'.", "order", "invalid_value")
    limit = query.get("limit", [str(DEFAULT_ITEMS)])[-1]
    is_number = limit.isascii() and limit.isdigit() and len(limit) <= _MAX_DIGITS
    if not is_number or not 1 <= int(limit) <= MOST_ITEMS:
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


async def _cancelled(response_id: str, running: RunningResponse) -> bytes:
    """Ends a response of this gateway, and returns it as it ended. Raises ApiError."""
    running.cancel()
    await running.ended.wait()
    if running.described["status"] in GOING_ON:  # it ended in an error, or its client left
        raise not_found(response_id)
    return orjson.dumps(running.described)


def _wants_stream(query: dict[str, list[str]]) -> bool:
    """Raises ApiError."""
    wanted = query.get("stream", ["false"])[-1]
    if wanted not in ("true", "false", ""):
        raise invalid("Invalid 'stream': it must be true or false.", "stream", "invalid_value")
    return wanted == "true"


def _starting_after(query: dict[str, list[str]]) -> int:
    """Returns the number of the last event that the client has; -1: none. Raises ApiError."""
    if "starting_after" not in query:
        return -1
    number = query["starting_after"][-1]
    if not number.isascii() or not number.isdigit() or len(number) > _MAX_DIGITS:
        message = "Invalid 'starting_after': it must be the sequence number of an event."
        raise invalid(message, "starting_after", "invalid_value")
    return int(number)


def _not_in_background() -> ApiError:
    return unsupported("stream", "'stream' is not supported for a response that was not created with 'background'.")
