"""Background responses as they are kept, from their beginning on, so that every gateway can say what became of them.

The gateway that generates one has a lease on it. Where it dies, the lease runs out, and the response counts as failed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog

from services.gateway.api.errors import invalid
from services.gateway.api.side_thread import SideThread
from services.gateway.openai.responses.items import Item
from services.gateway.openai.responses.kept import packed_response, store_unavailable
from services.gateway.openai.responses.output import OutputItem
from services.gateway.openai.responses.pieces import pieces_of
from services.gateway.openai.responses.response import as_failed
from services.gateway.openai.responses.store import LEASE_S, MAX_KEPT_BYTES, UNENDED, ResponseStore, StoreUnavailable

_RENEW_EVERY_S = LEASE_S / 5
_TRIES, _TRY_AGAIN_S = 10, 1.0  # to keep one that has ended, while the store does not answer

log = structlog.get_logger()


class BackgroundResponses:
    """Writes a store for the gateway that generates the responses."""

    def __init__(self, store: ResponseStore, side: SideThread) -> None:
        self._store = store
        self._side = side

    @asynccontextmanager
    async def leased(self, tenant: str, response_id: str, end: Callable[[], None]) -> AsyncIterator[None]:
        """Has the lease on a response during the `async with` block. Raises ApiError.

        end: called when somebody asked another gateway to cancel the response.
        """
        try:
            await self._store.renew(tenant, response_id)
        except StoreUnavailable as error:
            raise store_unavailable("background") from error
        renewing = asyncio.create_task(self._renew(tenant, response_id, end))
        try:
            yield
        finally:
            renewing.cancel()

    async def _renew(self, tenant: str, response_id: str, end: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(_RENEW_EVERY_S)
            try:
                if await self._store.renew(tenant, response_id):
                    end()
            except StoreUnavailable as error:
                log.warning("the lease on a response is not renewed", response_id=response_id, reason=str(error))

    async def begin(self, tenant: str, response: Mapping[str, Any], conversation: Sequence[Item]) -> None:
        """Keeps a response that has not ended. Raises ApiError where that cannot be."""
        packed = await self._side.run(packed_response, response, conversation, UNENDED)
        if len(packed) > MAX_KEPT_BYTES:
            message = (
                f"'background' needs a response that is kept, and its conversation has over {MAX_KEPT_BYTES} bytes."
            )
            raise invalid(message, "background")
        if not await self._store.put(tenant, response["id"], packed):
            raise store_unavailable("background")

    async def note_progress(self, tenant: str, response: Mapping[str, Any], conversation: Sequence[Item]) -> None:
        """Keeps the new status of a response that has begun; where the store does not answer it stays as it was."""
        await self._store.put(
            tenant, response["id"], await self._side.run(packed_response, response, conversation, UNENDED)
        )

    async def end(
        self, tenant: str, response: dict[str, Any], conversation: Sequence[Item], items: Sequence[OutputItem]
    ) -> dict[str, Any]:
        """Keeps a response that has ended, and returns it: as a failed one where it is too large to be kept."""
        packed = await self._side.run(_packed, response, conversation, items)
        if len(packed) > MAX_KEPT_BYTES:
            response = as_failed(response, f"The response cannot be kept: it has more than {MAX_KEPT_BYTES} bytes.")
            packed = await self._side.run(_packed, response, conversation, ())
        for _ in range(_TRIES):
            if await self._store.put(tenant, response["id"], packed):
                return response
            await asyncio.sleep(_TRY_AGAIN_S)
        log.warning("a response that ended in the background is not kept", response_id=response["id"])
        return response


def _packed(response: Mapping[str, Any], conversation: Sequence[Item], items: Sequence[OutputItem]) -> bytes:
    return packed_response(response, conversation, pieces_of(items))
