"""The kept responses as requests ask for them, with the errors that clients get."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import orjson
import structlog
from pydantic import TypeAdapter

from services.gateway.api.errors import ApiError, invalid, unavailable, unsupported
from services.gateway.api.requests.large_json import takes_long
from services.gateway.api.side_thread import SideThread
from services.gateway.openai.responses.held import HeldAnswers
from services.gateway.openai.responses.input_items import InputItem, of_conversation
from services.gateway.openai.responses.items import Item, num_parts
from services.gateway.openai.responses.kept_response import KeptResponse
from services.gateway.openai.responses.output import OutputItem
from services.gateway.openai.responses.pieces import cut_items, pieces_of
from services.gateway.openai.responses.response import as_failed
from services.gateway.openai.responses.store import MAX_KEPT_BYTES, ResponseStore, StoreUnavailable

FEW_PARTS = 128  # of items, which are handled in a millisecond or two

_RETRY_AFTER_S = 1
_ID = re.compile(r"[A-Za-z0-9._:@+=~-]{1,200}")  # of a response
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])

log = structlog.get_logger()


class KeptResponses:
    """Reads and writes a store, and reads what this gateway holds for it. `store`: None keeps nothing."""

    def __init__(self, store: ResponseStore | None, side: SideThread, held: HeldAnswers) -> None:
        self._store = store
        self._side = side
        self._held = held

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
        packed = await self._side.run_if(num_parts(items) > FEW_PARTS, packed_response, response, items)
        return await self._store.put(tenant, response["id"], packed)

    async def find(self, tenant: str, response_id: str, param: str | None = None) -> KeptResponse:
        """Returns a response. `param`: the field that names it. Raises ApiError."""
        packed = self._held.get(tenant, response_id)
        if packed is None and self._store is not None and _ID.fullmatch(response_id):
            with _translated(param):
                packed = await self._store.get(tenant, response_id)
        if packed is None:
            raise not_found(response_id, param)
        kept = await self._unpacked(response_id, packed, param)
        if kept.ended:
            return kept
        assert self._store is not None  # it has the response
        with _translated(param):
            if not await self._store.claim(tenant, response_id):
                return kept
            packed = await self._store.update(tenant, response_id, _lost(kept).pack(response_id), anew=False)
        if packed is None:  # it was deleted meanwhile
            raise not_found(response_id, param)
        return await self._unpacked(response_id, packed, param)

    async def _unpacked(self, response_id: str, packed: bytes, param: str | None) -> KeptResponse:
        try:
            return await self._side.run_if(takes_long(packed), KeptResponse.unpack, packed, response_id)
        except ValueError as error:
            raise _unreadable(response_id, error, param) from error

    async def delete(self, tenant: str, response_id: str) -> None:
        """Deletes a response. Raises ApiError."""
        if not (await self.find(tenant, response_id)).ended:
            raise unended(response_id, "deleted")
        if self._held.get(tenant, response_id) is not None:
            raise store_unavailable()
        assert self._store is not None  # it has the response
        with _translated():
            if not await self._store.delete(tenant, response_id):
                raise not_found(response_id)

    async def ask_for_end(self, tenant: str, response_id: str) -> None:
        """Asks the gateway that generates a response in the background to cancel it soon. Raises ApiError."""
        assert self._store is not None  # it has the response
        with _translated():
            await self._store.ask_for_end(tenant, response_id)

    async def cut_items(self, response_id: str, kept: KeptResponse) -> list[OutputItem]:
        """Returns the items of a background response that has ended, as they grew. Raises ApiError."""
        try:
            return await self._side.run(cut_items, orjson.loads(kept.response)["output"], kept.pieces)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise _unreadable(response_id, error) from error

    async def input_items(self, tenant: str, response_id: str) -> list[dict[str, Any]]:
        """Returns the items that a response answers, as JSON values. Raises ApiError."""
        kept = await self.find(tenant, response_id)
        return await self._side.run_if(takes_long(kept.input), _listed, kept)

    async def conversation(self, tenant: str, response_id: str) -> list[Item]:
        """Returns the items up to the end of a response, for a request that continues it. Raises ApiError."""
        return await self._read(_items, tenant, response_id, "previous_response_id")

    async def output(self, tenant: str, response_id: str) -> list[Item]:
        """Returns the output of a response, for a request that refers to items of it. Raises ApiError."""
        return await self._read(_output, tenant, response_id, "input")

    async def _read(
        self, read: Callable[[KeptResponse], list[Item]], tenant: str, response_id: str, param: str
    ) -> list[Item]:
        """Returns items of a response that has ended. param: the field that names it. Raises ApiError."""
        kept = await self.find(tenant, response_id, param)
        if not kept.ended:
            raise unended(response_id, "continued", param)
        try:
            long = takes_long(kept.response) or takes_long(kept.input)
            return await self._side.run_if(long, read, kept)
        except (ValueError, KeyError, TypeError) as error:
            raise _unreadable(response_id, error, param) from error


def packed_response(response: Mapping[str, Any], items: Sequence[Item], pieces: bytes = b"") -> bytes:
    """Returns a response to these items as stores keep it. pieces: see KeptResponse."""
    kept = KeptResponse(orjson.dumps(response), orjson.dumps([item.as_json() for item in items]), pieces)
    return kept.pack(response["id"])


def _listed(kept: KeptResponse) -> list[dict[str, Any]]:
    return [*orjson.loads(kept.input)]


def _items(kept: KeptResponse) -> list[Item]:
    """Raises ValueError, of which pydantic's error is one, KeyError and TypeError for what no gateway wrote."""
    output = orjson.loads(kept.response)["output"]
    return of_conversation(_ITEMS.validate_python([*orjson.loads(kept.input), *output]))


def _output(kept: KeptResponse) -> list[Item]:
    """Raises as `_items` does."""
    return of_conversation(_ITEMS.validate_python(orjson.loads(kept.response)["output"]))


def _lost(kept: KeptResponse) -> KeptResponse:
    """Returns the response of a gateway that has died, as it ended."""
    failed = as_failed(orjson.loads(kept.response), "The gateway that generated the response ended before it did.")
    return KeptResponse(orjson.dumps(failed), kept.input, pieces_of(()))


def unended(response_id: str, done: str, param: str | None = None) -> ApiError:
    """400: the response must end before it can be `done` something with."""
    message = f"Response '{response_id[:200]}' has not ended: it must end, or be cancelled, before it can be {done}."
    return invalid(message, param, "response_not_ended")


def not_found(response_id: str, param: str | None = None) -> ApiError:
    """404: there is no such response, or none any more."""
    kind = "Response" if param is None else "Previous response"
    code = "response_not_found" if param is None else "previous_response_not_found"
    return ApiError(404, f"{kind} with id '{response_id[:200]}' not found.", param, code)


def _unreadable(response_id: str, error: Exception, param: str | None = None) -> ApiError:
    log.warning("a kept response is not as a gateway writes it", response_id=response_id, reason=str(error))
    return not_found(response_id, param)


@contextmanager
def _translated(param: str | None = None) -> Iterator[None]:
    """Raises ApiError for StoreUnavailable."""
    try:
        yield
    except StoreUnavailable as error:
        raise store_unavailable(param) from error


def store_unavailable(param: str | None = None) -> ApiError:
    """503: the store does not answer. param: the field that needs the store."""
    error = unavailable("The store of responses does not answer now. Try again later.", _RETRY_AFTER_S)
    error.param = param
    return error
