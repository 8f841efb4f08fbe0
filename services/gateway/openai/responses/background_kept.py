"""Background responses as they are kept, from their beginning on, so that every gateway can say what became of them.

The gateway that generates one has a lease on it. Where it dies, the lease runs out, and the response counts as failed.
Where the store is away, nobody is dead for it: the lease is renewed and what it lost is kept anew when it is back, and
an answer that it does not take is held until then.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import orjson
import structlog

from services.gateway.api.errors import invalid
from services.gateway.api.side_thread import SideThread
from services.gateway.openai.responses.held import HeldAnswers
from services.gateway.openai.responses.items import Item
from services.gateway.openai.responses.kept import packed_response, store_unavailable
from services.gateway.openai.responses.kept_response import UNENDED, KeptResponse
from services.gateway.openai.responses.output import OutputItem
from services.gateway.openai.responses.pieces import pieces_of
from services.gateway.openai.responses.response import as_failed
from services.gateway.openai.responses.store import MAX_KEPT_BYTES, RENEW_AFTER, ResponseStore, StoreUnavailable
from services.process.backoff import Backoff
from services.process.supervised import supervised

_HOLD_S = 600.0  # an answer, while the store does not take it
_FIRST_WAIT_S = 0.25  # between two tries to have it kept; at last as between two renewals of the lease

log = structlog.get_logger()


class BackgroundResponses:
    """Writes a store for the gateway that generates the responses. held: the answers that it does not take now."""

    def __init__(self, store: ResponseStore, side: SideThread, held: HeldAnswers) -> None:
        self._store = store
        self._side = side
        self._held = held

    @asynccontextmanager
    async def leased(
        self, tenant: str, response_id: str, conversation: Sequence[Item], cancel: Callable[[], None]
    ) -> AsyncIterator["BackgroundResponse"]:
        """Keeps the lease on a response during the `async with` block. Raises ApiError.

        cancel: called when the response is to end: another gateway was asked to cancel it, or took it for lost.
        """
        try:
            await self._store.renew(tenant, response_id)
        except StoreUnavailable as error:
            raise store_unavailable("background") from error
        response = BackgroundResponse(self._store, self._side, self._held, (tenant, response_id), conversation)
        renew = partial(response.renew_lease, cancel)
        renewing = asyncio.create_task(supervised("the lease on a response", renew))
        try:
            yield response
        finally:
            renewing.cancel()


class BackgroundResponse:
    """One response as it is kept. key: its tenant and its id. conversation: the items that it answers."""

    def __init__(
        self,
        store: ResponseStore,
        side: SideThread,
        held: HeldAnswers,
        key: tuple[str, str],
        conversation: Sequence[Item],
    ) -> None:
        self._store = store
        self._side = side
        self._held = held
        self._key = key
        self._conversation = conversation
        self._unended: bytes | None = None  # what is to be kept before its end
        self._progressed = asyncio.Event()
        self._behind = False  # the store has an older status

    async def begin(self, response: Mapping[str, Any]) -> None:
        """Keeps the response, which has not ended. Raises ApiError where that cannot be."""
        packed = await self._packed_unended(response)
        if len(packed) > MAX_KEPT_BYTES:
            message = (
                f"'background' needs a response that is kept, and its conversation has over {MAX_KEPT_BYTES} bytes."
            )
            raise invalid(message, "background")
        if not await self._store.put(*self._key, packed):
            raise store_unavailable("background")
        self._unended = packed

    async def note_progress(self, response: Mapping[str, Any]) -> None:
        """Notes the new status of the response, which is kept soon."""
        self._unended = await self._packed_unended(response)
        self._progressed.set()

    async def end(
        self, response: dict[str, Any], items: Sequence[OutputItem], told: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Keeps the response, which has ended: as a failed one where it is too large. Returns when the store has it.

        told: called once with the response as it ended, as soon as that is certain: when the store has it, or does not
        take it now. Then it is held here, for 10 minutes at most.
        """
        self._unended = None
        packed = await self._side.run(_packed, response, self._conversation, items)
        if len(packed) > MAX_KEPT_BYTES:
            response = as_failed(response, f"The response cannot be kept: it has more than {MAX_KEPT_BYTES} bytes.")
            packed = await self._side.run(_packed, response, self._conversation, ())
        kept = await self._offer(packed)
        if kept is not None:
            told(response if kept == packed else self._ended_elsewhere(kept, response))
            return
        holds = self._held.hold(*self._key, packed)
        told(response)
        if holds:
            try:
                kept = await self._offer_until_taken(packed)
            finally:
                self._held.remove(*self._key)
        if kept != packed:
            log.warning("a response that ended in the background is not kept", response_id=self._key[1])

    async def renew_lease(self, cancel: Callable[[], None]) -> None:
        """Renews the lease until cancelled, and keeps what the store has not: progress, and what it lost."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._store.lease_s * RENEW_AFTER):
                    await self._progressed.wait()
                    self._behind = True
            self._progressed.clear()
            try:
                renewal = await self._store.renew(*self._key)
                if renewal.end_wanted or renewal.over:
                    cancel()
                if (self._behind or renewal.lost) and not renewal.over and self._unended is not None:
                    await self._store.update(*self._key, self._unended, anew=renewal.lost)
                self._behind = False
            except StoreUnavailable as error:
                log.warning("the lease on a response is not renewed", response_id=self._key[1], reason=str(error))

    async def _packed_unended(self, response: Mapping[str, Any]) -> bytes:
        return await self._side.run(packed_response, response, self._conversation, UNENDED)

    async def _offer_until_taken(self, packed: bytes) -> bytes | None:
        """Returns what is kept then; None: the store took nothing for too long."""
        backoff = Backoff(_FIRST_WAIT_S, self._store.lease_s * RENEW_AFTER)
        with suppress(TimeoutError):
            async with asyncio.timeout(_HOLD_S):
                while True:
                    await asyncio.sleep(backoff.next_s())
                    if (kept := await self._offer(packed)) is not None:
                        return kept
        return None

    async def _offer(self, packed: bytes) -> bytes | None:
        """Returns what is kept now: this, another end, or nothing more (no bytes). None: the store takes nothing."""
        try:
            if (await self._store.renew(*self._key)).over:
                return await self._store.get(*self._key) or b""
            return await self._store.update(*self._key, packed, anew=True)
        except StoreUnavailable:
            return None

    def _ended_elsewhere(self, kept: bytes, response: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the response as another gateway ended it, to which this one seemed dead."""
        log.warning("another gateway took a response for lost", response_id=self._key[1])
        try:
            ended: dict[str, Any] = orjson.loads(KeptResponse.unpack(kept, self._key[1]).response)
        except ValueError:  # deleted since, or damaged
            return as_failed(response, "The response was taken for lost, and is not kept any more.")
        return ended


def _packed(response: Mapping[str, Any], conversation: Sequence[Item], items: Sequence[OutputItem]) -> bytes:
    return packed_response(response, conversation, pieces_of(items))
