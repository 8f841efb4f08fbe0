"""The kept responses as requests ask for them, with the errors that clients get."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import structlog
from pydantic import TypeAdapter

from services.gateway.api.errors import ApiError, unavailable, unsupported
from services.gateway.api.large_json import takes_long
from services.gateway.api.side_thread import SideThread
from services.gateway.openai.responses.items import AnyItem, Item, num_parts
from services.gateway.openai.responses.store import MAX_KEPT_BYTES, KeptResponse, ResponseStore, StoreUnavailable

FEW_PARTS = 128  # of items, which are handled in a millisecond or two

_RETRY_AFTER_S = 1
_ID = re.compile(r"[A-Za-z0-9._:@+=~-]{1,200}")  # of a response
_ITEMS: TypeAdapter[list[AnyItem]] = TypeAdapter(list[AnyItem])

log = structlog.get_logger()


class KeptResponses:
    """Reads and writes a store. `store`: None keeps nothing."""

    def __init__(self, store: ResponseStore | None, side: SideThread) -> None:
        self._store = store
        self._side = side

    def asked(self, store: bool | None) -> bool:
        """True for a request whose response is to be kept. `store`: the request's. Raises ApiError."""
        if store and self._store is None:
            raise unsupported("store", "This server keeps no responses: 'store' must be false, or left out.")
        return self._store is not None and store is not False

    async def keep(self, tenant: str, response: Mapping[str, Any], items: Sequence[Item]) -> bool:
        """Keeps a response to these items. False: it is not kept, being too large, or the store does not answer."""
        assert self._store is not None
        if sum(len(text) for item in items for text in item.texts) > MAX_KEPT_BYTES:
            return False  # before it is made
        packed = await self._side.run_if(num_parts(items) > FEW_PARTS, _packed, response, items)
        return await self._store.put(tenant, response["id"], packed)

    async def find(self, tenant: str, response_id: str, param: str | None = None) -> KeptResponse:
        """Returns a response. `param`: the field that names it. Raises ApiError."""
        packed = None
        if self._store is not None and _ID.fullmatch(response_id):
            try:
                packed = await self._store.get(tenant, response_id)
            except StoreUnavailable as error:
                raise _unavailable(param) from error
        if packed is None:
            raise not_found(response_id, param)
        return KeptResponse.unpack(packed)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Deletes a response. Raises ApiError."""
        found = False
        if self._store is not None and _ID.fullmatch(response_id):
            try:
                found = await self._store.delete(tenant, response_id)
            except StoreUnavailable as error:
                raise _unavailable(None) from error
        if not found:
            raise not_found(response_id)

    async def input_items(self, tenant: str, response_id: str) -> list[dict[str, Any]]:
        """Returns the items that a response answers, as JSON values. Raises ApiError."""
        kept = await self.find(tenant, response_id)
        return await self._side.run_if(takes_long(kept.input), _listed, kept)

    async def conversation(self, tenant: str, response_id: str) -> list[Item]:
        """Returns the items up to the end of a response, for a request that continues it. Raises ApiError."""
        param = "previous_response_id"
        kept = await self.find(tenant, response_id, param)
        try:
            long = takes_long(kept.response) or takes_long(kept.input)
            return await self._side.run_if(long, _items, kept)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("a kept response is not as a gateway writes it", response_id=response_id, reason=str(error))
            raise not_found(response_id, param) from error


def _packed(response: Mapping[str, Any], items: Sequence[Item]) -> bytes:
    return KeptResponse(orjson.dumps(response), orjson.dumps([item.as_json() for item in items])).pack()


def _listed(kept: KeptResponse) -> list[dict[str, Any]]:
    return [*orjson.loads(kept.input)]


def _items(kept: KeptResponse) -> list[Item]:
    """Raises ValueError, of which pydantic's error is one, KeyError and TypeError for what no gateway wrote."""
    output = orjson.loads(kept.response)["output"]
    return [*_ITEMS.validate_python([*orjson.loads(kept.input), *output])]


def not_found(response_id: str, param: str | None = None) -> ApiError:
    """404: there is no such response, or none any more."""
    kind = "Response" if param is None else "Previous response"
    code = "response_not_found" if param is None else "previous_response_not_found"
    return ApiError(404, f"{kind} with id '{response_id[:200]}' not found.", param, code)


def _unavailable(param: str | None) -> ApiError:
    error = unavailable("The store of responses does not answer now. Try again later.", _RETRY_AFTER_S)
    error.param = param
    return error
